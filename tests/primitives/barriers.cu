// Named barriers: two warps hand a line of numbers to two others, over and over; the second pair only arrives at the
// barrier that says "read". __syncthreads and __syncwarp order a last exchange.
#include "primitives.cuh"

namespace mlaforge {

constexpr int kFilled = 1;
constexpr int kDrained = 15;

extern "C" __global__ void __launch_bounds__(128) barriers(const int32_t* in, int32_t* out, int rounds) {
  const smem_t base = dynamic_smem();
  const int t = static_cast<int>(threadIdx.x);
  if (t < 64) {
    for (int round = 0; round < rounds; ++round) {
      if (round > 0) named_barrier_sync(kDrained, 128);
      store_shared_s32(base + 4 * t, load_global(in + 64 * round + t));
      named_barrier_arrive(kFilled, 128);
    }
  } else {
    for (int round = 0; round < rounds; ++round) {
      named_barrier_sync(kFilled, 128);
      store_global(out + 64 * round + t - 64, load_shared_s32(base + 4 * (127 - t)));
      if (round + 1 < rounds) named_barrier_arrive(kDrained, 128);
    }
  }
  __syncthreads();
  store_shared_s32(base + 4 * t, t);
  __syncwarp();
  const int neighbour = load_shared_s32(base + 4 * (t ^ 31));
  __syncthreads();
  store_shared_s32(base + 4 * t, neighbour);
  __syncthreads();
  store_global(out + 64 * rounds + t, load_shared_s32(base + 4 * (t ^ 127)));
}

}  // namespace mlaforge
