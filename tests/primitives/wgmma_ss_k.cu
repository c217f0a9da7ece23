// wgmma_ss_k: D[64, N] = (C +) A[64, 128] B[N, 128]^T, both operands in two subtiles of 64 columns, `offset` bytes up in
// shared memory.
#include "operands.cuh"
#include "primitives.cuh"

namespace mlaforge {

constexpr int kDepth = 128;

template <class Element, int N>
MLAFORGE_DEVICE void product(smem_t a, smem_t b, const float* c, float* out, int accumulate) {
  float d[N / 2];
  load_accumulators<N>(d, c);
  const uint64_t left = wgmma_descriptor(a, 16, 1024);
  const uint64_t right = wgmma_descriptor(b, 16, 1024);
  wgmma_fence_operand(d);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kDepth / 16; ++i) {
    wgmma_ss_k<Element, N>(d, wgmma_advance(left, i / 4 * (64 * 128) + i % 4 * 32),
                           wgmma_advance(right, i / 4 * (N * 128) + i % 4 * 32), accumulate || i > 0);
  }
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_fence_operand(d);
  store_accumulators<N>(d, out);
}

extern "C" __global__ void __launch_bounds__(128)
    product_ss_k(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map, const float* c,
                 float* out, int n, int fp16, int accumulate, int offset) {
  const smem_t bar = dynamic_smem();
  const smem_t a = bar + 1024 + offset;
  const smem_t b = a + 2 * 64 * 128;
  load_operands(a_map, b_map, bar, a, 2, 64 * 128, b, 2, n * 128);
  if (fp16) {
    if (n == 8) product<Fp16, 8>(a, b, c, out, accumulate);
    if (n == 16) product<Fp16, 16>(a, b, c, out, accumulate);
    if (n == 24) product<Fp16, 24>(a, b, c, out, accumulate);
    if (n == 32) product<Fp16, 32>(a, b, c, out, accumulate);
    if (n == 40) product<Fp16, 40>(a, b, c, out, accumulate);
    if (n == 48) product<Fp16, 48>(a, b, c, out, accumulate);
    if (n == 56) product<Fp16, 56>(a, b, c, out, accumulate);
    if (n == 64) product<Fp16, 64>(a, b, c, out, accumulate);
    if (n == 80) product<Fp16, 80>(a, b, c, out, accumulate);
    if (n == 128) product<Fp16, 128>(a, b, c, out, accumulate);
    if (n == 192) product<Fp16, 192>(a, b, c, out, accumulate);
    if (n == 256) product<Fp16, 256>(a, b, c, out, accumulate);
  } else {
    if (n == 8) product<Bf16, 8>(a, b, c, out, accumulate);
    if (n == 16) product<Bf16, 16>(a, b, c, out, accumulate);
    if (n == 24) product<Bf16, 24>(a, b, c, out, accumulate);
    if (n == 32) product<Bf16, 32>(a, b, c, out, accumulate);
    if (n == 40) product<Bf16, 40>(a, b, c, out, accumulate);
    if (n == 48) product<Bf16, 48>(a, b, c, out, accumulate);
    if (n == 56) product<Bf16, 56>(a, b, c, out, accumulate);
    if (n == 64) product<Bf16, 64>(a, b, c, out, accumulate);
    if (n == 80) product<Bf16, 80>(a, b, c, out, accumulate);
    if (n == 128) product<Bf16, 128>(a, b, c, out, accumulate);
    if (n == 192) product<Bf16, 192>(a, b, c, out, accumulate);
    if (n == 256) product<Bf16, 256>(a, b, c, out, accumulate);
  }
}

}  // namespace mlaforge
