// What the WGMMA tests share: accumulators from and to a row-major matrix.
#pragma once

#include "primitives.cuh"

namespace mlaforge {

// Where this thread's first accumulator lies in a matrix of N columns, and how far behind it accumulator i does.
template <int N>
MLAFORGE_DEVICE int first_accumulator() {
  const int t = static_cast<int>(threadIdx.x);
  return (16 * (t / 32) + t % 32 / 4) * N + t % 4 * 2;
}
template <int N>
constexpr int behind_first(int i) {
  return i / 2 % 2 * (8 * N) + i / 4 * 8 + i % 2;
}

template <int N>
MLAFORGE_DEVICE void load_accumulators(float (&d)[N / 2], const float* from) {
  const float* first = from + first_accumulator<N>();
#pragma unroll
  for (int i = 0; i < N / 2; ++i) d[i] = load_global(first + behind_first<N>(i));
}

template <int N>
MLAFORGE_DEVICE void store_accumulators(const float (&d)[N / 2], float* to) {
  float* first = to + first_accumulator<N>();
#pragma unroll
  for (int i = 0; i < N / 2; ++i) store_global(first + behind_first<N>(i), d[i]);
}

// A with its 64 rows to registers, four for each of the products along a row. `from` is the matrix in global memory.
template <int Products>
MLAFORGE_DEVICE void load_fragments(uint32_t (&a)[4 * Products], const int32_t* from) {
  const int t = static_cast<int>(threadIdx.x);
  constexpr int kWords = 8 * Products;  // of a row
  const int32_t* first = from + (16 * (t / 32) + t % 32 / 4) * kWords + t % 4;
#pragma unroll
  for (int i = 0; i < 4 * Products; ++i) {
    a[i] = static_cast<uint32_t>(load_global(first + i % 2 * (8 * kWords) + i / 2 * 4));
  }
}

// Sets up a barrier at `bar`, copies both operands as boxes of 64 columns, one behind the other, and waits for them.
MLAFORGE_DEVICE void load_operands(const TensorMap& a_map, const TensorMap& b_map, smem_t bar, smem_t a, int a_boxes,
                                   int a_bytes, smem_t b, int b_boxes, int b_bytes) {
  if (threadIdx.x == 0) {
    mbarrier_init(bar, 1);
    fence_mbarrier_init();
    mbarrier_arrive_expect_tx(bar, a_boxes * a_bytes + b_boxes * b_bytes);
    for (int i = 0; i < a_boxes; ++i) tma_load_4d(a_map, bar, a + i * a_bytes, 64 * i, 0, 0, 0, kEvictNormal);
    for (int i = 0; i < b_boxes; ++i) tma_load_4d(b_map, bar, b + i * b_bytes, 64 * i, 0, 0, 0, kEvictNormal);
  }
  __syncthreads();
  mbarrier_wait(bar, 0);
}

}  // namespace mlaforge
