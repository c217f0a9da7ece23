// pack2: pairs of float32 to pairs of bf16 (first half of `out`) and fp16 (second half).
#include "primitives.cuh"

namespace mlaforge {

extern "C" __global__ void __launch_bounds__(128) pack2_pairs(const float* in, int32_t* out, int pairs) {
  for (int i = static_cast<int>(threadIdx.x); i < pairs; i += 128) {
    const float lo = load_global(in + 2 * i);
    const float hi = load_global(in + 2 * i + 1);
    store_global(out + i, static_cast<int32_t>(pack2<Bf16>(lo, hi)));
    store_global(out + pairs + i, static_cast<int32_t>(pack2<Fp16>(lo, hi)));
  }
}

}  // namespace mlaforge
