// exp2_approx, log2_approx, rsqrt_approx and reciprocal_approx of every input; kLn2 and infinity() behind them.
#include "primitives.cuh"

namespace mlaforge {

extern "C" __global__ void __launch_bounds__(128) approx(const float* in, float* out, int count) {
  for (int i = static_cast<int>(threadIdx.x); i < count; i += 128) {
    const float x = load_global(in + i);
    store_global(out + i, exp2_approx(x));
    store_global(out + count + i, log2_approx(x));
    store_global(out + 2 * count + i, rsqrt_approx(x));
    store_global(out + 3 * count + i, reciprocal_approx(x));
  }
  if (threadIdx.x == 0) {
    store_global(out + 4 * count, kLn2);
    store_global(out + 4 * count + 1, infinity());
  }
}

}  // namespace mlaforge
