// griddepcontrol: the second kernel may start while the first is at work, and waits for its end before it reads.
#include "primitives.cuh"

namespace mlaforge {

extern "C" __global__ void __launch_bounds__(128) first_kernel(const int32_t* in, int32_t* out, int steps) {
  grid_launch_dependents();
  const int i = static_cast<int>(blockIdx.x) * 128 + static_cast<int>(threadIdx.x);
  uint32_t x = static_cast<uint32_t>(load_global(in + i));
  // Long enough for the second kernel to get in its way.
  for (int step = 0; step < steps; ++step) x = x * 5 + static_cast<uint32_t>(load_global(in + (i + step) % 128));
  store_global(out + i, static_cast<int32_t>(x));
}

extern "C" __global__ void __launch_bounds__(128) second_kernel(const int32_t* in, int32_t* out) {
  grid_wait();
  const int i = static_cast<int>(blockIdx.x) * 128 + static_cast<int>(threadIdx.x);
  store_global(out + i, load_global(in + i) + 1);
}

}  // namespace mlaforge
