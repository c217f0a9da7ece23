// Who does which blocks of which request: worked out by every block of the grid from the lengths alone, so that nothing
// runs on the host or before the kernel, and a captured graph replays with other lengths.
//
// All requests are laid on a line, each as long as its cost: its token blocks plus a fixed overhead (prologue, epilogue
// and, when it is split, its share of the merge). The line is cut into `parts` equal pieces; piece p belongs to part p.
// A request that lies in several pieces is split at the cuts, and a cut close to one of its ends moves to that end.
// The rule is a closed form, so every block finds its own piece, and the number of splits of a request, alone.
//
// Requests of one length are common (and every benchmark's), and for them a cut that falls just beside every end would be
// a waste: then fewer parts are used, so that each holds whole requests, or each request the same number of parts.
#pragma once

#include "primitives.cuh"

namespace mlaforge {

// What the planner fixed (decode.schedule_* of the plan).
template <int TileTokens, int FixedOverheadBlocks, int SnapBlocks, int MinPartBlocks>
struct SchedulePolicy {
  static constexpr int kTileTokens = TileTokens;
  static constexpr int kFixedOverheadBlocks = FixedOverheadBlocks;
  static constexpr int kSnapBlocks = SnapBlocks;
  static constexpr int kMinPartBlocks = MinPartBlocks;  // on average
  static_assert(MinPartBlocks > 0, "a part must be able to hold a block");
};

// a / b of numbers that are not negative, which takes fewer instructions than of others.
MLAFORGE_DEVICE int quotient(int a, int b) {
  return static_cast<int>(static_cast<uint32_t>(a) / static_cast<uint32_t>(b));
}

// Token blocks of a request on the line. A request without a token keeps one, so that some part owns its rows.
template <class Policy>
MLAFORGE_DEVICE int request_blocks(int len) {
  const int blocks = (len + Policy::kTileTokens - 1) / Policy::kTileTokens;
  return blocks > 0 ? blocks : 1;
}

// Length of request i as the kernel may use it: never beyond what its row of the block table can name.
struct RequestLengths {
  const int32_t* cache_seqlens;
  int capacity;  // tokens

  MLAFORGE_DEVICE RequestLengths(const int32_t* lengths, int table_width, int page_size) : cache_seqlens(lengths) {
    const int64_t tokens = static_cast<int64_t>(table_width) * page_size;
    capacity = static_cast<int>(tokens < 0x7fffffff ? tokens : 0x7fffffff);
  }
  MLAFORGE_DEVICE int operator()(int i) const {
    const int len = load_global(cache_seqlens + i);
    return len < 0 ? 0 : len < capacity ? len : capacity;
  }
};

struct PartRange {
  int first;
  int count;
};

// How many blocks of a request that begins at `start` lie before a cut at position `at`.
MLAFORGE_DEVICE int blocks_before(int at, int start, int blocks, int snap) {
  const int t = at - start;
  if (t <= snap) return 0;
  if (t >= blocks - snap) return blocks;
  return t;
}

// The cut line and this part's piece of it. Positions on the line are in blocks; the host refuses a batch whose line
// could pass 2^31.
template <class Policy>
struct Schedule {
  int parts;          // parts in use; the ones beyond have no work
  int part;           // this one
  int from, to;       // its piece
  int first_request;  // the request in which the piece begins
  int first_start;    // where that request begins on the line
  // Cuts come in groups, one group to every `span` of the line: `cut` and `more` times `cut + 1` behind each other.
  int group, span, cut, more;

  MLAFORGE_DEVICE int boundary(int p) const {
    const int groups = quotient(p, group);
    const int i = p - groups * group;
    return groups * span + i * cut + (i < more ? i : more);
  }

  // Cuts a line of this length into equal pieces.
  MLAFORGE_DEVICE void divide(int total) {
    group = parts;
    span = total;
    cut = quotient(total, parts);
    more = total - cut * parts;
  }

