// Running top-w by segments of up to four neighbouring blocks of query rows. A thread block finds the best keys before
// its segment once, with the candidates in registers from the first digit on. It then follows the active keys: those
// that join inside the segment and those that may leave. From both it writes the lists of all blocks of the segment.
#include "displaced.cuh"
#include "in_registers.cuh"

namespace dmattn {
namespace prep {
namespace {

// When the active keys come and go.
struct ActiveSmem {
  DisplacedSmem displaced;
  // The rows that keep each active key, leaving keys first: the first row in the lower half of the word, the last row
  // + 1 in the upper half.
  uint32_t span[kMaxActive];
  uint2 kept_by[kMaxSegmentBlocks][kActiveWords];  // of each block: bits of the keys that all (x), some rows (y) keep
};

struct SegmentSmem {
  union {
    BoundSmem bound;                       // while bounds are searched
    int32_t core_item[kMaxSegmentWindow];  // then: the candidates that no row of the segment can lose
    ActiveSmem active;                     // at the end
  };
  ActiveKeys keys;
  uint2 warp_tally[32];
  int32_t warp_joining[kSegmentRows / 32];
};
static_assert(kSegmentRows / 32 <= 32, "a lane for each");

// What is known of a whole segment.
struct Segment {
  int32_t row, block0, row0, rows;  // row of the selection; first block; position of the first row; rows of all blocks
  int32_t kept, core, joining;      // `core` of the `kept` keys cannot leave

  __device__ __forceinline__ int leaving() const { return kept - core; }
};

// --- keys that join ------------------------------------------------------------------------------------------------

// The keys at the positions of the segment's rows. One that is worse than all keys kept before it changes nothing.
template <int kThreads>
struct OwnKeys {
  static constexpr int kEach = kThreads < kSegmentRows ? kSegmentRows / kThreads : 1;
  uint32_t ord[kEach];

