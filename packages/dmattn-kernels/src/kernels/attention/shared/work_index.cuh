// Splits the number of a piece of work into indices, such as those of its head, tile and split.
#pragma once

#include <cuda_runtime.h>

#include "../../divisor.h"

namespace dmattn {

// A number in mixed radix, whose fastest index is taken first. Each kernel decides in which order its thread blocks
// go through heads, tiles and splits. Int is the type of the divisions: unsigned ones take fewer instructions and
// registers, which counts in kernels whose thread blocks do little work.
template <class Int>
struct WorkIndex {
  Int rest;  // what take() has left; after the last take(), the slowest index

  __device__ __forceinline__ explicit WorkIndex(Int work) : rest(work) {}
  __device__ __forceinline__ int take(Int extent) {
    const Int index = rest % extent;
    rest /= extent;
    return static_cast<int>(index);
  }
};

// As WorkIndex::take(), with a divisor that the host has prepared, for numbers below 2^31.
__device__ __forceinline__ int take(uint32_t& rest, const Divisor& extent) {
  const uint32_t quotient = extent.value == 1 ? rest : __umulhi(rest, extent.multiplier) >> extent.shift;
  const uint32_t index = rest - quotient * extent.value;
  rest = quotient;
  return static_cast<int>(index);
}

// Offset in elements of row `row` of a head whose rows are laid out as TokenRows, from the first one. row_stride:
// between the rows of a token.
__device__ __forceinline__ int64_t token_row_offset(const Divisor& group, int64_t token_stride, int64_t row_stride,
                                                    int row) {
  uint32_t token = row;
  const int of_token = take(token, group);
  return token * token_stride + of_token * row_stride;
}

}  // namespace dmattn
