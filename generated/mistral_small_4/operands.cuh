// Codes of quantised rows as the A operand of WGMMA: 64 columns of 64 tokens from shared memory to registers, as fp16.
//
// Every e4m3, and every product of an e2m1 with an e4m3, is an fp16: nothing is rounded. A matrix load gives a lane four
// neighbouring bytes of a token, and the codes in them become registers of the operand as they come. So the columns change
// places within a few: `column` says which one stands where. The other operand must stand in the same order, and the
// columns of a result come in it.
#pragma once

#include "decode.cuh"
#include "primitives.cuh"
#include "quantised.cuh"
#include "tile.cuh"
#include "transposed.cuh"

namespace mlaforge {

template <class Code>
struct Operand;

template <>
struct Operand<E4m3> {
  static constexpr int kSubtilesPerLine = 2;  // of 128 bytes
  static constexpr int kWords = 8;            // of a lane: codes of 64 columns of its two tokens
  static constexpr int kGroup = 16;           // columns that change places among themselves
  static constexpr float kUnit = 1.f;         // what the fp16 must be multiplied with

  // Place 8h + 2q + e of 16.
  static constexpr int column(int place) {
    return (place & ~15) | (place >> 1 & 3) << 2 | (place >> 3 & 1) << 1 | (place & 1);
  }

  // a[4k] to a[4k + 3] are the registers of the product with columns 16k to 16k + 15.
  static MLAFORGE_DEVICE void widen(const uint32_t (&words)[kWords], uint32_t (&a)[16]) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      a[i / 2 * 4 + i % 2] = widen_low<E4m3>(words[i]);
      a[i / 2 * 4 + i % 2 + 2] = widen_high<E4m3>(words[i]);
    }
  }

  // Four words of a line in this order: eight columns from 8 * chunk on.
  static MLAFORGE_DEVICE void load_columns(smem_t line, int swizzle, int chunk, int32_t (&w)[4]) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int q = 2 * (chunk & 1) + k / 2;
      const int piece = (chunk & ~1) + k % 2;
      w[k] = load_shared_s32(line + ((piece ^ swizzle) << 4) + 4 * q);
    }
  }
};

template <>
struct Operand<E2m1> {
  static constexpr int kSubtilesPerLine = 4;
  static constexpr int kWords = 4;
  static constexpr int kGroup = 32;
  static constexpr float kUnit = 64.f;

  // Place 16t + 8h + 2q + e of 32.
  static constexpr int column(int place) {
    return (place & ~31) | (place >> 1 & 3) << 3 | (place >> 3 & 1) << 2 | (place & 1) << 1 | (place >> 4 & 1);
  }

  static MLAFORGE_DEVICE void widen(const uint32_t (&words)[kWords], uint32_t (&a)[16]) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      uint32_t pairs[4];
      widen_e2m1(words[i], pairs);
#pragma unroll
      for (int k = 0; k < 4; ++k) a[i / 2 * 8 + k / 2 * 4 + k % 2 * 2 + i % 2] = pairs[k];
    }
  }

  static MLAFORGE_DEVICE void load_columns(smem_t line, int swizzle, int chunk, int32_t (&w)[4]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint32_t of[2];  // columns 0 and 2, 1 and 3
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        const int piece = (chunk & ~3) + 2 * t + h;
        of[t] = static_cast<uint32_t>(load_shared_s32(line + ((piece ^ swizzle) << 4) + 4 * (chunk & 3)));
      }
      w[2 * h] = static_cast<int32_t>(permute_bytes(of[0], of[1], 0x5410));
      w[2 * h + 1] = static_cast<int32_t>(permute_bytes(of[0], of[1], 0x7632));
    }
  }
};

// What a lane adds to find the 16 bytes of its matrix row: token of the warp's 16, and the first or second piece of two.
MLAFORGE_DEVICE int matrix_token() { return 16 * group_warp() + (lane_id() & 15); }

