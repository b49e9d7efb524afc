// The items of the Hopper backward: which keys, and which rows see them.
#pragma once

#include "../../list_numbers.h"
#include "../../shared/list_numbering.cuh"
#include "bwd_params.h"
#include "bwd_traits.cuh"

namespace dmattn::sm90 {

struct BwdItem {
  int n_block, head_k, split, batch;  // of a list, n_block counts tiles of its entries; split: which part of them
  int m_begin, m_end;                 // blocks of rows that see any of the keys
  int chunk;                          // of rows; 0 without lists
  HeadShare heads;                    // over lists, in any order
};
// Of a packed sequence, in which the blocks count; batch is 0.
struct PackedBwdItem : BwdItem {
  int sequence;
  SeqRange q, k;
};
template <class T>
using BwdItemOf = std::conditional_t<T::kPacked, PackedBwdItem, BwdItem>;

// Where TMA finds the rows and the keys.
__device__ __forceinline__ int place_of_rows(const BwdItem& item) { return item.batch; }
__device__ __forceinline__ const SeqRange& place_of_rows(const PackedBwdItem& item) { return item.q; }
__device__ __forceinline__ int place_of_keys(const BwdItem& item) { return item.batch; }
__device__ __forceinline__ const SeqRange& place_of_keys(const PackedBwdItem& item) { return item.k; }
// The first block of rows of the sequence among those of all, in arrays of blocks of so many.
__device__ __forceinline__ int first_row_block(const SeqRange& q, int sequence, int block) {
  return first_packed_block(q.first, sequence, block);
}
// Which block of rows of all, in the arrays of dq and of its counters.
template <class T>
__device__ __forceinline__ int dq_block_of(const BwdArguments& p, const BwdItemOf<T>& item, int head, int m) {
  int block = (item.batch * p.nheads + head) * p.dq_blocks + m;
  if constexpr (T::kPacked) block += first_row_block(item.q, item.sequence, T::kBlockM);
  return block;
}
// Where lse, delta and the like of a block of rows begin.
template <class T>
__device__ __forceinline__ int64_t row_of_stat(const BwdArguments& p, const BwdItemOf<T>& item, int head, int m) {
  int64_t row = (static_cast<int64_t>(item.batch) * p.nheads + head) * p.seqlen_q_rounded + m * T::kBlockM;
  if constexpr (T::kPacked) row += first_row_block(item.q, item.sequence, kRowPitch) * kRowPitch;
  return row;
}

// --- consecutive keys -----------------------------------------------------------------------------------------------

struct PlaceOfItem {
  int n_block, part;
};
// Items are numbered by sections; in each from the first blocks of keys, which the most rows see under causality, to
// the last, the parts of the section side by side.
__device__ __forceinline__ PlaceOfItem find_item_of_section(const BwdArguments& p, int index) {
  const int section = min(index / (p.section_parts * p.n_blocks), p.sections);
  const int first = section * p.section_parts;
  const int parts = section < p.sections ? p.section_parts : p.all_parts - first;
  const int in_section = index - first * p.n_blocks;
  const int n_block = in_section / parts;
  return {n_block, first + in_section - n_block * parts};
}
// Or two by two, which a thread block takes one after the other: of a part, a block of keys and that as far from the
// end as the first is from the beginning. Under causality any two have the same number of rows together, so that thread
// blocks stay in step. The first goes through the rows downwards, the second upwards (MirroredSteps). In step t,
// counted from the first one's, with M blocks of rows and two for each block of keys, one is at block M - 1 - t and the
// other at t - 2, whichever two they are: at any time the thread blocks of a group are at two blocks of rows. (Where a
// block of keys has no whole number of blocks of rows, about so.) Of packed sequences each has such pairs of its own.
// Their places are those of all blocks of keys, see find_packed_item().
template <class T>
__host__ __device__ inline int pairs_of_part(const BwdArguments& p) {
  return T::kPacked ? p.n_blocks : (p.n_blocks + 1) / 2;
}
template <class T>
__device__ __forceinline__ PlaceOfItem find_mirrored_item(const BwdArguments& p, int index) {
  const int pairs = pairs_of_part<T>(p), part = index / 2 / pairs, front = index / 2 - part * pairs;
  return {T::kPacked || index % 2 == 0 ? front : p.n_blocks - 1 - front, part};
}
// The block as far from the end: not for the middle one of an odd number.
__device__ __forceinline__ bool has_mirror_image(int front, int blocks) { return 2 * front + 1 < blocks; }

template <class T>
__device__ __forceinline__ BwdItem find_tiled_item(const BwdArguments& p, int index) {
  const bool is_mirrored = T::kMirrors && p.mirrors_items;
  const auto [n_block, part] = is_mirrored ? find_mirrored_item<T>(p, index) : find_item_of_section(p, index);
  const int head = part / p.num_splits;
  // What reads the same tiles of a bias goes side by side: batches if they share it, or else heads.
  const bool batch_is_inner = T::kPairs ? p.pair_batch_step > 0 : T::kDenseBias && p.bias_batch_step == 0;
  const int inner = (batch_is_inner ? p.batches : p.nheads_k) / T::kMembers;
  const int outer_part = head / inner, inner_part = (head - outer_part * inner) * T::kMembers;
  const int first_row = p.is_causal ? n_block * T::kBlockN - (p.seqlen_k - p.seqlen_q) : 0;
  int m_end = p.m_blocks;
  if constexpr (T::kWindows) {
    if (p.window > 0) {
      const int end_row = first_row + T::kBlockN - 1 + p.window;
      m_end = min((max(end_row, 0) + T::kBlockM - 1) / T::kBlockM, m_end);
    }
  }
  int m_begin = min(max(first_row, 0) / T::kBlockM, p.m_blocks);
  const int split = part - head * p.num_splits;
  // Beside an fp32 bias, and for pairs, there are no registers for it.
  constexpr bool kSplitsRows = (T::kMasked || !T::kDenseBias) && !T::kPacked;
  if (kSplitsRows && p.row_splits > 1) {
    const int row_part = split % p.row_splits, blocks = max(m_end - m_begin, 0);
    m_end = m_begin + blocks * (row_part + 1) / p.row_splits;
    m_begin += blocks * row_part / p.row_splits;
  }
  return {n_block, batch_is_inner ? outer_part : inner_part,
          split,   batch_is_inner ? inner_part : outer_part,
          m_begin, m_end,
          0,       {0}};
}

// 0, or with a window the first block of keys that a block of rows sees any of: find_tiled_item() says the same of keys,
// which rows see them.
template <class T>
__device__ __forceinline__ int first_block_of_window(const BwdArguments& p, int m) {
  if constexpr (T::kWindows) {
    const int first_key = m * T::kBlockM + p.seqlen_k - p.seqlen_q - p.window + 1;
    if (p.window > 0 && p.is_causal) return max(first_key, 0) / T::kBlockN;
  }
  return 0;
}

// The item that a member of a pair has: find_tiled_item() finds that of the first.
template <class T>
__device__ __forceinline__ BwdItem item_of_member(const BwdArguments& p, const BwdItem& item, int member) {
  BwdItem own = item;
  if constexpr (T::kPairs) {
    own.head_k += member * p.pair_head_step;
    own.batch += member * p.pair_batch_step;
  }
  return own;
}
// From a query head of the first member to that of the second.
__device__ __forceinline__ int heads_to_second(const BwdArguments& p) { return p.pair_head_step * p.head_ratio; }

// --- packed sequences -----------------------------------------------------------------------------------------------

template <class T>
__device__ __forceinline__ int blocks_of_keys(int keys) {
  return (keys + T::kBlockN - 1) / T::kBlockN;
}
// Items are numbered as if the blocks of keys, one sequence behind the other, were those of one. Some stand for no
// keys: then k.length is 0.
template <class T>
__device__ __forceinline__ PackedItem find_packed_item(const BwdArguments& p, int index) {
  const BwdItem slot = find_tiled_item<T>(p, index);
  const PackedRows keys = find_packed_keys(p.packing, T::kBlockN, slot.n_block);
  const SeqlenInfo own = read_packed_seqlens(p.packing, keys.sequence, p.seqlen_q, p.seqlen_k);
  bool exists = keys.offset >= 0 && keys.offset < own.seqlen_k;
  int n_block = keys.offset / T::kBlockN;
  if (p.mirrors_items) {  // what would be the second of two is none, and is found from the first
    const int blocks = blocks_of_keys<T>(own.seqlen_k);
    exists &= n_block <= blocks - 1 - n_block;
    if (index % 2 != 0) n_block = blocks - 1 - n_block;
  }
  return {index,
          n_block,
          slot.head_k,
          keys.sequence,
          {own.first_row, own.seqlen_q},
          {own.first_key, exists ? own.seqlen_k : 0}};
}
// The rows that see the keys.
template <class T>
__device__ __forceinline__ PackedBwdItem to_item(const BwdArguments& p, const PackedItem& found) {
  const int blocks = (found.q.length + T::kBlockM - 1) / T::kBlockM;
  const int first_row = p.is_causal ? found.n_block * T::kBlockN - (found.k.length - found.q.length) : 0;
  const int m_begin = min(max(first_row, 0) / T::kBlockM, blocks);
  return {{found.n_block, found.head_k, 0, 0, m_begin, blocks, 0}, found.sequence, found.q, found.k};
}

// --- lists ----------------------------------------------------------------------------------------------------------

struct ListItem {
  int tile, chunk, head_k, batch;
};

// Where sums are in a fixed order and chunks do not wait for each other, items are numbered by groups of chunks: the
// first tiles of all of a group's lists, then the second ones, and so on. Tiles of a list follow one another at dq,
// each some steps behind the one before it, and what begins together then are tiles that do not.
__device__ __forceinline__ ListItem find_grouped_item(const BwdArguments& p, int index) {
  const int group = index / (p.group_chunks * p.n_blocks * p.all_parts);
  const int first = group * p.group_chunks, chunks = min(p.group_chunks, p.keys.blocks - first);
  const int in_group = index - first * p.n_blocks * p.all_parts;
  const int row = in_group / p.all_parts;
  const int part = in_group - row * p.all_parts;
  const int tile = row / chunks;
  const int batch = part / p.nheads_k;
  return {tile, p.keys.blocks - 1 - first - (row - tile * chunks), part - batch * p.nheads_k, batch};
}
// Items are numbered by sections; in each by chunks of rows, from the last, which have the most keys before them; in
// each of these by the tiles of its lists, whose first ones the most rows see.
template <class T>
__device__ __forceinline__ ListItem find_list_item(const BwdArguments& p, int index) {
  if constexpr (T::kOrdered) return find_grouped_item(p, index);
  const int items_of_part = p.n_blocks * p.keys.blocks;
  const int section = min(index / (p.section_parts * items_of_part), p.sections);
  const int first = section * p.section_parts;
  const int parts = section < p.sections ? p.section_parts : p.all_parts - first;
  const int in_section = index - first * items_of_part;
  const int row = in_section / parts;
  const int part = first + in_section - row * parts;
  const int chunk = row / p.n_blocks;
  const int batch = part / p.nheads_k;
  return {row - chunk * p.n_blocks, p.keys.blocks - 1 - chunk, part - batch * p.nheads_k, batch};
}
// Places are those of find_list_item().
__device__ __forceinline__ ListRoom list_room_of(const BwdArguments& p) {
  return {p.n_blocks, p.keys.blocks, p.all_parts, p.section_parts, p.sections};
}
template <class T>
__device__ __forceinline__ ListNumbering find_list_numbering(const BwdArguments& p) {
  if (p.lists_as_they_are) {
    const int rows = p.n_blocks * p.keys.blocks;
    return {rows, rows, 1, nullptr};
  }
  const auto* const known = reinterpret_cast<const ListNumbers*>(p.work_counter);
  const int32_t* const rows_before = reinterpret_cast<const int32_t*>(known + 1) + p.keys.blocks;
  // The end of several sections is that of the last one alone.
  const bool has_tail = p.sections == 0 && known->tail_chunks > 0;
  if (!has_tail) return {known->rows, known->rows, 1, rows_before};
  return {known->rows, rows_before[known->tail_chunks - 1], known->tail_parts, rows_before};
}
// The lists of a head, as KeyList numbers (batch, head).
__device__ __forceinline__ int64_t head_list_of(const BwdArguments& p, int batch, int head_k) {
  return static_cast<int64_t>(p.keys.batch > 1 ? batch : 0) * p.keys.heads + head_k * p.head_ratio / p.keys.head_ratio;
}
// The rows of the tiles of a chunk's list.
__device__ __forceinline__ const int2* tile_rows_of(const BwdArguments& p, int batch, int head_k, int chunk) {
  return p.tile_rows + (head_list_of(p, batch, head_k) * p.keys.blocks + chunk) * p.n_blocks;
}
__device__ __forceinline__ int2 read_tile_rows(const BwdArguments& p, const ListItem& item) {
  return __ldg(tile_rows_of(p, item.batch, item.head_k, item.chunk) + item.tile);
}
// Of the tiles of a chunk before this one, how many see block m_begin + lane of the item's rows: 32 blocks at most, see
// kMostChunkRows. Whole warp.
__device__ __forceinline__ int count_tiles_before(const BwdArguments& p, const BwdItem& item, int lane) {
  const int2* const rows = tile_rows_of(p, item.batch, item.head_k, item.chunk);
  const int blocks = item.m_end - item.m_begin;
  int seen_by = 0;
#pragma unroll 1
  for (int first = 0; first < item.n_block; first += 32) {
    const int tile = first + lane;
    const int2 other = tile < item.n_block ? __ldg(rows + tile) : make_int2(0, 0);
#pragma unroll 1
    for (int i = 0; i < blocks; ++i) {
      const int m = item.m_begin + i;
      const int seen = __popc(__ballot_sync(0xffffffffu, other.x <= m && m < other.y));
      if (lane == i) seen_by += seen;
    }
  }
  return seen_by;
}
// How many tiles they are.
__device__ __forceinline__ int count_tiles(const BwdArguments& p, int batch, int head_k, int chunk, int keys_of_tile) {
  const int64_t list = head_list_of(p, batch, head_k) * p.keys.blocks + chunk;
  return (__ldg(p.keys.count + list) + keys_of_tile - 1) / keys_of_tile;
}
// Which row of ChunkTerms a listed key has; -1: none. Lists and intervals may be the caller's and hold any numbers.
__device__ __forceinline__ int read_term(const BwdArguments& p, int64_t head_list, int chunk, int key, bool exists) {
  if (p.terms.first == nullptr || !exists) return -1;
  const int term = __ldg(p.terms.first + head_list * p.seqlen_k + key) + chunk;
  return static_cast<uint32_t>(term) < static_cast<uint32_t>(p.terms.capacity) ? term : -1;
}

// --- all ------------------------------------------------------------------------------------------------------------

// The next item, for a warp beside the producer; an index of `items` and more: there is none. Whole warp.
template <class T>
__device__ __forceinline__ typename T::Announced take_announced(typename T::Shared& s, RingPlace<2>& place, int lane) {
  s.item_full[place.stage].wait(place.phase);
  const typename T::Announced announced = s.item[place.stage];
  __syncwarp();
  if (lane == 0) s.item_empty[place.stage].arrive();
  place.advance();
  return announced;
}

template <class T>
__device__ __forceinline__ BwdItemOf<T> find_item(const BwdArguments& p, const typename T::Announced& announced) {
  if constexpr (T::kPacked) {
    return to_item<T>(p, announced);
  } else if constexpr (T::kGathered) {
    const ListItem item = find_list_item<T>(p, announced.index);
    return {item.tile, item.head_k, 0, item.batch, announced.m_begin, announced.m_end, item.chunk, {announced.heads}};
  } else {
    BwdItem item = find_tiled_item<T>(p, announced.index);
    if constexpr (T::kMasked) item.m_end = announced.has_rows ? item.m_end : item.m_begin;
    return item;
  }
}

// Whether rows and keys meet of which the one does not see the other, or one of which there is not.
template <class T, class Lengths>
__device__ __forceinline__ bool cuts_tile(const Lengths& p, int m, int n_block) {
  const int last = (n_block + 1) * T::kBlockN - 1, offset = p.seqlen_k - p.seqlen_q;
  if constexpr (T::kWindows) {
    if (p.window > 0 && (m + 1) * T::kBlockM + offset - p.window > n_block * T::kBlockN) return true;
  }
  return last >= p.seqlen_k || (p.is_causal && m * T::kBlockM < last - offset);
}

// The first query head that the launch has of an item's group.
__device__ __forceinline__ int first_head_of(const BwdArguments& p, const BwdItem& item) {
  return item.head_k * p.head_ratio + p.group_begin;
}
// The query heads of an item's part: from begin up to end.
struct HeadRange {
  int begin, end;
};
__device__ __forceinline__ HeadRange heads_of(const BwdArguments& p, const BwdItem& item) {
  const int first = first_head_of(p, item);
  const int splits = p.num_splits / p.row_splits, split = item.split / p.row_splits;
  return {first + p.group_heads * split / splits, first + p.group_heads * (split + 1) / splits};
}

// The steps of an item: the query heads of its part, and of each the blocks of rows that see its keys, from the last to
// the first.
struct RowSteps {
  int m_begin, m_end;
  int head, m;
  int left;

