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
  static constexpr int kUnused = 28;  // a word that nobody reads

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

// No maximum of a block is looked for before its exponentials. They refer to what their row refers to already, and a
// thread's sum of them tells whether that will do: none is negative, so each is at most as large as the sum. Up to this
// much will do: fp16 ends at 65504, and is as exact here as below 1, like float32 in sums and O. Where a sum passes it, as
// one that is infinite does, the block is made anew with its maximum.
constexpr float kMost = 8192.f;

// What a thread's two rows refer to. One without a token so far: any finite value keeps exp2(-inf - reference) = 0
// instead of NaN.
MLAFORGE_DEVICE void references(const RowState& state, float (&reference)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) reference[i] = state.max[i] == -infinity() ? 0.f : state.max[i];
}

// The first Count exponentials of a thread's scores of a block, and their sums over even and odd columns of each row.
template <int Count>
struct Begun {
  static_assert(Count % 4 == 0, "two columns of two rows each");
  float p[Count > 0 ? Count : 1];
  float sum[2][2] = {{0.f, 0.f}, {0.f, 0.f}};

  // They are there when this returns. Without that the compiler may work them out as late as they are used, for it knows
  // of no wait that they could fill. Its price is a vote: no sum of exponentials is -1, and nothing is stored at `unused`.
  template <int Half>
  MLAFORGE_DEVICE void make(const float (&s)[Half], const float (&reference)[2], float scale_log2, smem_t unused) {
    if constexpr (Count > 0) {
#pragma unroll
      for (int i = 0; i < Count; ++i) {
        const int row = (i >> 1) & 1;
        p[i] = exp2_approx(fmaf(s[i], scale_log2, -reference[row]));
        sum[row][i & 1] = i < 4 ? p[i] : sum[row][i & 1] + p[i];
      }
      if (warp_any((sum[0][0] + sum[0][1]) + (sum[1][0] + sum[1][1]) == -1.f)) store_shared_f32(unused, sum[0][0]);
    }
  }
};

// Probabilities of a block's scores relative to `reference`, rounded, as A operands of the product with V, four registers
// for each 16 tokens; and this thread's sums of them, not rounded. Those that have begun are taken as they are. The scores
// stay, for they may be needed once more.
template <class Element, int Tokens, int Count>
MLAFORGE_DEVICE void probabilities(const float (&s)[Tokens / 2], const Begun<Count>& begun, const float (&reference)[2],
                                   float scale_log2, float (&sum)[2], uint32_t (&p)[Tokens / 4]) {
  float part[2][2] = {{begun.sum[0][0], begun.sum[0][1]}, {begun.sum[1][0], begun.sum[1][1]}};
#pragma unroll
  for (int i = 0; i < Tokens / 4; ++i) {
    const int row = i & 1;
    float pair[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (2 * i < Count) {
        pair[j] = begun.p[2 * i + j];
      } else {
        pair[j] = exp2_approx(fmaf(s[2 * i + j], scale_log2, -reference[row]));
        part[row][j] += pair[j];
      }
    }
    p[i] = pack2<Element>(pair[0], pair[1]);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) sum[i] = part[i][0] + part[i][1];
}

// ---- Results -----------------------------------------------------------------------------------------------------

// Where results go.
struct Output {
  unsigned char* out;
  int64_t stride_t, stride_h;  // bytes, from one row or head to the next
  float* lse;                  // (heads, total_q), natural log
  int total_q;
};

// A warpgroup's rows of a tile, 64 from `first` of it on, normalised and rounded: half the registers of O.
template <class C>
struct Results {
  Item item{};  // whose they are; one without rows at first
  uint32_t o[C::kHeadDimV / 4]{};

  // Takes the results of the item at `place`, and stores their lse.
  MLAFORGE_DEVICE void take(const Output& to, smem_t place, int first, const RowState& state,
                            const float (&acc)[C::kHeadDimV / 2]) {
    item.load_place(place);
    float factor[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float sum = quad_sum(state.sum[i]);
      factor[i] = sum == 0.f ? 0.f : 1.f / sum;
      const int r = first + accumulator_row(i);
      if (r < item.rows && (lane_id() & 3) == 0) {
        const float lse = (state.max[i] + log2_approx(sum)) * kLn2;
        store_global(to.lse + static_cast<int64_t>(item.head) * to.total_q + item.q_row + r, sum == 0.f ? infinity() : lse);
      }
    }
#pragma unroll
    for (int i = 0; i < C::kHeadDimV / 4; ++i) {
      o[i] = pack2<typename C::Element>(acc[2 * i] * factor[i & 1], acc[2 * i + 1] * factor[i & 1]);
    }
  }

  MLAFORGE_DEVICE void store(const Output& to, int first) const {
    const int quarter = lane_id() & 3;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = late(first + accumulator_row(i));
      const bool valid = r < item.rows;
      unsigned char* row = to.out + (item.q_row + r) * to.stride_t + item.head * to.stride_h;
#pragma unroll
      for (int g = 0; g < C::kHeadDimV / 8; g += 4) {
        uint32_t w[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) w[k] = o[2 * (g + k) + i];
        quad_transpose(w);
        if (valid) store_global_v4(row + 16 * (g + quarter), w[0], w[1], w[2], w[3]);
      }
    }
  }
};

}  // namespace mlaforge
