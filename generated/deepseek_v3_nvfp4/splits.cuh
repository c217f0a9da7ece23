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
constexpr int kUnitBytes = 4 * kMergeColumns;
constexpr int kMaxSplits = 144;
// Weights of every partial row of a share: of r rows and s splits, at most r / s + 2 rows of s.
template <class C>
constexpr int kWeightBytes = 4 * (C::kRows + 2 * kMaxSplits);
template <class C>
constexpr int kMergeScratch = kWeightBytes<C> + kMaxSplits * kUnitBytes;  // or more: what lands at once

// One part's share in the merge of one request. Its units follow each other in memory, in each of the partial results.
template <class C, int Barrier>
struct Merge {
  static constexpr int kUnitsPerRow = C::kHeadDimV / kMergeColumns;

  const Output& o;
  const RowTile<C>& tile;
  Split split;
  smem_t weights;   // of every partial row of the share, and behind them
  smem_t partials;  // units of each split
  int begin, end;   // units

  MLAFORGE_DEVICE int first_row() const { return begin / kUnitsPerRow; }
  MLAFORGE_DEVICE smem_t weights_of(int r) const { return weights + 4 * (r - first_row()) * split.splits; }
  // The parts behind the first have continued what it opened.
  MLAFORGE_DEVICE int64_t partial_row(int k, int r) const {
    const int part = split.first_part + k;
    return tile.partial_row(k == 0 ? opened_slot(part) : continued_slot(part), r);
  }

  // Starts the copies of `count` units of every split. The warps take them in turns: a thread needs tens of cycles for one.
  MLAFORGE_DEVICE void load(int first, int count, smem_t landed) const {
    if (lane_id() != 0) return;
    if (threadIdx.x == 0) mbarrier_arrive_expect_tx(landed, split.splits * count * kUnitBytes);
#pragma unroll 1
    for (int k = warp_id(); k < split.splits; k += kMergeWarps) {
      bulk_load(landed, partials + k * count * kUnitBytes,
                o.partial_out + partial_row(k, 0) * C::kHeadDimV + first * kMergeColumns, count * kUnitBytes);
    }
  }

  // Partial rows of the share, and the log-sum-exp of one of them.
  MLAFORGE_DEVICE int partial_rows() const { return ((end - 1) / kUnitsPerRow - first_row() + 1) * split.splits; }
  MLAFORGE_DEVICE float partial_lse(int i) const {
    const int r = quotient(i, split.splits);
    return load_global(o.partial_lse + partial_row(i - r * split.splits, first_row() + r));
  }

  // What each partial row counts, and the rows' log-sum-exp. The thread has asked for its first partial row's before.
  MLAFORGE_DEVICE void weigh(float lse_of_first) const {
    const int last_row = (end - 1) / kUnitsPerRow;
    const int count = partial_rows();
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < count;) {
      store_shared_f32(weights + 4 * i, lse_of_first);
      i += kMergeThreads;
      if (i < count) lse_of_first = partial_lse(i);
    }
    named_barrier_sync(Barrier, kMergeThreads);
    // A warp has a row.
#pragma unroll 1
    for (int r = first_row() + warp_id(); r <= last_row; r += kMergeWarps) {
      float max = -infinity();
#pragma unroll 1
      for (int k = lane_id(); k < split.splits; k += 32) max = fmaxf(max, load_shared_f32(weights_of(r) + 4 * k));
#pragma unroll
      for (int mask = 16; mask > 0; mask /= 2) max = fmaxf(max, shuffle_xor(max, mask));
      const float reference = max == -infinity() ? 0.f : max;
      float sum = 0.f;
#pragma unroll 1
      for (int k = lane_id(); k < split.splits; k += 32) {
        const float weight = exp2_approx(load_shared_f32(weights_of(r) + 4 * k) - reference);
        store_shared_f32(weights_of(r) + 4 * k, weight);
        sum += weight;
      }
#pragma unroll
      for (int mask = 16; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
      const float factor = sum == 0.f ? 0.f : 1.f / sum;
#pragma unroll 1
      for (int k = lane_id(); k < split.splits; k += 32) {
        store_shared_f32(weights_of(r) + 4 * k, load_shared_f32(weights_of(r) + 4 * k) * factor);
      }
      // Where a row is shared by parts, that with its first columns has its log-sum-exp.
      if (lane_id() == 0 && r * kUnitsPerRow >= begin) {
        store_global(o.lse_at(tile, split.request, r), sum == 0.f ? infinity() : (max + log2_approx(sum)) * kLn2);
      }
    }
    named_barrier_sync(Barrier, kMergeThreads);
  }

