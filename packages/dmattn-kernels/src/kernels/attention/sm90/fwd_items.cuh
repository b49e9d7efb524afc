// The pieces of work (items) that the thread blocks of a Hopper forward kernel take: each is a block of rows of a
// head.
#pragma once

#include <cuda_runtime.h>

#include "fwd_params.h"
#include "fwd_traits.cuh"
#include "packed.cuh"
#include "pipeline.cuh"

namespace dmattn::sm90 {

// Lengths, and where TMA finds the rows and the keys, for items of both kinds.
template <class Arguments>
__device__ __forceinline__ const Arguments& lengths_of(const Arguments& p, const FwdItem&) {
  return p;
}
template <class Arguments>
__device__ __forceinline__ PackedLengths lengths_of(const Arguments& p, const PackedFwdItem& item) {
  return {item.q.length, item.k.length, p.is_causal};
}
__device__ __forceinline__ int place_of_rows(const FwdItem& item) { return item.batch; }
__device__ __forceinline__ const SeqRange& place_of_rows(const PackedFwdItem& item) { return item.q; }
__device__ __forceinline__ int place_of_keys(const FwdItem& item) { return item.batch; }
__device__ __forceinline__ const SeqRange& place_of_keys(const PackedFwdItem& item) { return item.k; }
// Where the log-sum-exp of row 0 of the item's sequence and head is.
template <class Arguments>
__device__ __forceinline__ int64_t lse_offset(const Arguments& p, const FwdItem& item) {
  return item.batch * p.lse_stride.batch + item.head * p.lse_stride.head;
}
template <class Arguments>
__device__ __forceinline__ int64_t lse_offset(const Arguments& p, const PackedFwdItem& item) {
  return item.q.first * p.lse_stride.row + item.head * p.lse_stride.head;
}

// The number of row 0 of a share among the rows of all partial results.
template <class Arguments>
__device__ __forceinline__ int64_t lse_offset(const Arguments& p, const SplitFwdItem& item) {
  return (int64_t{item.split * p.batches + item.batch} * p.nheads + item.head) * p.seqlen_q;
}

// An item as the producer announces it: its number, and whether any of its rows may see a key.
struct AnnouncedItem {
  int32_t word;

