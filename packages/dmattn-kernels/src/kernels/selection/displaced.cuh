// Which keys come and go in a segment of rows, and when a key is displaced: at the first row at which `window` better
// keys have come.
//
// All these keys are sorted together, best first: a warp sorts groups of 32, and then pairs of groups are merged,
// where each key searches for its place in the other group. Joining keys are also taken in groups of 32, in the order
// of their rows. For each such group there is a bit for every place of the sorted order: whether the key at this place
// has come by the end of the group. Counting bits tells how many better keys have come by then, and a binary search
// over the groups finds the one in which a key is displaced.
#pragma once

#include "radix.cuh"

namespace dmattn {
namespace prep {

constexpr int kSegmentRows = kMaxSegmentBlocks * kSelectBlockRows;
// Leaving keys: the worst of those kept before the segment, which may leave. Joining keys: the segment's own keys that
// may be kept. There are no more leaving than joining ones.
constexpr int kMaxActive = 2 * kSegmentRows;
constexpr int kGroup = 32;  // keys that a warp sorts, and joining keys that share a row of bits
constexpr int kJoinGroups = kSegmentRows / kGroup;
constexpr int kActiveWords = kMaxActive / 32;

// Greater is better: the score decides, then the place among the active keys in key order. That is the slot of a
// leaving key, or kSegmentRows plus the slot of a joining key.
using Rank = uint64_t;
__device__ __forceinline__ Rank make_rank(uint32_t ord, int place) {
  return static_cast<Rank>(ord) << 32 | static_cast<uint32_t>(place);
}
__device__ __forceinline__ int place_of(Rank rank) { return static_cast<int>(rank & UINT32_MAX); }

// The leaving and the joining keys, each in key order.
struct ActiveKeys {
  uint32_t ord[2 * kSegmentRows];  // joining keys from kSegmentRows on
  int32_t leaving_key[kSegmentRows];
  int32_t joining_row[kSegmentRows];  // their rows, counted from the segment's first
};

struct DisplacedSmem {
  Rank sorted[2][kMaxActive];  // best first; each merge goes from one to the other
  // Row 0 of `come` has the leaving keys, row g these and the joining keys of the first g groups, as bits at their
  // places in the sorted order. come_before: how many bits of the row are set before each word. Rows are padded to
  // avoid bank conflicts.
  uint32_t come[kJoinGroups + 1][kActiveWords + 1];
  uint16_t come_before[kJoinGroups + 1][kActiveWords + 2];
  // best[g][n]: the n best joining keys of group g, as bits at their slots in the group.
  uint32_t best[kJoinGroups][kGroup + 1];
};

// --- sorting -------------------------------------------------------------------------------------------------------

// Sorts the keys of a warp, the greatest into lane 0.
__device__ __forceinline__ Rank sort_falling(Rank x) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int size = 2; size <= 32; size *= 2) {
#pragma unroll
    for (int stride = size / 2; stride > 0; stride /= 2) {
      const Rank other = __shfl_xor_sync(kFullWarp, x, stride);
      const bool takes_greater = ((lane & stride) == 0) == ((lane & size) == 0);
      x = (x > other) == takes_greater ? x : other;
    }
  }
  return x;
}

// kEach keys of a thread in a merge, kThreads apart. Their binary searches go on side by side, as each step waits for
// memory.
template <int kThreads, int kEach>
struct MergedKeys {
  int32_t first;
  Rank x[kEach];
  int32_t other[kEach], length[kEach];  // the run that a key's own run is merged with: its beginning and length
  int32_t better[kEach];                // how many keys of that run are better

  __device__ __forceinline__ int item(int e) const { return first + e * kThreads; }
  __device__ __forceinline__ MergedKeys(const Rank* from, int padded, int run, int first_item) : first(first_item) {
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int run_start = (item(e) & ~(run - 1)) ^ run;
      x[e] = item(e) < padded ? from[item(e)] : 0;
      length[e] = item(e) < padded ? min(max(padded - run_start, 0), run) : 0;
      other[e] = length[e] > 0 ? run_start : 0;
      better[e] = 0;
    }
#pragma unroll 1
    for (int step = run; step > 0; step /= 2) {
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        // No branch around the load, so that the searches wait at the same time.
        const int next = better[e] + step;
        const Rank found = from[other[e] + max(min(next, length[e]) - 1, 0)];
        if (next <= length[e] && found > x[e]) better[e] = next;
      }
    }
  }
  __device__ __forceinline__ void store(Rank* to, int padded, int run) const {
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      if (item(e) < padded) to[(item(e) & ~(2 * run - 1)) + (item(e) & (run - 1)) + better[e]] = x[e];
    }
  }
};

