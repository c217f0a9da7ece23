// A chip that is awake and does nothing: one sleeping warp on the whole GPU keeps its clocks up.
#include "primitives.cuh"

namespace mlaforge {

extern "C" __global__ void __launch_bounds__(32) bench_awake(int32_t* sink, int rounds) {
#pragma unroll 1
  for (int i = 0; i < rounds; ++i) __nanosleep(1000);
  if (threadIdx.x == 0) store_global(sink, rounds);
}

}  // namespace mlaforge
