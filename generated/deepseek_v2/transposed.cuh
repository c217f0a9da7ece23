// What a warpgroup does with a tile in registers whose tokens run along M and whose rows of Q along N: softmax down the
// columns, and O with the columns of V along M.
// A thread holds two tokens of Rows / 4 columns of the accumulator; the eight lanes and four warps that share a column see
// it as one row of Q.
#pragma once

#include "decode.cuh"
#include "primitives.cuh"
#include "tile.cuh"

namespace mlaforge {

// Warp of the warpgroup.
MLAFORGE_DEVICE int group_warp() { return (static_cast<int>(threadIdx.x) & 127) >> 5; }

// The columns of an accumulator that this thread holds, and which of them accumulator i is in.
MLAFORGE_DEVICE int accumulator_column(int j) { return 8 * (j / 2) + 2 * (lane_id() & 3) + j % 2; }
constexpr MLAFORGE_DEVICE int column_of(int i) { return i / 4 * 2 + i % 2; }

// Online softmax of this thread's columns, in the log2 domain. All threads that share a column agree on max.
template <int Rows>
struct ColumnState {
  float max[Rows / 4];  // what the row refers to: its maximum of scale_log2 * s so far, or a little less; -inf without a token
  float sum[Rows / 4];  // running sum of this thread's tokens only, relative to max

