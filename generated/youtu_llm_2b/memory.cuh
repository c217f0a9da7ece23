// What the memory-bound kernels share.
#pragma once

#include "primitives.cuh"

namespace mlaforge {

// The place `bytes` behind a pointer: strides are in bytes, whatever the tensor holds.
MLAFORGE_DEVICE const void* at(const void* base, int64_t bytes) { return static_cast<const unsigned char*>(base) + bytes; }
MLAFORGE_DEVICE void* at(void* base, int64_t bytes) { return static_cast<unsigned char*>(base) + bytes; }
MLAFORGE_DEVICE const float* at(const float* base, int64_t bytes) {
  return static_cast<const float*>(at(static_cast<const void*>(base), bytes));
}
MLAFORGE_DEVICE float* at(float* base, int64_t bytes) { return static_cast<float*>(at(static_cast<void*>(base), bytes)); }

}  // namespace mlaforge