  // Cuts `batch` requests of `blocks` blocks each so that every part has whole requests, or every request the same number
  // of parts; false if that would leave more than a sixteenth of the parts idle.
  MLAFORGE_DEVICE bool divide_evenly(int batch, int blocks) {
    const int whole = quotient(batch + parts - 1, parts);  // requests in a part
    const int shares = quotient(parts, batch);
    const int pieces = shares < blocks ? shares : blocks;  // parts of a request
    const int holders = quotient(batch, whole);
    const int used = batch > parts ? (holders * whole == batch ? holders : 0) : pieces * batch;
    if (used * 16 < parts * 15) return false;
    parts = used;
    group = batch > parts ? 1 : pieces;
    span = (blocks + Policy::kFixedOverheadBlocks) * whole;
    cut = quotient(blocks, group);
    more = blocks - cut * group;
    return true;
  }

  // Cuts this close to an end of a request move there; of pieces that are hardly longer, none.
  MLAFORGE_DEVICE int snap() const { return cut > 2 * Policy::kSnapBlocks + 1 ? Policy::kSnapBlocks : 0; }

  // How a role that has no registers for it finds the rule again, in shared memory.
  static constexpr int kBytes = 24;
  MLAFORGE_DEVICE void store(smem_t at) const {
    const int groups = quotient(part, group);
    const int32_t words[4] = {groups * span, groups * group, cut, more};
    store_shared_v4(at, words);
    store_shared_s32(at + 16, group);
    store_shared_s32(at + 20, snap());
  }

  MLAFORGE_DEVICE static int stored_snap(smem_t at) { return load_shared_s32(at + 20); }

  // The parts that share the request of `blocks` blocks which begins at `start` on the line, if this part is one of them.
  MLAFORGE_DEVICE static PartRange sharers(smem_t at, int start, int blocks) {
    int32_t words[4];
    load_shared_v4(at, words);
    const int group = load_shared_s32(at + 16);
    const int snap = stored_snap(at);
    const int longer = words[3] * (words[2] + 1);  // where the longer pieces end, counted from the first
    // The last cut that leaves none of its blocks behind, and the first that leaves all of them.
    const int begin = start + snap - words[0];
    const int first = begin < longer ? quotient(begin, words[2] + 1) : quotient(begin - words[3], words[2]);
    const int end = start + blocks - snap - words[0];
    int next = end <= longer ? quotient(end + words[2], words[2] + 1)
                             : quotient(end - words[3] + words[2] - 1, words[2]);
    next = next < group ? next : group;
    return {words[1] + first, next - first};
  }
};

// The largest of a warp's numbers, none of them negative.
MLAFORGE_DEVICE int warp_max(int x) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
    const int other = static_cast<int>(shuffle_xor(static_cast<uint32_t>(x), mask));
    x = other > x ? other : x;
  }
  return x;
}

