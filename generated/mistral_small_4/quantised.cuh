// Elements of quantised caches: float32 to codes and back. What rows of them mean is in mlaforge.formats.
#pragma once

#include "primitives.cuh"

namespace mlaforge {

// The nearest e2m1, ties to even; what is beyond 6 is 6, and so is NaN.
MLAFORGE_DEVICE uint32_t e2m1_of(float x) {
  const float size = fabsf(x) < 6.f ? fabsf(x) : 6.f;
  const uint32_t bits = float_bits(size);
  // Below 1 the steps are 1/2, which is the last place of numbers about 2^22; above, one bit of mantissa is left.
  const uint32_t small = float_bits(size + 4194304.f) & 3;
  const uint32_t large = ((bits + 0x1fffff + (bits >> 22 & 1)) >> 22) - 252;
  const uint32_t sign = x != x ? 0 : float_bits(x) >> 31;
  return sign << 3 | (size < 1.f ? small : large);
}

// Eight elements in codes, the first in the lowest bits.
template <class Code>
struct Codes;

template <>
struct Codes<E4m3> {
  static constexpr int kWords = 2;

  static MLAFORGE_DEVICE void encode(const float (&x)[8], uint32_t (&words)[kWords]) {
    words[0] = pack4<E4m3>(x[0], x[1], x[2], x[3]);
    words[1] = pack4<E4m3>(x[4], x[5], x[6], x[7]);
  }
  static MLAFORGE_DEVICE void decode(const uint32_t* words, float (&x)[8]) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      float four[4];
      unpack4<E4m3>(words[i], four);
#pragma unroll
      for (int e = 0; e < 4; ++e) x[4 * i + e] = four[e];
    }
  }
};

template <>
struct Codes<E2m1> {
  static constexpr int kWords = 1;

  static MLAFORGE_DEVICE void encode(const float (&x)[8], uint32_t (&words)[kWords]) {
    words[0] = 0;
#pragma unroll
    for (int e = 0; e < 8; ++e) words[0] |= e2m1_of(x[e]) << (4 * e);
  }
  static MLAFORGE_DEVICE void decode(const uint32_t* words, float (&x)[8]) {
    uint32_t pairs[4];
    widen_e2m1(words[0], pairs);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int e = k / 2 + k % 2 * 2;
      x[e] = unpack_low<Fp16>(pairs[k]) * 0x1p14f;
      x[e + 4] = unpack_high<Fp16>(pairs[k]) * 0x1p14f;
    }
  }
};

// Eight elements divided by their scale, for `encode`: quotients that become the same codes as the correctly rounded ones,
// but with one reciprocal for all of them. A quotient's error is found exactly and taken off by the reciprocal, which gives
// the correctly rounded one wherever nothing overflows or leaves the normal numbers; and what is below 2^-12 or from 2^10
// on is 0 or the largest code however it is rounded.
MLAFORGE_DEVICE void divide(float (&x)[8], float scale) {
  if (scale >= 0x1p-90f && scale <= 0x1p90f) {
    const float reciprocal = 1.f / scale;
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const float near = x[e] * reciprocal;
      const float rest = fmaf(-scale, near, x[e]);
      const bool matters = fabsf(near) >= 0x1p-12f && fabsf(near) < 0x1p10f;
      x[e] = matters ? fmaf(rest, reciprocal, near) : near;
    }
  } else {
#pragma unroll
    for (int e = 0; e < 8; ++e) x[e] /= scale;
  }
}

// Scales of a group, of the largest magnitude under it. All rounded to nearest even, NaN kept: see mlaforge.formats.

// float32, of e4m3.
MLAFORGE_DEVICE float group_scale(float amax) { return max_nan(amax / 448.f, 0x1p-126f); }

// e4m3, of e2m1: its code. What is not finite gives NaN.
MLAFORGE_DEVICE uint32_t block_scale(float amax, float tensor_scale) {
  const float scale = max_nan(amax / (6.f * tensor_scale), 0x1p-9f);
  return amax == infinity() ? 0x7f : pack4<E4m3>(scale, 0.f, 0.f, 0.f) & 0xff;
}

// What such a code stands for.
MLAFORGE_DEVICE float block_scale_of(uint32_t code) {
  float scale[4];
  unpack4<E4m3>(code, scale);
  return scale[0];
}

}  // namespace mlaforge