  __device__ __forceinline__ RowSteps(const BwdArguments& p, const BwdItem& item) : RowSteps(item, heads_of(p, item)) {}
  __device__ __forceinline__ RowSteps(const BwdItem& item, const HeadRange& heads)
      : m_begin(item.m_begin), m_end(item.m_end) {
    head = heads.begin;
    m = m_end - 1;
    left = (heads.end - heads.begin) * (m_end - m_begin);
  }
  __device__ __forceinline__ bool is_last() const { return left <= 1; }
  __device__ __forceinline__ void advance() {
    --left;
    if (--m >= m_begin) return;
    m = m_end - 1;
    ++head;
  }
};

// Over lists, in any order.
struct ListSteps : RowSteps {
  __device__ __forceinline__ ListSteps(const BwdArguments& p, const BwdItem& item)
      : RowSteps(item, {first_head_of(p, item) + item.heads.begin(), first_head_of(p, item) + item.heads.end()}) {}
};

// Where dq is added up in order: the blocks of rows, and of each the heads, so that items of different length stay side
// by side. Head by head the shorter ones would wait at each head until the longest has come to it. Lists begin with the
// first block of rows, which all but few tiles of a chunk have; consecutive keys with the last one, which they all
// have.
template <class T>
struct HeadSteps {
  int heads, heads_left;  // of the item; of the block of rows, this one included
  int head, m;
  int left;