// This lane's codes of a subtile's columns: words 2i and 2i + 1 are of tokens accumulator_row(0) and (1). `line` holds the
// tokens' lines under the 128-byte swizzle. Every lane takes part.
template <class Code>
MLAFORGE_DEVICE void load_codes(smem_t line, int subtile, uint32_t (&words)[Operand<Code>::kWords]) {
  const int token = matrix_token();
#pragma unroll
  for (int i = 0; i < Operand<Code>::kWords / 4; ++i) {
    const int piece = subtile * (Operand<Code>::kWords / 2) + 2 * i + (lane_id() >> 4);
    uint32_t m[4];
    ldmatrix_x4(line + token * 128 + ((piece ^ (token & 7)) << 4), m);
#pragma unroll
    for (int e = 0; e < 4; ++e) words[4 * i + e] = m[e];
  }
}

// Stores them, widened, as a subtile of K: [64 tokens, 64 columns] under the 128-byte swizzle.
MLAFORGE_DEVICE void store_operand(smem_t subtile, const uint32_t (&a)[16]) {
  const int token = matrix_token();
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const int piece = 2 * k + (lane_id() >> 4);
    stmatrix_x4(subtile + token * 128 + ((piece ^ (token & 7)) << 4), a[4 * k], a[4 * k + 1], a[4 * k + 2], a[4 * k + 3]);
  }
}

// Both tokens' columns of 16k to 16k + 15 times a pair of fp16 each.
MLAFORGE_DEVICE void scale_operand(uint32_t (&a)[16], int k, uint32_t first, uint32_t second) {
#pragma unroll
  for (int i = 0; i < 4; ++i) a[4 * k + i] = multiply2(a[4 * k + i], i % 2 == 0 ? first : second);
}

// Rows of Q as the other operand, in place: the first `Columns` of each become fp16 in the order of the codes, times a
// power of two that brings the row's largest just below 2^15; the inverse is left at `units`. `tile` is subtiles of
// [Rows, 64] under the 128-byte swizzle. Called by 256 threads, who need a barrier behind it.
template <class Code, int Rows, int Columns>
MLAFORGE_DEVICE void convert_query(smem_t tile, smem_t units) {
  constexpr int kSharers = 256 / Rows;
  constexpr int kGroup = Operand<Code>::kGroup;
  static_assert(kSharers <= 32 && Columns % kGroup == 0, "a row is of one warp, in whole groups");
  const int row = static_cast<int>(threadIdx.x) / kSharers;
  const int sharer = static_cast<int>(threadIdx.x) % kSharers;
  const auto piece_at = [&](int piece) {
    return tile + piece / 8 * (Rows * 128) + row * 128 + (((piece & 7) ^ (row & 7)) << 4);
  };
  const auto load_piece = [&](int piece, float* x) {
    int32_t w[4];
    load_shared_v4(piece_at(piece), w);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[2 * i] = unpack_low<Bf16>(static_cast<uint32_t>(w[i]));
      x[2 * i + 1] = unpack_high<Bf16>(static_cast<uint32_t>(w[i]));
    }
  };
  float largest = 0.f;
#pragma unroll 1
  for (int group = sharer; group < Columns / kGroup; group += kSharers) {
#pragma unroll
    for (int i = 0; i < kGroup / 8; ++i) {
      float x[8];
      load_piece(group * (kGroup / 8) + i, x);
#pragma unroll
      for (int e = 0; e < 8; ++e) largest = fmaxf(largest, fabsf(x[e]));
    }
  }
#pragma unroll
  for (int mask = 1; mask < kSharers; mask *= 2) largest = fmaxf(largest, shuffle_xor(largest, mask));
  const uint32_t found = float_bits(largest) >> 23;
  const uint32_t exponent = found > 15 ? found : 15;  // so that the inverse is a normal number, too
  const float factor = bits_float((268 - exponent) << 23);
  if (sharer == 0) store_shared_f32(units + 4 * row, bits_float((exponent - 14) << 23));
