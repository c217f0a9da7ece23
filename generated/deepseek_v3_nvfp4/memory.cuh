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

// A piece of 16-bit elements as float32, and back.
template <class Element>
MLAFORGE_DEVICE void unpack_piece(const uint32_t (&piece)[4], float (&x)[8]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = unpack_low<Element>(piece[i]);
    x[2 * i + 1] = unpack_high<Element>(piece[i]);
  }
}
template <class Element>
MLAFORGE_DEVICE void pack_piece(const float (&x)[8], uint32_t (&piece)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) piece[i] = pack2<Element>(x[2 * i], x[2 * i + 1]);
}

// An index that is 32 or 64 bits wide in memory.
MLAFORGE_DEVICE int64_t load_index(const void* indices, int i, bool is_long) {
  if (is_long) return load_global(static_cast<const int64_t*>(indices) + i);
  return load_global(static_cast<const int32_t*>(indices) + i);
}

// ---- Ranges of cached tokens, one behind the other

// Where a row comes from. Not every block id is one: a row of a token that the table or the cache does not have is zeros,
// a row that no sequence has stays as it is.
constexpr int kZeros = -1;
constexpr int kNobodys = -2;
struct Source {
  int block;
  int slot;
};

// The last sequence that begins at `row` or before it; sequences without a token begin where the next one does.
MLAFORGE_DEVICE int sequence_of(int row, const int* cu_seqlens, int batch) {
  int first = 0;
  int behind = batch;
  while (behind - first > 1) {
    const int middle = (first + behind) / 2;
    if (load_global(cu_seqlens + middle) <= row) {
      first = middle;
    } else {
      behind = middle;
    }
  }
  return first;
}

// Of which sequences there are ranges, and where their pages are; see the parameters of gather.
struct Ranges {
  const int* block_table;
  int64_t table_stride;
  int table_width;
  int num_blocks;
  const int* cu_seqlens;
  const int* seq_starts;
  int batch;
};

// Where a row that the result has comes from.
template <int PageSize>
MLAFORGE_DEVICE Source source_of(int row, const Ranges& ranges) {
  if (row < load_global(ranges.cu_seqlens) || row >= load_global(ranges.cu_seqlens + ranges.batch)) return {kNobodys, 0};
  const int sequence = sequence_of(row, ranges.cu_seqlens, ranges.batch);
  const int64_t start = ranges.seq_starts == nullptr ? 0 : load_global(ranges.seq_starts + sequence);
  const int64_t token = start + row - load_global(ranges.cu_seqlens + sequence);
  const int64_t page = token / PageSize;
  if (token < 0 || page >= ranges.table_width) return {kZeros, 0};
  const int block = load_global(ranges.block_table + sequence * ranges.table_stride + page);
  if (block < 0 || block >= ranges.num_blocks) return {kZeros, 0};
  return {block, static_cast<int>(token % PageSize)};
}

// What lane `lane` knows.
MLAFORGE_DEVICE Source shuffle(Source mine, int lane) {
  return {__shfl_sync(0xffffffffu, mine.block, lane), __shfl_sync(0xffffffffu, mine.slot, lane)};
}

}  // namespace mlaforge
