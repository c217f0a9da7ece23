// wgmma_ss_mn_k: D[64, N] = C + A[64, 64]^T B[N, 64]^T, A as it lies with its columns along the row, which become the rows
// of D.
#include "operands.cuh"
#include "primitives.cuh"

namespace mlaforge {

constexpr int kDepth = 64;

template <class Element, int N>
MLAFORGE_DEVICE void product(smem_t a, smem_t b, const float* c, float* out) {
  float d[N / 2];
  load_accumulators<N>(d, c);
  const uint64_t left = wgmma_descriptor(a, 16, 1024);
  const uint64_t right = wgmma_descriptor(b, 16, 1024);
  wgmma_fence_operand(d);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kDepth / 16; ++i) {
    wgmma_ss_mn_k<Element, N>(d, wgmma_advance(left, 2048 * i), wgmma_advance(right, 32 * i));
  }
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_fence_operand(d);
  store_accumulators<N>(d, out);
}

template <class Element>
MLAFORGE_DEVICE void product_of(int n, smem_t a, smem_t b, const float* c, float* out) {
  if (n == 8) product<Element, 8>(a, b, c, out);
  if (n == 16) product<Element, 16>(a, b, c, out);
  if (n == 24) product<Element, 24>(a, b, c, out);
  if (n == 32) product<Element, 32>(a, b, c, out);
  if (n == 40) product<Element, 40>(a, b, c, out);
  if (n == 48) product<Element, 48>(a, b, c, out);
  if (n == 56) product<Element, 56>(a, b, c, out);
  if (n == 64) product<Element, 64>(a, b, c, out);
}

extern "C" __global__ void __launch_bounds__(128)
    product_mn_k(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map, const float* c,
                 float* out, int n, int fp16, int offset) {
  const smem_t bar = dynamic_smem();
  const smem_t a = bar + 1024 + offset;
  const smem_t b = a + kDepth * 128;
  load_operands(a_map, b_map, bar, a, 1, kDepth * 128, b, 1, n * 128);
  if (fp16) {
    product_of<Fp16>(n, a, b, c, out);
  } else {
    product_of<Bf16>(n, a, b, c, out);
  }
}

}  // namespace mlaforge
