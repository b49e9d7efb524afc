// Before the backward kernel for Hopper: merges the lists of neighbouring row blocks into the lists of chunks.
//
// A key that no row sees any more is never seen again. So the keys of a chunk are those of its first row block's list
// and, of the positions behind that block, the keys that the row at their own position sees. Each key belongs to one
// of kPlaces * kPlaces classes, by the places of the chunk whose rows see it first and last. The classes are put one
// behind the other by a counting sort, which keeps the order within a class and so always gives the same lists.
//
// A key-only mask has one list for all rows. Each chunk then takes from it the keys that any of its rows sees. Where
// such lists have many tiles, each tile has all rows, and nothing is merged. In both cases rows without a gradient are
// left out if they come before the first or behind the last row with one (UsedRows).
#include "../attention/shared/key_source.cuh"
#include "../shared/chunk_terms.cuh"
#include "../shared/helper.cuh"
#include "../shared/list_tail.cuh"
#include "../shared/seen_keys.cuh"
#include "backward.h"

namespace dmattn {
namespace {

using namespace prep;

constexpr int kThreads = 512, kWarps = kThreads / 32;
// Thread blocks for each SM. With terms, more than two would leave too few registers for the ends that number_keys()
// loads at once. 0: ptxas decides.
constexpr int blocks_per_sm(bool has_terms) { return has_terms ? 2 : 0; }
// A chunk is divided into kPlaces places: blocks of kChunkTileRows rows, or pairs of these if there are more. Twice as
// many places would be four times as many classes.
constexpr int kPlaces = 16, kClasses = kPlaces * kPlaces;
constexpr int place_blocks(int chunk_rows) { return chunk_rows > kPlaces * kChunkTileRows ? 2 : 1; }
static_assert(kClasses <= kThreads && kMostChunkRows <= kPlaces * place_blocks(kMostChunkRows) * kChunkTileRows);

// A class: the keys whose first rows in the chunk lie in one place, and whose last rows lie in one place. A tile has
// all rows from the first that sees any of its keys to the last, so neighbouring classes should have similar places:
// keys are sorted by the quarter of the chunk that first sees them, then by the place that last sees them, then by the
// place that first sees them. Of the orders by these two places that were tried, this one left the fewest rows that
// see nothing of their tile, for random scores and in nearly all cases (docs/kernels/lists.md). If later last places
// came first within a quarter, more such rows would be left than without quarters.
struct SeenIn {
  int first, last;
  static constexpr int kQuarter = kPlaces / 4;
  __device__ __forceinline__ int number() const {
    return (first / kQuarter * kPlaces + last) * kQuarter + first % kQuarter;
  }
  static __device__ __forceinline__ SeenIn of(int number) {
    return {number / (kPlaces * kQuarter) * kQuarter + number % kQuarter, number / kQuarter % kPlaces};
  }
};

// Rows begin, ..., end - 1: from the first to the last row that gradients come from.
struct RowRange {
  int begin, end;
};
__device__ __forceinline__ RowRange read_used_rows(const ChunkKeyListsParams& p, int64_t head_list) {
  if (p.used_rows == nullptr) return {0, p.seqlen_q};
  const int2 found = __ldg(reinterpret_cast<const int2*>(p.used_rows) + head_list);
  return {p.seqlen_q - found.y, found.x};
}

struct Chunk {
  const int32_t* idx;  // the list of the first row block, or of all rows
  const int32_t* end;  // nullptr: later rows see all keys that a row sees
  int list_count;
  int first_new, count;         // position behind the first row block; keys to look at
  int position, after;          // positions of the first row, and behind the last that counts
  int begin;                    // position of the first row that counts (see UsedRows)
  int seqlen_k, first_row;      // first_row: in blocks of kChunkTileRows
  int blocks_of_place, blocks;  // of kChunkTileRows rows: in a place; to the last row that counts
  bool is_seen_before;          // rows before a key's own see it, too

