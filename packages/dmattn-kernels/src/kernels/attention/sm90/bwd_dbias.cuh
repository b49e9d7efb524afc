// The gradient of a dense bias whose rows do not start on 16 bytes, from a consumer's tile in shared memory to where it
// belongs: by threads, as TMA does not take it. Whole warps, a row each; rows and keys outside the tensor are left out.
#pragma once

#include "bias_rows.h"
#include "bwd_bias.cuh"

namespace dmattn::sm90 {

// The part of a tensor that begins with a tile's first row and key, and how many of them there are.
struct DbiasPart {
  void* to;  // fp32 or 16-bit
  int64_t row_stride;
  int rows, keys;
};

// The word of a lane in a row of a panel of 128 bytes.
__device__ __forceinline__ uint32_t word_of_row(uint32_t panel, uint32_t row, int lane) {
  return panel + row * kPanelRowBytes + ((lane / 4 ^ row % 8) << 4) + lane % 4 * 4;
}

// Stores a 16-bit panel of 64 keys. A row may begin in the middle of four bytes: then lanes store the second of their
// numbers and the first of the next, and the row's ends remain.
template <int kRows>
__device__ __forceinline__ void store_dbias_panel(const DbiasPart& part, uint32_t panel, int warp, int lane) {
  constexpr int kBatch = 4;  // rows of a warp that are read before they are stored
#pragma unroll 1
  for (int first = warp; first < kRows; first += 4 * kBatch) {
    uint32_t words[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) words[i] = ld_shared(word_of_row(panel, first + 4 * i, lane));
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int row = first + 4 * i;
      const uint32_t next = __shfl_down_sync(0xffffffffu, words[i], 1);
      if (row >= part.rows) continue;
      uint16_t* const to = static_cast<uint16_t*>(part.to) + row * part.row_stride + 2 * lane;
      const int left = part.keys - 2 * lane;
      const bool is_odd = reinterpret_cast<uintptr_t>(to) & 2;
      const uint32_t two = is_odd ? __byte_perm(words[i], next, 0x5432) : words[i];
      const bool has_two = left > (is_odd ? 2 : 1) && !(is_odd && lane == 31);
      if (is_odd && lane == 0 && left > 0) to[0] = static_cast<uint16_t>(words[i]);
      if (has_two) {
        *reinterpret_cast<uint32_t*>(to + is_odd) = two;
      } else if (left > is_odd) {
        to[is_odd] = static_cast<uint16_t>(two);
      }
    }
  }
}

// Adds a 16-bit panel of 64 keys to fp32 sums.
template <class Element, int kRows>
__device__ __forceinline__ void add_dbias_panel(const DbiasPart& part, uint32_t panel, int warp, int lane) {
#pragma unroll 2  // few registers
  for (int row = warp; row < min(kRows, part.rows); row += 4) {
    float* const to = static_cast<float*>(part.to) + row * part.row_stride + lane;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t word = ld_shared(word_of_row(panel, row, 16 * half + lane / 2));
      const float2 two = ElementTraits<Element>::unpack(word);
      if (lane + 32 * half < part.keys) atomicAdd(to + 32 * half, lane % 2 == 0 ? two.x : two.y);
    }
  }
}

// Stores a panel of 32 keys in fp32, or adds it to sums.
template <int kRows>
__device__ __forceinline__ void send_wide_dbias_panel(const DbiasPart& part, uint32_t panel, bool is_sum, int warp,
                                                      int lane) {
#pragma unroll 4
  for (int row = warp; row < min(kRows, part.rows); row += 4) {
    const float x = __uint_as_float(ld_shared(word_of_row(panel, row, lane)));
    float* const to = static_cast<float*>(part.to) + row * part.row_stride + lane;
    if (lane >= part.keys) continue;
    if (is_sum) {
      atomicAdd(to, x);
    } else {
      *to = x;
    }
  }
}

}  // namespace dmattn::sm90
