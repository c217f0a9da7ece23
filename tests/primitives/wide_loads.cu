// Loads of 16 bytes and of 64-bit numbers from global memory, turned around word by word.
#include "primitives.cuh"

namespace mlaforge {

extern "C" __global__ void __launch_bounds__(64) wide_loads(const int32_t* words, const int64_t* numbers, int32_t* out) {
  const int t = static_cast<int>(threadIdx.x);
  uint32_t four[4];
  load_global_v4(static_cast<const void*>(words + 4 * t), four);
  store_global_v4(out + 4 * t, four[3], four[2], four[1], four[0]);
  const int64_t number = load_global(numbers + t);
  store_global(out + 256 + 2 * t, static_cast<int32_t>(number >> 32));
  store_global(out + 256 + 2 * t + 1, static_cast<int32_t>(number));
}

}  // namespace mlaforge
