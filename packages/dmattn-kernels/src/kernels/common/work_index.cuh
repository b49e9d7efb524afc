// The number of a piece of work, taken apart into the indices of what it is about.
#pragma once

#include <cuda_runtime.h>

namespace dmattn {

// Mixed radix, the fastest index first: each kernel says in which order its blocks go through heads, tiles and splits.
struct WorkIndex {
  int rest;  // after the last take(): the slowest index

  __device__ __forceinline__ explicit WorkIndex(int work) : rest(work) {}
  __device__ __forceinline__ int take(int extent) {
    const int index = rest % extent;
    rest /= extent;
    return index;
  }
};

}  // namespace dmattn