  static __device__ __forceinline__ AnnouncedItem of(int index, bool has_keys) { return {has_keys ? index : ~index}; }
  __device__ __forceinline__ bool has_keys() const { return word >= 0; }
  __device__ __forceinline__ int index() const { return has_keys() ? word : ~word; }
};
// Waits for the item that is announced next. For a whole warp.
template <class T>
__device__ __forceinline__ AnnouncedItem next_item(typename T::Shared& s, RingPlace<2>& place) {
  s.item_full[place.stage].wait(place.phase);
  const AnnouncedItem item = {__shfl_sync(0xffffffffu, s.item[place.stage], 0)};
  if (threadIdx.x % 32 == 0) s.item_empty[place.stage].arrive();
  place.advance();
  return item;
}

// Items are numbered section by section. Within a section of heads, row blocks come from the last, which is the
// longest under causality, to the first, and the heads of a row block follow one another.
template <class Arguments>
__device__ __forceinline__ FwdItem find_item(const Arguments& p, int index) {
  const int section = index / (p.section_heads * p.m_blocks);
  const int first_head = section * p.section_heads;
  const int heads = min(p.section_heads, p.all_heads - first_head);
  const int in_section = index - first_head * p.m_blocks;
  const int rank = in_section / heads;
  const int head = first_head + in_section - rank * heads;
  const int batch = head / p.nheads;
  return {p.m_blocks - 1 - rank, head - batch * p.nheads, batch};
}

// The item of a number. Shares of the keys are numbered as if they were batches.
template <class T, class Arguments>
__device__ __forceinline__ typename T::Item find_item_of(const Arguments& p, int index) {
  const FwdItem item = find_item(p, index);
  if constexpr (T::kSplit) {
    const int split = item.batch / p.batches;
    return {{item.m_block, item.head, item.batch - split * p.batches}, split};
  } else {
    return item;
  }
}

// Packed sequences: items are numbered as if the row blocks of all sequences, one sequence after the other, were
// those of a single sequence. Some numbers stand for no rows: m_block is then outside the row blocks of the sequence.
template <class T>
__device__ __forceinline__ PackedFwdItem find_packed_item(const PackedFwdArguments& p, int index) {
  const FwdItem slot = find_item(p, index);
  const PackedRows rows = find_packed_rows(p.packing, T::kBlockM, slot.m_block);
  const SeqlenInfo own = read_packed_seqlens(p.packing, rows.sequence, p.seqlen_q, p.seqlen_k);
  return {{rows.offset / T::kBlockM, slot.head, rows.sequence},
          {own.first_row, own.seqlen_q},
          {own.first_key, own.seqlen_k}};
}
template <class T>
__device__ __forceinline__ bool has_rows(const PackedFwdItem& item) {
  return item.m_block >= 0 && item.m_block * T::kBlockM < item.q.length;
}
// As next_item(), for kernels whose producer announces the item itself beside its number (kSaysItems).
template <class T>
__device__ __forceinline__ AnnouncedItem next_item(typename T::Shared& s, RingPlace<2>& place,
                                                   typename T::Item& found) {
  s.item_full[place.stage].wait(place.phase);
  const AnnouncedItem item = {__shfl_sync(0xffffffffu, s.item[place.stage], 0)};
  found = s.general.found[place.stage];
  if constexpr (!T::kOverlaps) {
    // The shuffles show the compiler that all threads of the warp have read the same: it then keeps the item, and
    // what follows from it, once for the warp.
    static_assert(sizeof(found) % 4 == 0);
    int (&words)[sizeof(found) / 4] = reinterpret_cast<int (&)[sizeof(found) / 4]>(found);
#pragma unroll
    for (int& word : words) word = __shfl_sync(0xffffffffu, word, 0);
  }
  __syncwarp();
  if (threadIdx.x % 32 == 0) s.item_empty[place.stage].arrive();
  place.advance();
  return item;
}

template <class T, class Lengths>
__device__ __forceinline__ bool has_window(const Lengths& p) {
  return T::kWindows == Windows::kAlways || (T::kWindows == Windows::kMaybe && p.window > 0);
}

// The key blocks of some rows: those in [begin, end) have keys that any of the rows sees, and those in [whole, full)
// have only keys that all of them see.
struct KeyBlocks {
  int begin, whole, full, end;
};
template <class T, class Lengths>
__device__ __forceinline__ KeyBlocks find_key_blocks(const Lengths& p, int first_row, int rows) {
  int seen_by_all = p.seqlen_k, seen = p.seqlen_k;
  if (p.is_causal) {
    const int first_limit = first_row + p.seqlen_k - p.seqlen_q + 1;
    seen_by_all = min(max(first_limit, 0), p.seqlen_k);
    seen = min(max(first_limit + rows - 1, 0), p.seqlen_k);
  }
  KeyBlocks blocks = {0, 0, seen_by_all / T::kBlockN, (seen + T::kBlockN - 1) / T::kBlockN};
  if (has_window<T>(p)) {
    const int first_unseen = first_row + p.seqlen_k - p.seqlen_q + 1 - p.window;
    blocks.begin = max(first_unseen, 0) / T::kBlockN;
    blocks.whole = (max(first_unseen + rows - 1, 0) + T::kBlockN - 1) / T::kBlockN;
    blocks.full = max(blocks.full, blocks.whole);  // a block that is cut on both sides comes before the whole ones
  }
  return blocks;
}

template <class T, class Lengths>
__device__ __forceinline__ KeyBlocks find_key_blocks(const Lengths& p, int m_block) {
  return find_key_blocks<T>(p, m_block * T::kBlockM, T::kBlockM);
}

// The key blocks of an item: all that its rows see, or an even share of these.
template <class T>
__device__ __forceinline__ KeyBlocks find_key_blocks_of(const typename T::Arguments& p, const typename T::Item& item) {
  KeyBlocks blocks = find_key_blocks<T>(lengths_of(p, item), item.m_block);
  if constexpr (T::kSplit) {
    blocks.begin = blocks.end * item.split / p.splits;
    blocks.end = blocks.end * (item.split + 1) / p.splits;
    blocks.whole = blocks.begin;
    blocks.full = max(blocks.full, blocks.begin);
  }
  return blocks;
}

// In a tile that begins with key0, the scores of keys past the last one, or past what a row may see, become -inf.
// first_row: the first of the two rows that this thread has; the other is 8 later.
template <int kFragments, class Lengths>
__device__ __forceinline__ void cut_keys(const Lengths& p, float (&scores)[1][kFragments][4], int key0, int first_row,
                                         int lane) {
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int row = first_row + 8 * j;
    int limit = p.is_causal ? min(p.seqlen_k, row + 1 + p.seqlen_k - p.seqlen_q) : p.seqlen_k;
    limit -= key0 + (lane % 4) * 2;
#pragma unroll
    for (int i = 0; i < kFragments; ++i) {
      if (8 * i >= limit) scores[0][i][2 * j] = -INFINITY;
      if (8 * i + 1 >= limit) scores[0][i][2 * j + 1] = -INFINITY;
    }
  }
}
// The same for keys before the window of a row.
template <int kFragments, class Arguments>
__device__ __forceinline__ void cut_keys_before_window(const Arguments& p, float (&scores)[1][kFragments][4], int key0,
                                                       int first_row, int lane) {
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int first_key = first_row + 8 * j + 1 + p.seqlen_k - p.seqlen_q - p.window;
    const int first = first_key - (key0 + (lane % 4) * 2);
#pragma unroll
    for (int i = 0; i < kFragments; ++i) {
      if (8 * i < first) scores[0][i][2 * j] = -INFINITY;
      if (8 * i + 1 < first) scores[0][i][2 * j + 1] = -INFINITY;
    }
  }
}

}  // namespace dmattn::sm90