  static __device__ __forceinline__ int row_of(int o) { return o * kThreads + static_cast<int>(threadIdx.x); }
  // ord_of(key): its ordered score.
  template <class OrdOf>
  __device__ __forceinline__ OwnKeys(const Segment& at, const OrdOf& ord_of) {
#pragma unroll
    for (int o = 0; o < kEach; ++o) ord[o] = row_of(o) < at.rows ? ord_of(at.row0 + row_of(o)) : 0u;
  }
  // Lists those that join. Returns their number; the list may be read after the next barrier.
  __device__ __forceinline__ int join(SegmentSmem& s, const Segment& at, const Cut& kept_cut, int32_t* end) const {
    const int lane = threadIdx.x % 32;
    uint32_t joins[kEach];
#pragma unroll
    for (int o = 0; o < kEach; ++o) {
      const bool is_in = ord[o] > kept_cut.value || (ord[o] == kept_cut.value && kept_cut.skip != INT_MAX);
      joins[o] = __ballot_sync(kFullWarp, is_in);
      if (lane == 0 && row_of(o) < kSegmentRows) s.warp_joining[row_of(o) / 32] = __popc(joins[o]);
      if (!is_in && end != nullptr && row_of(o) < at.rows) end[at.row0 + row_of(o)] = at.row0 + row_of(o);
    }
    __syncthreads();
    const int own = lane < kSegmentRows / 32 ? s.warp_joining[lane] : 0;
    const int inclusive = warp_inclusive_scan(own);
#pragma unroll
    for (int o = 0; o < kEach; ++o) {
      const int before = __shfl_sync(kFullWarp, inclusive - own, row_of(o) / 32);
      if (joins[o] >> lane & 1) {
        const int slot = before + __popc(joins[o] & ((1u << lane) - 1));
        s.keys.ord[kSegmentRows + slot] = ord[o];
        s.keys.joining_row[slot] = row_of(o);
      }
    }
    return __shfl_sync(kFullWarp, inclusive, 31);
  }
};

// --- keys that leave -----------------------------------------------------------------------------------------------

// Puts into shared memory, in key order, the core as items of the candidates, and the keys that may leave. `end` is
// null except for the first segment: no block of rows sees candidates leave that are not kept there, so that their
// ends are written here. s.bound is out of use from the first barrier on; the core may be read when this returns, the
// other keys after the next barrier.
template <int kThreads, class AnyCandidates>
__device__ __forceinline__ void split_kept(SegmentSmem& s, const AnyCandidates& c, const OwnQuads<kThreads>& own,
                                           const Cut& core_cut, const Cut& kept_cut, int leaving, int32_t* end) {
  const auto read = [](int item) { return item; };
  const auto place = [&](int item, int, bool in_core, bool in_kept, int core_rank, int rest_rank) {
    if (in_kept) {
      int32_t* const to = in_core ? s.core_item + core_rank : s.keys.leaving_key + rest_rank;
      *to = item;
    } else {
      end[c.key(item)] = c.key(item);
    }
  };
  for_each_kept<1>(s.warp_tally, c, own, core_cut, kept_cut, end != nullptr, read, place);
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < leaving; i += kThreads) {
    const int item = s.keys.leaving_key[i];
    s.keys.ord[i] = c.ord(item);
    s.keys.leaving_key[i] = c.key(item);
  }
}

// Finds the rows that keep each active key. last_end: the end of keys that the last row of all keeps; 0: it has been
// written already, or the segment is not the last. Ends with a barrier.
template <int kThreads>
__device__ __forceinline__ void follow(SegmentSmem& s, const Segment& at, int window, int32_t* end, int last_end) {
  const int leaving = at.leaving();
  const bool is_full = at.kept + at.joining > window;
  const Rank* sorted = nullptr;
  if (is_full) {
    sorted = sort_active<kThreads>(s.active.displaced, s.keys, leaving, at.joining);
    count_arrivals<kThreads>(s.active.displaced, s.keys, sorted, leaving, at.joining);
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < leaving + at.joining; i += kThreads) {
    const int place = is_full ? place_of(sorted[i]) : i < leaving ? i : kSegmentRows + i - leaving;
    const bool is_new = place >= kSegmentRows;
    const int slot = is_new ? place - kSegmentRows : place;
    const int first = is_new ? s.keys.joining_row[slot] : 0;
    int last = at.rows;  // exclusive
    if (is_full) {
      const int displacing = find_displacing(s.active.displaced, i, window - at.core, at.joining);
      last = displacing < 0 ? 0 : displacing < at.joining ? s.keys.joining_row[displacing] : at.rows;
    }
    const bool present = last > first;
    if (end != nullptr && (last < at.rows || last_end > 0)) {
      const int key = is_new ? at.row0 + first : s.keys.leaving_key[slot];
      // A leaving key that the first row displaces was seen by the block before, if there is one.
      const bool was_seen = present || (!is_new && at.block0 > 0);
      end[key] = last == at.rows ? last_end : was_seen ? at.row0 + last : key;
    }
    s.active.span[is_new ? leaving + slot : slot] =
        present ? static_cast<uint32_t>(first) | static_cast<uint32_t>(last) << 16 : 0u;
  }
  __syncthreads();
}

// --- lists ---------------------------------------------------------------------------------------------------------

// Adds the active keys to the lists of the segment's blocks, behind the core: those that all rows of a block keep,
// then those that only some keep. Each block has an equal share of the warps, which take 32 keys at a time.
template <int kThreads>
__device__ __forceinline__ void write_active(SegmentSmem& s, const Segment& at, const KeyList& keys, int blocks) {
  constexpr int kWarpsEach = kThreads / 32 / kMaxSegmentBlocks;
  const int lane = threadIdx.x % 32, block = threadIdx.x / 32 / kWarpsEach, first_word = threadIdx.x / 32 % kWarpsEach;
  const int active = at.leaving() + at.joining, words = ceil_div(active, 32);
  const int begin = block * kSelectBlockRows, stop = min(begin + kSelectBlockRows, at.rows);
  uint2* const kept_by = s.active.kept_by[block];
#pragma unroll 1
  for (int word = first_word; block < blocks && word < words; word += kWarpsEach) {
    const uint32_t span = word * 32 + lane < active ? s.active.span[word * 32 + lane] : 0u;
    const int first = max(static_cast<int>(span & 0xffff), begin), last = min(static_cast<int>(span >> 16), stop);
    const bool all = first == begin && last == stop;
    const uint32_t all_warp = __ballot_sync(kFullWarp, all), some_warp = __ballot_sync(kFullWarp, !all && first < last);
    if (lane == 0) kept_by[word] = make_uint2(all_warp, some_warp);
  }
  __syncthreads();
  if (block >= blocks) return;
  const uint2 of_lane = lane < words ? kept_by[lane] : make_uint2(0, 0);
  const uint32_t sums = __popc(of_lane.x) | __popc(of_lane.y) << 16, inclusive = warp_inclusive_scan(sums);
  const uint32_t total = __shfl_sync(kFullWarp, inclusive, 31);
  const int full = at.core + static_cast<int>(total & 0xffff), count = full + static_cast<int>(total >> 16);
  const int64_t list = static_cast<int64_t>(at.row) * keys.blocks + at.block0 + block;
  int32_t* const idx = const_cast<int32_t*>(keys.idx) + list * keys.capacity;
  const uint32_t lower_lanes = (1u << lane) - 1;
#pragma unroll 1
  for (int word = first_word; word < words; word += kWarpsEach) {
    const uint32_t before = __shfl_sync(kFullWarp, inclusive - sums, word);
    const uint2 own = kept_by[word];
    const bool all = (own.x >> lane & 1) != 0, some = (own.y >> lane & 1) != 0;
    if (!all && !some) continue;
    const int i = word * 32 + lane;
    const int key = i < at.leaving() ? s.keys.leaving_key[i] : at.row0 + s.keys.joining_row[i - at.leaving()];
    const int place = all ? at.core + static_cast<int>(before & 0xffff) + __popc(own.x & lower_lanes)
                          : full + static_cast<int>(before >> 16) + __popc(own.y & lower_lanes);
    idx[place] = key;
  }
  if (first_word > 0) return;
#pragma unroll 1
  for (int i = count + lane; i < round_up(count, 128); i += 32) idx[i] = 0;
  if (lane != 0) return;
  const_cast<int32_t*>(keys.count)[list] = count;
  if (keys.full != nullptr) const_cast<int32_t*>(keys.full)[list] = full;
}

// kBytes: the bytes of a score, if segments read the scores and write all ends (SelectPlan::reads_scores); 0 if
// select_order() has written the ordered scores and the first values of ends.
template <int kThreads, int kBytes>
__global__ void __launch_bounds__(kThreads, 1024 / kThreads)
    segment_kernel(const SelectPlan p, const __grid_constant__ SelectParams scores, const KeyList keys) {
  __shared__ SegmentSmem s;
  s.bound.clear<kThreads>(p.digits);
  follow_previous_kernel();
  // Segments with the most keys before them start first.
  const int segments = ceil_div(keys.blocks, p.segment_blocks);
  Segment at;
  at.row = blockIdx.x % p.rows;
  at.block0 = (segments - 1 - static_cast<int>(blockIdx.x / p.rows)) * p.segment_blocks;
  at.row0 = p.offset + at.block0 * kSelectBlockRows;
  at.rows = min(p.segment_blocks * kSelectBlockRows, p.seqlen_k - at.row0);
  int32_t* end = nullptr;
  if (keys.end != nullptr) end = const_cast<int32_t*>(keys.end) + static_cast<int64_t>(at.row) * p.seqlen_k;

  const auto c = [&] {
    if constexpr (kBytes > 0) {
      return RawCandidates<kBytes>(scores, at.row, at.row0);
    } else {
      return block_candidates(p, at.row, at.row0, 0);
    }
  }();
  const OwnQuads<kThreads> own(c);
  const OwnKeys<kThreads> own_keys(at, [&](int key) {
    if constexpr (kBytes > 0) {
      return c.ord(key);
    } else {
      return __ldg(p.ord + at.row * p.ord_pitch + key);
    }
  });
  const bool is_last = at.block0 + p.segment_blocks >= keys.blocks;
  const int last_end = kBytes > 0 && is_last ? p.seqlen_k : 0;
  BoundFinder<kThreads> finder{s.bound, own, p.digits};
  finder.count_first_digit();
  Cut kept_cut, core_cut;
  int leaving = 0;
#pragma unroll 1
  for (bool is_kept = true;; is_kept = false) {
    const auto wanted = [&](int total) { return is_kept ? min(p.window, total) : at.kept - leaving; };
    core_cut = finder.find(wanted, at.core);
    if (!is_kept) break;
    kept_cut = core_cut;
    at.kept = at.core;
    at.joining = own_keys.join(s, at, kept_cut, end);
    // No more keys leave than join.
    leaving = min(max(at.kept - p.window + at.joining, 0), at.kept);
    if (leaving == 0) break;
  }
  split_kept(s, c, own, core_cut, kept_cut, at.leaving(), at.block0 == 0 ? end : nullptr);

  const int blocks = ceil_div(at.rows, kSelectBlockRows);
  const int64_t first_list = static_cast<int64_t>(at.row) * keys.blocks + at.block0;
  int32_t* const idx = const_cast<int32_t*>(keys.idx) + first_list * keys.capacity;
#pragma unroll 1
  for (int i = threadIdx.x; i < at.core; i += kThreads) {
    const int key = c.key(s.core_item[i]);
#pragma unroll
    for (int block = 0; block < kMaxSegmentBlocks; ++block) {
      if (block < blocks) idx[int64_t{block} * keys.capacity + i] = key;
    }
    if (end != nullptr && last_end > 0) end[key] = last_end;
  }
  __syncthreads();
  follow<kThreads>(s, at, p.window, end, last_end);
  write_active<kThreads>(s, at, keys, blocks);
}

}  // namespace

cudaError_t select_segments(const SelectParams& p, const SelectPlan& plan, const KeyList& keys, cudaStream_t stream) {
  const int64_t blocks = static_cast<int64_t>(plan.rows) * ceil_div(keys.blocks, plan.segment_blocks);
  const auto run = [&](auto kernel) { return launch(kernel, blocks, plan.segment_threads, 0, stream, plan, p, keys); };
  const auto run_with = [&](auto threads) {
    constexpr int kThreads = decltype(threads)::value;
    if (!plan.reads_scores) return run(segment_kernel<kThreads, 0>);
    return p.dtype == Dtype::kFloat32 ? run(segment_kernel<kThreads, 4>) : run(segment_kernel<kThreads, 2>);
  };
  if (plan.segment_threads == 256) return run_with(std::integral_constant<int, 256>{});
  if (plan.segment_threads == 512) return run_with(std::integral_constant<int, 512>{});
  if (plan.segment_threads == 1024) return run_with(std::integral_constant<int, 1024>{});
  return cudaErrorInvalidConfiguration;
}

}  // namespace prep
}  // namespace dmattn
