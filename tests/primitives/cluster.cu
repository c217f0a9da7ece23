// Clusters: ranks, the cluster's barrier, and arrivals at the mbarriers of the other blocks, for several rounds.
#include "primitives.cuh"

namespace mlaforge {

constexpr int kThreads = 64;

extern "C" __global__ void __launch_bounds__(kThreads) cluster(int32_t* ranks, int32_t* lines, int32_t* out, int rounds) {
  const smem_t bar = dynamic_smem();
  const int t = static_cast<int>(threadIdx.x);
  const int block = static_cast<int>(blockIdx.x);
  const int rank = cluster_rank();
  const int size = cluster_size();
  const int first = block - rank;
  if (t == 0) {
    store_global(ranks + 2 * block, rank);
    store_global(ranks + 2 * block + 1, size);
    mbarrier_init(bar, kThreads * size);
    fence_mbarrier_init();
  }
  // What a block wrote before the barrier, every other may read behind it.
  store_global(lines + kThreads * block + t, 1000 * block + t);
  cluster_arrive();
  cluster_wait();
  const int next = (rank + 1) % size;
  int32_t value = load_global(lines + kThreads * (first + next) + t);
  for (int round = 0; round < rounds; ++round) {
    for (int other = 0; other < size; ++other) mbarrier_arrive_remote(bar, other);
    mbarrier_wait(bar, round & 1);
    value += 1;
  }
  store_global(out + kThreads * block + t, value);
  // Nobody leaves while others may still arrive here.
  cluster_sync();
}

}  // namespace mlaforge
