// Codes of quantised rows as the A operand of WGMMA: 64 columns of 64 tokens from shared memory to registers, as fp16.
//
// Every e4m3, and every 2^-14 of the product of an e2m1 with an e4m3, is an fp16: nothing is rounded.
//
// With tokens along M a matrix load gives a lane four neighbouring bytes of a token, and the codes in them become registers
// of the operand as they come. So the columns change places within a few: `column` says which one stands where. The other
// operand must stand in the same order.
//
// With columns along M, 16 at a time, a unit, a transposed load gives a lane two neighbouring bytes of each of two tokens,
// and again codes become registers as they come: a lane holds a pair of neighbouring columns, the first from `pair_column`
// on, as row(0) and row(1) of an accumulator.
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
  static constexpr int kStepsPerLoad = 1;     // of 32 columns
  static constexpr int kGroup = 16;           // columns that change places among themselves
  static constexpr float kUnit = 1.f;         // what the fp16 must be multiplied with
  static constexpr int kUnitsPerPiece = 1;    // of 16 bytes
  template <int Units>
  static constexpr int kPieces = Units;  // that hold as many neighbouring units
  static MLAFORGE_DEVICE int piece(int unit) { return unit; }
  static MLAFORGE_DEVICE int pair_column(int unit) { return 16 * unit + 2 * (lane_id() >> 2); }
  // From this one to one behind, of a warp's `Units`.
  template <int Units>
  static MLAFORGE_DEVICE int columns_between(int, int behind) {
    return 16 * behind;
  }

  // Place 8h + 2q + e of 16.
  static constexpr MLAFORGE_DEVICE int column(int place) {
    return (place & ~15) | (place >> 1 & 3) << 2 | (place >> 3 & 1) << 1 | (place & 1);
  }

  // Half a subtile: a[4k] to a[4k + 3] are the registers of the product with its columns 16k to 16k + 15.
  static MLAFORGE_DEVICE void widen(const uint32_t (&words)[4], int, uint32_t (&a)[8]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a[i / 2 * 4 + i % 2] = widen_low<E4m3>(words[i]);
      a[i / 2 * 4 + i % 2 + 2] = widen_high<E4m3>(words[i]);
    }
  }

  // A word of a piece, two tokens, to the registers of both columns of the pair.
  static MLAFORGE_DEVICE void widen_pairs(uint32_t word, int, uint32_t& first, uint32_t& second) {
    const uint32_t pairs = permute_bytes(word, word, 0x3120);
    first = widen_low<E4m3>(pairs);
    second = widen_high<E4m3>(pairs);
  }
};

template <>
struct Operand<E2m1> {
  static constexpr int kSubtilesPerLine = 4;
  static constexpr int kStepsPerLoad = 2;
  static constexpr int kGroup = 32;
  static constexpr float kUnit = 0x1p14f;
  static constexpr int kUnitsPerPiece = 2;
  template <int Units>
  static constexpr int kPieces = (Units + 1) / 2;  // an odd number begins or ends inside of one
  static MLAFORGE_DEVICE int piece(int unit) { return unit / 2; }
  static MLAFORGE_DEVICE int pair_column(int unit) { return 32 * (unit / 2) + 4 * (lane_id() >> 2) + 2 * (unit % 2); }
  template <int Units>
  static MLAFORGE_DEVICE int columns_between(int unit, int behind) {
    return Units % 2 == 0 ? 32 * (behind / 2) + 2 * (behind % 2) : pair_column(unit + behind) - pair_column(unit);
  }

  // Place 16t + 8h + 2q + e of 32.
  static constexpr MLAFORGE_DEVICE int column(int place) {
    return (place & ~31) | (place >> 1 & 3) << 3 | (place & 1) << 2 | (place >> 3 & 1) << 1 | (place >> 4 & 1);
  }

  static MLAFORGE_DEVICE void widen(const uint32_t (&words)[4], int half, uint32_t (&a)[8]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t pairs[4];
      widen_e2m1(words[2 * half + i], pairs);
#pragma unroll
      for (int k = 0; k < 4; ++k) a[k / 2 * 4 + k % 2 * 2 + i] = pairs[k];
    }
  }

  static MLAFORGE_DEVICE void widen_pairs(uint32_t word, int half, uint32_t& first, uint32_t& second) {
    uint32_t pairs[4];
    widen_e2m1(word, pairs);
    first = half == 0 ? pairs[0] : pairs[1];
    second = half == 0 ? pairs[2] : pairs[3];
  }
};

// This lane's codes of 32 bytes of a line, the `number`th: two words of the first half, of tokens accumulator_row(0) and
// (1), and two of the other. `line` holds the tokens' lines under the 128-byte swizzle. Every lane takes part.
MLAFORGE_DEVICE void load_codes(smem_t line, int number, uint32_t (&words)[4]) {
  const int token = 16 * group_warp() + (lane_id() & 15);
  const int piece = 2 * number + (lane_id() >> 4);
  ldmatrix_x4(line + token * 128 + ((piece ^ (token & 7)) << 4), words);
}

// Leaves `x` as it is, but not before what `loaded` is part of has been loaded: else the compiler moves the load down to its
// first use, and its latency with it. `nothing` is 0, which the compiler must not know.
MLAFORGE_DEVICE void keep_behind(uint32_t& x, uint32_t loaded, uint32_t nothing) { x |= loaded & nothing; }

// Two float32 of each row of Q: what scores of its codes are multiplied with, and the row's reference, which is taken from
// them. Neighbouring rows have theirs together: 16 bytes, the units first.
MLAFORGE_DEVICE smem_t unit_at(smem_t terms, int row) { return terms + row / 2 * 16 + row % 2 * 4; }
MLAFORGE_DEVICE smem_t reference_at(smem_t terms, int row) { return unit_at(terms, row) + 8; }

// Rows of Q as the other operand, in place: the first `Columns` of each become fp16 in the order of the codes, times a
// power of two that brings the row's largest just below 2^15; the inverse, times `unit`, is left in the row's `terms`.
// `tile` is subtiles of [Rows, 64] under the 128-byte swizzle. Called by 256 threads, who need a barrier behind it.
template <class Code, int Rows, int Columns>
MLAFORGE_DEVICE void convert_query(smem_t tile, smem_t terms, float unit) {
  constexpr int kSharers = 256 / Rows;
  constexpr int kGroup = Operand<Code>::kGroup;
  static_assert(kSharers <= 32 && Columns % kGroup == 0, "a row is of one warp, in whole groups");
  const int thread = late(static_cast<int>(threadIdx.x));  // so that no register is held for it meanwhile
  const int row = thread / kSharers;
  const int sharer = thread % kSharers;
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
  if (sharer == 0) store_shared_f32(unit_at(terms, row), unit * bits_float((exponent - 14) << 23));
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

}  // namespace mlaforge
