// unpack_low and unpack_high: pairs of bf16 (first half of `out`) and of fp16 (second half) to pairs of float32.
#include "primitives.cuh"

namespace mlaforge {

extern "C" __global__ void __launch_bounds__(128) unpack_pairs(const int32_t* in, float* out, int pairs) {
  for (int i = static_cast<int>(threadIdx.x); i < pairs; i += 128) {
    const auto x = static_cast<uint32_t>(load_global(in + i));
    store_global(out + 2 * i, unpack_low<Bf16>(x));
    store_global(out + 2 * i + 1, unpack_high<Bf16>(x));
    store_global(out + 2 * pairs + 2 * i, unpack_low<Fp16>(x));
    store_global(out + 2 * pairs + 2 * i + 1, unpack_high<Fp16>(x));
  }
}

}  // namespace mlaforge
