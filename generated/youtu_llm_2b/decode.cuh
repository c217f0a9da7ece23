// What the schedules of the decode kernel share: the rows of a tile, the copies of pages, and where results go.
//
// `C` is the kernel's own table of constants: Element, kHeadDimV, kPageSize, kRows, kTokens, kBoxTokens, kSubtiles.
#pragma once

#include "division.cuh"
#include "primitives.cuh"
#include "ring.cuh"
#include "schedule.cuh"
#include "tile.cuh"

namespace mlaforge {

// Rows of the tile and what they may see.
template <class C>
struct RowTile {
  int first_row;     // in the request's rows, token-major: row = query token x heads_per_kv + head
  int rows;          // rows of the request
  int s_q;
  int heads_per_kv;
  uint32_t multiplier;  // division by heads_per_kv
  int shift;
  int kv_head;
  int heads;         // of all kv heads
  int causal;

  // Row r of the tile is a row of the request.
  MLAFORGE_DEVICE bool holds(int r) const { return first_row + r < rows; }
  MLAFORGE_DEVICE int query(int r) const { return query_of(first_row + r); }
  MLAFORGE_DEVICE int head(int r) const {
    return kv_head * heads_per_kv + first_row + r - query_of(first_row + r) * heads_per_kv;
  }
  MLAFORGE_DEVICE int query_of(int row) const { return divided(row, multiplier, shift); }
  // Where row r lies among the partial results, in rows.
  MLAFORGE_DEVICE int64_t partial_row(int slot, int r) const {
    return (static_cast<int64_t>(slot) * gridDim.x + blockIdx.x) * C::kRows + r;
  }

  // Row r sees the tokens before its border: all of them, or under the bottom-right aligned mask as many fewer as there
  // are query tokens behind its own.
  MLAFORGE_DEVICE int hidden(int r) const {
    return causal ? s_q - 1 - query_of(holds(r) ? first_row + r : rows - 1) : 0;
  }
  MLAFORGE_DEVICE static int border(int len, int hidden) { return len > hidden ? len - hidden : 0; }
};

// This block's tile: blockIdx.x counts the `row_tiles` of each kv head.
template <class C>
MLAFORGE_DEVICE RowTile<C> row_tile(int s_q, int heads_per_kv, uint32_t multiplier, int shift, int row_tiles, int causal) {
  const int kv_head = static_cast<int>(blockIdx.x) / row_tiles;
  const int first_row = static_cast<int>(blockIdx.x) % row_tiles * C::kRows;
  const int heads = static_cast<int>(gridDim.x) / row_tiles * heads_per_kv;
  return {first_row, s_q * heads_per_kv, s_q, heads_per_kv, multiplier, shift, kv_head, heads, causal};
}

// End of the blocks that the tile needs of an item.
template <class C>
MLAFORGE_DEVICE int needed_end(const WorkItem& item, int kv_end) {
  const int blocks = (kv_end + C::kTokens - 1) / C::kTokens;
  return item.block_end < blocks ? item.block_end : blocks;
}

// ---- Pages -------------------------------------------------------------------------------------------------------

struct KvSource {
  const TensorMap& map;
  const int32_t* block_table;
  int64_t row_stride;  // elements from one request's row of the table to the next
  int head;
  uint64_t cache_policy;
};

// How L2 keeps what was read of K. One row tile reads a token once: the memory takes such reads fastest as they come. Of
// several, which read it at about the same time, tokens that all have read shall make room first.
MLAFORGE_DEVICE uint64_t kv_policy(int row_tiles) { return row_tiles > 1 ? kEvictFirst : kEvictNormal; }

// Brings the table entries of a block near before they are needed.
template <class C>
MLAFORGE_DEVICE void prefetch_pages(const int32_t* table, int block, int kv_end) {
  const int token = block * C::kTokens + lane_id() * (C::kTokens / 32);
  if (token < kv_end) prefetch_global(table + token / C::kPageSize);
}

// The blocks of the grid together bring the first lines of the block table near, all of its `entries` if they are few.
MLAFORGE_DEVICE void prefetch_table(const int32_t* table, int64_t entries) {
  const int64_t entry = 32 * static_cast<int64_t>(blockIdx.y * gridDim.x + blockIdx.x);
  if (entry < entries) prefetch_global(table + entry);
}

// Copies `Count` subtiles of a block from the `First` on, of the boxes that hold a token of the tile, and no other: a table
// entry behind them means nothing. `to` is where the first of these subtiles begins. Called by a whole warp.
template <class C, int First, int Count>
MLAFORGE_DEVICE void copy_block(const KvSource& kv, const int32_t* table, int block, int kv_end, smem_t bar, smem_t to) {
  const int tokens = kv_end - block * C::kTokens;
  constexpr int kBoxes = C::kTokens / C::kBoxTokens;
  const int boxes = tokens >= C::kTokens ? kBoxes : (tokens + C::kBoxTokens - 1) / C::kBoxTokens;
  if (lane_id() == 0) mbarrier_arrive_expect_tx(bar, boxes * C::kBoxTokens * Count * 128);
  __syncwarp();
  for (int copy = lane_id(); copy < boxes * Count; copy += 32) {
    const int box = copy / Count;
    const int subtile = copy % Count;
    const int token = block * C::kTokens + box * C::kBoxTokens;
    tma_load_4d(kv.map, bar, to + subtile * (C::kTokens * 128) + box * (C::kBoxTokens * 128), 64 * (First + subtile),
                token % C::kPageSize, kv.head, load_global(table + token / C::kPageSize), kv.cache_policy);
  }
}

// Copies `Count` subtiles of the tile's rows of Q from the `First` on. Called by a whole warp.
template <class C, int First, int Count>
MLAFORGE_DEVICE void copy_query(const TensorMap& map, const RowTile<C>& tile, int request, smem_t bar, smem_t to) {
  if (lane_id() == 0) mbarrier_arrive_expect_tx(bar, Count * C::kRows * 128);
  __syncwarp();
  if (lane_id() < Count) {
    tma_load_4d(map, bar, to + lane_id() * (C::kRows * 128), 64 * (First + lane_id()), tile.first_row, tile.kv_head,
                request, kEvictNormal);
  }
}

// ---- Results -----------------------------------------------------------------------------------------------------

// Where results go.
struct Output {
  unsigned char* out;
  int64_t stride_b, stride_s, stride_h;  // bytes
  float* lse;                            // (b, heads, s_q), natural log
  float* partial_out;                    // (slots, tiles, kRows, kHeadDimV)
  float* partial_lse;                    // (slots, tiles, kRows), log2

