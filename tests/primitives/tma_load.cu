// tma_load_4d: every box of a list to its own place in shared memory, all on one barrier, twice over, so that the barrier
// goes through two phases. What landed goes out as it lies, swizzle and all.
#include "primitives.cuh"

namespace mlaforge {

extern "C" __global__ void __launch_bounds__(64)
    tma_load(const __grid_constant__ TensorMap map, const int32_t* corners, int32_t* out, int boxes, int box_bytes) {
  const smem_t base = dynamic_smem();
  const smem_t bar = base + boxes * box_bytes;
  const int t = static_cast<int>(threadIdx.x);
  if (t == 0) {
    tma_prefetch(map);
    mbarrier_init(bar, 2);
    fence_mbarrier_init();
  }
  __syncthreads();
  for (int round = 0; round < 2; ++round) {
    if (t == 0) {
      // Bytes may be expected in parts, by several arrivals.
      mbarrier_arrive_expect_tx(bar, box_bytes);
      mbarrier_arrive_expect_tx(bar, (boxes - 1) * box_bytes);
      for (int box = 0; box < boxes; ++box) {
        const int32_t* corner = corners + 4 * (boxes * round + box);
        tma_load_4d(map, bar, base + box * box_bytes, load_global(corner), load_global(corner + 1),
                    load_global(corner + 2), load_global(corner + 3), round == 0 ? kEvictNormal : kEvictFirst);
      }
    }
    mbarrier_wait(bar, round);
    const int words = boxes * box_bytes / 4;
    for (int i = t; i < words; i += 64) store_global(out + round * words + i, load_shared_s32(base + 4 * i));
    __syncthreads();
  }
}

}  // namespace mlaforge