  __device__ __forceinline__ Chunk(const ChunkKeyListsParams& p, int64_t head_list, int chunk) {
    const KeyList& from = p.from;
    const int block = p.row_block_begin + chunk * (p.to.keys.block_rows / p.row_block_rows);
    const int64_t list = p.is_shared ? head_list : head_list * from.blocks + block;
    const int offset = p.seqlen_k - p.seqlen_q;
    const int rows = min(p.to.keys.block_rows, (p.row_block_begin + p.row_blocks - block) * p.row_block_rows);
    const int row = block * p.row_block_rows;
    idx = from.idx + list * from.capacity;
    end = p.is_shared ? nullptr : from.end + head_list * p.seqlen_k;
    list_count = read_list_count(from, list);
    const RowRange used = read_used_rows(p, head_list);
    position = row + offset;
    begin = max(row, used.begin) + offset;
    after = min(row + rows, used.end) + offset;
    first_new = max(position + p.row_block_rows, 0);
    count = list_count + (p.is_shared ? 0 : max(min(after, p.seqlen_k) - first_new, 0));
    seqlen_k = p.seqlen_k;
    is_seen_before = p.is_shared && !p.is_causal;
    first_row = row / kChunkTileRows;
    blocks_of_place = place_blocks(p.to.keys.block_rows);
    blocks = ceil_div(after - position, kChunkTileRows);
  }
  __device__ __forceinline__ int key(int i) const {
    const KeyLimits limits = {0, seqlen_k - 1};
    return i < list_count ? limits.position(__ldg(idx + i)) : first_new + i - list_count;
  }
  // The class of a key; -1 if no row of the chunk sees it.
  __device__ __forceinline__ int find_class(int key) const {
    const int seen_from = is_seen_before ? begin : max(key, begin);
    const int seen_to = end == nullptr ? after : min(__ldg(end + key), after);
    if (seen_from >= seen_to) return -1;
    const int rows = blocks_of_place * kChunkTileRows;
    return SeenIn{(seen_from - position) / rows, (seen_to - 1 - position) / rows}.number();
  }
};

struct ClassCounts {
  int before[kWarps][kClasses];  // of a pass: a warp's entries of each class; then where the first goes
  int next[kClasses];            // place of the next entry of each class
  int start[kClasses + 1];
};

__device__ __forceinline__ void count_classes(const Chunk& c, ClassCounts& s) {
  __shared__ int warp_sums[32];
  const int lane = threadIdx.x % 32;
  if (threadIdx.x < kClasses) s.next[threadIdx.x] = 0;
  __syncthreads();
  for (int i0 = 0; i0 < c.count; i0 += kThreads) {
    const int i = i0 + threadIdx.x;
    const int found = i < c.count ? c.find_class(c.key(i)) : -1;
    const uint32_t same = __match_any_sync(kFullWarp, found);
    if (found >= 0 && lane == __ffs(same) - 1) atomicAdd(&s.next[found], __popc(same));
  }
  __syncthreads();
  int total;
  const int own = threadIdx.x < kClasses ? s.next[threadIdx.x] : 0;
  const int before = block_exclusive_scan<kThreads>(own, warp_sums, total);
  if (threadIdx.x < kClasses) s.next[threadIdx.x] = s.start[threadIdx.x] = before;
  if (threadIdx.x == 0) s.start[kClasses] = total;
  __syncthreads();
}

__device__ __forceinline__ void place_keys(const Chunk& c, ClassCounts& s, int32_t* to, int capacity) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int i0 = 0; i0 < c.count; i0 += kThreads) {
    const int i = i0 + threadIdx.x;
    const int key = i < c.count ? c.key(i) : 0;
    const int found = i < c.count ? c.find_class(key) : -1;
    for (int j = lane; j < kClasses; j += 32) s.before[warp][j] = 0;
    __syncwarp();
    const uint32_t same = __match_any_sync(kFullWarp, found);
    if (found >= 0 && lane == __ffs(same) - 1) s.before[warp][found] = __popc(same);
    __syncthreads();
    if (threadIdx.x < kClasses) {
      int place = s.next[threadIdx.x];
      for (int w = 0; w < kWarps; ++w) {
        const int own = s.before[w][threadIdx.x];
        s.before[w][threadIdx.x] = place;
        place += own;
      }
      s.next[threadIdx.x] = place;
    }
    __syncthreads();
    if (found >= 0) {
      const int place = s.before[warp][found] + __popc(same & ((1u << lane) - 1));
      if (place < capacity) to[place] = key;
    }
    __syncthreads();
  }
}

