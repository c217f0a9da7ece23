// The read stream of a cache: its tiles in a given order to shared memory, and nothing else. Persistent blocks, one
// thread each, keep `slots` pieces of a tile in flight; what arrives is thrown away. This is the ceiling of any kernel
// that must read the cache.
#include "primitives.cuh"

namespace mlaforge {

constexpr int kRing = 1024;  // the mbarriers lie before it: at most 128 slots

MLAFORGE_DEVICE int following(int tile, int tiles) { return tile + 1 < tiles ? tile + 1 : tile; }

// `order` names the tiles to read, `tiles` of them, each of `pieces` x `piece_bytes`. Neighbouring `readers` blocks read
// the same share of them, `rounds` times over. `sink` gets a word of each block. gridDim.x is a multiple of `readers`.
extern "C" __global__ void __launch_bounds__(32)
    bench_read_stream(const void* data, const int32_t* order, int32_t* sink, int tiles, int pieces, int piece_bytes,
                      int slots, int readers, int rounds) {
  if (threadIdx.x != 0) return;
  const smem_t bars = dynamic_smem();
  const smem_t ring = bars + kRing;
  for (int slot = 0; slot < slots; ++slot) mbarrier_init(bars + 8 * slot, 1);
  fence_mbarrier_init();

  // The share is counted in pieces, so that no block has more than one piece more than another.
  const int64_t group = static_cast<int64_t>(blockIdx.x) / readers;
  const int64_t groups = static_cast<int64_t>(gridDim.x) / readers;
  const int64_t all = static_cast<int64_t>(tiles) * pieces;
  const int64_t begin = all * group / groups;
  const int64_t share = all * (group + 1) / groups - begin;
  const int64_t count = share * rounds;

  const unsigned char* bytes = static_cast<const unsigned char*>(data);
  const int first_tile = static_cast<int>(begin / pieces);
  const int first_piece = static_cast<int>(begin % pieces);
  int64_t left = share;  // of this round
  int tile = first_tile;
  int piece = first_piece;
  // The number of the tile after this one is fetched a tile ahead: its latency hides behind the copies.
  int now = share > 0 ? load_global(order + tile) : 0;
  int next = share > 0 ? load_global(order + following(tile, tiles)) : 0;

  int slot = 0;
  int parity = 0;
  for (int64_t i = 0; i < count + slots; ++i) {
    // The first pass over the ring has nothing to wait for, the last nothing to issue.
    if (i >= slots && i - slots < count) mbarrier_wait(bars + 8 * slot, parity ^ 1);
    if (i < count) {
      const int64_t offset = (static_cast<int64_t>(now) * pieces + piece) * piece_bytes;
      mbarrier_arrive_expect_tx(bars + 8 * slot, piece_bytes);
      bulk_load(bars + 8 * slot, ring + slot * piece_bytes, bytes + offset, piece_bytes);
      if (--left == 0) {
        left = share;
        tile = first_tile;
        piece = first_piece;
        now = load_global(order + tile);
        next = load_global(order + following(tile, tiles));
      } else if (++piece == pieces) {
        piece = 0;
        ++tile;
        now = next;
        next = load_global(order + following(tile, tiles));
      }
    }
    if (++slot == slots) {
      slot = 0;
      parity ^= 1;
    }
  }
  // More blocks than pieces leave some without a share.
  if (share > 0) store_global(sink + blockIdx.x, load_shared_s32(ring));
}

}  // namespace mlaforge
