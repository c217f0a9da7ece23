// What the memory-bound kernels share.
#pragma once

#include "primitives.cuh"

namespace mlaforge {

// Tensors of elements are walked in pieces of 16 bytes, which their addresses and strides are multiples of.
MLAFORGE_DEVICE const void* piece_at(const void* base, int64_t pieces) {
  return static_cast<const unsigned char*>(base) + 16 * pieces;
}
MLAFORGE_DEVICE void* piece_at(void* base, int64_t pieces) { return static_cast<unsigned char*>(base) + 16 * pieces; }

// A step of `stride` taken `index` times, which may lead further than an int.
MLAFORGE_DEVICE int64_t steps(int index, int stride) { return static_cast<int64_t>(index) * stride; }

// n / d for 0 <= n < 2^31 and a d that the host knows, which gives 2^31+shift / d rounded up, and the least shift with
// 2^shift >= d.
MLAFORGE_DEVICE int divided(int n, uint32_t multiplier, int shift) {
  return static_cast<int>(static_cast<uint32_t>(static_cast<uint64_t>(n) * multiplier >> 31) >> shift);
}

}  // namespace mlaforge