// The rows of each tile, from the classes that have keys in it. One warp for each tile.
__device__ __forceinline__ void find_tile_rows(const Chunk& c, const ClassCounts& s, int2* tile_rows, int tiles) {
  const int lane = threadIdx.x % 32;
  for (int tile = threadIdx.x / 32; tile < tiles; tile += kWarps) {
    const int first_key = tile * kChunkTileKeys;
    int first = kPlaces, after = 0;
    for (int j = lane; j < kClasses; j += 32) {
      const int from = max(s.start[j], first_key), to = min(s.start[j + 1], first_key + kChunkTileKeys);
      if (from >= to) continue;
      const SeenIn seen = SeenIn::of(j);
      first = min(first, seen.first);
      after = max(after, seen.last + 1);
    }
    first = __reduce_min_sync(kFullWarp, first);
    after = __reduce_max_sync(kFullWarp, after);
    if (lane == 0) {
      const int begin = first * c.blocks_of_place, end = min(after * c.blocks_of_place, c.blocks);
      tile_rows[tile] = first < after ? make_int2(c.first_row + begin, c.first_row + end) : int2{0, 0};
    }
  }
}

// --- the numbers of items -------------------------------------------------------------------------------------------

// The last items are only divided if this saves more steps, since the estimate takes all items to be of one length.
constexpr int kLeastGain = 4;
// With more items than this, the last ones take too small a part of the time.
constexpr int kMostItems = 1 << 16;
// At most this many of the last items are divided for each thread block.
constexpr int kMostTailItems = 2;

// A way to divide the last items, as a number to be minimised: it is lower the sooner all items are done and, among
// equal times, the fewer chunks are concerned.
__device__ __forceinline__ uint64_t as_number(int end, int chunks, int parts) {
  return static_cast<uint64_t>(min(end, 0xffffff)) << 40 | static_cast<uint64_t>(chunks) << 16 |
         static_cast<uint64_t>(parts);
}