// Sorts all active keys, best first. Ends with a barrier.
template <int kThreads>
__device__ __forceinline__ const Rank* sort_active(DisplacedSmem& s, const ActiveKeys& keys, int leaving, int joining) {
  const int active = leaving + joining, padded = round_up(active, kGroup);
  Rank *from = s.sorted[0], *to = s.sorted[1];
#pragma unroll 1
  for (int i = threadIdx.x; i < padded; i += kThreads) {
    Rank x = 0;
    if (i < active) {
      const int slot = i < leaving ? i : kSegmentRows + i - leaving;
      x = make_rank(keys.ord[slot], slot);
    }
    from[i] = sort_falling(x);
  }
  __syncthreads();
#pragma unroll 1
  for (int run = kGroup; run < padded; run *= 2) {
    // Of 512 threads, one that has two keys merges both at once. With 256 threads an SM has several thread blocks,
    // which wait at the same time anyhow.
    if (kThreads == 512 && padded > kThreads) {
      MergedKeys<kThreads, 2>(from, padded, run, threadIdx.x).store(to, padded, run);
    } else {
#pragma unroll 1
      for (int i = threadIdx.x; i < padded; i += kThreads) {
        MergedKeys<kThreads, 1>(from, padded, run, i).store(to, padded, run);
      }
    }
    __syncthreads();
    Rank* const merged = to;
    to = from;
    from = merged;
  }
  return from;
}

// --- which keys have come ------------------------------------------------------------------------------------------

// Fills s.come, s.come_before and s.best. Ends with a barrier.
template <int kThreads>
__device__ __forceinline__ void count_arrivals(DisplacedSmem& s, const ActiveKeys& keys, const Rank* sorted,
                                               int leaving, int joining) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int active = leaving + joining, words = ceil_div(active, 32), groups = ceil_div(joining, kGroup);
#pragma unroll 1
  for (int w = warp; w < words; w += kThreads / 32) {
    const int i = 32 * w + lane, place = place_of(sorted[i]);
    // The first row of `come` that has the key.
    const int first = i >= active ? INT_MAX : place < kSegmentRows ? 0 : 1 + (place - kSegmentRows) / kGroup;
    uint32_t own = 0;  // the word of row `lane`
#pragma unroll 4
    for (int g = 0; g <= groups; ++g) {
      const uint32_t bits = __ballot_sync(kFullWarp, first <= g);
      if (lane == g) own = bits;
    }
    if (lane <= groups) s.come[lane][w] = own;
  }
  // Begins with the last warp, as the first ones may have had more words.
#pragma unroll 1
  for (int g = kThreads / 32 - 1 - warp; g < groups; g += kThreads / 32) {
    const uint32_t ord = g * kGroup + lane < joining ? keys.ord[kSegmentRows + g * kGroup + lane] : 0u;
    uint32_t better = 0;
#pragma unroll 8
    for (int i = 0; i < kGroup; ++i) {
      const uint32_t other = __shfl_sync(kFullWarp, ord, i);
      if (other > ord || (other == ord && i > lane)) better |= 1u << i;
    }
    s.best[g][__popc(better)] = better;
    if (__popc(better) == kGroup - 1) s.best[g][kGroup] = kFullWarp;
  }
  __syncthreads();
#pragma unroll 1
  for (int g = warp; g <= groups; g += kThreads / 32) {
    const int own = lane < words ? __popc(s.come[g][lane]) : 0;
    const int inclusive = warp_inclusive_scan(own);
    s.come_before[g][lane] = static_cast<uint16_t>(inclusive - own);
  }
  __syncthreads();
}

// The place of the n-th bit that is set, n from 1.
__device__ __forceinline__ int find_bit(uint32_t bits, int n) {
  int at = 0;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    const int lower = __popc(bits & ((1u << step) - 1));
    if (n > lower) {
      n -= lower;
      bits >>= step;
      at += step;
    }
  }
  return at;
}

// The slot of the joining key that displaces key i of the sorted order: with it, `room` better keys have come. -1 if
// so many were there from the start; `joining` if so many never come.
__device__ __forceinline__ int find_displacing(const DisplacedSmem& s, int i, int room, int joining) {
  static_assert(kJoinGroups + 1 < 32, "steps of the search");
  const int word = i / 32, groups = ceil_div(joining, kGroup);
  const uint32_t better = (1u << i % 32) - 1;
  const auto come = [&](int g) { return s.come_before[g][word] + __popc(s.come[g][word] & better); };
  int g = 0;  // the first row of `come` with at least `room` better keys
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    const int next = g + step - 1;
    const int arrived = come(min(next, groups));
    if (next <= groups && arrived < room) g += step;
  }
  if (g == 0) return -1;
  if (g > groups) return joining;
  const int before = come(g - 1);
  return (g - 1) * kGroup + find_bit(s.best[g - 1][come(g) - before], room - before);
}

}  // namespace prep
}  // namespace dmattn
