// stmatrix_x4, as they lie and transposed: each warp stores four 8x8 matrices to the rows that its lanes name. Then as they
// lie once more, and of the first two transposed what stmatrix_x2_transposed stores over them.
#include "primitives.cuh"

namespace mlaforge {

extern "C" __global__ void __launch_bounds__(64)
    stmatrix(const int32_t* registers, const int32_t* rows, int32_t* out, int32_t* out_transposed, int32_t* out_two) {
  const smem_t base = dynamic_smem();
  const int t = static_cast<int>(threadIdx.x);
  uint32_t m[4];
  for (int i = 0; i < 4; ++i) m[i] = static_cast<uint32_t>(load_global(registers + 4 * t + i));
  stmatrix_x4(base + 16 * load_global(rows + t), m[0], m[1], m[2], m[3]);
  __syncthreads();
  for (int i = 0; i < 4; ++i) store_global(out + 64 * i + t, load_shared_s32(base + 4 * (64 * i + t)));
  __syncthreads();
  stmatrix_x4_transposed(base + 16 * load_global(rows + t), m[0], m[1], m[2], m[3]);
  __syncthreads();
  for (int i = 0; i < 4; ++i) store_global(out_transposed + 64 * i + t, load_shared_s32(base + 4 * (64 * i + t)));
  __syncthreads();
  stmatrix_x4(base + 16 * load_global(rows + t), m[0], m[1], m[2], m[3]);
  __syncthreads();
  stmatrix_x2_transposed(base + 16 * load_global(rows + t), m[0], m[1]);
  __syncthreads();
  for (int i = 0; i < 4; ++i) store_global(out_two + 64 * i + t, load_shared_s32(base + 4 * (64 * i + t)));
}

}  // namespace mlaforge
