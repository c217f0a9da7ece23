// bulk_store: lines of numbers through two buffers, each written again as soon as it has been read. The last line is
// read back once it has been written out.
#include "primitives.cuh"

namespace mlaforge {

constexpr int kThreads = 64;
constexpr int kLine = 4 * kThreads;

extern "C" __global__ void __launch_bounds__(kThreads)
    bulk_store_lines(const int32_t* in, int32_t* out, int32_t* again, int rounds) {
  const smem_t base = dynamic_smem();
  const int t = static_cast<int>(threadIdx.x);
  for (int round = 0; round < rounds; ++round) {
    const smem_t line = base + round % 2 * kLine;
    store_shared_s32(line + 4 * t, load_global(in + kThreads * round + t) + 1);
    fence_proxy_async();
    __syncthreads();
    if (t == 0) {
      // In two halves: a group of two.
      bulk_store(out + kThreads * round, line, kLine / 2);
      bulk_store(out + kThreads * round + kThreads / 2, line + kLine / 2, kLine / 2);
      bulk_commit();
      bulk_wait_read<1>();
    }
    __syncthreads();
  }
  if (t == 0) bulk_wait<0>();
  __syncthreads();
  store_global(again + t, load_global(out + kThreads * (rounds - 1) + t));
}

}  // namespace mlaforge
