// Selection in which one thread block finds a list, or a set. For running top-w it has a block of query rows: it finds
// the best keys before them and follows the few keys that come or go while its rows go by. In long sequences sets are
// made first, from which that search starts. There is also a kernel for single lists.
#include <algorithm>
#include <type_traits>

#include "in_registers.cuh"

namespace dmattn {
namespace prep {
namespace {

// --- sets ----------------------------------------------------------------------------------------------------------

constexpr int kSetThreads = 512;

__device__ __forceinline__ int set_position(const SelectPlan& p, int set) {
  return p.set_origin + (set + p.first_set) * p.super_keys;
}

// The candidates that a launch makes a set from, and the index of the result in the arrays. Returns false if the
// launch leaves the set alone.
// step < 0: the candidates are the keys of the piece that ends at the set's position. step >= 0, for the sets whose
// bit `step` is 1: the set itself, and the last set before its group of 2^step sets, which already holds everything
// before the group. That one has bit `step` 0, so that no set is both read by others and replaced in one launch. It
// only counts if this set's document starts before its position: then it is of the same document.
__device__ __forceinline__ bool set_candidates(const SelectPlan& p, int row, int set, int step, Candidates& c,
                                               int64_t& dst) {
  c = Candidates{};
  if (step < 0) {
    if (set + p.first_set == 0) return false;  // the grid has found the set at set_origin
    const int position = set_position(p, set);
    const int first = max(position - p.super_keys, document_of(p, position).x);
    c.set_range(p.ord + row * p.ord_pitch, first, position);
    dst = set_index(p, row, set, 0);
    return true;
  }
  if ((set >> step & 1) == 0) return false;
  const int other = (set >> step << step) - 1;
  const int merges = __popc(set & ((1 << step) - 1));
  const int64_t a = set_index(p, row, other, step & 1), b = set_index(p, row, set, merges & 1);
  if (document_of(p, set_position(p, set)).x < set_position(p, other)) {
    c.first_ord = p.set_ord + a * p.set_capacity;
    c.first_key = p.set_key + a * p.set_capacity;
    c.first_count = p.set_count[a];
  }
  c.second_ord = p.set_ord + b * p.set_capacity;
  c.second_key = p.set_key + b * p.set_capacity;
  c.second_count = p.set_count[b];
  dst = set_index(p, row, set, (merges + 1) & 1);
  return true;
}

// Finds the best candidates and writes them, in key order, to the set at `dst`. Returns their number.
__device__ __forceinline__ int take_set(SelectSmem& s, const SelectPlan& p, const Candidates& c, int64_t dst) {
  if (threadIdx.x == 0) s.candidates = c;
  __syncthreads();
  select<kSetThreads>(s, p.digits, p.window, 0);
  uint32_t* ord = p.set_ord + dst * p.set_capacity;
  int32_t* key = p.set_key + dst * p.set_capacity;
  compact<kSetThreads>(s, false, [&](int item, uint32_t x, bool, bool, int rank, int) {
    ord[rank] = x;
    key[rank] = s.candidates.key(item);
  });
  return s.selected.kept;
}

struct HeldSmem {
  BoundSmem bound;
  uint2 warp_tally[32];
};
// The same for candidates that fit the registers.
__device__ __forceinline__ int take_set(HeldSmem& s, const SelectPlan& p, const Candidates& c, int64_t dst) {
  const OwnQuads<kSetThreads> own(c);
  BoundFinder<kSetThreads> finder{s.bound, own, p.digits};
  int count;
  finder.count_first_digit();
  const Cut cut = finder.find([&](int total) { return min(p.window, total); }, count);
  uint32_t* ord = p.set_ord + dst * p.set_capacity;
  int32_t* key = p.set_key + dst * p.set_capacity;
  const Cut none{UINT32_MAX, INT_MAX};
  const auto read = [&](int item) { return make_uint2(c.ord(item), c.key(item)); };
  for_each_kept<4>(s.warp_tally, c, own, none, cut, false, read,
                   [&](int, const uint2& found, bool, bool, int, int rank) {
                     ord[rank] = found.x;
                     key[rank] = static_cast<int32_t>(found.y);
                   });
  return count;
}

template <class Smem>
__global__ void __launch_bounds__(kSetThreads) set_kernel(const SelectPlan p, int step) {
  __shared__ Smem s;
  if constexpr (std::is_same_v<Smem, HeldSmem>) s.bound.template clear<kSetThreads>(p.digits);
  follow_previous_kernel();
  Candidates c;
  int64_t dst;
  if (!set_candidates(p, blockIdx.x / p.sets, blockIdx.x % p.sets, step, c, dst)) return;
  const int count = take_set(s, p, c, dst);
  const int64_t pad = dst * p.set_capacity + count + threadIdx.x;
  if (threadIdx.x < round_up(count, 4) - count) p.set_ord[pad] = p.set_key[pad] = 0;
  if (threadIdx.x == 0) p.set_count[dst] = count;
}

// --- blocks --------------------------------------------------------------------------------------------------------

constexpr int kBlockThreads = 2 * kSelectBlockRows;

// Greater is better. A key of a later document is better than all keys of earlier ones, which its row does not see;
// then the score decides, then the place among the keys that can change. `start`: the row of the block at which the
// key's document starts, 0 for the document of the first row.
using Rank = uint64_t;
__device__ __forceinline__ Rank make_rank(int start, uint32_t ord, int place) {
  static_assert(2 * kSelectBlockRows <= 256, "a place takes 8 bits");
  return static_cast<Rank>(start) << 40 | static_cast<Rank>(ord) << 8 | static_cast<uint32_t>(place);
}

// The keys that can come or go inside the block.
struct ActiveKeys {
  alignas(16) Rank leaving[kSelectBlockRows];  // the worst of the kept keys, in key order
  alignas(16) Rank joining[kSelectBlockRows];  // the block's own keys that may be kept, in key order
  int32_t leaving_key[kSelectBlockRows];
  int32_t joining_row[kSelectBlockRows];  // their rows, counted from the block's first
  int32_t warp_joining[kSelectBlockRows / 32];
};

// The first row of the block at which `window` keys are better than `rank`; `rows` if there is none; the row of the
// first joining key if there are so many from the start. `core` keys are better from the start. (They are not better
// than a key of a later document, but there are at most `window` - `rows` of them, so that such a key is not displaced
// by counting them.) Keys of documents later than that of `rank` count too: at their rows, `rank` is not seen any
// more.
__device__ __forceinline__ int first_row_out(const ActiveKeys& active, Rank rank, int core, int leaving, int joining,
                                             int window, int rows) {
  int better = core;
#pragma unroll 8
  for (int i = 0; i < leaving; ++i) better += active.leaving[i] > rank;
  int survived = 0;
#pragma unroll 8
  for (int i = 0; i < joining; ++i) {
    better += active.joining[i] > rank;
    survived += better < window;
  }
  return survived < joining ? active.joining_row[survived] : rows;
}

__global__ void __launch_bounds__(kBlockThreads, 3) block_kernel(const SelectPlan p, const KeyList keys) {
  __shared__ SelectSmem s;
  __shared__ ActiveKeys active;
  follow_previous_kernel();
  const int tid = threadIdx.x;
  // Blocks with the most keys before them start first.
  const int row = blockIdx.x % p.rows, block = keys.blocks - 1 - blockIdx.x / p.rows;
  const int row0 = p.offset + block * kSelectBlockRows;
  const int rows = min(kSelectBlockRows, p.seqlen_k - row0);

  const int2 document = document_of(p, row0);
  const int document_rows = min(document.y - row0, rows);  // of the document of the first row

  if (tid == 0) s.candidates = block_candidates(p, row, row0, document.x);
  select<kBlockThreads>(s, p.digits, p.window, rows);
  const Candidates& c = s.candidates;
  const Selected& sel = s.selected;
  const int64_t list = static_cast<int64_t>(row) * keys.blocks + block;
  int32_t* idx = const_cast<int32_t*>(keys.idx) + list * keys.capacity;
  int32_t* end = nullptr;
  if (keys.end != nullptr) end = const_cast<int32_t*>(keys.end) + static_cast<int64_t>(row) * p.seqlen_k;

  // No block sees keys leave that are gone before the first row: the first block writes their ends.
  const bool visit_all = block == 0 && end != nullptr;
  compact<kBlockThreads>(s, visit_all,
                         [&](int item, uint32_t x, bool in_core, bool in_kept, int core_rank, int rest_rank) {
                           if (in_core) {
                             idx[core_rank] = c.key(item);
                           } else if (in_kept) {
                             active.leaving[rest_rank] = make_rank(0, x, rest_rank);
                             active.leaving_key[rest_rank] = c.key(item);
                           } else if (c.exists(item)) {
                             end[c.key(item)] = c.key(item);
                           }
                         });

  // Each thread of the upper half has one of the block's own keys. One that is worse than all kept keys of its
  // document changes nothing.
  const bool is_new = tid >= kSelectBlockRows;
  const int i = tid % kSelectBlockRows;
  const uint32_t new_ord = is_new && i < rows ? __ldg(p.ord + row * p.ord_pitch + row0 + i) : 0u;
  int start = 0, stop = document_rows;  // rows of the block at which the key's document starts and stops
  if (p.document != nullptr && is_new && i < rows) {
    const int2 own = document_of(p, row0 + i);
    start = max(own.x - row0, 0);
    stop = min(own.y - row0, rows);
  }
  const bool joins = new_ord > sel.kept_cut.value || (new_ord == sel.kept_cut.value && sel.kept_cut.skip != INT_MAX) ||
                     (start > 0 && new_ord != 0);
  const uint32_t joins_warp = __ballot_sync(kFullWarp, joins);
  if (is_new && i % 32 == 0) active.warp_joining[i / 32] = __popc(joins_warp);
  __syncthreads();
  int joining = 0;
#pragma unroll
  for (int w = 0; w < kSelectBlockRows / 32; ++w) {
    if (joins && w == i / 32) {
      const int slot = joining + __popc(joins_warp & ((1u << i % 32) - 1));
      active.joining[slot] = make_rank(start, new_ord, kSelectBlockRows + i);
      active.joining_row[slot] = i;
    }
    joining += active.warp_joining[w];
  }
  __syncthreads();

  const int core = sel.core, leaving = sel.kept - core;
  const bool exists = is_new ? joins : i < leaving;
  const Rank rank = is_new ? make_rank(start, new_ord, kSelectBlockRows + i) : exists ? active.leaving[i] : 0;
  const int key = is_new ? row0 + i : exists ? active.leaving_key[i] : 0;
  const int first = is_new ? i : 0;  // row of the block from which on the key may be kept
  int last = exists ? stop : 0;      // the row after the last one that keeps it
  if (exists && sel.kept + joining > p.window) {
    last = min(last, first_row_out(active, rank, core, leaving, joining, p.window, rows));
  }
  const bool present = last > first;
  const bool full = present && first == 0 && last == rows;
  if (end != nullptr && (is_new ? i < rows : exists) && last < rows) {
    // A kept key that the very first position displaces was seen by the block before, if there is one.
    end[key] = present || (!is_new && block > 0) ? row0 + last : key;
  }

  int total;
  const int before =
      block_exclusive_scan<kBlockThreads>((full ? 1 : 0) + (present && !full ? 1 << 16 : 0), s.warp_sums, total);
  const int steady = core + (total & 0xffff), count = steady + (total >> 16);
  // Where a document ends inside the block, no key is kept by all rows.
  const int full_count = document_rows == rows ? steady : 0;
  if (present) idx[full ? core + (before & 0xffff) : steady + (before >> 16)] = key;
  finish_list(keys, list, count, full_count);
}

// --- one list ------------------------------------------------------------------------------------------------------

__global__ void __launch_bounds__(kSetThreads) single_kernel(const SelectPlan p, const KeyList keys) {
  __shared__ SelectSmem s;
  follow_previous_kernel();
  const int row = blockIdx.x;
  if (threadIdx.x == 0) {
    s.candidates = Candidates{};
    s.candidates.second_ord = p.ord + row * p.ord_pitch;
    s.candidates.second_count = p.seqlen_k;
  }
  select<kSetThreads>(s, p.digits, p.window, 0);
  int32_t* idx = const_cast<int32_t*>(keys.idx) + static_cast<int64_t>(row) * keys.capacity;
  int32_t* end = nullptr;
  if (keys.end != nullptr) end = const_cast<int32_t*>(keys.end) + static_cast<int64_t>(row) * p.seqlen_k;
  compact<kSetThreads>(s, end != nullptr, [&](int key, uint32_t, bool, bool in_kept, int rank, int) {
    if (in_kept) idx[rank] = key;
    if (end != nullptr && key < p.seqlen_k) end[key] = in_kept ? p.seqlen_k : p.is_causal ? key : 0;
  });
  finish_list(keys, row, s.selected.kept, s.selected.kept);
}

}  // namespace

cudaError_t select_sets(const SelectPlan& plan, cudaStream_t stream) {
  const int pieces = plan.sets - (1 - plan.first_set);
  if (pieces <= 0) return cudaSuccess;
  const int64_t blocks = static_cast<int64_t>(plan.rows) * plan.sets;
  const int held_keys = 4 * kSetThreads * segment_quads(kSetThreads);
  const bool is_held = std::max(plan.super_keys, 2 * plan.set_capacity) <= held_keys;
  const auto kernel = is_held ? set_kernel<HeldSmem> : set_kernel<SelectSmem>;
  cudaError_t status = launch(kernel, blocks, kSetThreads, 0, stream, plan, -1);
  for (int step = 0; status == cudaSuccess && (1 << step) < plan.sets; ++step) {
    status = launch(kernel, blocks, kSetThreads, 0, stream, plan, step);
  }
  return status;
}

cudaError_t select_single(const SelectPlan& plan, const KeyList& keys, cudaStream_t stream) {
  return launch(single_kernel, plan.rows, kSetThreads, 0, stream, plan, keys);
}

cudaError_t select_blocks(const SelectPlan& plan, const KeyList& keys, cudaStream_t stream) {
  return launch(block_kernel, static_cast<int64_t>(plan.rows) * keys.blocks, kBlockThreads, 0, stream, plan, keys);
}

}  // namespace prep
}  // namespace dmattn