// Chooses the chunks whose items are divided, and into how many parts, if all items are then done sooner (see
// ListEnd). These are the last items. Whole warp.
__device__ __forceinline__ void share_out_tail(const ChunkKeyListsParams& p, const int32_t* items_of_chunk) {
  const int lane = threadIdx.x % 32, chunks = p.to.keys.blocks;
  int64_t sum = 0;
  for (int i = lane; i < chunks; i += 32) sum += __ldcg(items_of_chunk + i);
  for (int i = 16; i > 0; i /= 2) sum += __shfl_xor_sync(kFullWarp, sum, i);
  if (sum == 0 || sum > kMostItems || p.group_heads == 1) return;
  const int all = static_cast<int>(sum);
  const ListEnd end(p.blocks, all, p.group_heads, p.steps_of_head, p.steps_of_prologue);
  uint64_t best = as_number(max(end.of_whole() - kLeastGain, 0), 0, 1);
  // Items are numbered from the last chunk on, so that the first chunks have the last items.
  int before = 0;
  for (int first = 0; first < chunks && before <= kMostTailItems * p.blocks; first += 32) {
    const int own = first + lane < chunks ? __ldcg(items_of_chunk + first + lane) : 0;
    const int tail = before + warp_inclusive_scan(own);
    if (own > 0 && tail <= kMostTailItems * p.blocks) {
      for (int parts = 1; parts < p.group_heads;) {
        parts = min(2 * parts, p.group_heads);
        best = min(best, as_number(end.with_tail(tail, parts), first + lane + 1, parts));
      }
    }
    before = __shfl_sync(kFullWarp, tail, 31);
  }
  for (int i = 16; i > 0; i /= 2) best = min(best, __shfl_xor_sync(kFullWarp, best, i));
  if (lane == 0) {
    p.numbers->tail_chunks = static_cast<int>(best >> 16 & 0xffffff);
    p.numbers->tail_parts = static_cast<int>(best & 0xffff);
  }
}
// Replaces the tiles of each chunk's longest list by the number of rows that come before the chunk's: see ListNumbers.
// Whole warp.
__device__ __forceinline__ void number_rows(const ChunkKeyListsParams& p, int32_t* rows_of_chunk) {
  const int lane = threadIdx.x % 32, chunks = p.to.keys.blocks;
  int rows = 0;
  for (int first = 0; first < chunks; first += 32) {
    const int chunk = chunks - 1 - first - lane;
    const int own = chunk >= 0 ? __ldcg(rows_of_chunk + chunk) : 0, after = warp_inclusive_scan(own);
    if (chunk >= 0) rows_of_chunk[chunk] = rows + after - own;
    rows += __shfl_sync(kFullWarp, after, 31);
  }
  if (lane == 0) p.numbers->rows = rows;
}
// How many lists the launch writes.
__host__ __device__ inline int64_t lists_of(const ChunkKeyListsParams& p) {
  return static_cast<int64_t>(p.to.keys.batch) * (p.to.keys.heads / p.head_step) * p.to.keys.blocks;
}
// Counts the tiles of a chunk's list. The warp that counts the last list of all also numbers the items. Whole warp.
__device__ __forceinline__ void count_items(const ChunkKeyListsParams& p, int chunk, int tiles) {
  int32_t* const items_of_chunk = reinterpret_cast<int32_t*>(p.numbers + 1);
  int32_t* const rows_of_chunk = items_of_chunk + p.to.keys.blocks;
  int done = 0;
  if (threadIdx.x % 32 == 0) {
    atomicMax(rows_of_chunk + chunk, tiles);
    atomicAdd(items_of_chunk + chunk, tiles * p.parts_of_list);
    __threadfence();
    done = atomicAdd(&p.numbers->lists_done, 1) + 1;
  }
  done = __shfl_sync(kFullWarp, done, 0);
  if (done < static_cast<int>(lists_of(p))) return;
  __threadfence();
  number_rows(p, rows_of_chunk);
  share_out_tail(p, items_of_chunk);
}

// --- the rows of ChunkTerms, and the places of CarriedTerms ---------------------------------------------------------

// A block has kTermKeys keys of a list head, and a warp of it 32 * kKeysOfLane neighbouring ones. The rows of a key
// begin where those of the keys before it end. Each block counts the rows of all keys before its own by itself, which
// takes less time than waiting for the blocks that have these keys.
constexpr int kKeysOfLane = 8, kTermKeys = kThreads * kKeysOfLane;

struct TermBlocks {
  TermRange range;
  uint32_t* carried_places;  // as in CarriedTerms; nullptr: none
  int32_t carried_keys;
  int32_t of_head;  // blocks for each list head
};
struct TermSums {
  uint32_t before[kWarps], own[kWarps];  // counted by each warp: of keys before the block; of its own
};

// A prefix sum over the first `keys` keys. A key counts as much as count_of(its rows) says, and gets the number
// place_of(its rows, sum over the keys before it), which has to be that sum plus a constant of the key. Sums are
// unsigned: intervals of the caller may be any, so that sums may overflow.
template <class CountOf, class PlaceOf>
__device__ __forceinline__ void number_keys(const TermRange& t, int keys, int block, const int32_t* end, TermSums& sums,
                                            uint32_t* to, const CountOf& count_of, const PlaceOf& place_of) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first_of_block = block * kTermKeys;
  uint32_t before = 0;
#pragma unroll 2
  for (int pass = threadIdx.x; pass < first_of_block; pass += kTermKeys) {
#pragma unroll
    for (int i = 0; i < kKeysOfLane; ++i) {
      const int key = pass + i * kThreads;
      before += count_of(RowsOfKey(t, key, __ldg(end + key)));
    }
  }
  before = __reduce_add_sync(kFullWarp, before);
  const int first_key = first_of_block + warp * (32 * kKeysOfLane) + lane;
  int ends[kKeysOfLane];  // loaded at once. 0 for keys that do not exist: no row sees such a key, so it counts nothing
