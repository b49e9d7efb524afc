// The number of a piece of work, taken apart into the indices of what it is about.
#pragma once

#include <cuda_runtime.h>

namespace dmattn {

// Mixed radix, the fastest index first: each kernel says in which order its blocks go through heads, tiles and splits.
// Int is the type of the divisions: unsigned ones take fewer instructions and registers where blocks are small.
template <class Int>
struct WorkIndex {
  Int rest;  // after the last take(): the slowest index

  __device__ __forceinline__ explicit WorkIndex(Int work) : rest(work) {}
  __device__ __forceinline__ int take(Int extent) {
    const Int index = rest % extent;
    rest /= extent;
    return static_cast<int>(index);
  }
};

}  // namespace dmattn
