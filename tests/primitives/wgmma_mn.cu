// wgmma_ss_mn and wgmma_rs_mn: D[64, N] = C + A[64, 64] B[64, N], B as it lies with its columns along the row, in
// subtiles of 64 columns; A from shared memory or, for `rs`, from registers.
#include "operands.cuh"
#include "primitives.cuh"

namespace mlaforge {

constexpr int kDepth = 64;
constexpr int kSubtile = kDepth * 128;

template <class Element, int N>
MLAFORGE_DEVICE void product_ss(smem_t a, smem_t b, const float* c, float* out) {
  float d[N / 2];
  load_accumulators<N>(d, c);
  const uint64_t left = wgmma_descriptor(a, 16, 1024);
  const uint64_t right = wgmma_descriptor(b, kSubtile, 1024);
  wgmma_fence_operand(d);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kDepth / 16; ++i) {
    wgmma_ss_mn<Element, N>(d, wgmma_advance(left, 32 * i), wgmma_advance(right, 2048 * i));
  }
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_fence_operand(d);
  store_accumulators<N>(d, out);
}

// `a` is the matrix in global memory.
template <class Element, int N>
MLAFORGE_DEVICE void product_rs(const int32_t* a, smem_t b, const float* c, float* out) {
  float d[N / 2];
  load_accumulators<N>(d, c);
  uint32_t left[kDepth / 4];
  load_fragments<kDepth / 16>(left, a);
  const uint64_t right = wgmma_descriptor(b, kSubtile, 1024);
  wgmma_fence_operand(d);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kDepth / 16; ++i) wgmma_rs_mn<Element, N>(d, left + 4 * i, wgmma_advance(right, 2048 * i));
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_fence_operand(d);
  store_accumulators<N>(d, out);
}

template <class Element, int N>
MLAFORGE_DEVICE void product(const int32_t* a_global, smem_t a, smem_t b, const float* c, float* out, int rs) {
  if (rs) {
    product_rs<Element, N>(a_global, b, c, out);
  } else {
    product_ss<Element, N>(a, b, c, out);
  }
}

extern "C" __global__ void __launch_bounds__(128)
    product_mn(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map, const int32_t* a_global,
               const float* c, float* out, int n, int fp16, int rs, int offset) {
  const smem_t bar = dynamic_smem();
  const smem_t a = bar + 1024 + offset;
  const smem_t b = a + kSubtile;
  load_operands(a_map, b_map, bar, a, 1, 64 * 128, b, n / 64, kSubtile);
  if (fp16) {
    if (n == 64) product<Fp16, 64>(a_global, a, b, c, out, rs);
    if (n == 128) product<Fp16, 128>(a_global, a, b, c, out, rs);
    if (n == 192) product<Fp16, 192>(a_global, a, b, c, out, rs);
    if (n == 256) product<Fp16, 256>(a_global, a, b, c, out, rs);
  } else {
    if (n == 64) product<Bf16, 64>(a_global, a, b, c, out, rs);
    if (n == 128) product<Bf16, 128>(a_global, a, b, c, out, rs);
    if (n == 192) product<Bf16, 192>(a_global, a, b, c, out, rs);
    if (n == 256) product<Bf16, 256>(a_global, a, b, c, out, rs);
  }
}

}  // namespace mlaforge
