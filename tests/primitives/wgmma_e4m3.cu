// wgmma_ss_k and wgmma_rs_k of e4m3: D[64, N] = (C +) A[64, 128] B[N, 128]^T; A from shared memory or, for `rs`, from
// registers.
#include "operands.cuh"
#include "primitives.cuh"

namespace mlaforge {

constexpr int kProducts = 4;  // along a row of 128 bytes

template <class Element, int N>
MLAFORGE_DEVICE void product(const int32_t* a_global, smem_t a, smem_t b, const float* c, float* out, int rs,
                             int accumulate) {
  float d[N / 2];
  load_accumulators<N>(d, c);
  const uint64_t right = wgmma_descriptor(b, 16, 1024);
  if (rs) {
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
  } else {
    const uint64_t left = wgmma_descriptor(a, 16, 1024);
    wgmma_fence_operand(d);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kProducts; ++i) {
      wgmma_ss_k<Element, N>(d, wgmma_advance(left, 32 * i), wgmma_advance(right, 32 * i), accumulate || i > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
  }
  wgmma_fence_operand(d);
  store_accumulators<N>(d, out);
}

extern "C" __global__ void __launch_bounds__(128)
    product_e4m3(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
                 const int32_t* a_global, const float* c, float* out, int n, int rs, int accumulate, int offset) {
  const smem_t bar = dynamic_smem();
  const smem_t a = bar + 1024 + offset;
  const smem_t b = a + 64 * 128;
  load_operands(a_map, b_map, bar, a, 1, 64 * 128, b, 1, n * 128);
  if (n == 64) product<E4m3, 64>(a_global, a, b, c, out, rs, accumulate);
  if (n == 128) product<E4m3, 128>(a_global, a, b, c, out, rs, accumulate);
  if (n == 192) product<E4m3, 192>(a_global, a, b, c, out, rs, accumulate);
  if (n == 256) product<E4m3, 256>(a_global, a, b, c, out, rs, accumulate);
}

}  // namespace mlaforge