  template <class C>
  MLAFORGE_DEVICE unsigned char* row_at(const RowTile<C>& tile, int request, int r) const {
    return out + request * stride_b + tile.query(r) * stride_s + tile.head(r) * stride_h;
  }
  template <class C>
  MLAFORGE_DEVICE float* lse_at(const RowTile<C>& tile, int request, int r) const {
    return lse + (static_cast<int64_t>(request) * tile.heads + tile.head(r)) * tile.s_q + tile.query(r);
  }
};

// Stores a warpgroup's columns of O, `Columns` from `first_column` on, times its rows' factors. Leaves nothing of use in
// acc.
template <class C, int Columns>
MLAFORGE_DEVICE void store_columns(const Output& o, const RowTile<C>& tile, int request, int slot, int first_column,
                                   float (&acc)[Columns / 2], const float (&factor)[2]) {
  scale_rows(acc, factor);
  if (slot < 0) {
    // The code for a row is long; the second row goes where the first was, and through it again.
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      const int r = accumulator_row(i);
      store_row<typename C::Element, Columns>(acc, 0, o.row_at(tile, request, r) + first_column * 2, tile.holds(r));
#pragma unroll
      for (int j = 0; j < Columns / 2; j += 4) {
        acc[j] = acc[j + 2];
        acc[j + 1] = acc[j + 3];
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = late(accumulator_row(i));
      if (!tile.holds(r)) continue;
      const int64_t at = tile.partial_row(slot, r) * C::kHeadDimV + first_column;
      store_row_f32<0>(acc, i, o.partial_out + at + 2 * (lane_id() & 3));
    }
  }
}

// What is left of softmax at the end of an item: the factor that normalises a row of O, and its log-sum-exp.
template <class C>
MLAFORGE_DEVICE void finish_rows(const Output& o, const RowTile<C>& tile, int request, int slot, const RowState& state,
                                 float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float sum = quad_sum(state.sum[i]);
    factor[i] = sum == 0.f ? 0.f : 1.f / sum;
    const float lse = state.max[i] + log2_approx(sum);
    const int r = late(accumulator_row(i));
    if ((lane_id() & 3) != 0 || !tile.holds(r)) continue;
    if (slot < 0) {
      store_global(o.lse_at(tile, request, r), sum == 0.f ? infinity() : lse * kLn2);
    } else {
      store_global(o.partial_lse + tile.partial_row(slot, r), sum == 0.f ? -infinity() : lse);
    }
  }
}

}  // namespace mlaforge
