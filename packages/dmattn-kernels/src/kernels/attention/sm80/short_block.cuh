// Attention over few keys, which all fit one tile: what the forward and the backward have in common.
#pragma once

#include "../../short_params.h"
#include "../../tiles.h"
#include "../shared/launch.cuh"
#include "../shared/scores.cuh"
#include "../shared/work_index.cuh"
#include "copy.cuh"

namespace dmattn {

// The number of this thread. The compiler takes it for a new one each time: what follows from it is then worked out again
// for each tile. Kept over the tiles, such addresses took more registers than there are.
__device__ __forceinline__ int renewed_thread() {
  int thread = static_cast<int>(threadIdx.x);
  asm volatile("" : "+r"(thread));
  return thread;
}

// What a bias and a mask do to the scores of a warp: 16 rows and 8 NT keys, which begin at `map` in a tile of kShortRows
// rows from row0 on.
template <class Element, int NT>
struct ShortScores {
  using Fragments = float[1][NT][4];
  const ShortParams& p;
  FragmentMap map;
  int row0;

  __device__ __forceinline__ bool exists(int row, int col) const { return row < p.seqlen_q && col < p.seqlen_k; }

  // Whether a tile with room for so many keys has some to cut.
  __device__ __forceinline__ bool has_limits(int keys) const { return p.is_causal || p.seqlen_k < keys; }
  // acc = -inf for keys past the end and, when causal, keys after the row's last one.
  __device__ __forceinline__ void apply_limits(Fragments& acc) const {
#pragma unroll
    for (int nt = 0; nt < NT; ++nt)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = row0 + map.row(0, e), col = map.col(nt, e);
        const int end = p.is_causal ? min(p.seqlen_k, row + p.seqlen_k - p.seqlen_q + 1) : p.seqlen_k;
        if (col >= end) acc[0][nt][e] = -INFINITY;
      }
  }

  // Which scores the mask of a batch and a query head keeps, a bit each: score e of fragment nt is bit 4 nt + e. Scores
  // that there are not count as kept.
  __device__ __forceinline__ uint32_t load_mask(int batch, int head) const {
    static_assert(4 * NT <= 32);
    const MaskSource& mask = p.mask;
    const uint8_t* base = mask.ptr + batch * mask.batch_stride + (head / p.mask_head_ratio) * mask.head_stride;
    uint32_t kept = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row0 + map.row(0, 2 * half);
      const uint8_t* of_row = base + row * mask.row_stride;
#pragma unroll
      for (int nt = 0; nt < NT; ++nt)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int col = map.col(nt, c);
          const bool keeps = !exists(row, col) || __ldg(of_row + col * mask.col_stride) != 0;
          kept |= static_cast<uint32_t>(keeps) << (4 * nt + 2 * half + c);
        }
    }
    return kept;
  }
  static __device__ __forceinline__ void apply_mask(Fragments& acc, uint32_t kept) {
#pragma unroll
    for (int nt = 0; nt < NT; ++nt)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if ((kept >> (4 * nt + e) & 1) == 0) acc[0][nt][e] = -INFINITY;
      }
  }

  // The bias of a batch and a query head; 0 where there are no scores.
  __device__ __forceinline__ float4 load_bias_of(int nt, int batch, int head) const {
    constexpr bool kIsBf16 = std::is_same_v<Element, cutlass::bfloat16_t>;
    const int64_t base = batch * p.bias.batch_stride + (head / p.bias.head_ratio) * p.bias.head_stride;
    float bias[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int row = row0 + map.row(0, e), col = map.col(nt, e);
      const int64_t at = base + row * p.bias.row_stride + col * p.bias.col_stride;
      bias[e] = exists(row, col) ? load_bias(p.bias, at, kIsBf16) : 0.f;
    }
    return make_float4(bias[0], bias[1], bias[2], bias[3]);
  }
  // bias_of(nt): of the fragment nt.
  template <class F>
  static __device__ __forceinline__ void add_bias(Fragments& acc, F&& bias_of) {
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
      const float4 bias = bias_of(nt);
      acc[0][nt][0] += bias.x;
      acc[0][nt][1] += bias.y;
      acc[0][nt][2] += bias.z;
      acc[0][nt][3] += bias.w;
    }
  }
};

