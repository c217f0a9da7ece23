// bulk_load: pieces of several sizes on one barrier, in two phases.
#include "primitives.cuh"

namespace mlaforge {

constexpr int kPieces = 4;

// `pieces` holds for each piece: 16-byte units from the start of `in`, 16-byte units from the start of the buffer, bytes.
extern "C" __global__ void __launch_bounds__(64)
    bulk_load_pieces(const int32_t* in, const int32_t* pieces, int32_t* out, int words) {
  const smem_t bar = dynamic_smem();
  const smem_t base = bar + 16;
  const int t = static_cast<int>(threadIdx.x);
  for (int i = t; i < words; i += 64) store_shared_s32(base + 4 * i, 0);
  if (t == 0) {
    mbarrier_init(bar, 1);
    fence_mbarrier_init();
  }
  fence_proxy_async();
  __syncthreads();
  for (int round = 0; round < 2; ++round) {
    if (t == 0) {
      int bytes = 0;
      for (int i = 0; i < kPieces; ++i) bytes += load_global(pieces + 3 * (kPieces * round + i) + 2);
      mbarrier_arrive_expect_tx(bar, bytes);
      for (int i = 0; i < kPieces; ++i) {
        const int32_t* piece = pieces + 3 * (kPieces * round + i);
        bulk_load(bar, base + 16 * load_global(piece + 1), in + 4 * load_global(piece), load_global(piece + 2));
      }
    }
    mbarrier_wait(bar, round);
    for (int i = t; i < words; i += 64) store_global(out + round * words + i, load_shared_s32(base + 4 * i));
    __syncthreads();
  }
}

}  // namespace mlaforge
