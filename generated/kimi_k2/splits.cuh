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

// The requests that a part shares with others, in shared memory: one begun before it, and one that goes on. Written by
// whoever walks the part.
constexpr int kSplitBytes = 16;
MLAFORGE_DEVICE void store_split(smem_t at, int request, int start, int len) {
  const int32_t words[4] = {request, start, len, 0};
  store_shared_v4(at, words);
}
MLAFORGE_DEVICE void clear_splits(smem_t splits) {
  store_split(splits, -1, 0, 0);
  store_split(splits + kSplitBytes, -1, 0, 0);
}
MLAFORGE_DEVICE void note_split(smem_t splits, const WorkItem& item) {
  if (item.slot >= 0) store_split(splits + (item.slot & 1) * kSplitBytes, item.request, item.start, item.len);
}

struct Split {
  int request;  // -1: none
  int first_part;
  int splits;

  template <class Policy>
  MLAFORGE_DEVICE static Split load(smem_t at, smem_t schedule) {
    int32_t words[4];
    load_shared_v4(at, words);
    if (words[0] < 0) return {-1, 0, 0};
    const PartRange range = Schedule<Policy>::sharers(schedule, words[1], request_blocks<Policy>(words[2]));
    return {words[0], range.first, range.count};
  }
};

constexpr int kMergeWarps = 8;
constexpr int kMergeThreads = 32 * kMergeWarps;
constexpr int kMergeColumns = 4 * 32;  // that a warp has of a row: a unit of this work
constexpr int kMergeLoads = 18;        // of 16 bytes, in flight in a thread
constexpr int kMaxSplits = kMergeWarps * kMergeLoads;

// One part's share in the merge of one request. `sharing` warps have a unit together, each at most `Each` of its splits.
template <class C, int Barrier>
struct Merge {
  static constexpr int kUnitsPerRow = C::kHeadDimV / kMergeColumns;

  const Output& o;
  const RowTile<C>& tile;
  Split split;
  smem_t exchange;  // kMergeWarps x kMergeColumns float32
  smem_t weights;   // of every partial row of the share
  int begin, end;   // units

  MLAFORGE_DEVICE int first_row() const { return begin / kUnitsPerRow; }
  MLAFORGE_DEVICE int64_t partial_row(int k, int r) const {
    const int part = split.first_part + k;
    return tile.partial_row(k == 0 ? opened_slot(part) : continued_slot(part), r);
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
  // load would take more than it saves.
  template <int Each>
  MLAFORGE_DEVICE void sum(int sharing) const {
    constexpr int kAtOnce = kMergeLoads / Each;
    const int padded = sharing * Each;
    weigh(padded);
    const int member = warp_id() % sharing;
    const int group = warp_id() / sharing;
    const int groups = kMergeWarps / sharing;
#pragma unroll 1
    for (int first = begin; first < end; first += groups * kAtOnce) {
      const int unit = first + group * kAtOnce;
      float x[kAtOnce][Each][4];
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        const int at = unit + u < end ? unit + u : end - 1;
        const int column = at % kUnitsPerRow * kMergeColumns + 4 * lane_id();
#pragma unroll
        for (int i = 0; i < Each; ++i) {
          const int k = member + sharing * i < split.splits ? member + sharing * i : split.splits - 1;
          load_global_v4(o.partial_out + partial_row(k, at / kUnitsPerRow) * C::kHeadDimV + column, x[u][i]);
        }
      }
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        const int at = unit + u < end ? unit + u : end - 1;
        const int r = at / kUnitsPerRow;
        const smem_t weight = weights + 4 * ((r - first_row()) * padded + member);
        float acc[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
        for (int i = 0; i < Each; ++i) {
          const float w = load_shared_f32(weight + 4 * sharing * i);
#pragma unroll
          for (int e = 0; e < 4; ++e) acc[e] = fmaf(w, x[u][i][e], acc[e]);
        }
        if (Each == kMergeLoads && sharing > 1) {
          store_shared_v4(exchange + (warp_id() * 32 + lane_id()) * 16, acc);
          named_barrier_sync(Barrier, kMergeThreads);
#pragma unroll 1
          for (int other = 1; member == 0 && other < sharing; ++other) {
            float more[4];
            load_shared_v4(exchange + ((warp_id() + other) * 32 + lane_id()) * 16, more);
#pragma unroll
            for (int e = 0; e < 4; ++e) acc[e] += more[e];
          }
          named_barrier_sync(Barrier, kMergeThreads);
        }
        if (member == 0 && unit + u < end) {
          const int column = at % kUnitsPerRow * kMergeColumns + 4 * lane_id();
          store_global_v2(o.row_at(tile, split.request, r) + 2 * column, pack2<typename C::Element>(acc[0], acc[1]),
                          pack2<typename C::Element>(acc[2], acc[3]));
        }
      }
    }
  }

  MLAFORGE_DEVICE void run() const {
    if (begin == end) return;
    int sharing = 1;
    while (split.splits > kMergeLoads * sharing) sharing *= 2;
    if (split.splits <= 2) {
      sum<2>(1);
    } else if (split.splits <= kMergeLoads / 2) {
      sum<kMergeLoads / 2>(1);
    } else {
      sum<kMergeLoads>(sharing);
    }
  }
};

// Announces this part's partial results, stored before, and merges its shares of the requests that it shares. Called by
// the first kMergeThreads threads; `scratch` is shared memory that nobody uses any more. `arrivals` counts, for each tile
// and part, who has stored and then who has gone on: the last one leaves a zero for the next launch.
template <class C, class Policy, int Barrier>
MLAFORGE_DEVICE void merge_splits(smem_t splits, smem_t schedule, smem_t scratch, const Output& o, const RowTile<C>& tile,
                                  int32_t* arrivals, int part) {
  const auto counter = [&](const Split& split) { return arrivals + blockIdx.x * gridDim.y + split.first_part; };
  named_barrier_sync(Barrier, kMergeThreads);
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    const Split split = Split::load<Policy>(splits + i * kSplitBytes, schedule);
    if (split.request >= 0 && threadIdx.x == 0) atomic_add_acq_rel(counter(split), 1);
  }
  const int rows = tile.rows - tile.first_row < C::kRows ? tile.rows - tile.first_row : C::kRows;
#pragma unroll 1
  for (int i = 0; i < 2; i = late(i + 1)) {
    const Split split = Split::load<Policy>(splits + i * kSplitBytes, schedule);
    if (split.request < 0) continue;
    if (threadIdx.x == 0) {
      int32_t* arrived = counter(split);
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
                                  scratch + kMergeWarps * kMergeColumns * 4,
                                  units * k / split.splits,
                                  units * (k + 1) / split.splits};
    merge.run();
    named_barrier_sync(Barrier, kMergeThreads);
  }
}

}  // namespace mlaforge