  // Adds up `count` units from `first` on. A warp has a unit, four columns a thread. Of few units several warps have each
  // one, every so manieth split of it, and the first of them adds up their sums.
  MLAFORGE_DEVICE void sum(int first, int count) const {
    const int slices = count > kMergeWarps / 2 ? 1 : count > kMergeWarps / 4 ? 2 : count > 1 ? 4 : 8;
    const int slice = warp_id() & (slices - 1);
    const int stride = count * kUnitBytes;
    int u = quotient(warp_id(), slices);
    float acc[4];
#pragma unroll 1
    for (; u < count; u += kMergeWarps) {
      const smem_t weight = weights_of(quotient(first + u, kUnitsPerRow));
      const smem_t at = partials + u * kUnitBytes + 16 * lane_id();
      acc[0] = acc[1] = acc[2] = acc[3] = 0.f;
#pragma unroll 4
      for (int k = slice; k < split.splits; k += slices) add(acc, load_shared_f32(weight + 4 * k), at + k * stride);
      if (slices > 1) break;
      store(first + u, acc);
    }
    if (slices == 1) return;
    const smem_t at = partials + u * kUnitBytes + 16 * lane_id();
    const bool some = u < count && slice < split.splits;
    // A sum goes where the first split was that it has, which nobody else reads.
    if (some && slice > 0) store_shared_v4(at + slice * stride, acc);
    fence_proxy_async();  // the next copies may land there
    named_barrier_sync(Barrier, kMergeThreads);
    if (some && slice == 0) {
#pragma unroll 1
      for (int k = 1; k < slices && k < split.splits; ++k) add(acc, 1.f, at + k * stride);
      store(first + u, acc);
    }
  }
  MLAFORGE_DEVICE void store(int unit, const float (&x)[4]) const {
    const int column = unit % kUnitsPerRow * kMergeColumns + 4 * lane_id();
    store_global_v2(o.row_at(tile, split.request, quotient(unit, kUnitsPerRow)) + 2 * column,
                    pack2<typename C::Element>(x[0], x[1]), pack2<typename C::Element>(x[2], x[3]));
  }
  MLAFORGE_DEVICE static void add(float (&acc)[4], float weight, smem_t at) {
    float x[4];
    load_shared_v4(at, x);
#pragma unroll
    for (int e = 0; e < 4; ++e) acc[e] = fmaf(weight, x[e], acc[e]);
  }

  // `bytes` of room are behind `weights`; `landed` is an mbarrier of one arrival, `phase` that which it is in.
  MLAFORGE_DEVICE void run(int bytes, smem_t landed, int& phase) const {
    if (begin == end) return;
    const int at_once = quotient((bytes - kWeightBytes<C>) / kUnitBytes, split.splits);
    const int thread = static_cast<int>(threadIdx.x);
    const float lse_of_first = thread < partial_rows() ? partial_lse(thread) : 0.f;
#pragma unroll 1
    for (int first = begin; first < end; first += at_once) {
      const int count = end - first < at_once ? end - first : at_once;
      if (first > begin) named_barrier_sync(Barrier, kMergeThreads);  // the units before have been added up
      load(first, count, landed);
      if (first == begin) weigh(lse_of_first);  // while they are on their way
      mbarrier_wait(landed, phase);
      phase ^= 1;
      sum(first, count);
    }
  }
};

// Announces this part's partial results, stored before, and merges its shares of the requests that it shares. Called by
// the first kMergeThreads threads; `scratch` is `Bytes` of shared memory that nobody uses any more, `landed` an mbarrier of
// one arrival in its first phase. `arrivals` counts, for each tile and part, who has stored and then who has gone on: the
// last one leaves a zero for the next launch.
template <class C, class Policy, int Barrier, int Bytes>
MLAFORGE_DEVICE void merge_splits(smem_t splits, smem_t schedule, smem_t scratch, smem_t landed, const Output& o,
                                  const RowTile<C>& tile, int32_t* arrivals, int part) {
  static_assert(kMergeScratch<C> <= Bytes, "a unit of every split has room");
  const auto counter = [&](int first_part) { return arrivals + blockIdx.x * gridDim.y + first_part; };
  // Partial results were written by plain stores, here and in other blocks; bulk copies read them, and write where plain
  // stores have written.
  fence_proxy_async_global();
  fence_proxy_async();
  named_barrier_sync(Barrier, kMergeThreads);
  if (threadIdx.x < 2) {
    const smem_t at = splits + static_cast<int>(threadIdx.x) * kSplitBytes;
    const Split split = find_split<Policy>(at, schedule);
    store_split(at, split.request, split.first_part, split.splits);
    if (split.request >= 0) atomic_add_acq_rel(counter(split.first_part), 1);
  }
  named_barrier_sync(Barrier, kMergeThreads);
  const int rows = tile.rows - tile.first_row < C::kRows ? tile.rows - tile.first_row : C::kRows;
  const int units = rows * Merge<C, Barrier>::kUnitsPerRow;
  int phase = 0;
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
    fence_proxy_async_global();
    const int k = part - split.first_part;
    const Merge<C, Barrier> merge{o,
                                  tile,
                                  split,
                                  scratch,
                                  scratch + kWeightBytes<C>,
                                  quotient(units * k, split.splits),
                                  quotient(units * (k + 1), split.splits)};
    merge.run(Bytes, landed, phase);
  }
}

}  // namespace mlaforge
