// Small pieces of block-level plumbing shared by the forward and the backward.
#pragma once

#include "../params.h"
#include "atoms.cuh"

namespace dmattn {

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

// Rows that start on 16 bytes whichever (batch, head, row) is taken, for 16-bit elements.
__device__ __forceinline__ bool is_vec16(const void* ptr, int64_t stride_a, int64_t stride_b, int64_t stride_c) {
  return ((reinterpret_cast<uintptr_t>(ptr) & 15) | ((stride_a | stride_b | stride_c) & 7)) == 0;
}

// The packed mask bits of a tile: kRows x kWords words, columns from word0 on. Of its rows only the first `rows` are
// read: those behind may belong to a packed sequence of fewer keys, whose rows of bits end earlier.
template <int kRows, int kWords, int kThreads>
__device__ __forceinline__ void load_mask_words(uint32_t dst, const MaskBits& mask, int64_t index, int row0, int rows,
                                                int word0) {
  for (int row = threadIdx.x; row < kRows; row += kThreads) {
    if (row < rows) {
      const uint32_t* src = mask.bits + (index * mask.rows + row0 + row) * mask.words_per_row + word0;
      asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(dst + row * kWords * 4), "l"(src),
                   "n"(kWords * 4));
    }
  }
}

}  // namespace dmattn
