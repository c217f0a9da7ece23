// Division by numbers that the host knows, in a few instructions instead of twenty.
#pragma once

#include "primitives.cuh"

namespace mlaforge {

// n / d for 0 <= n < 2^31, of which the host gives 2^31+shift / d rounded up, and the least shift with 2^shift >= d.
MLAFORGE_DEVICE int divided(int n, uint32_t multiplier, int shift) {
  return static_cast<int>(static_cast<uint32_t>(static_cast<uint64_t>(n) * multiplier >> 31) >> shift);
}

}  // namespace mlaforge
