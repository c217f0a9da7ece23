// The positional rotation: (x, y) -> (x cos - y sin, x sin + y cos), of the pairs (x_2i, x_2i+1) or (x_i, x_i+half).
#pragma once

#include "memory.cuh"

namespace mlaforge {

// Eight cosines, eight sines.
struct Angles {
  float cos[8];
  float sin[8];
};

// Those of a position's pairs from `first` on, of `Pairs` in all; NaN where the table does not have the position.
template <int Pairs>
MLAFORGE_DEVICE Angles angles_of(int64_t position, int first, const float* cos_sin, int stride, int max_position) {
  Angles angles;
  const bool known = position >= 0 && position < max_position;
#pragma unroll
  for (int i = 0; i < 8; i += 4) {
    float cos[4], sin[4];
    if (known) {
      const float* from = cos_sin + steps(static_cast<int>(position), stride) + first + i;
      load_global_v4(from, cos);
      load_global_v4(from + Pairs, sin);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      angles.cos[i + e] = known ? cos[e] : infinity() - infinity();
      angles.sin[i + e] = known ? sin[e] : infinity() - infinity();
    }
  }
  return angles;
}

MLAFORGE_DEVICE void rotate_pair(float& x, float& y, const Angles& angles, int i) {
  const float turned = fmaf(x, angles.cos[i], -(y * angles.sin[i]));
  y = fmaf(x, angles.sin[i], y * angles.cos[i]);
  x = turned;
}

// Turns eight pairs. Interleaved, neighbours are one; else `a` holds the first of two, `b` the second.
MLAFORGE_DEVICE void rotate(float (&a)[8], float (&b)[8], const Angles& angles, bool interleaved) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (interleaved) {
      rotate_pair(i < 4 ? a[2 * i] : b[2 * i - 8], i < 4 ? a[2 * i + 1] : b[2 * i - 7], angles, i);
    } else {
      rotate_pair(a[i], b[i], angles, i);
    }
  }
}

}  // namespace mlaforge