#pragma unroll
  for (int i = 0; i < kKeysOfLane; ++i) {
    const int key = first_key + 32 * i;
    ends[i] = key < keys ? __ldg(end + key) : 0;
  }
  uint32_t place[kKeysOfLane], sum = 0;
#pragma unroll
  for (int i = 0; i < kKeysOfLane; ++i) {
    const RowsOfKey rows(t, first_key + 32 * i, ends[i]);
    const uint32_t count = count_of(rows), after = warp_inclusive_scan(count);
    place[i] = place_of(rows, sum + after - count);
    sum += __shfl_sync(kFullWarp, after, 31);
  }
  if (lane == 0) sums.before[warp] = before, sums.own[warp] = sum;
  __syncthreads();
  uint32_t begin = 0;
  for (int w = 0; w < kWarps; ++w) begin += sums.before[w] + (w < warp ? sums.own[w] : 0);
#pragma unroll
  for (int i = 0; i < kKeysOfLane; ++i) {
    const int key = first_key + 32 * i;
    if (key < keys) to[key] = begin + place[i];
  }
}

// Fills ChunkTerms::first for the keys of a block.
__device__ __forceinline__ void place_terms(const TermRange& t, int block, const int32_t* end, TermSums& sums,
                                            int32_t* to) {
  const auto count_of = [&](const RowsOfKey& rows) -> uint32_t { return find_chunks_of_key(t, rows).count; };
  const auto place_of = [&](const RowsOfKey& rows, uint32_t before) {
    return before - find_chunks_of_key(t, rows).first;
  };
  number_keys(t, t.seqlen_k, block, end, sums, reinterpret_cast<uint32_t*>(to), count_of, place_of);
}

// Fills CarriedTerms::places for the keys of a block: both numbers of a key are counted in one word.
__device__ __forceinline__ void place_carried(const TermRange& t, int keys, int block, const int32_t* end,
                                              TermSums& sums, uint32_t* to) {
  const auto count_of = [&](const RowsOfKey& rows) -> uint32_t {
    return (rows.come_before(t) ? 1 : 0) + (rows.go_on(t) ? 1 << 16 : 0);
  };
  number_keys(t, keys, block, end, sums, to, count_of, [](const RowsOfKey&, uint32_t before) { return before; });
}

// --- sums that start as zeros ---------------------------------------------------------------------------------------

// A block clears dk and dv of kClearedKeys keys of a kv head, or kClearedQuads times 16 bytes of dq for each thread.
constexpr int kClearedKeys = 64, kClearedQuads = 8;

struct ClearBlocks {
  Divisor quads;    // of 16 bytes in a row of dk or dv
  int64_t of_keys;  // blocks for dk and dv; behind them come those for dq
  int64_t all;
};

ClearBlocks clear_blocks(const ListSums& sums, int32_t seqlen_k) {
  ClearBlocks blocks = {};
  if (sums.dk != nullptr) {
    blocks.quads = Divisor(sums.head_dim / 4);
    blocks.of_keys = static_cast<int64_t>(sums.batch) * sums.nheads_k * ceil_div(seqlen_k, kClearedKeys);
  }
  blocks.all = blocks.of_keys + ceil_div<int64_t>(sums.dq_bytes / sizeof(uint4), kThreads * kClearedQuads);
  return blocks;
}

__device__ __forceinline__ void clear_dq(const ListSums& sums, int64_t block) {
  uint4* const quads = static_cast<uint4*>(sums.dq);
  const int64_t count = static_cast<int64_t>(sums.dq_bytes / sizeof(uint4));
  const int64_t first = block * (kThreads * kClearedQuads) + threadIdx.x;
#pragma unroll
  for (int i = 0; i < kClearedQuads; ++i) {
    if (first + i * kThreads < count) quads[first + i * kThreads] = make_uint4(0, 0, 0, 0);
  }
}

