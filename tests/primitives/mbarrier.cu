// mbarriers: three warps fill a ring of two stages, one warp drains it; each stage's pair of barriers runs through many
// phases, with 96 arrivals on one side and 32 on the other.
#include "primitives.cuh"

namespace mlaforge {

constexpr int kStages = 2;
constexpr int kWriters = 96;

extern "C" __global__ void __launch_bounds__(128) mbarrier(const int32_t* in, int32_t* out, int rounds) {
  const smem_t base = dynamic_smem();
  const smem_t full = base;
  const smem_t empty = base + 8 * kStages;
  const smem_t data = base + 64;
  const int t = static_cast<int>(threadIdx.x);
  if (t == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      mbarrier_init(full + 8 * stage, kWriters);
      mbarrier_init(empty + 8 * stage, 32);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  for (int round = 0; round < rounds; ++round) {
    const int stage = round % kStages;
    const int phase = round / kStages & 1;
    const smem_t line = data + 4 * kWriters * stage;
    if (t < kWriters) {
      // The phase before the first counts as done.
      mbarrier_wait(empty + 8 * stage, phase ^ 1);
      store_shared_s32(line + 4 * t, load_global(in + kWriters * round + t));
      mbarrier_arrive(full + 8 * stage);
    } else {
      mbarrier_wait(full + 8 * stage, phase);
      for (int i = lane_id(); i < kWriters; i += 32) {
        store_global(out + kWriters * round + i, load_shared_s32(line + 4 * (kWriters - 1 - i)));
      }
      mbarrier_arrive(empty + 8 * stage);
    }
  }
}

}  // namespace mlaforge