  __device__ __forceinline__ HeadSteps(const BwdArguments& p, const BwdItem& item) {
    // Lists are not split, so that the number of heads need not be kept.
    if constexpr (T::kGathered) {
      heads = p.group_heads;
      head = first_head_of(p, item);
    } else {
      const HeadRange range = heads_of(p, item);
      heads = range.end - range.begin;
      head = range.begin;
    }
    heads_left = heads;
    m = T::kGathered ? item.m_begin : item.m_end - 1;
    left = heads * (item.m_end - item.m_begin);
  }
  __device__ __forceinline__ bool is_last() const { return left <= 1; }
  __device__ __forceinline__ void advance() {
    --left;
    ++head;
    if (--heads_left > 0) return;
    heads_left = heads;
    head -= heads;
    m += T::kGathered ? 1 : -1;
  }
};

// Of wide heads: those of RowSteps, or where dq is added up in order those of HeadSteps.
template <class T>
struct WideSteps {
  const BwdArguments& p;
  int begin, end;  // of the blocks of rows, or of the heads
  int head, m;
  int left;

  __device__ __forceinline__ WideSteps(const BwdArguments& arguments, const BwdItem& item) : p(arguments) {
    const HeadRange heads = heads_of(p, item);
    begin = takes_turns() ? heads.begin : item.m_begin;
    end = takes_turns() ? heads.end : item.m_end;
    head = heads.begin;
    m = T::kGathered && takes_turns() ? item.m_begin : item.m_end - 1;
    left = (heads.end - heads.begin) * (item.m_end - item.m_begin);
  }
  __device__ __forceinline__ bool takes_turns() const { return T::kGathered ? T::kOrdered : p.dq_semaphore != nullptr; }
  __device__ __forceinline__ bool is_last() const { return left <= 1; }
  __device__ __forceinline__ void advance() {
    --left;
    if (takes_turns()) {
      if (++head < end) return;
      head = begin;
      m += T::kGathered ? 1 : -1;
    } else {
      if (--m >= begin) return;
      m = end - 1;
      ++head;
    }
  }
};

// Whether an item is the second of two that are mirrored.
template <class T>
__device__ __forceinline__ bool is_mirror_image(const BwdArguments& p, const BwdItem& item) {
  return p.mirrors_items && 2 * item.n_block >= p.n_blocks;
}
template <class T>
__device__ __forceinline__ bool is_mirror_image(const BwdArguments& p, const PackedBwdItem& item) {
  return p.mirrors_items && 2 * item.n_block >= blocks_of_keys<T>(item.k.length);
}

// Those of RowSteps. Or, of mirrored items, the blocks of rows, and of each the heads: from the last block to the
// first, and of the second of two items the other way round. Both share registers, of which the kernel has none to
// spare.
template <class T>
struct MirroredSteps {
  const BwdArguments& p;
  int m_begin_or_direction, end;  // end: of the blocks of rows, or of the heads
  int head, m;
  int left;

