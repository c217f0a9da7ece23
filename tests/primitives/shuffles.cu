// Shuffles: seven results of 64 threads, one row each.
#include "primitives.cuh"

namespace mlaforge {

constexpr int kThreads = 64;

extern "C" __global__ void __launch_bounds__(kThreads) shuffles(const int32_t* in, float* floats, int32_t* out) {
  const int t = static_cast<int>(threadIdx.x);
  const int32_t x = load_global(in + t);
  const float f = static_cast<float>(x);
  store_global(floats + t, shuffle_xor(f, 1));
  store_global(out + 0 * kThreads + t, static_cast<int32_t>(shuffle_xor(static_cast<uint32_t>(x), 5)));
  store_global(out + 1 * kThreads + t, warp_uniform(x));
  store_global(out + 2 * kThreads + t, __shfl_sync(0xffffffffu, x, (lane_id() * 7 + 3) & 31));
  store_global(out + 3 * kThreads + t, __shfl_up_sync(0xffffffffu, x, 4));
  store_global(out + 4 * kThreads + t, lane_id());
  store_global(out + 5 * kThreads + t, warp_id());
}

}  // namespace mlaforge
