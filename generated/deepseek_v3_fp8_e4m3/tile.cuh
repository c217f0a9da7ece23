// What a warpgroup does with its tile in registers: softmax of the scores, rescaling and storing of the output.
// The layout of an accumulator over the threads is the one of WGMMA (primitives.cuh): a thread holds two rows.
#pragma once

#include "primitives.cuh"

namespace mlaforge {

// The rows of a 64-row tile that this thread holds of an accumulator: row(0) and row(1) = row(0) + 8.
MLAFORGE_DEVICE int accumulator_row(int i) {
  return ((static_cast<int>(threadIdx.x) & 127) >> 5) * 16 + (lane_id() >> 2) + 8 * i;
}

// The four lanes that share a row of an accumulator.
MLAFORGE_DEVICE float quad_max(float x) {
  x = fmaxf(x, shuffle_xor(x, 1));
  return fmaxf(x, shuffle_xor(x, 2));
}
MLAFORGE_DEVICE float quad_sum(float x) {
  x += shuffle_xor(x, 1);
  return x + shuffle_xor(x, 2);
}

// Online softmax of this thread's two rows, in the log2 domain: exp(scale * s) is computed as exp2(scale_log2 * s).
struct RowState {
  float max[2];  // what the row refers to: its maximum of scale_log2 * s so far, or a little less; -inf without a token
  float sum[2];  // running sum of this thread's columns only, relative to max

  MLAFORGE_DEVICE void reset() {
    max[0] = max[1] = -infinity();
    sum[0] = sum[1] = 0.f;
  }
};

// Scores of columns at and beyond the row's border become -inf. `first` is the token of column 0.
template <int Tokens>
MLAFORGE_DEVICE void mask_scores(float (&s)[Tokens / 2], int first, const int (&border)[2]) {
  const int column = first + 2 * (lane_id() & 3);
#pragma unroll
  for (int g = 0; g < Tokens / 8; ++g) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (column + 8 * g + (e & 1) >= border[e >> 1]) s[4 * g + e] = -infinity();
    }
  }
}

// The first half of a softmax step: what the rows refer to from now on, and what everything accumulated before must be
// multiplied with. The reference follows the running maximum when that has passed it by more than `slack`, so that
// probabilities stay below 2^slack, rescale is mostly one, and the lanes of a row seldom need to agree on a maximum.
template <int Tokens>
MLAFORGE_DEVICE void softmax_reference(const float (&s)[Tokens / 2], RowState& state, float (&rescale)[2],
                                       float scale_log2, float slack) {
  float top[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float even = s[2 * i];
    float odd = s[2 * i + 1];
#pragma unroll
    for (int g = 1; g < Tokens / 8; ++g) {
      even = fmaxf(even, s[4 * g + 2 * i]);
      odd = fmaxf(odd, s[4 * g + 2 * i + 1]);
    }
    top[i] = fmaxf(even, odd) * scale_log2;
    rescale[i] = 1.f;
  }
  if (warp_any(top[0] > state.max[0] + slack || top[1] > state.max[1] + slack)) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float seen = quad_max(top[i]);
      if (seen > state.max[i] + slack) {
        rescale[i] = exp2_approx(state.max[i] - seen);
        state.max[i] = seen;
      }
    }
  }
}

// The second half: scores to probabilities, packed as the A operand of the next product, four registers for each 16 tokens.
// `take(k, p)` gets those of tokens 16k to 16k + 15 as soon as they are there.
template <class Element, int Tokens, class Take>
MLAFORGE_DEVICE void softmax_probabilities(const float (&s)[Tokens / 2], RowState& state, const float (&rescale)[2],
                                           float scale_log2, const Take& take) {
  float sum[2][2] = {{0.f, 0.f}, {0.f, 0.f}};  // of even and odd columns
  // A row without a token so far: any finite reference keeps exp2(-inf - reference) = 0 instead of NaN.
  const float reference[2] = {state.max[0] == -infinity() ? 0.f : state.max[0],
                              state.max[1] == -infinity() ? 0.f : state.max[1]};
#pragma unroll
  for (int k = 0; k < Tokens / 16; ++k) {
    uint32_t p[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int row = j % 2;
      const float even = exp2_approx(fmaf(s[8 * k + 2 * j], scale_log2, -reference[row]));
      const float odd = exp2_approx(fmaf(s[8 * k + 2 * j + 1], scale_log2, -reference[row]));
      sum[row][0] += even;
      sum[row][1] += odd;
      p[j] = pack2<Element>(even, odd);
    }
    take(k, p);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) state.sum[i] = state.sum[i] * rescale[i] + (sum[i][0] + sum[i][1]);
}

