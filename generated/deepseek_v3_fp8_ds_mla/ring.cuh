// Rings of buffers in shared memory, each guarded by mbarriers: as their users see them.
#pragma once

#include "primitives.cuh"

namespace mlaforge {

// A ring of `count` buffers, seen by one role: the buffer to use next and the parity of its phase, in one register.
struct Ring {
  int count;
  int at = 0;  // counts through two rounds, one of each parity

  MLAFORGE_DEVICE int stage() const { return at < count ? at : at - count; }
  MLAFORGE_DEVICE int phase() const { return at < count ? 0 : 1; }
  MLAFORGE_DEVICE void advance() { at = at + 1 < 2 * count ? at + 1 : 0; }
  // Past `buffers` of them, no more than there are.
  MLAFORGE_DEVICE void skip(int buffers) { at = at + buffers < 2 * count ? at + buffers : at + buffers - 2 * count; }
};

// A warp has finished with a buffer that only its WGMMA read: all its lanes have come out of the same wait.
MLAFORGE_DEVICE void release(smem_t bar) {
  if (lane_id() == 0) mbarrier_arrive(bar);
}

}  // namespace mlaforge
