// The order in which entries leave a cache of the best keys.
#pragma once

#include <climits>
#include <cmath>

namespace dmattn {

struct CacheEntry {
  float score;
  int position;
  int slot;
};

// The position of the next of `tokens` tokens, given the cache's `seen`, which is the caller's and may hold any number:
// neither it nor the positions after it leave the range of int32.
__device__ __forceinline__ int next_cache_position(int seen, int tokens) { return min(max(seen, 0), INT_MAX - tokens); }

// Higher than every entry.
__device__ __forceinline__ CacheEntry no_cache_entry() { return {INFINITY, INT_MAX, INT_MAX}; }

// The one that leaves first: of the lowest score, among equals of the earliest key.
__device__ __forceinline__ CacheEntry lower(const CacheEntry& a, const CacheEntry& b) {
  const bool b_first = b.score != a.score         ? b.score < a.score
                       : b.position != a.position ? b.position < a.position
                                                  : b.slot < a.slot;  // empty entries have the same score and position
  return b_first ? b : a;
}

__device__ __forceinline__ CacheEntry warp_lowest(CacheEntry e) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    e = lower(e, {__shfl_xor_sync(0xffffffffu, e.score, offset), __shfl_xor_sync(0xffffffffu, e.position, offset),
                  __shfl_xor_sync(0xffffffffu, e.slot, offset)});
  }
  return e;
}

// The search of a thread block for the lowest of a cache's entries: load() starts the reads, find() uses them. Between
// the two the block can do something else.
template <int kThreads>
struct LowestEntry {
  static constexpr int kAhead = 16;
  float score[kAhead];
  int position[kAhead];

  template <class ScoreAt>
  __device__ __forceinline__ void load(ScoreAt&& score_at, const int32_t* positions, int entries) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int slot = threadIdx.x + i * kThreads;
      score[i] = slot < entries ? score_at(slot) : INFINITY;
      position[i] = slot < entries ? positions[slot] : INT_MAX;
    }
  }
  // Every thread takes part and gets the result; `warp_low` may be written again after the next barrier.
  template <class ScoreAt>
  __device__ __forceinline__ CacheEntry find(ScoreAt&& score_at, const int32_t* positions, int entries,
                                             CacheEntry (&warp_low)[kThreads / 32]) const {
    CacheEntry low = no_cache_entry();
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int slot = threadIdx.x + i * kThreads;
      if (slot < entries) low = lower(low, {score[i], position[i], slot});
    }
#pragma unroll 4
    for (int slot = threadIdx.x + kAhead * kThreads; slot < entries; slot += kThreads) {
      low = lower(low, {score_at(slot), positions[slot], slot});
    }
    low = warp_lowest(low);
    if (threadIdx.x % 32 == 0) warp_low[threadIdx.x / 32] = low;
    __syncthreads();
    low = warp_low[0];
#pragma unroll
    for (int w = 1; w < kThreads / 32; ++w) low = lower(low, warp_low[w]);
    return low;
  }
};

}  // namespace dmattn
