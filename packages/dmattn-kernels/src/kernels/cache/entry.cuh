// The order in which entries leave a cache of the best keys.
#pragma once

#include <cuda_runtime.h>

#include <climits>
#include <cmath>
#include <cstdint>

namespace dmattn {

// The position of the first of `tokens` new tokens, given the cache's `seen`. That is the caller's and may hold any
// number: it is cut so that no position of these tokens leaves the range of int32.
__device__ __forceinline__ int next_cache_position(int seen, int tokens) { return min(max(seen, 0), INT_MAX - tokens); }

// The entry that leaves first is the one of the lowest score, among equals that of the earliest key. Entries are
// compared by unsigned integers in the order of their scores and positions. A score that is NaN comes last: its entry
// never leaves.
__device__ __forceinline__ uint32_t score_order(float score) {
  const uint32_t bits = __float_as_uint(score + 0.f);  // -0 becomes 0
  const uint32_t order = bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
  return score == score ? order : ~0u;
}
__device__ __forceinline__ float score_of_order(uint32_t order) {  // NaN for ~0u, which stands for no score
  return __uint_as_float(order & 0x80000000u ? order ^ 0x80000000u : ~order);
}

struct CacheEntry {
  uint32_t score = ~0u, position = ~0u;  // as integers in the order of scores and positions
  int32_t slot = INT_MAX;

  __device__ __forceinline__ uint64_t key() const { return static_cast<uint64_t>(score) << 32 | position; }
};

__device__ __forceinline__ CacheEntry make_cache_entry(float score, int32_t position, int32_t slot) {
  return {score_order(score), static_cast<uint32_t>(position) ^ 0x80000000u, slot};
}
__device__ __forceinline__ CacheEntry lower(const CacheEntry& a, const CacheEntry& b) {
  // Entries without a key have the same score and position: among these the slot decides.
  const bool b_first = b.key() < a.key() || (b.key() == a.key() && b.slot < a.slot);
  return b_first ? b : a;
}

// The lowest entry of a warp, field by field: lanes without the lowest score take no part in the next minimum.
__device__ __forceinline__ CacheEntry warp_lowest(const CacheEntry& e) {
  CacheEntry low;
  low.score = __reduce_min_sync(0xffffffffu, e.score);
  low.position = __reduce_min_sync(0xffffffffu, e.score == low.score ? e.position : ~0u);
  low.slot = __reduce_min_sync(0xffffffffu, e.key() == low.key() ? e.slot : INT_MAX);
  return low;
}

// The score and slot of the entry that leaves first; slot INT_MAX where every score is NaN.
struct LowestSlot {
  float score;
  int32_t slot;
};

// The search of a thread block, or of a warp, for the lowest entry of a cache: load() starts the reads, find() or
// own() uses them. The threads can do something else in between, since scores are kept as the bits that were read:
// bits_at(entry) reads the bits of a score, value_of(bits) is its value.
template <int kThreads>
struct LowestEntry {
  static constexpr int kAhead = 16;
  uint32_t bits[kAhead];
  int position[kAhead];

  static __device__ __forceinline__ int thread() { return threadIdx.x % kThreads; }

  template <class BitsAt>
  __device__ __forceinline__ void load(BitsAt&& bits_at, const int32_t* positions, int entries) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (i * kThreads >= entries) break;
      const int slot = thread() + i * kThreads;
      bits[i] = slot < entries ? bits_at(slot) : 0;
      position[i] = slot < entries ? positions[slot] : 0;
    }
  }
  // The lowest of the entries that this thread looks at.
  template <class BitsAt, class ValueOf>
  __device__ __forceinline__ CacheEntry own(BitsAt&& bits_at, ValueOf&& value_of, const int32_t* positions,
                                            int entries) const {
    CacheEntry low;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (i * kThreads >= entries) break;
      const int slot = thread() + i * kThreads;
      if (slot < entries) low = lower(low, make_cache_entry(value_of(bits[i]), position[i], slot));
    }
#pragma unroll 4
    for (int slot = thread() + kAhead * kThreads; slot < entries; slot += kThreads) {
      low = lower(low, make_cache_entry(value_of(bits_at(slot)), positions[slot], slot));
    }
    return low;
  }
  // The lowest entry of all, found by a thread block: every thread takes part and gets the result. `warp_low` may be
  // written again after the next barrier.
  template <class BitsAt, class ValueOf>
  __device__ __forceinline__ LowestSlot find(BitsAt&& bits_at, ValueOf&& value_of, const int32_t* positions,
                                             int entries, CacheEntry (&warp_low)[kThreads / 32]) const {
    CacheEntry low = warp_lowest(own(bits_at, value_of, positions, entries));
    if (threadIdx.x % 32 == 0) warp_low[threadIdx.x / 32] = low;
    __syncthreads();
    low = warp_low[0];
#pragma unroll
    for (int w = 1; w < kThreads / 32; ++w) low = lower(low, warp_low[w]);
    return {score_of_order(low.score), low.score == ~0u ? INT_MAX : low.slot};
  }
};

}  // namespace dmattn
