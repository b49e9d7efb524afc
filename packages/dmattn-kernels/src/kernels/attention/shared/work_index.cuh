// The number of a piece of work, taken apart into the indices of what it is about.
#pragma once

#include <cuda_runtime.h>

#include "../../divisor.h"

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

// The same with an extent that the host has prepared, for numbers below 2^31.
__device__ __forceinline__ int take(uint32_t& rest, const Divisor& extent) {
  const uint32_t quotient = extent.value == 1 ? rest : __umulhi(rest, extent.multiplier) >> extent.shift;
  const uint32_t index = rest - quotient * extent.value;
  rest = quotient;
  return static_cast<int>(index);
}

// Elements between a head's first row and another one of TokenRows. row_stride: between the rows of a token.
__device__ __forceinline__ int64_t token_row_offset(const Divisor& group, int64_t token_stride, int64_t row_stride,
                                                    int row) {
  uint32_t token = row;
  const int of_token = take(token, group);
  return token * token_stride + of_token * row_stride;
}

}  // namespace dmattn