  __device__ __forceinline__ MirroredSteps(const BwdArguments& arguments, const BwdItemOf<T>& item) : p(arguments) {
    const HeadRange heads = heads_of(p, item);
    const bool ascends = is_mirror_image<T>(p, item);
    m_begin_or_direction = !p.mirrors_items ? item.m_begin : ascends ? 1 : -1;
    end = p.mirrors_items ? heads.end : item.m_end;
    head = heads.begin;
    m = ascends ? item.m_begin : item.m_end - 1;
    left = (heads.end - heads.begin) * (item.m_end - item.m_begin);
  }
  __device__ __forceinline__ bool is_last() const { return left <= 1; }
  __device__ __forceinline__ void advance() {
    --left;
    if (p.mirrors_items) {
      if (++head < end) return;
      head = end - p.group_heads;  // items that are mirrored have all heads of the launch
      m += m_begin_or_direction;
    } else {
      if (--m >= m_begin_or_direction) return;
      m = end - 1;
      ++head;
    }
  }
};

// Of packed sequences, whose lengths are not at hand in each step.
template <class T>
struct PackedSteps : std::conditional_t<T::kOrdered, HeadSteps<T>, MirroredSteps<T>> {
  using Steps = std::conditional_t<T::kOrdered, HeadSteps<T>, MirroredSteps<T>>;
  int cut_end;  // the first block of rows from which on cuts_tile() is false

  __device__ __forceinline__ PackedSteps(const BwdArguments& p, const PackedBwdItem& item) : Steps(p, item) {
    const int last = (item.n_block + 1) * T::kBlockN - 1;
    const int first_seeing_all = p.is_causal ? last - (item.k.length - item.q.length) : 0;
    cut_end = last >= item.k.length ? item.m_end : (max(first_seeing_all, 0) + T::kBlockM - 1) / T::kBlockM;
  }
};

template <class T>
using BwdSteps =
    std::conditional_t<T::kPacked, PackedSteps<T>,
                       std::conditional_t<T::kOrdered || T::kHasTurnWarps, HeadSteps<T>,
                                          std::conditional_t<T::kMirrors, MirroredSteps<T>,
                                                             std::conditional_t<T::kGathered, ListSteps, RowSteps>>>>;

}  // namespace dmattn::sm90