// Called by all `Threads` threads of the block; `scratch` is 4 * (3 * Threads / 32 + 2) bytes of shared memory.
template <class Policy, int Threads>
MLAFORGE_DEVICE Schedule<Policy> make_schedule(RequestLengths lengths, int batch, int part, int max_parts,
                                               smem_t scratch) {
  constexpr int kWarps = Threads / 32;
  const int thread = static_cast<int>(threadIdx.x);
  const int chunk = (batch + Threads - 1) / Threads;
  const int begin = thread * chunk < batch ? thread * chunk : batch;
  const int end = begin + chunk < batch ? begin + chunk : batch;

  int mine = 0;
  int longest = 0;
  int shortest = 0x7fffffff;
#pragma unroll 1
  for (int i = begin; i < end; ++i) {
    const int blocks = request_blocks<Policy>(lengths(i));
    mine += blocks + Policy::kFixedOverheadBlocks;
    longest = blocks > longest ? blocks : longest;
    shortest = blocks < shortest ? blocks : shortest;
  }
  longest = warp_max(longest);
  shortest = 0x7fffffff - warp_max(0x7fffffff - shortest);

  // Prefix sums over the threads: within the warp by shuffles, over the warps through shared memory.
  int inclusive = mine;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int below = __shfl_up_sync(0xffffffffu, inclusive, step);
    if (lane_id() >= step) inclusive += below;
  }
  if (lane_id() == 31) {
    store_shared_s32(scratch + 4 * warp_id(), inclusive);
    store_shared_s32(scratch + 4 * (kWarps + 2 + warp_id()), longest);
    store_shared_s32(scratch + 4 * (2 * kWarps + 2 + warp_id()), shortest);
  }
  __syncthreads();
  int prefix = inclusive - mine;
  int total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const int sum = load_shared_s32(scratch + 4 * w);
    if (w < warp_id()) prefix += sum;
    total += sum;
    const int high = load_shared_s32(scratch + 4 * (kWarps + 2 + w));
    const int low = load_shared_s32(scratch + 4 * (2 * kWarps + 2 + w));
    longest = high > longest ? high : longest;
    shortest = low < shortest ? low : shortest;
  }

  Schedule<Policy> s;
  const int useful = (total - batch * Policy::kFixedOverheadBlocks) / Policy::kMinPartBlocks;
  s.parts = useful < 1 ? 1 : useful < max_parts ? useful : max_parts;
  if (longest != shortest || !s.divide_evenly(batch, longest)) s.divide(total);
  s.part = part;
  s.from = s.boundary(part);
  s.to = s.boundary(part + 1);
  s.first_request = batch;
  s.first_start = s.to;  // no work, unless a request is found
  if (part < s.parts && prefix <= s.from && s.from < prefix + mine) {
    int i = begin;
    int start = prefix;
#pragma unroll 1
    for (;; ++i) {
      const int next = start + request_blocks<Policy>(lengths(i)) + Policy::kFixedOverheadBlocks;
      if (s.from < next) break;
      start = next;
    }
    store_shared_s32(scratch + 4 * kWarps, i);
    store_shared_s32(scratch + 4 * (kWarps + 1), start);
  }
  __syncthreads();
  if (part < s.parts) {
    s.first_request = load_shared_s32(scratch + 4 * kWarps);
    s.first_start = load_shared_s32(scratch + 4 * (kWarps + 1));
  }
  return s;
}

// Partial results live in slots, two to a part: one for a request that began in an earlier part, one for a request that
// goes on in the next.
MLAFORGE_DEVICE int continued_slot(int part) { return 2 * part; }
MLAFORGE_DEVICE int opened_slot(int part) { return 2 * part + 1; }

// One request's share of a part.
struct WorkItem {
  int request;
  int len;    // tokens of the request
  int start;  // where the request begins on the line
  int block_begin;
  int block_end;  // exclusive
  int slot;       // of the partial result; -1 when the request is not split
};

// Walks the requests of a part. Whoever walks finds the same items in the same order.
template <class Policy>
struct WorkWalker {
  RequestLengths lengths;
  smem_t stored;  // the rule, in shared memory
  int from, to;
  int request;
  int start;

  MLAFORGE_DEVICE WorkWalker(const Schedule<Policy>& s, smem_t at, RequestLengths l)
      : lengths(l), stored(at), from(s.from), to(s.to), request(s.first_request), start(s.first_start) {}

  MLAFORGE_DEVICE bool next(WorkItem& item) {
    while (start < to) {
      const int len = lengths(request);
      const int blocks = request_blocks<Policy>(len);
      item.request = request;
      item.len = len;
      item.start = start;
      const int snap = Schedule<Policy>::stored_snap(stored);
      item.block_begin = blocks_before(from, start, blocks, snap);
      item.block_end = blocks_before(to, start, blocks, snap);
      const int count = item.block_end - item.block_begin;
      const int part = static_cast<int>(blockIdx.y);
      item.slot = count == blocks ? -1 : item.block_begin > 0 ? continued_slot(part) : opened_slot(part);
      start += blocks + Policy::kFixedOverheadBlocks;
      ++request;
      if (count > 0) return true;
    }
    return false;
  }
};

}  // namespace mlaforge