// The rows of a batch and a head, from row0 on.
template <class Element>
__device__ __forceinline__ const Element* rows_at(const void* base, const Strides3& s, int batch, int head, int row0) {
  return static_cast<const Element*>(base) + batch * s.batch + head * s.head + row0 * s.row;
}
template <class Element>
__device__ __forceinline__ Element* rows_at(void* base, const Strides3& s, int batch, int head, int row0) {
  return static_cast<Element*>(base) + batch * s.batch + head * s.head + row0 * s.row;
}
__device__ __forceinline__ int64_t row_at(const Strides3& s, int batch, int head, int row) {
  return batch * s.batch + head * s.head + row * s.row;
}

// Four words that each lane of a quad has, word i of lane t for lane i: lane i gets those of lanes 0 to 3, in this order.
__device__ __forceinline__ uint4 transpose_quad(const uint32_t (&words)[4], int lane) {
  const bool odd = lane & 1, upper = lane & 2;
  const auto exchange = [&](uint32_t even_word, uint32_t odd_word) {
    const uint32_t got = __shfl_xor_sync(0xffffffffu, odd ? even_word : odd_word, 1);
    return odd ? make_uint2(got, odd_word) : make_uint2(even_word, got);
  };
  const uint2 low = exchange(words[0], words[1]), high = exchange(words[2], words[3]);
  const uint2 kept = upper ? high : low, sent = upper ? low : high;
  const uint2 got = {__shfl_xor_sync(0xffffffffu, sent.x, 2), __shfl_xor_sync(0xffffffffu, sent.y, 2)};
  return upper ? make_uint4(got.x, got.y, kept.x, kept.y) : make_uint4(kept.x, kept.y, got.x, got.y);
}

// Writes 16 rows that a warp holds, rounded, straight from its registers, 16 bytes a lane: rows of `out` below `rows`,
// columns from col0 on and below `cols`. Two fragments at a time, where their number is no multiple of four, go by 8 bytes.
template <class Element, int NT>
__device__ __forceinline__ void store_rows(Element* out, int64_t row_stride, const float (&acc)[1][NT][4], int col0,
                                           int rows, int cols, int lane) {
  static_assert(NT % 4 == 0 || NT == 2);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = lane / 4 + 8 * half;
    uint32_t words[NT];
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
      words[nt] = ElementTraits<Element>::pack(acc[0][nt][2 * half], acc[0][nt][2 * half + 1]);
    }
    if constexpr (NT == 2) {
      const bool odd = lane & 1;
      const uint32_t got = __shfl_xor_sync(0xffffffffu, odd ? words[0] : words[1], 1);
      const int col = col0 + (odd ? 8 : 0) + (lane & 2) * 2;
      if (row < rows && col < cols) {
        *reinterpret_cast<uint2*>(out + row * row_stride + col) =
            odd ? make_uint2(got, words[1]) : make_uint2(words[0], got);
      }
    } else {
#pragma unroll
      for (int nt = 0; nt < NT; nt += 4) {
        const uint4 chunk = transpose_quad({words[nt], words[nt + 1], words[nt + 2], words[nt + 3]}, lane);
        const int col = col0 + 8 * (nt + (lane & 3));
        if (row < rows && col < cols) *reinterpret_cast<uint4*>(out + row * row_stride + col) = chunk;
      }
    }
  }
}

// Calls f(head dimension, level) of the kernel for a problem, as compile-time constants.
template <class F>
cudaError_t with_short_shape(const ShortParams& p, Level level, F&& f) {
  const auto with_level = [&](auto head_dim) {
    return level == Level::kPlain ? f(head_dim, std::integral_constant<Level, Level::kPlain>{})
                                  : f(head_dim, std::integral_constant<Level, Level::kGeneral>{});
  };
  return short_head_dim(p.head_dim) == 32 ? with_level(std::integral_constant<int, 32>{})
                                          : with_level(std::integral_constant<int, 64>{});
}

}  // namespace dmattn