// Stores the probabilities of tokens 16k to 16k + 15 into a [64, 64] K-major tile under the 128-byte swizzle.
MLAFORGE_DEVICE void store_probabilities(smem_t tile, int k, const uint32_t (&p)[4]) {
  const int lane = lane_id();
  // stmatrix takes 8x8 matrices in the order of the A fragment: rows 0-7, rows 8-15, then the same 8 columns on.
  const int row = ((static_cast<int>(threadIdx.x) & 127) >> 5) * 16 + (lane & 15);
  const int chunk = 2 * k + (lane >> 4);
  stmatrix_x4(tile + row * 128 + ((chunk ^ (row & 7)) << 4), p[0], p[1], p[2], p[3]);
}

template <int Count>
MLAFORGE_DEVICE void scale_rows(float (&acc)[Count], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < Count; ++i) acc[i] *= factor[(i >> 1) & 1];
}

// Zeros for the rows [first_row, Rows) of the 64-column subtiles [first, first + count) of a K tile. V is the head of
// K, and a probability of zero does not hide a NaN. Called by the 128 threads of a warpgroup.
template <int Rows>
MLAFORGE_DEVICE void zero_rows(smem_t tile, int first, int count, int first_row) {
  const int chunks = (Rows - first_row) * 8;
#pragma unroll 1
  for (int sub = first; sub < first + count; ++sub) {
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x) & 127; i < chunks; i += 128) {
      store_shared_zero16(tile + sub * (Rows * 128) + first_row * 128 + i * 16);
    }
  }
}

// Turns 4 words each of 4 lanes: lane q of a quad ends with word q of its lanes 0, 1, 2, 3.
MLAFORGE_DEVICE void quad_transpose(uint32_t (&w)[4]) {
  const int lane = lane_id();
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool upper = (lane & bit) != 0;
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const int low = bit == 1 ? 2 * pair : pair;
      const uint32_t received = shuffle_xor(upper ? w[low] : w[low + bit], bit);
      if (upper) {
        w[low] = received;
      } else {
        w[low + bit] = received;
      }
    }
  }
}

// One row of an accumulator to 16-bit elements in global memory. `row` points at the row's first column of this
// accumulator, on a 16-byte border. All lanes take part; only those with `valid` store.
template <class Element, int Columns>
MLAFORGE_DEVICE void store_row(const float (&acc)[Columns / 2], int i, unsigned char* row, bool valid) {
  const int quarter = lane_id() & 3;
#pragma unroll
  for (int g = 0; g < Columns / 8; g += 4) {
    uint32_t w[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      w[k] = pack2<Element>(acc[4 * (g + k) + 2 * i], acc[4 * (g + k) + 2 * i + 1]);
    }
    quad_transpose(w);
    if (valid) store_global_v4(row + 16 * (g + quarter), w[0], w[1], w[2], w[3]);
  }
}

// The same to float32, from the group of 8 columns `First` on. `row` points at this lane's columns of the first group.
template <int First, int Count>
MLAFORGE_DEVICE void store_row_f32(const float (&acc)[Count], int i, float* row) {
  if constexpr (First < Count / 4) {
    store_global_v2<32 * First>(row, acc[4 * First + 2 * i], acc[4 * First + 2 * i + 1]);
    store_row_f32<First + 1>(acc, i, row);
  }
}

}  // namespace mlaforge
