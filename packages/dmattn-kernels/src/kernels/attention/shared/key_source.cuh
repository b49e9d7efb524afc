// Which keys a block attends to, and where they are: a key has a position, which causality, intervals, bias and dbias
// count in, and a row of K, V, dK and dV. Contiguous keys have neither in memory; listed keys have their position in
// the list. The only code that reads lists of keys.
#pragma once

#include <cuda_runtime.h>

#include "../../params.h"

namespace dmattn {

// Entries of list i. The lists may be the caller's and hold any numbers: the count is cut to the capacity, and `full`
// to the count.
__device__ __forceinline__ int known_list_count(const KeyList& keys, int as_read) {
  return min(max(as_read, 0), keys.capacity);
}
__device__ __forceinline__ int known_list_full(int as_read, int count) { return min(max(as_read, 0), count); }
__device__ __forceinline__ int read_list_count(const KeyList& keys, int64_t i) {
  return known_list_count(keys, __ldg(keys.count + i));
}
__device__ __forceinline__ int read_list_full(const KeyList& keys, int64_t i, int count) {
  return known_list_full(__ldg(keys.full + i), count);
}

// Number of entries of the ascending list below `value`, found by the whole warp: 32 probes a round, so that a list
// of a million keys takes four dependent loads instead of twenty.
__device__ __forceinline__ int warp_lower_bound(const int32_t* list, int count, int value, int lane) {
  int low = 0, high = count;  // the answer lies in [low, high]
  while (low < high) {
    const int step = (high - low + 31) / 32;
    const int probe = low + lane * step;
    const bool below = probe < high && __ldg(list + probe) < value;
    const int passed = __popc(__ballot_sync(0xffffffffu, below));  // probes are ascending: the first ones pass
    if (passed == 0) return low;
    // list[low + (passed - 1) * step] < value, and the next probe (if inside) is not.
    const int new_low = low + (passed - 1) * step + 1;
    high = min(high, low + passed * step);
    low = new_low;
  }
  return low;
}

// The keys that the entries of a list may name.
struct KeyLimits {
  int32_t first, last;
  // An entry as it was read -> the position of a key that exists.
  __device__ __forceinline__ int position(int entry) const { return min(max(entry, first), last); }
};

// Row of a tile -> row of K and V. Contiguous keys: row i of the tile is i rows after its first.
struct RowIdentity {
  __device__ __forceinline__ int64_t operator()(int row) const { return row; }
};
// Listed keys, by their positions in shared memory. K and V hold every position in order: the row is the position.
struct RowGather {
  const int32_t* position;
  __device__ __forceinline__ int64_t operator()(int row) const { return position[row]; }
};

}  // namespace dmattn
