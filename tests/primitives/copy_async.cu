// copy_async_16: one warp brings pieces in any order into one of two buffers, and arrives at its barrier when they have
// landed; another hands the buffer to a bulk store, which reads by the other proxy. In the end each thread waits for a piece
// of its own.
#include "primitives.cuh"

namespace mlaforge {

constexpr int kPieces = 64;
constexpr int kBytes = 16 * kPieces;

// `from` and `to` hold the places of the pieces of each round, in units of 16 bytes.
extern "C" __global__ void __launch_bounds__(64)
    copy_async_pieces(const int32_t* in, const int32_t* from, const int32_t* to, int32_t* out, int32_t* own, int rounds) {
  const smem_t base = dynamic_smem();
  const smem_t bars = base + 2 * kBytes + 512;  // two full, two empty
  const int t = static_cast<int>(threadIdx.x);
  if (t == 0) {
    for (int i = 0; i < 2; ++i) mbarrier_init(bars + 8 * i, 32);
    for (int i = 2; i < 4; ++i) mbarrier_init(bars + 8 * i, 1);
  }
  __syncthreads();
  for (int round = 0; round < rounds; ++round) {
    const smem_t buffer = base + round % 2 * kBytes;
    const smem_t full = bars + 8 * (round % 2);
    const smem_t empty = full + 16;
    const int phase = round / 2 % 2;
    if (t < 32) {
      mbarrier_wait(empty, phase ^ 1);
      for (int i = 0; i < 2; ++i) {
        const int piece = round * kPieces + 32 * i + t;
        copy_async_16(buffer + 16 * load_global(to + piece), in + 4 * load_global(from + piece));
      }
      copy_async_arrive(full);
    } else {
      mbarrier_wait(full, phase);
      fence_proxy_async();
      __syncwarp();
      if (t == 32) {
        bulk_store(out + round * (kBytes / 4), buffer, kBytes);
        bulk_commit();
        bulk_wait_read<0>();
        mbarrier_arrive(empty);
      }
    }
  }
  if (t < 32) {
    const smem_t mine = base + 2 * kBytes + 16 * t;
    copy_async_16(mine, in + 4 * t);
    copy_async_wait();
    int32_t v[4];
    load_shared_v4(mine, v);
    for (int i = 0; i < 4; ++i) store_global(own + 4 * t + i, v[i]);
  }
}

}  // namespace mlaforge
