// What the prefill kernel has beside its loads and products: the order of the work, the softmax in registers, results.
//
// `C` is the kernel's own table of constants: Element, kHeadDimV, kRows, kTokens, kItems, kSectionTokens.
#pragma once

#include "primitives.cuh"
#include "ring.cuh"
#include "tile.cuh"

namespace mlaforge {

// ---- Work --------------------------------------------------------------------------------------------------------

// The sequences of a call. Sequence i has rows cu[i] to cu[i + 1] - 1.
struct Sequences {
  const int32_t* cu_q;
  const int32_t* cu_k;
  int batch;
  int total_q, total_k;  // rows of q, and of k and v
  int heads;
  int causal;
};

// Rows of one sequence, never any that the tensor does not have.
struct Rows {
  int first;
  int count;

  MLAFORGE_DEVICE Rows(const int32_t* cu, int i, int total) {
    const int from = load_global(cu + i);
    const int to = load_global(cu + i + 1);
    first = from < 0 ? 0 : from < total ? from : total;
    count = (to < total ? to : total) - first;
    if (count < 0) count = 0;
  }
};

// A tile: up to kRows rows of one sequence and head, and the blocks of kTokens tokens that they see.
struct Item {
  static constexpr int kBytes = 32;

  int blocks;  // -1: there is no more work
  int q_row;   // the tile's first row of q
  int rows;    // rows of the sequence from there on
  int k_row;   // the sequence's first row of k and v
  int head;
  int length;  // tokens of the sequence
  int border;  // the tile's first row sees the tokens before this one; under the mask, each further row sees one more

  MLAFORGE_DEVICE void store(smem_t at) const {
    const int32_t low[4] = {blocks, q_row, rows, k_row};
    const int32_t high[4] = {head, length, border, 0};
    store_shared_v4(at, low);
    store_shared_v4(at + 16, high);
  }
  // What the products need to know of an item, and what its results do.
  MLAFORGE_DEVICE void load_work(smem_t at) {
    blocks = load_shared_s32(at);
    rows = load_shared_s32(at + 8);
    length = load_shared_s32(at + 20);
    border = load_shared_s32(at + 24);
  }
  MLAFORGE_DEVICE void load_place(smem_t at) {
    q_row = load_shared_s32(at + 4);
    rows = load_shared_s32(at + 8);
    head = load_shared_s32(at + 16);
  }
  MLAFORGE_DEVICE void load(smem_t at) {
    load_work(at);
    load_place(at);
    k_row = load_shared_s32(at + 12);
  }
  // Row r of the tile sees the tokens before this one.
  MLAFORGE_DEVICE int seen(int r, int causal) const {
    const int end = border + causal * r;
    return end < length ? end : length;
  }
  // Tokens of the last block that the sequence has.
  template <class C>
  MLAFORGE_DEVICE int tokens_of_last() const {
    return length - (blocks - 1) * C::kTokens;
  }
};

// Tile `at` of a sequence. Its heads are taken in sections whose keys and values stay in L2 together; in a section the
// tiles with the most blocks come first, and those at the same rows of all its heads behind each other.
template <class C>
MLAFORGE_DEVICE Item tile_of(const Sequences& s, Rows q, Rows k, int at) {
  const int tiles = (q.count + C::kRows - 1) / C::kRows;
  int section = C::kSectionTokens / (k.count > 0 ? k.count : 1);
  section = section < 1 ? 1 : section < s.heads ? section : s.heads;
  const int first_head = at / (tiles * section) * section;
  const int heads = s.heads - first_head < section ? s.heads - first_head : section;
  const int rank = at - first_head * tiles;
  const int row = (tiles - 1 - rank / heads) * C::kRows;

  Item item;
  item.q_row = q.first + row;
  item.rows = q.count - row;
  item.k_row = k.first;
  item.head = first_head + rank % heads;
  item.length = k.count;
  item.border = s.causal ? k.count - q.count + 1 + row : k.count;
  const int seen = item.seen((item.rows < C::kRows ? item.rows : C::kRows) - 1, s.causal);
  item.blocks = seen > 0 ? (seen + C::kTokens - 1) / C::kTokens : 0;
  return item;
}

// ---- Softmax -----------------------------------------------------------------------------------------------------

// Scores to probabilities, in place; softmax_reference has been called.
template <int Tokens>
MLAFORGE_DEVICE void softmax_exponentials(float (&s)[Tokens / 2], RowState& state, const float (&rescale)[2],
                                          float scale_log2) {
  float sum[2][2] = {{0.f, 0.f}, {0.f, 0.f}};  // of even and odd columns
  // A row without a token so far: any finite reference keeps exp2(-inf - reference) = 0 instead of NaN.
  const float reference[2] = {state.max[0] == -infinity() ? 0.f : state.max[0],
                              state.max[1] == -infinity() ? 0.f : state.max[1]};
#pragma unroll
  for (int i = 0; i < Tokens / 2; ++i) {
    const int row = (i >> 1) & 1;
    s[i] = exp2_approx(fmaf(s[i], scale_log2, -reference[row]));
    sum[row][i & 1] += s[i];
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) state.sum[i] = state.sum[i] * rescale[i] + (sum[i][0] + sum[i][1]);
}

// Probabilities as A operands of the product with V, four registers for each 16 tokens.
template <class Element, int Tokens>
MLAFORGE_DEVICE void pack_probabilities(const float (&s)[Tokens / 2], uint32_t (&p)[Tokens / 4]) {
#pragma unroll
  for (int i = 0; i < Tokens / 4; ++i) p[i] = pack2<Element>(s[2 * i], s[2 * i + 1]);
}

// ---- Results -----------------------------------------------------------------------------------------------------

// Where results go.
struct Output {
  unsigned char* out;
  int64_t stride_t, stride_h;  // bytes, from one row or head to the next
  float* lse;                  // (heads, total_q), natural log
  int total_q;
};

// Normalises and stores the rows that a warpgroup holds, 64 from `first` of the tile on.
template <class C>
MLAFORGE_DEVICE void store_rows(const Output& o, const Item& item, int first, const RowState& state,
                                float (&acc)[C::kHeadDimV / 2]) {
  float sum[2], factor[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    sum[i] = quad_sum(state.sum[i]);
    factor[i] = sum[i] == 0.f ? 0.f : 1.f / sum[i];
  }
  scale_rows(acc, factor);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int r = late(first + accumulator_row(i));
    const bool valid = r < item.rows;
    unsigned char* row = o.out + (item.q_row + r) * o.stride_t + item.head * o.stride_h;
    store_row<typename C::Element, C::kHeadDimV>(acc, i, row, valid);
    if (valid && (lane_id() & 3) == 0) {
      const float lse = (state.max[i] + log2_approx(sum[i])) * kLn2;
      store_global(o.lse + static_cast<int64_t>(item.head) * o.total_q + item.q_row + r,
                   sum[i] == 0.f ? infinity() : lse);
    }
  }
}

}  // namespace mlaforge
