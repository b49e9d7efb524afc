// Which keys a thread block attends to, and where they are. A key has a position, in which causality, intervals, bias
// and dbias count, and a row of K, V, dK and dV. Both follow from the place of a key in its tile where keys are
// contiguous; of a listed key the list holds the position. Counts and entries of the caller's lists are clamped by the
// functions of this file.
#pragma once

#include <cuda_runtime.h>

#include "../../params.h"

namespace dmattn {

// Number of entries of list i, and how many of them are full keys. The lists may be the caller's and hold any
// numbers: the count is clamped to the capacity, and `full` to the count.
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

// Number of entries below `value` in an ascending list, found by the whole warp with 32 probes at a time, so that a
// list of a million keys takes four dependent loads instead of twenty.
__device__ __forceinline__ int warp_lower_bound(const int32_t* list, int count, int value, int lane) {
  int low = 0, high = count;  // the answer lies in [low, high]
  while (low < high) {
    const int step = (high - low + 31) / 32;
    const int probe = low + lane * step;
    const bool below = probe < high && __ldg(list + probe) < value;
    const int passed = __popc(__ballot_sync(0xffffffffu, below));  // entries ascend: the first probes pass
    if (passed == 0) return low;
    // list[low + (passed - 1) * step] < value, and the next probe (if inside) is not.
    const int new_low = low + (passed - 1) * step + 1;
    high = min(high, low + passed * step);
    low = new_low;
  }
  return low;
}

// The positions that the entries of a list may name.
struct KeyLimits {
  int32_t first, last;
  // Turns an entry as it was read into the position of a key that exists.
  __device__ __forceinline__ int position(int entry) const { return min(max(entry, first), last); }
};

// Row of a tile -> row of K and V, counted from where the copy starts. Contiguous keys: both are the same.
struct RowIdentity {
  __device__ __forceinline__ int64_t operator()(int row) const { return row; }
};
// The same for listed keys, whose positions are in shared memory: row `position` of K and V has the key of that
// position.
struct RowGather {
  const int32_t* position;
  __device__ __forceinline__ int64_t operator()(int row) const { return position[row]; }
};

}  // namespace dmattn
