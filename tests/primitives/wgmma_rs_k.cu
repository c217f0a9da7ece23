// wgmma_rs_k of 16-bit elements: D[64, N] = (C +) A[64, 64] B[N, 64]^T, A from registers.
#include "operands.cuh"
#include "primitives.cuh"

namespace mlaforge {

constexpr int kProducts = 4;  // along a row of 128 bytes

template <class Element, int N>
MLAFORGE_DEVICE void product(const int32_t* a_global, smem_t b, const float* c, float* out, int accumulate) {
  float d[N / 2];
  load_accumulators<N>(d, c);
  const uint64_t right = wgmma_descriptor(b, 16, 1024);
  uint32_t left[4 * kProducts];
  load_fragments<kProducts>(left, a_global);
  wgmma_fence_operand(d);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kProducts; ++i) {
    wgmma_rs_k<Element, N>(d, left + 4 * i, wgmma_advance(right, 32 * i), accumulate || i > 0);
  }
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_fence_operand(d);
  store_accumulators<N>(d, out);
}

extern "C" __global__ void __launch_bounds__(128)
    product_rs_k(const __grid_constant__ TensorMap b_map, const int32_t* a_global, const float* c, float* out, int n,
                 int fp16, int accumulate, int offset) {
  const smem_t bar = dynamic_smem();
  const smem_t b = bar + 1024 + offset;
  load_operands(b_map, b_map, bar, b, 0, 0, b, 1, n * 128);
  if (fp16) {
    if (n == 64) product<Fp16, 64>(a_global, b, c, out, accumulate);
    if (n == 128) product<Fp16, 128>(a_global, b, c, out, accumulate);
    if (n == 192) product<Fp16, 192>(a_global, b, c, out, accumulate);
    if (n == 256) product<Fp16, 256>(a_global, b, c, out, accumulate);
  } else {
    if (n == 64) product<Bf16, 64>(a_global, b, c, out, accumulate);
    if (n == 128) product<Bf16, 128>(a_global, b, c, out, accumulate);
    if (n == 192) product<Bf16, 192>(a_global, b, c, out, accumulate);
    if (n == 256) product<Bf16, 256>(a_global, b, c, out, accumulate);
  }
}

}  // namespace mlaforge
