// tma_load_4d_multicast: every block of a cluster brings one part of a tile to all of them, so that each has the whole.
// Each block expects the bytes on its own barrier, and is refilled when all have read theirs.
#include "primitives.cuh"

namespace mlaforge {

constexpr int kThreads = 64;
constexpr int kPartRows = 16;
constexpr int kPartBytes = kPartRows * 128;

extern "C" __global__ void __launch_bounds__(kThreads)
    multicast(const __grid_constant__ TensorMap map, int32_t* out, int rounds) {
  const int t = static_cast<int>(threadIdx.x);
  const int block = static_cast<int>(blockIdx.x);
  const int rank = cluster_rank();
  const int size = cluster_size();
  const smem_t base = dynamic_smem();
  const smem_t full = base + size * kPartBytes;
  const smem_t empty = full + 8;
  const int words = size * kPartBytes / 4;
  if (t == 0) {
    mbarrier_init(full, 1);
    mbarrier_init(empty, kThreads * size);
    fence_mbarrier_init();
  }
  cluster_sync();
  for (int round = 0; round < rounds; ++round) {
    if (t == 0) {
      mbarrier_arrive_expect_tx(full, size * kPartBytes);
      if (round > 0) mbarrier_wait(empty, (round - 1) & 1);
      tma_load_4d_multicast(map, full, base + rank * kPartBytes, 0, kPartRows * rank, round, block / size,
                            (1u << size) - 1, kEvictNormal);
    }
    mbarrier_wait(full, round & 1);
    int32_t* to = out + (block * rounds + round) * words;
    for (int i = t; i < words; i += kThreads) store_global(to + i, load_shared_s32(base + 4 * i));
    for (int other = 0; other < size; ++other) mbarrier_arrive_remote(empty, other);
  }
  // Nobody leaves while others may still arrive here.
  cluster_sync();
}

}  // namespace mlaforge