#pragma unroll 1
  for (int group = sharer; group < Columns / kGroup; group += kSharers) {
    float x[kGroup];
#pragma unroll
    for (int i = 0; i < kGroup / 8; ++i) load_piece(group * (kGroup / 8) + i, x + 8 * i);
#pragma unroll
    for (int i = 0; i < kGroup / 8; ++i) {
      int32_t w[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int place = 8 * i + 2 * e;
        w[e] = static_cast<int32_t>(pack2<Fp16>(x[Operand<Code>::column(place)] * factor,
                                                x[Operand<Code>::column(place + 1)] * factor));
      }
      store_shared_v4(piece_at(group * (kGroup / 8) + i), w);
    }
  }
}

// Scores to probabilities, as store_column_probabilities: `s` is in the log2 domain. What is stored is fp16, and each
// token's times its scale; the sums are of the probabilities alone.
template <int Rows>
MLAFORGE_DEVICE void store_scaled_probabilities(smem_t tile, const float (&s)[Rows / 2], const float (&scale)[2],
                                                ColumnState<Rows>& state) {
  store_transposed<Rows>(tile, [&](int i) {
    float p[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int j = column_of(i + e);
      const float reference = state.max[j] == -infinity() ? 0.f : state.max[j];
      p[e] = exp2_approx(s[i + e] - reference);
      state.sum[j] += p[e];
    }
    return pack2<Fp16>(p[0] * scale[i / 2 % 2], p[1] * scale[i / 2 % 2]);
  });
}

// store_out_columns for columns that come in the order of the codes. The warpgroup meets at `barrier`.
template <class Code, class C, int First, int Count, int Subtiles>
MLAFORGE_DEVICE void store_coded_columns(const Output& o, const RowTile<C>& tile, int request, int slot,
                                         const float (&acc)[Subtiles][C::kRows / 2], smem_t scratch, int barrier) {
  if (slot < 0) {
    const int chunk = 2 * group_warp() + (lane_id() & 1);
    unsigned char* line[C::kRows / 16];
#pragma unroll
    for (int h = 0; h < C::kRows / 16; ++h) {
      const int r = 16 * h + (lane_id() >> 1);
      line[h] = o.row_at(tile, request, r) + (64 * First + 8 * chunk) * 2;
    }
#pragma unroll
    for (int c = 0; c < Count; ++c) {
      const auto& columns = acc[First + c];
      store_transposed<C::kRows>(scratch, [&](int i) { return pack2<typename C::Element>(columns[i], columns[i + 1]); });
      named_barrier_sync(barrier, 128);
#pragma unroll
      for (int h = 0; h < C::kRows / 16; ++h) {
        const int r = 16 * h + (lane_id() >> 1);
        int32_t w[4];
        Operand<Code>::load_columns(scratch + r * 128, r & 7, chunk, w);
        if (!tile.holds(r)) continue;
        store_global_v4(line[h] + c * 128, static_cast<uint32_t>(w[0]), static_cast<uint32_t>(w[1]),
                        static_cast<uint32_t>(w[2]), static_cast<uint32_t>(w[3]));
      }
      named_barrier_sync(barrier, 128);
    }
  } else {
    // A slot has room for all rows of a tile, so nobody asks which of them there are.
    float* at = o.partial_out + tile.partial_row(slot, accumulator_column(0)) * C::kHeadDimV + 64 * First +
                Operand<Code>::column(accumulator_row(0));
#pragma unroll
    for (int c = 0; c < Count; ++c) {
#pragma unroll
      for (int i = 0; i < C::kRows / 2; ++i) {
        const int r = 8 * (i / 4) + i % 2;
        store_global(at + r * C::kHeadDimV + 64 * c + Operand<Code>::column(8) * (i / 2 % 2), acc[First + c][i]);
      }
    }
  }
}

}  // namespace mlaforge
