// ldmatrix_x4, as it lies and transposed: each warp loads four 8x8 matrices from the rows that its lanes name.
#include "primitives.cuh"

namespace mlaforge {

extern "C" __global__ void __launch_bounds__(64)
    ldmatrix(const int32_t* words, const int32_t* rows, int32_t* out, int32_t* out_transposed) {
  const smem_t base = dynamic_smem();
  const int t = static_cast<int>(threadIdx.x);
  for (int i = 0; i < 4; ++i) store_shared_s32(base + 4 * (64 * i + t), load_global(words + 64 * i + t));
  __syncthreads();
  const smem_t row = base + 16 * load_global(rows + t);
  uint32_t m[4];
  ldmatrix_x4(row, m);
  store_global_v4(out + 4 * t, m[0], m[1], m[2], m[3]);
  ldmatrix_x4_transposed(row, m);
  store_global_v4(out_transposed + 4 * t, m[0], m[1], m[2], m[3]);
}

}  // namespace mlaforge
