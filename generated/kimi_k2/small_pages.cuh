// Tiles of K that lie in several pages each: a few warps bring them together, by TMA or, of pages that are too small for it,
// by copies of single threads. A box costs the warp that issues it some 50 cycles, however little it brings.
//
// `C` is as in decode.cuh; where threads copy it also has kColumns, elements of a row of K, and where several warps bring a
// tile kLoaders, their number.
#pragma once

#include "decode.cuh"
#include "primitives.cuh"

namespace mlaforge {

// ---- By TMA ------------------------------------------------------------------------------------------------------

// How many of a block's boxes hold a token of the tile.
template <class C>
MLAFORGE_DEVICE int needed_boxes(int block, int kv_end) {
  constexpr int kBoxes = C::kTokens / C::kBoxTokens;
  const int tokens = kv_end - block * C::kTokens;
  return tokens >= C::kTokens ? kBoxes : (tokens + C::kBoxTokens - 1) / C::kBoxTokens;
}

// copy_block() by C::kLoaders warps: number `loader` copies the boxes `loader`, loader + kLoaders and so on, and is one of
// the arrivals at `bar`.
template <class C, int First, int Count>
MLAFORGE_DEVICE void copy_boxes(const KvSource& kv, const int32_t* table, int block, int kv_end, int loader, smem_t bar,
                                smem_t to) {
  const int mine = (needed_boxes<C>(block, kv_end) + C::kLoaders - 1 - loader) / C::kLoaders;
  if (lane_id() == 0) mbarrier_arrive_expect_tx(bar, mine * C::kBoxTokens * Count * 128);
  __syncwarp();
  for (int copy = lane_id(); copy < mine * Count; copy += 32) {
    const int box = loader + copy / Count * C::kLoaders;
    const int subtile = copy % Count;
    const int token = block * C::kTokens + box * C::kBoxTokens;
    tma_load_4d(kv.map, bar, to + subtile * (C::kTokens * 128) + box * (C::kBoxTokens * 128), 64 * (First + subtile),
                token % C::kPageSize, kv.head, load_global(table + token / C::kPageSize), kv.cache_policy);
  }
}

// ---- By threads --------------------------------------------------------------------------------------------------

// The cache as threads address it.
struct KvRows {
  const unsigned char* head;  // this kv head's part of the first token
  int64_t page_stride, token_stride;  // bytes
  const int32_t* block_table;
  int64_t row_stride;  // elements from one request's row of the table to the next
  uint64_t cache_policy;
};

// What a warp copies of a block when `Warps` of them, `loader` being its number, share the tokens: every so manieth four,
// eight lanes of 16 bytes to a line of a token. The lines lie under the 128-byte swizzle.
template <class C, int Warps>
struct Gather {
  static constexpr int kSteps = C::kTokens / (4 * Warps);  // fours of tokens
  static constexpr int kEntries = (4 * kSteps + 31) / 32;
  static_assert(C::kTokens % C::kPageSize == 0, "a token's place in its page is that in its block");

  int first;  // of the lane's tokens of a block; the next is 4 x Warps behind it
  int entry[kEntries];  // of the table, for all tokens of the warp: each lane has another's

  MLAFORGE_DEVICE explicit Gather(int loader) : first(4 * loader + (lane_id() >> 3)) {}

  // Reads the entries of a block. Behind the tile's last token an entry means nothing.
  MLAFORGE_DEVICE void load_entries(const int32_t* table, int block, int kv_end) {
    const int loader = first >> 2;
#pragma unroll
    for (int i = 0; i < kEntries; ++i) {
      const int at = lane_id() + 32 * i;  // among the warp's tokens
      const int token = block * C::kTokens + 4 * (loader + at / 4 * Warps) + at % 4;
      entry[i] = at < 4 * kSteps && token < kv_end ? load_global(table + token / C::kPageSize) : 0;
    }
  }

  // This lane's token of a step, counted from the block's first; where its piece of the first subtile comes from, by the
  // entries that were read last; and where in a subtile it goes.
  MLAFORGE_DEVICE int token(int step) const { return first + 4 * Warps * step; }
  MLAFORGE_DEVICE const unsigned char* source(const KvRows& kv, int step) const {
    const int page = __shfl_sync(0xffffffffu, entry[step / 8], 4 * step % 32 + (lane_id() >> 3));
    return kv.head + page * kv.page_stride + token(step) % C::kPageSize * kv.token_stride + 16 * (lane_id() & 7);
  }
  MLAFORGE_DEVICE int target(int step) const {
    const int line = token(step);
    return line * 128 + (((lane_id() & 7) ^ (line & 7)) << 4);
  }
};

// Whether a lane's piece of a subtile is one of the row's, whose last subtile may be part zeros; those are never read.
template <class C>
MLAFORGE_DEVICE bool in_row(int subtile) {
  return 64 * subtile + 8 * (lane_id() & 7) < C::kColumns;
}

// Starts the copies of a warp's share of a block, `Count` subtiles from the `First` on; `tokens` of the block, or more, are
// the tile's, and no other is read. `to` is where the first of these subtiles begins.
template <class C, int First, int Count, int Warps>
MLAFORGE_DEVICE void gather_block(const KvRows& kv, const Gather<C, Warps>& gather, int tokens, smem_t to) {
#pragma unroll
  for (int step = 0; step < Gather<C, Warps>::kSteps; ++step) {
    const unsigned char* from = gather.source(kv, step) + 128 * First;
    if (gather.token(step) >= tokens) continue;
#pragma unroll
    for (int subtile = 0; subtile < Count; ++subtile) {
      if (64 * (First + subtile + 1) > C::kColumns && !in_row<C>(First + subtile)) continue;
      copy_async_16(to + subtile * (C::kTokens * 128) + gather.target(step), from + 128 * subtile, kv.cache_policy);
    }
  }
}

// The same of one subtile, with the lane's sources of all steps, as Gather gives them.
template <class C>
MLAFORGE_DEVICE void gather_subtile(const Gather<C, C::kLoaders>& gather,
                                    const unsigned char* const (&from)[Gather<C, C::kLoaders>::kSteps], int subtile,
                                    int tokens, smem_t to, uint64_t cache_policy) {
  if (C::kColumns % 64 != 0 && !in_row<C>(subtile)) return;
#pragma unroll
  for (int step = 0; step < Gather<C, C::kLoaders>::kSteps; ++step) {
    if (gather.token(step) < tokens) copy_async_16(to + gather.target(step), from[step] + 128 * subtile, cache_policy);
  }
}

}  // namespace mlaforge
