// The end of a part. A request that several parts share was left behind by each as a partial result; the same parts merge
// it, each a share of its rows and columns:
//
//   out = sum_k 2^(lse_k - lse) out_k,   lse = log2 sum_k 2^lse_k
//
// They wait for each other, so all of them must be running: the launch is cooperative. Sums go in the order of the parts,
// whoever comes first, so that the same call gives the same bits.
#pragma once

#include "decode.cuh"
#include "primitives.cuh"
#include "schedule.cuh"

namespace mlaforge {

// The requests that a part shares with others, in shared memory: one begun before it, and one that goes on. Whoever walks
// the part writes where each begins on the line, and its length; in the end that becomes a `Split`.
constexpr int kSplitBytes = 16;
MLAFORGE_DEVICE void store_split(smem_t at, int request, int x, int y) {
  const int32_t words[4] = {request, x, y, 0};
  store_shared_v4(at, words);
}
MLAFORGE_DEVICE void clear_splits(smem_t splits) {
  store_split(splits, -1, 0, 0);
  store_split(splits + kSplitBytes, -1, 0, 0);
}
MLAFORGE_DEVICE void note_split(smem_t splits, const WorkItem& item) {
  if (item.slot >= 0) store_split(splits + (item.slot & 1) * kSplitBytes, item.request, item.start, item.len);
}

// One of them, when the part is done: by which parts it is shared.
struct Split {
  int request;  // -1: none
  int first_part;
  int splits;
};
template <class Policy>
MLAFORGE_DEVICE Split find_split(smem_t at, smem_t schedule) {
  int32_t words[4];
  load_shared_v4(at, words);
  if (words[0] < 0) return {-1, 0, 0};
  const PartRange range = Schedule<Policy>::sharers(schedule, words[1], request_blocks<Policy>(words[2]));
  return {words[0], range.first, range.count};
}

constexpr int kMergeWarps = 8;
constexpr int kMergeThreads = 32 * kMergeWarps;
constexpr int kMergeColumns = 4 * 32;  // that a warp has of a row: a unit of this work
constexpr int kMergeLoads = 18;        // of 16 bytes, in flight in a thread
constexpr int kMaxSplits = kMergeWarps * kMergeLoads;
constexpr int kMergeUnits = 6;  // a warp has no more of them at once: their sums must find room
constexpr int kExchangeBytes = kMergeWarps * kMergeUnits * kMergeColumns * 4;
// Weights of every partial row of a share: of r rows and s splits, at most r / s + 2 rows of what s is padded to.
template <class C>
constexpr int kMergeScratch = kExchangeBytes + 4 * (C::kRows / 3 + 2) * kMergeLoads + 4 * 2 * kMaxSplits;

// One part's share in the merge of one request. `sharing` warps have a unit together, each at most `Each` of its splits.
template <class C, int Barrier>
struct Merge {
  static constexpr int kUnitsPerRow = C::kHeadDimV / kMergeColumns;

  const Output& o;
  const RowTile<C>& tile;
  Split split;
  smem_t exchange;  // kMergeWarps x kMergeUnits x kMergeColumns float32
  smem_t weights;   // of every partial row of the share
  int begin, end;   // units

  MLAFORGE_DEVICE int first_row() const { return begin / kUnitsPerRow; }
  // The slot of split k, counted from that of the first: the parts behind it have continued what it opened.
  MLAFORGE_DEVICE static int slots_behind(int k) { return k == 0 ? 0 : continued_slot(k) - opened_slot(0); }
  MLAFORGE_DEVICE static int64_t slot_floats() { return static_cast<int64_t>(gridDim.x) * C::kRows * C::kHeadDimV; }
  MLAFORGE_DEVICE int64_t partial_row(int k, int r) const {
    return tile.partial_row(opened_slot(split.first_part) + slots_behind(k), r);
  }