// Clears the sums of dk and dv of those keys of a block that any row sees. `rows`: in shared memory.
__device__ __forceinline__ void clear_seen_keys(const ListSums& sums, const SeenKeys& seen, const Divisor& quads_of_row,
                                                int64_t block, int (&rows)[kClearedKeys]) {
  __shared__ int warp_sums[32];
  WorkIndex work(block);
  const int seqlen_k = seen.range.seqlen_k;
  const int key = work.take(ceil_div(seqlen_k, kClearedKeys)) * kClearedKeys + static_cast<int>(threadIdx.x);
  const int hk = work.take(sums.nheads_k), b = static_cast<int>(work.rest);
  const bool is_seen = threadIdx.x < kClearedKeys && key < seqlen_k && seen.contain(b, hk, key);
  int count;
  const int place = block_exclusive_scan<kThreads>(is_seen ? 1 : 0, warp_sums, count);
  if (is_seen) rows[place] = key;
  __syncthreads();
  const int64_t first_row = (static_cast<int64_t>(b) * sums.nheads_k + hk) * seqlen_k;
  const int quads = static_cast<int>(quads_of_row.value);
  uint4* const grads[2] = {reinterpret_cast<uint4*>(sums.dk), reinterpret_cast<uint4*>(sums.dv)};
  for (int i = threadIdx.x; i < count * quads; i += kThreads) {
    uint32_t row = i;
    const int quad = take(row, quads_of_row);
    const int64_t at = (first_row + rows[row]) * quads + quad;
    grads[0][at] = grads[1][at] = make_uint4(0, 0, 0, 0);
  }
}

// kHasTerms: the first blocks place the terms of the list heads while the next ones merge lists. The last blocks clear
// sums.
template <bool kHasTerms>
__global__ void __launch_bounds__(kThreads, blocks_per_sm(kHasTerms))
    chunk_key_lists_kernel(const __grid_constant__ ChunkKeyListsParams p, const __grid_constant__ TermBlocks terms,
                           const __grid_constant__ SeenKeys seen, const __grid_constant__ ClearBlocks clears) {
  __shared__ ClassCounts s;
  follow_previous_kernel();
  const KeyList& to = p.to.keys;
  int64_t list = blockIdx.x;  // (batch, head, chunk)
  if constexpr (kHasTerms) {
    __shared__ TermSums sums;
    const int heads_of_batch = to.heads / p.head_step, heads = to.batch * heads_of_batch,
              blocks = heads * terms.of_head;
    const int kinds = terms.carried_places != nullptr ? 2 : 1;
    if (list < blocks * kinds) {
      // Blocks with the last keys of each head come first, since they count the most keys before their own.
      const int pair = static_cast<int>(list % heads), row = static_cast<int>(list / heads);
      const int block = terms.of_head - 1 - row / kinds;
      const int64_t batch = pair / heads_of_batch, head_of_batch = pair % heads_of_batch * p.head_step;
      const int64_t head = batch * to.heads + head_of_batch;
      const int32_t* const end = p.from.end + (batch * p.from.heads + head_of_batch) * p.seqlen_k;
      if (row % kinds == 0) {
        return place_terms(terms.range, block, end, sums, p.first_term + head * p.seqlen_k);
      }
      const int keys = terms.carried_keys;
      if (block * kTermKeys >= keys) return;
      return place_carried(terms.range, keys, block, end, sums, terms.carried_places + head * keys);
    }
    list -= blocks * kinds;
  }
  const int64_t lists = lists_of(p);
  if (list >= lists) {
    __shared__ int rows[kClearedKeys];
    const int64_t block = list - lists;
    if (block >= clears.of_keys) return clear_dq(p.sums, block - clears.of_keys);
    return clear_seen_keys(p.sums, seen, clears.quads, block, rows);
  }
  const int64_t pair = list / to.blocks;
  const int chunk = static_cast<int>(list - pair * to.blocks), heads = to.heads / p.head_step;
  const int64_t batch = pair / heads, head = (pair - batch * heads) * p.head_step;
  list = (batch * to.heads + head) * to.blocks + chunk;
  const Chunk c(p, batch * p.from.heads + head, chunk);
  count_classes(c, s);
  place_keys(c, s, const_cast<int32_t*>(to.idx) + list * to.capacity, to.capacity);
  const int tiles = to.capacity / kChunkTileKeys;
  find_tile_rows(c, s, static_cast<int2*>(p.to.tile_rows) + list * tiles, tiles);
  const int count = min(s.start[kClasses], to.capacity);
  if (threadIdx.x == 0) const_cast<int32_t*>(to.count)[list] = count;
  if (p.numbers != nullptr && threadIdx.x < 32) {
    count_items(p, chunk, ceil_div(count, kChunkTileKeys));
  }
}

