// Products of two warpgroups from shared memory without end, to measure what one takes of energy.
#include "primitives.cuh"

namespace mlaforge {

constexpr int kSubtiles = 4;              // of 64 columns: a depth of 256
constexpr int kProducts = kSubtiles * 4;  // of depth 16
constexpr int kRows = 64;
constexpr int kOperands = 1024;  // where they begin, behind the mbarrier
constexpr int kPiece = 32768;    // of one copy

// `rounds` x kProducts products A[64, 16] B[16, N] in each of two warpgroups. Every round begins with new accumulators,
// so that they stay as small as those of real work. `operands` holds random bf16: A of both warpgroups, then B.
template <int N>
MLAFORGE_DEVICE void products(const void* operands, int32_t* sink, int rounds) {
  constexpr int kA = kSubtiles * kRows * 128;
  constexpr int kBytes = 2 * kA + kSubtiles * N * 128;
  const smem_t bar = dynamic_smem();
  const smem_t base = bar + kOperands;
  if (threadIdx.x == 0) {
    mbarrier_init(bar, 1);
    fence_mbarrier_init();
    mbarrier_arrive_expect_tx(bar, kBytes);
    const unsigned char* from = static_cast<const unsigned char*>(operands);
    for (int at = 0; at < kBytes; at += kPiece) bulk_load(bar, base + at, from + at, kPiece);
  }
  __syncthreads();
  mbarrier_wait(bar, 0);
  // Both warpgroups multiply with the same B, as in a decode kernel.
  const uint64_t a = wgmma_descriptor(base + warp_uniform(warp_id() / 4) * kA, 16, 1024);
  const uint64_t b = wgmma_descriptor(base + 2 * kA, 16, 1024);
  float d[N / 2];
#pragma unroll
  for (int i = 0; i < N / 2; ++i) d[i] = 0.f;
#pragma unroll 1
  for (int round = 0; round < rounds; ++round) {
    wgmma_fence_operand(d);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kProducts; ++k) {
      wgmma_ss_k<Bf16, N>(d, wgmma_advance(a, k / 4 * (kRows * 128) + k % 4 * 32),
                          wgmma_advance(b, k / 4 * (N * 128) + k % 4 * 32), k > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_fence_operand(d);
  }
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < N / 2; ++i) sum += d[i];
  if (sum == 1234.5f) store_global(sink + blockIdx.x, 1);
}

extern "C" __global__ void __launch_bounds__(256) bench_wgmma_n64(const void* operands, int32_t* sink, int rounds) {
  products<64>(operands, sink, rounds);
}
extern "C" __global__ void __launch_bounds__(256) bench_wgmma_n128(const void* operands, int32_t* sink, int rounds) {
  products<128>(operands, sink, rounds);
}
extern "C" __global__ void __launch_bounds__(256) bench_wgmma_n256(const void* operands, int32_t* sink, int rounds) {
  products<256>(operands, sink, rounds);
}

}  // namespace mlaforge