  // What each partial row counts, `padded` of them with zeros, and the row's log-sum-exp. A warp has a row.
  MLAFORGE_DEVICE void weigh(int padded) const {
    const int last_row = (end - 1) / kUnitsPerRow;
#pragma unroll 1
    for (int r = first_row() + warp_id(); r <= last_row; r += kMergeWarps) {
      const smem_t row = weights + 4 * (r - first_row()) * padded;
      float max = -infinity();
#pragma unroll 1
      for (int k = lane_id(); k < padded; k += 32) {
        const float lse = k < split.splits ? load_global(o.partial_lse + partial_row(k, r)) : -infinity();
        store_shared_f32(row + 4 * k, lse);
        max = fmaxf(max, lse);
      }
#pragma unroll
      for (int mask = 16; mask > 0; mask /= 2) max = fmaxf(max, shuffle_xor(max, mask));
      const float reference = max == -infinity() ? 0.f : max;
      float sum = 0.f;
#pragma unroll 1
      for (int k = lane_id(); k < padded; k += 32) {
        const float weight = exp2_approx(load_shared_f32(row + 4 * k) - reference);
        store_shared_f32(row + 4 * k, weight);
        sum += weight;
      }
#pragma unroll
      for (int mask = 16; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
      const float factor = sum == 0.f ? 0.f : 1.f / sum;
#pragma unroll 1
      for (int k = lane_id(); k < padded; k += 32) store_shared_f32(row + 4 * k, load_shared_f32(row + 4 * k) * factor);
      // Where a row is shared by parts, that with its first columns has its log-sum-exp.
      if (lane_id() == 0 && r * kUnitsPerRow >= begin) {
        store_global(o.lse_at(tile, split.request, r), sum == 0.f ? infinity() : (max + log2_approx(sum)) * kLn2);
      }
    }
    named_barrier_sync(Barrier, kMergeThreads);
  }

  // As many units at once as loads fit. What is loaded beyond the last split or unit counts nothing: a branch for each
  // load would take more than it saves. Sums go through shared memory, where the first of the sharing warps finds them.
  template <int Each>
  MLAFORGE_DEVICE void sum(int sharing) const {
    constexpr int kAtOnce = kMergeLoads / Each < kMergeUnits ? kMergeLoads / Each : kMergeUnits;
    const int member = warp_id() & (sharing - 1);  // a power of two
    const int group = quotient(warp_id(), sharing);
    const int groups = quotient(kMergeWarps, sharing);
    const smem_t mine = exchange + (warp_id() * kMergeUnits * 32 + lane_id()) * 16;
#pragma unroll 1
    for (int first = begin; first < end; first += groups * kAtOnce) {
      const int unit = first + group * kAtOnce;
      float x[kAtOnce][Each][4];
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        const int at = unit + u < end ? unit + u : end - 1;
        const float* from = o.partial_out + partial_row(0, at / kUnitsPerRow) * C::kHeadDimV +
                            at % kUnitsPerRow * kMergeColumns + 4 * lane_id();
#pragma unroll
        for (int i = 0; i < Each; ++i) {
          const int k = member + sharing * i < split.splits ? member + sharing * i : split.splits - 1;
          load_global_v4(from + slots_behind(k) * slot_floats(), x[u][i]);
        }
      }
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        const int at = unit + u < end ? unit + u : end - 1;
        const smem_t weight = weights + 4 * ((at / kUnitsPerRow - first_row()) * (sharing * Each) + member);
        float acc[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
        for (int i = 0; i < Each; ++i) {
          const float w = load_shared_f32(weight + 4 * sharing * i);
#pragma unroll
          for (int e = 0; e < 4; ++e) acc[e] = fmaf(w, x[u][i][e], acc[e]);
        }
        store_shared_v4(mine + u * 512, acc);
      }
      if (sharing > 1) named_barrier_sync(Barrier, kMergeThreads);
#pragma unroll 1
      for (int u = 0; member == 0 && u < kAtOnce && unit + u < end; ++u) {
        float acc[4];
        load_shared_v4(mine + u * 512, acc);
#pragma unroll 1
        for (int other = 1; other < sharing; ++other) {
          float more[4];
          load_shared_v4(mine + other * (kMergeUnits * 512) + u * 512, more);
#pragma unroll
          for (int e = 0; e < 4; ++e) acc[e] += more[e];
        }
        const int r = (unit + u) / kUnitsPerRow;
        const int column = (unit + u) % kUnitsPerRow * kMergeColumns + 4 * lane_id();
        store_global_v2(o.row_at(tile, split.request, r) + 2 * column, pack2<typename C::Element>(acc[0], acc[1]),
                        pack2<typename C::Element>(acc[2], acc[3]));
      }
      if (sharing > 1) named_barrier_sync(Barrier, kMergeThreads);
    }
  }

  MLAFORGE_DEVICE void run() const {
    if (begin == end) return;
    int sharing = 1;
    while (split.splits > kMergeLoads * sharing) sharing *= 2;
    const bool two = split.splits == 2;
    weigh(two ? 2 : sharing * kMergeLoads);
    if (two) {
      sum<2>(1);
    } else {
      sum<kMergeLoads>(sharing);
    }
  }
};

// Announces this part's partial results, stored before, and merges its shares of the requests that it shares. Called by
// the first kMergeThreads threads; `scratch` is kMergeScratch bytes that nobody uses any
// more. `arrivals` counts, for each tile
// and part, who has stored and then who has gone on: the last one leaves a zero for the next launch.
template <class C, class Policy, int Barrier>
MLAFORGE_DEVICE void merge_splits(smem_t splits, smem_t schedule, smem_t scratch, const Output& o, const RowTile<C>& tile,
                                  int32_t* arrivals, int part) {
  const auto counter = [&](int first_part) { return arrivals + blockIdx.x * gridDim.y + first_part; };
  named_barrier_sync(Barrier, kMergeThreads);
  if (threadIdx.x < 2) {
    const smem_t at = splits + static_cast<int>(threadIdx.x) * kSplitBytes;
    const Split split = find_split<Policy>(at, schedule);
    store_split(at, split.request, split.first_part, split.splits);
    if (split.request >= 0) atomic_add_acq_rel(counter(split.first_part), 1);
  }
  named_barrier_sync(Barrier, kMergeThreads);
  const int rows = tile.rows - tile.first_row < C::kRows ? tile.rows - tile.first_row : C::kRows;
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    int32_t words[4];
    load_shared_v4(splits + i * kSplitBytes, words);
    const Split split{words[0], words[1], words[2]};
    if (split.request < 0) continue;
    if (threadIdx.x == 0) {
      int32_t* arrived = counter(split.first_part);
      while (load_global_acquire(arrived) < split.splits) {
      }
      if (atomic_add_acq_rel(arrived, 1) == 2 * split.splits - 1) store_global(arrived, 0);
    }
    named_barrier_sync(Barrier, kMergeThreads);
    const int units = rows * Merge<C, Barrier>::kUnitsPerRow;
    const int k = part - split.first_part;
    const Merge<C, Barrier> merge{o,
                                  tile,
                                  split,
                                  scratch,
                                  scratch + kExchangeBytes,
                                  quotient(units * k, split.splits),
                                  quotient(units * (k + 1), split.splits)};
    merge.run();
    named_barrier_sync(Barrier, kMergeThreads);
  }
}

}  // namespace mlaforge
