// Atomics: every block leaves a line of numbers, and the one that arrives last adds them all up.
#include "primitives.cuh"

namespace mlaforge {

constexpr int kThreads = 64;

MLAFORGE_DEVICE int arrive(int32_t* counter, int acq_rel) {
  if (acq_rel) return atomic_add_acq_rel(counter, 1);
  fence_gpu();
  const int before = atomic_add_relaxed(counter, 1);
  fence_gpu();
  return before;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    last_block_adds(const int32_t* in, int32_t* lines, int32_t* counter, int32_t* sums, int acq_rel) {
  const smem_t base = dynamic_smem();
  const int t = static_cast<int>(threadIdx.x);
  const int block = static_cast<int>(blockIdx.x);
  const int blocks = static_cast<int>(gridDim.x);
  store_global(lines + kThreads * block + t, load_global(in + kThreads * block + t));
  __syncthreads();
  if (t == 0) store_shared_s32(base, arrive(counter, acq_rel));
  __syncthreads();
  if (load_shared_s32(base) == blocks - 1) {
    int32_t sum = 0;
    for (int i = 0; i < blocks; ++i) sum += load_global(lines + kThreads * i + t);
    store_global(sums + t, sum);
  }
}

}  // namespace mlaforge