// The rows of the tiles of lists for all rows, one thread for each tile. Lists are ascending: the first key of a tile
// is seen first.
__global__ void __launch_bounds__(kThreads) whole_list_tiles_kernel(const ChunkKeyListsParams p) {
  follow_previous_kernel();
  const KeyList& keys = p.from;
  const int tiles = keys.capacity / kChunkTileKeys;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t pair = index / tiles;
  const int heads = p.list_heads;
  if (pair >= static_cast<int64_t>(p.to.keys.batch) * heads) return;
  const int first = static_cast<int>(index - pair * tiles) * kChunkTileKeys;
  const int64_t list = pair / heads * keys.heads + pair % heads;
  const RowRange used = read_used_rows(p, list);
  int begin = used.begin;
  const bool exists = first < read_list_count(keys, list);
  if (exists && p.is_causal) {
    begin = max(__ldg(keys.idx + list * keys.capacity + first) - (p.seqlen_k - p.seqlen_q), begin);
  }
  const bool is_seen = exists && begin < used.end;
  static_cast<int2*>(p.to.tile_rows)[list * tiles + first / kChunkTileKeys] =
      is_seen ? make_int2(begin / kChunkTileRows, ceil_div(used.end, kChunkTileRows)) : make_int2(0, 0);
}
cudaError_t list_whole_tiles(const ChunkKeyListsParams& p, cudaStream_t stream) {
  const int64_t tiles = static_cast<int64_t>(p.to.keys.batch) * p.list_heads * (p.from.capacity / kChunkTileKeys);
  return launch(whole_list_tiles_kernel, ceil_div<int64_t>(tiles, kThreads), kThreads, 0, stream, p);
}

}  // namespace

cudaError_t chunk_key_lists(const ChunkKeyListsParams& p, const CarriedTerms& carried, cudaStream_t stream) {
  if (p.is_whole) return list_whole_tiles(p, stream);
  const KeyList& to = p.to.keys;
  const int64_t lists = lists_of(p);
  KeyList ends = p.from;
  if (p.is_shared) ends.end = nullptr;
  const SeenKeys seen(ends, Packing{}, p.sums.head_ratio, p.seqlen_q, p.seqlen_k);
  const ClearBlocks clears = clear_blocks(p.sums, p.seqlen_k);
  if (p.first_term == nullptr) {
    return launch(chunk_key_lists_kernel<false>, lists + clears.all, kThreads, 0, stream, p, TermBlocks{}, seen,
                  clears);
  }
  TermBlocks terms = {};
  terms.range = term_range(to.block_rows, p.row_block_begin * p.row_block_rows, p.row_blocks * p.row_block_rows,
                           p.seqlen_q, p.seqlen_k);
  terms.carried_places = carried.places;
  terms.carried_keys = carried.keys;
  terms.of_head = ceil_div(keys_up_to(terms.range), kTermKeys);
  const int64_t kinds = carried.places != nullptr ? 2 : 1;
  const int64_t term_blocks = kinds * to.batch * (to.heads / p.head_step) * terms.of_head;
  return launch(chunk_key_lists_kernel<true>, term_blocks + lists + clears.all, kThreads, 0, stream, p, terms, seen,
                clears);
}

}  // namespace dmattn
