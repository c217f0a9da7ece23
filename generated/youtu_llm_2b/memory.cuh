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

}  // namespace mlaforge
