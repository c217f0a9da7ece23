// tma_load_4d_multicast to some of the cluster's blocks: the first block serves those of a mask.
#include "primitives.cuh"

namespace mlaforge {

constexpr int kThreads = 64;
constexpr int kBytes = 16 * 128;

extern "C" __global__ void __launch_bounds__(kThreads)
    multicast_some(const __grid_constant__ TensorMap map, int32_t* out, int mask) {
  const int t = static_cast<int>(threadIdx.x);
  const int rank = cluster_rank();
  const smem_t base = dynamic_smem();
  const smem_t bar = base + kBytes;
  const bool served = mask >> rank & 1;
  if (t == 0) {
    mbarrier_init(bar, 1);
    fence_mbarrier_init();
    if (served) mbarrier_arrive_expect_tx(bar, kBytes);
  }
  cluster_sync();
  if (rank == 0 && t == 0) {
    tma_load_4d_multicast(map, bar, base, 0, 0, 0, 0, static_cast<uint32_t>(mask), kEvictNormal);
  }
  if (served) {
    mbarrier_wait(bar, 0);
    int32_t* to = out + static_cast<int>(blockIdx.x) * (kBytes / 4);
    for (int i = t; i < kBytes / 4; i += kThreads) store_global(to + i, load_shared_s32(base + 4 * i));
  }
  cluster_sync();
}

}  // namespace mlaforge