  MLAFORGE_DEVICE void reset() {
#pragma unroll
    for (int j = 0; j < Rows / 4; ++j) {
      max[j] = -infinity();
      sum[j] = 0.f;
    }
  }
};

// Scores of tokens at and beyond the row's border become -inf. `first` is the token of row 0 of the accumulator.
template <int Rows>
MLAFORGE_DEVICE void mask_tokens(float (&s)[Rows / 2], int first, const int (&border)[Rows / 4]) {
#pragma unroll
  for (int i = 0; i < Rows / 2; ++i) {
    if (first + accumulator_row(i / 2 % 2) >= border[column_of(i)]) s[i] = -infinity();
  }
}

// The larger of this thread's two scores of each column, scaled.
template <int Rows>
MLAFORGE_DEVICE void column_tops(const float (&s)[Rows / 2], float scale_log2, float (&top)[Rows / 4]) {
#pragma unroll
  for (int j = 0; j < Rows / 4; ++j) top[j] = fmaxf(s[j / 2 * 4 + j % 2], s[j / 2 * 4 + 2 + j % 2]) * scale_log2;
}

// Whether one of this thread's scores has passed what its row refers to by more than `slack`.
template <int Rows>
MLAFORGE_DEVICE bool passes_reference(const float (&s)[Rows / 2], const ColumnState<Rows>& state, float scale_log2,
                                      float slack) {
  float top[Rows / 4];
  column_tops<Rows>(s, scale_log2, top);
  bool passes = false;
#pragma unroll
  for (int j = 0; j < Rows / 4; ++j) passes = passes || top[j] > state.max[j] + slack;
  return passes;
}

// The warpgroup agrees on the maximum of each row, and rows that have passed their reference by more than `slack` refer to
// it from now on: `rescale` is what everything accumulated before must be multiplied with. `scratch` holds 4 x Rows
// float32, which were last read before a barrier of the warpgroup.
template <int Rows>
MLAFORGE_DEVICE void raise_reference(const float (&s)[Rows / 2], ColumnState<Rows>& state, float (&rescale)[Rows / 4],
                                     float scale_log2, float slack, smem_t scratch, int barrier) {
  float top[Rows / 4];
  column_tops<Rows>(s, scale_log2, top);
#pragma unroll
  for (int j = 0; j < Rows / 4; ++j) {
#pragma unroll
    for (int mask = 4; mask < 32; mask *= 2) top[j] = fmaxf(top[j], shuffle_xor(top[j], mask));
    if (lane_id() < 4) store_shared_f32(scratch + 4 * (group_warp() * Rows + accumulator_column(j)), top[j]);
  }
  named_barrier_sync(barrier, 128);
#pragma unroll
  for (int j = 0; j < Rows / 4; ++j) {
    float seen = -infinity();
#pragma unroll
    for (int warp = 0; warp < 4; ++warp) {
      seen = fmaxf(seen, load_shared_f32(scratch + 4 * (warp * Rows + accumulator_column(j))));
    }
    rescale[j] = 1.f;
    if (seen > state.max[j] + slack) {
      rescale[j] = exp2_approx(state.max[j] - seen);
      state.max[j] = seen;
      state.sum[j] *= rescale[j];
    }
  }
}

template <int Rows>
MLAFORGE_DEVICE void scale_columns(float (&acc)[Rows / 2], const float (&factor)[Rows / 4]) {
#pragma unroll
  for (int i = 0; i < Rows / 2; ++i) acc[i] *= factor[column_of(i)];
}

// Stores an accumulator's shape, packed, as [Rows, 64] under the 128-byte swizzle: what runs along M runs along the line.
// `pack(i)` gives accumulators i and i + 1. A warp writes 16 elements of every line, and reads nothing.
template <int Rows, class Pack>
MLAFORGE_DEVICE void store_transposed(smem_t tile, const Pack& pack) {
  static_assert(Rows % 8 == 0, "a matrix has 8 columns");
  const int lane = lane_id();
  // In the order of the accumulators: 8 rows, the next 8, then the same of the 8 columns on.
  const int chunk = 2 * group_warp() + ((lane >> 3) & 1);
#pragma unroll
  for (int h = 0; h < Rows / 16; ++h) {
    const int line = 16 * h + (lane >> 4) * 8 + (lane & 7);
    stmatrix_x4_transposed(tile + line * 128 + ((chunk ^ (line & 7)) << 4), pack(8 * h), pack(8 * h + 2), pack(8 * h + 4),
                           pack(8 * h + 6));
  }
  if constexpr (Rows % 16 != 0) {
    const int line = Rows - 8 + (lane & 7);
    stmatrix_x2_transposed(tile + line * 128 + ((chunk ^ (lane & 7)) << 4), pack(Rows / 2 - 4), pack(Rows / 2 - 2));
  }
}

// Scores to probabilities, stored as the B operand of the next product and added to the sums.
template <class Element, int Rows>
MLAFORGE_DEVICE void store_column_probabilities(smem_t tile, const float (&s)[Rows / 2], ColumnState<Rows>& state,
                                                float scale_log2) {
  store_transposed<Rows>(tile, [&](int i) {
    float p[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int j = column_of(i + e);
      // A row without a token so far: any finite reference keeps exp2(-inf - reference) = 0 instead of NaN.
      const float reference = state.max[j] == -infinity() ? 0.f : state.max[j];
      p[e] = exp2_approx(fmaf(s[i + e], scale_log2, -reference));
      state.sum[j] += p[e];
    }
    return pack2<Element>(p[0], p[1]);
  });
}

// A warpgroup's columns of O from subtile First on, `Count` subtiles, to the rows of the result. `scratch` is a tile as above;
// a warp uses only what it stores there itself.
template <class C, int First, int Count, int Subtiles>
MLAFORGE_DEVICE void store_out_columns(const Output& o, const RowTile<C>& tile, int request, int slot,
                                       const float (&acc)[Subtiles][C::kRows / 2], smem_t scratch) {
  if (slot < 0) {
    const int chunk = 2 * group_warp() + (lane_id() & 1);
    constexpr int kTurns = (C::kRows + 15) / 16;
    unsigned char* line[kTurns];
#pragma unroll
    for (int h = 0; h < kTurns; ++h) {
      const int r = 16 * h + (lane_id() >> 1);
      line[h] = o.row_at(tile, request, r) + (64 * First + 8 * chunk) * 2;
    }
#pragma unroll
    for (int c = 0; c < Count; ++c) {
      const auto& columns = acc[First + c];
      store_transposed<C::kRows>(scratch, [&](int i) { return pack2<typename C::Element>(columns[i], columns[i + 1]); });
      __syncwarp();
#pragma unroll
      for (int h = 0; h < kTurns; ++h) {
        const int r = 16 * h + (lane_id() >> 1);
        if (C::kRows % 16 != 0 && r >= C::kRows) continue;
        int32_t w[4];
        load_shared_v4(scratch + r * 128 + ((chunk ^ (r & 7)) << 4), w);
        if (!tile.holds(r)) continue;
        store_global_v4(line[h] + c * 128, static_cast<uint32_t>(w[0]), static_cast<uint32_t>(w[1]),
                        static_cast<uint32_t>(w[2]), static_cast<uint32_t>(w[3]));
      }
      __syncwarp();
    }
  } else {
    // A slot has room for all rows of a tile, so nobody asks which of them there are.
    float* at = o.partial_out + tile.partial_row(slot, accumulator_column(0)) * C::kHeadDimV + accumulator_row(0) + 64 * First;
#pragma unroll
    for (int c = 0; c < Count; ++c) {
#pragma unroll
      for (int i = 0; i < C::kRows / 2; ++i) {
        const int r = 8 * (i / 4) + i % 2;
        store_global(at + r * C::kHeadDimV + 64 * c + 8 * (i / 2 % 2), acc[First + c][i]);
      }
    }
  }
}

}  // namespace mlaforge
