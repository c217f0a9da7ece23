// Rows that nobody has written: a tile of 64 rows of which only the first boxes are loaded, as at the end of a request. All
// of them are multiplied and moved, and zeros take the place of what came of the others before anything is stored.
#include "operands.cuh"
#include "primitives.cuh"

namespace mlaforge {

constexpr int kRows = 64;
constexpr int kBoxRows = 16;

extern "C" __global__ void __launch_bounds__(128)
    unwritten_rows(const __grid_constant__ TensorMap map, float* products, int32_t* moved, int boxes) {
  const smem_t bar = dynamic_smem();
  const smem_t tile = bar + 1024;
  const smem_t copy = tile + kRows * 128;
  const int t = static_cast<int>(threadIdx.x);
  const int rows = kBoxRows * boxes;
  if (t == 0) {
    mbarrier_init(bar, 1);
    fence_mbarrier_init();
    mbarrier_arrive_expect_tx(bar, rows * 128);
    for (int i = 0; i < boxes; ++i) {
      tma_load_4d(map, bar, tile + i * kBoxRows * 128, 0, i * kBoxRows, 0, 0, kEvictNormal);
    }
  }
  __syncthreads();
  mbarrier_wait(bar, 0);

  // The tile times itself.
  float d[kRows / 2];
  const uint64_t operand = wgmma_descriptor(tile, 16, 1024);
  wgmma_fence_operand(d);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    wgmma_ss_k<Bf16, kRows>(d, wgmma_advance(operand, 32 * i), wgmma_advance(operand, 32 * i), i > 0);
  }
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_fence_operand(d);
  const int first = first_accumulator<kRows>();
#pragma unroll
  for (int i = 0; i < kRows / 2; ++i) {
    const int behind = behind_first<kRows>(i);
    if (first / kRows + behind / kRows >= rows) d[i] = 0.f;
    if (first % kRows + behind % kRows >= rows) d[i] = 0.f;
  }
  store_accumulators<kRows>(d, products);

  // The tile as it lies: a warp moves 16 rows, two chunks of 16 bytes at a time.
  const int row = 16 * warp_id() + lane_id() % 16;
  for (int i = 0; i < 4; ++i) {
    const int place = row * 128 + (2 * i + lane_id() / 16) * 16;
    uint32_t m[4];
    ldmatrix_x4(tile + place, m);
    stmatrix_x4(copy + place, m[0], m[1], m[2], m[3]);
    __syncwarp();
    if (row >= rows) store_shared_zero16(copy + place);
  }
  fence_proxy_async();
  __syncthreads();
  if (t == 0) {
    bulk_store(moved, copy, kRows * 128);
    bulk_commit();
    bulk_wait_read<0>();
  }
}

}  // namespace mlaforge
