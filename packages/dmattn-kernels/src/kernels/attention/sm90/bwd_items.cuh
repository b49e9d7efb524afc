// The items of the Hopper backward: which keys, and which rows see them.
#pragma once

#include "../../list_numbers.h"
#include "../../shared/list_numbering.cuh"
#include "bwd_params.h"
#include "bwd_traits.cuh"

namespace dmattn::sm90 {

struct BwdItem {
  int n_block, head_k, split, batch;  // n_block: over lists, the tile of a list; split: the part of the block of keys
  int m_begin, m_end;                 // blocks of rows that see any of the keys
  int chunk;                          // chunk of row blocks; 0 without lists
  HeadShare heads;                    // over lists in any order: the query heads of the item
};
// An item of a packed sequence, in which its blocks are numbered; batch is 0.
struct PackedBwdItem : BwdItem {
  int sequence;
  SeqRange q, k;
};
template <class T>
using BwdItemOf = std::conditional_t<T::kPacked, PackedBwdItem, BwdItem>;

// The batch or the packed sequence in which TMA finds the rows and the keys.
__device__ __forceinline__ int place_of_rows(const BwdItem& item) { return item.batch; }
__device__ __forceinline__ const SeqRange& place_of_rows(const PackedBwdItem& item) { return item.q; }
__device__ __forceinline__ int place_of_keys(const BwdItem& item) { return item.batch; }
__device__ __forceinline__ const SeqRange& place_of_keys(const PackedBwdItem& item) { return item.k; }
// The number of a sequence's first block of rows in an array with all sequences' blocks of `block` rows.
__device__ __forceinline__ int first_row_block(const SeqRange& q, int sequence, int block) {
  return first_packed_block(q.first, sequence, block);
}
// The number of a block of rows in the arrays of dq and of its counters.
template <class T>
__device__ __forceinline__ int dq_block_of(const BwdArguments& p, const BwdItemOf<T>& item, int head, int m) {
  int block = (item.batch * p.nheads + head) * p.dq_blocks + m;
  if constexpr (T::kPacked) block += first_row_block(item.q, item.sequence, T::kBlockM);
  return block;
}
// Where a block of rows begins in lse, lse_rest and delta.
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
// Items are numbered section by section. In a section the blocks of keys come in ascending order, as the most rows see
// the first ones under causality; for each block of keys the parts of the section follow one another.
__device__ __forceinline__ PlaceOfItem find_item_of_section(const BwdArguments& p, int index) {
  const int section = min(index / (p.section_parts * p.n_blocks), p.sections);
  const int first = section * p.section_parts;
  const int parts = section < p.sections ? p.section_parts : p.all_parts - first;
  const int in_section = index - first * p.n_blocks;
  const int n_block = in_section / parts;
  return {n_block, first + in_section - n_block * parts};
}
// Alternatively items are numbered in pairs, which a thread block takes one after the other: of a part, the j-th block
// of keys from the front and the j-th from the end. Under causality all pairs have the same number of rows, so that
// thread blocks stay in step. The first item goes through the blocks of rows downwards, the second upwards
// (MirroredSteps). If there are M blocks of rows, two for each block of keys, and a thread block has done t of them
// since it began its pair, the first item is at block M - 1 - t and the second at t - 2, whatever j is: at any time
// the thread blocks of a group are at one of two blocks of rows. (This holds only roughly where a block of keys is no
// whole number of blocks of rows.) Each packed sequence has its own pairs. All of its blocks of keys have the numbers
// of a pair, of which half stand for no item: see find_packed_item().
template <class T>
__host__ __device__ inline int pairs_of_part(const BwdArguments& p) {
  return T::kPacked ? p.n_blocks : (p.n_blocks + 1) / 2;
}
template <class T>
__device__ __forceinline__ PlaceOfItem find_mirrored_item(const BwdArguments& p, int index) {
  const int pairs = pairs_of_part<T>(p), part = index / 2 / pairs, front = index / 2 - part * pairs;
  return {T::kPacked || index % 2 == 0 ? front : p.n_blocks - 1 - front, part};
}
// Whether a pair has a second item: the middle one of an odd number of blocks of keys has none.
__device__ __forceinline__ bool has_mirror_image(int front, int blocks) { return 2 * front + 1 < blocks; }

template <class T>
__device__ __forceinline__ BwdItem find_tiled_item(const BwdArguments& p, int index) {
  const bool is_mirrored = T::kMirrors && p.mirrors_items;
  const auto [n_block, part] = is_mirrored ? find_mirrored_item<T>(p, index) : find_item_of_section(p, index);
  const int head = part / p.num_splits;
  // Items that read the same tiles of a bias have neighbouring numbers: those of batches that share the bias, or else
  // those of heads.
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
  // Beside an fp32 bias, and for pairs, there are no registers for dividing the rows.
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

// The first block of keys of which a block of rows sees any; 0 without a window. find_tiled_item() does the reverse:
// it finds the rows that see a block of keys.
template <class T>
__device__ __forceinline__ int first_block_of_window(const BwdArguments& p, int m) {
  if constexpr (T::kWindows) {
    const int first_key = m * T::kBlockM + p.seqlen_k - p.seqlen_q - p.window + 1;
    if (p.window > 0 && p.is_causal) return max(first_key, 0) / T::kBlockN;
  }
  return 0;
}

// The item of a member of a pair, given that of the first member, which find_tiled_item() finds.
template <class T>
__device__ __forceinline__ BwdItem item_of_member(const BwdArguments& p, const BwdItem& item, int member) {
  BwdItem own = item;
  if constexpr (T::kPairs) {
    own.head_k += member * p.pair_head_step;
    own.batch += member * p.pair_batch_step;
  }
  return own;
}
// How far a query head of the second member is from that of the first.
__device__ __forceinline__ int heads_to_second(const BwdArguments& p) { return p.pair_head_step * p.head_ratio; }

// --- packed sequences -----------------------------------------------------------------------------------------------

template <class T>
__device__ __forceinline__ int blocks_of_keys(int keys) {
  return (keys + T::kBlockN - 1) / T::kBlockN;
}
// Items are numbered as if the blocks of keys of all sequences, one sequence behind the other, belonged to a single
// one. Some numbers stand for no keys: then k.length is 0.
template <class T>
__device__ __forceinline__ PackedItem find_packed_item(const BwdArguments& p, int index) {
  const BwdItem slot = find_tiled_item<T>(p, index);
  const PackedRows keys = find_packed_keys(p.packing, T::kBlockN, slot.n_block);
  const SeqlenInfo own = read_packed_seqlens(p.packing, keys.sequence, p.seqlen_q, p.seqlen_k);
  bool exists = keys.offset >= 0 && keys.offset < own.seqlen_k;
  int n_block = keys.offset / T::kBlockN;
  if (p.mirrors_items) {  // numbers in the second half of a sequence stand for none: pairs follow from their first item
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
// Completes an item with the rows that see its keys.
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

// In a fixed order items are numbered by groups of chunks: the first tiles of all lists of a group, then the second
// tiles, and so on. The tiles of a list take turns at dq, each some steps behind the one before it; so items that
// begin together should be tiles of different lists. Where chunks take turns, too, a group is a single chunk.
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
// Items are numbered section by section; in a section the chunks come from the last to the first, as the last ones
// have the most keys before them; in a chunk the tiles of its lists come in ascending order, as the most rows see the
// first ones.
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
// Places have the order of find_list_item().
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
  // With several sections no tiles are divided: the last items would be those of the last section alone.
  const bool has_tail = p.sections == 0 && known->tail_chunks > 0;
  if (!has_tail) return {known->rows, known->rows, 1, rows_before};
  return {known->rows, rows_before[known->tail_chunks - 1], known->tail_parts, rows_before};
}
// The number of a head in KeyList, which counts (batch, list head).
__device__ __forceinline__ int64_t head_list_of(const BwdArguments& p, int batch, int head_k) {
  return static_cast<int64_t>(p.keys.batch > 1 ? batch : 0) * p.keys.heads + head_k * p.head_ratio / p.keys.head_ratio;
}
// The blocks of rows that see the tiles of a chunk's list.
__device__ __forceinline__ const int2* tile_rows_of(const BwdArguments& p, int batch, int head_k, int chunk) {
  return p.tile_rows + (head_list_of(p, batch, head_k) * p.keys.blocks + chunk) * p.n_blocks;
}
__device__ __forceinline__ int2 read_tile_rows(const BwdArguments& p, const ListItem& item) {
  return __ldg(tile_rows_of(p, item.batch, item.head_k, item.chunk) + item.tile);
}
// How many tiles of the chunk before the item's are seen by block m_begin + lane of the item's rows. There are at most
// 32 such blocks, see kMostChunkRows. Whole warp.
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
// How many tiles a chunk's list has.
__device__ __forceinline__ int count_tiles(const BwdArguments& p, int batch, int head_k, int chunk, int keys_of_tile) {
  const int64_t list = head_list_of(p, batch, head_k) * p.keys.blocks + chunk;
  return (__ldg(p.keys.count + list) + keys_of_tile - 1) / keys_of_tile;
}
// The row of a listed key in ChunkTerms; -1: it has none. Lists and intervals may come from the caller and hold any
// numbers.
__device__ __forceinline__ int read_term(const BwdArguments& p, int64_t head_list, int chunk, int key, bool exists) {
  if (p.terms.first == nullptr || !exists) return -1;
  const int term = __ldg(p.terms.first + head_list * p.seqlen_k + key) + chunk;
  return static_cast<uint32_t>(term) < static_cast<uint32_t>(p.terms.capacity) ? term : -1;
}

// --- all ------------------------------------------------------------------------------------------------------------

// The next item, for a warp beside the producer. An index of `items` or more: there are no more. Whole warp.
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

// Whether some scores of the tile have to be masked: causality or the window hides them, or their key does not exist.
template <class T, class Lengths>
__device__ __forceinline__ bool cuts_tile(const Lengths& p, int m, int n_block) {
  const int last = (n_block + 1) * T::kBlockN - 1, offset = p.seqlen_k - p.seqlen_q;
  if constexpr (T::kWindows) {
    if (p.window > 0 && (m + 1) * T::kBlockM + offset - p.window > n_block * T::kBlockN) return true;
  }
  return last >= p.seqlen_k || (p.is_causal && m * T::kBlockM < last - offset);
}

// The first query head of the item's group that this launch has.
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

// The steps of an item: for each query head of its part, the blocks of rows that see its keys, from the last to the
// first.
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

// Steps over lists in any order: the heads are those of the item.
struct ListSteps : RowSteps {
  __device__ __forceinline__ ListSteps(const BwdArguments& p, const BwdItem& item)
      : RowSteps(item, {first_head_of(p, item) + item.heads.begin(), first_head_of(p, item) + item.heads.end()}) {}
};

// Where dq can be added up in order: for each block of rows, all heads. So items of different lengths stay side by
// side; if they went through one head after the other, the shorter ones would wait for the longest at each head. Lists
// begin with the first block of rows, which nearly all tiles of a chunk have; consecutive keys begin with the last
// one, which all of them have.
template <class T>
struct HeadSteps {
  int heads, heads_left;  // heads of the item; those left at the block of rows, this one included
  int head, m;
  int left;

  __device__ __forceinline__ HeadSteps(const BwdArguments& p, const BwdItem& item) {
    // Items over lists have all heads of the launch, so that their number need not be kept.
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

// Steps of wide heads: in the order of RowSteps or, where dq is added up in order, in that of HeadSteps.
template <class T>
struct WideSteps {
  const BwdArguments& p;
  int begin, end;  // of the blocks of rows in the order of RowSteps; of the heads in that of HeadSteps
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

// Whether an item is the second of a mirrored pair.
template <class T>
__device__ __forceinline__ bool is_mirror_image(const BwdArguments& p, const BwdItem& item) {
  return p.mirrors_items && 2 * item.n_block >= p.n_blocks;
}
template <class T>
__device__ __forceinline__ bool is_mirror_image(const BwdArguments& p, const PackedBwdItem& item) {
  return p.mirrors_items && 2 * item.n_block >= blocks_of_keys<T>(item.k.length);
}

// The order of RowSteps or, for mirrored items, all heads for each block of rows: the first item of a pair goes from
// the last block to the first, the second from the first to the last. Both orders use the same registers, as the
// kernel has none to spare.
template <class T>
struct MirroredSteps {
  const BwdArguments& p;
  int m_begin_or_direction, end;  // end: of the blocks of rows; of the heads for mirrored items
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
      head = end - p.group_heads;  // mirrored items have all heads of the launch
      m += m_begin_or_direction;
    } else {
      if (--m >= m_begin_or_direction) return;
      m = end - 1;
      ++head;
    }
  }
};

// Steps in a packed sequence, whose lengths are not at hand in each step.
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
