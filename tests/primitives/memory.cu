// Loads and stores of shared and global memory, in every width.
#include "primitives.cuh"

namespace mlaforge {

extern "C" __global__ void __launch_bounds__(64)
    memory(const float* floats, const int32_t* ints, float* out_floats, int32_t* out_ints) {
  const smem_t base = dynamic_smem();
  const int t = static_cast<int>(threadIdx.x);
  prefetch_global(ints + 4 * t);

  // Global: four floats in one load, one by one for the rest.
  float four[4];
  load_global_v4(floats + 4 * t, four);
  store_global_v2<16>(out_floats + 4 * (t - 1), four[3], four[2]);
  store_global(out_floats + 4 * t + 2, four[1]);
  store_global(out_floats + 4 * t + 3, load_global(floats + 4 * t));
  uint32_t word[4];
  for (int i = 0; i < 4; ++i) word[i] = static_cast<uint32_t>(load_global(ints + 4 * t + i));
  store_global_v4(out_ints + 8 * t, word[3], word[2], word[1], word[0]);
  store_global_v2(out_ints + 8 * t + 4, word[1], word[0]);
  store_global(out_ints + 8 * t + 6, static_cast<int32_t>(word[2]));
  store_global(out_ints + 8 * t + 7, static_cast<int32_t>(word[3]));

  // Shared: turned around, with 16 bytes of zeros behind each.
  const smem_t mine = base + 32 * t;
  store_shared_f32(mine, four[0]);
  store_shared_f32(mine + 4, four[1]);
  store_shared_s32(mine + 8, static_cast<int32_t>(word[0]));
  store_shared_s32(mine + 12, static_cast<int32_t>(word[1]));
  store_shared_zero16(mine + 16);
  __syncthreads();
  const smem_t other = base + 32 * (63 - t);
  store_global(out_floats + 256 + 2 * t, load_shared_f32(other));
  store_global(out_floats + 256 + 2 * t + 1, load_shared_f32(other + 4));
  for (int i = 0; i < 6; ++i) store_global(out_ints + 512 + 6 * t + i, load_shared_s32(other + 8 + 4 * i));
}

}  // namespace mlaforge
