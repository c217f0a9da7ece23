// Tiles of K that lie in several pages each. A TMA box holds no more than a page and costs the warp that issues it some 50
// cycles, however little it brings: so C::kLoaders warps share them, and where every token has a page of its own, the
// threads of these warps copy them instead.
//
// `C` is as in decode.cuh, with kLoaders; where threads copy also with kColumns, elements of a row of K.
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

// The cache as threads address it, one token a page.
struct KvRows {
  const unsigned char* head;  // this kv head's part of the first page
  int page_stride;            // bytes
  const int32_t* block_table;
  int64_t row_stride;  // elements from one request's row of the table to the next
};

// What a warp copies of a block when `Warps` of them, `loader` being its number, share the tokens: every so manieth four,
// eight lanes of 16 bytes to a line of a token. The lines lie under the 128-byte swizzle.
template <class C, int Warps>
struct Gather {
  static constexpr int kSteps = C::kTokens / (4 * Warps);  // fours of tokens
  static constexpr int kEntries = (4 * kSteps + 31) / 32;
  static_assert(C::kPageSize == 1, "the table has an entry for each token");

  int first;  // of the lane's tokens of a block; the next is 4 x Warps behind it
  int target;  // where the lane's piece of that token lies in a subtile
  int entry[kEntries];  // of the table, for all tokens of the warp: each lane has another's

  MLAFORGE_DEVICE explicit Gather(int loader)
      : first(4 * loader + (lane_id() >> 3)), target(first * 128 + (((lane_id() & 7) ^ (first & 7)) << 4)) {}

  // Reads the entries of a block. Behind the tile's last token an entry means nothing.
  MLAFORGE_DEVICE void load_entries(const int32_t* table, int block, int kv_end) {
#pragma unroll
    for (int i = 0; i < kEntries; ++i) {
      const int at = lane_id() + 32 * i;  // among the warp's tokens
      const int token = block * C::kTokens + (first & ~3) + at / 4 * (4 * Warps) + at % 4;
      entry[i] = at < 4 * kSteps && token < kv_end ? load_global(table + token) : 0;
    }
  }

  // Whether this lane's token of a step is one of the block's first `tokens`.
  MLAFORGE_DEVICE bool needs(int step, int tokens) const { return 4 * Warps * step < tokens - first; }
  // Its page, by the entries that were read last.
  MLAFORGE_DEVICE int page(int step) const {
    return __shfl_sync(0xffffffffu, entry[step / 8], 4 * step % 32 + (lane_id() >> 3));
  }
  // Where in the subtile its piece goes: of lines that are four apart the swizzle differs in one bit.
  MLAFORGE_DEVICE int place(int step) const { return (target ^ ((4 * Warps * step & 4) << 4)) + 4 * Warps * step * 128; }
};

// A lane's piece of a subtile, in the cache's first page, and whether the row has it: the last subtile may be part zeros,
// which no product reads.
MLAFORGE_DEVICE const unsigned char* column_of(const KvRows& kv, int subtile) {
  return kv.head + 128 * subtile + 16 * (lane_id() & 7);
}
template <class C>
MLAFORGE_DEVICE bool in_row(int subtile) {
  return C::kColumns % 64 == 0 || 64 * subtile + 8 * (lane_id() & 7) < C::kColumns;
}

// Starts the copies of a warp's share of a block, `Count` subtiles from the `First` on. Of the block's tokens only the first
// `tokens` are the tile's: no other is read. `to` is where the first of these subtiles begins.
template <class C, int First, int Count, int Warps>
MLAFORGE_DEVICE void gather_block(const KvRows& kv, const Gather<C, Warps>& gather, int tokens, smem_t to) {
  const unsigned char* column = column_of(kv, First);
#pragma unroll
  for (int step = 0; step < Gather<C, Warps>::kSteps; ++step) {
    const unsigned char* from = strided(column, gather.page(step), kv.page_stride);
    if (!gather.needs(step, tokens)) continue;
#pragma unroll
    for (int subtile = 0; subtile < Count; ++subtile) {
      if (subtile == Count - 1 && !in_row<C>(First + subtile)) continue;
      copy_async_16(to + subtile * (C::kTokens * 128) + gather.place(step), from + 128 * subtile);
    }
  }
}

// The same of one subtile, with the lane's pages of all steps.
template <class C>
MLAFORGE_DEVICE void gather_subtile(const KvRows& kv, const Gather<C, C::kLoaders>& gather,
                                    const int (&page)[Gather<C, C::kLoaders>::kSteps], int subtile, int tokens, smem_t to) {
  const unsigned char* column = column_of(kv, subtile);
  if (!in_row<C>(subtile)) return;
#pragma unroll
  for (int step = 0; step < Gather<C, C::kLoaders>::kSteps; ++step) {
    if (!gather.needs(step, tokens)) continue;
    copy_async_16(to + gather.place(step), strided(column, page[step], kv.page_stride));
  }
}

}  // namespace mlaforge
