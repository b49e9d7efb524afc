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

// Which of a thread's scores stay, a bit each: score e of fragment nt is bit 4 nt + e.
template <int NT>
struct KeptScores {
  static_assert(NT % 8 == 0);
  uint32_t words[NT / 8];

  __device__ __forceinline__ bool has(int nt, int e) const { return words[nt / 8] >> (4 * (nt % 8) + e) & 1; }
  __device__ __forceinline__ void cut(int nt, int e) { words[nt / 8] &= ~(1u << (4 * (nt % 8) + e)); }
  // Of all scores of the warp.
  __device__ __forceinline__ bool has_all() const {
    bool all = true;
#pragma unroll
    for (int i = 0; i < NT / 8; ++i) all &= words[i] == ~0u;
    return __all_sync(0xffffffffu, all);
  }
  __device__ __forceinline__ void fill() {
#pragma unroll
    for (int i = 0; i < NT / 8; ++i) words[i] = ~0u;
  }
  template <int MT>
  __device__ __forceinline__ void apply(float (&acc)[MT][NT][4]) const {
#pragma unroll
    for (int nt = 0; nt < NT; ++nt)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (!has(nt, e)) acc[0][nt][e] = -INFINITY;
      }
  }
};

// A tile of kShortRows rows and all keys. NT: fragments of 8 keys that a warp has of its 16 rows. kThreads of the block.
template <class Element, int NT, int kThreads>
struct ShortScores {
  const ShortParams& p;
  int thread;
  FragmentMap map;  // of the warp in the tile

  __device__ __forceinline__ ShortScores(const ShortParams& params, int warp_row0, int warp_col0, int thread_)
      : p(params), thread(thread_), map(warp_row0, warp_col0, thread_ & 31) {}

  __device__ __forceinline__ bool exists(int row, int col) const { return row < p.seqlen_q && col < p.seqlen_k; }

  // Keys that there are and, when causal, that the rows see.
  __device__ __forceinline__ void apply_limits(KeptScores<NT>& kept, int row0) const {
#pragma unroll
    for (int nt = 0; nt < NT; ++nt)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = row0 + map.row(0, e), col = map.col(nt, e);
        const int end = p.is_causal ? min(p.seqlen_k, row + p.seqlen_k - p.seqlen_q + 1) : p.seqlen_k;
        if (col >= end) kept.cut(nt, e);
      }
  }
  // The mask of a batch and a query head.
  __device__ __forceinline__ void apply_mask(KeptScores<NT>& kept, int batch, int head, int row0) const {
    const MaskSource& mask = p.mask;
    const uint8_t* base = mask.ptr + batch * mask.batch_stride + (head / p.mask_head_ratio) * mask.head_stride;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row0 + map.row(0, 2 * half);
      const uint8_t* of_row = base + row * mask.row_stride;
#pragma unroll
      for (int nt = 0; nt < NT; ++nt)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int col = map.col(nt, c);
          if (exists(row, col) && __ldg(of_row + col * mask.col_stride) == 0) kept.cut(nt, 2 * half + c);
        }
    }
  }

  // The bias of a batch and a query head; 0 where there are no scores.
  __device__ __forceinline__ void load_bias_tile(float (&bias)[NT][4], int batch, int head, int row0) const {
    constexpr bool kIsBf16 = std::is_same_v<Element, cutlass::bfloat16_t>;
    const int64_t base = batch * p.bias.batch_stride + (head / p.bias.head_ratio) * p.bias.head_stride;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row0 + map.row(0, 2 * half);
      const int64_t of_row = base + row * p.bias.row_stride;
#pragma unroll
      for (int nt = 0; nt < NT; ++nt)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int col = map.col(nt, c);
          bias[nt][2 * half + c] =
              exists(row, col) ? load_bias(p.bias, of_row + col * p.bias.col_stride, kIsBf16) : 0.f;
        }
    }
  }
  // A bias that several batches share stays in shared memory, where each thread has its own place: [NT][kThreads].
  static constexpr uint32_t kStageBytes = NT * kThreads * sizeof(float4);
  __device__ __forceinline__ void keep_bias(float4* stage, const float (&bias)[NT][4]) const {
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
      stage[nt * kThreads + thread] = make_float4(bias[nt][0], bias[nt][1], bias[nt][2], bias[nt][3]);
    }
  }
  template <int MT>
  __device__ __forceinline__ void add_kept_bias(float (&acc)[MT][NT][4], const float4* stage) const {
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
      const float4 b = stage[nt * kThreads + thread];
      acc[0][nt][0] += b.x;
      acc[0][nt][1] += b.y;
      acc[0][nt][2] += b.z;
      acc[0][nt][3] += b.w;
    }
  }
  template <int MT>
  static __device__ __forceinline__ void add_to(float (&sums)[NT][4], const float (&acc)[MT][NT][4]) {
#pragma unroll
    for (int nt = 0; nt < NT; ++nt)
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[nt][e] += acc[0][nt][e];
  }
  template <int MT>
  static __device__ __forceinline__ void add(float (&acc)[MT][NT][4], const float (&bias)[NT][4]) {
#pragma unroll
    for (int nt = 0; nt < NT; ++nt)
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[0][nt][e] += bias[nt][e];
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

// Calls f(head dimension, number of keys, level) of the kernel for a problem, as compile-time constants.
template <class F>
cudaError_t with_short_shape(const ShortParams& p, Level level, F&& f) {
  const auto with_level = [&](auto head_dim, auto keys) {
    return level == Level::kPlain ? f(head_dim, keys, std::integral_constant<Level, Level::kPlain>{})
                                  : f(head_dim, keys, std::integral_constant<Level, Level::kGeneral>{});
  };
  const auto with_keys = [&](auto head_dim) {
    return short_keys(p.seqlen_k) == 64 ? with_level(head_dim, std::integral_constant<int, 64>{})
                                        : with_level(head_dim, std::integral_constant<int, 128>{});
  };
  return short_head_dim(p.head_dim) == 32 ? with_keys(std::integral_constant<int, 32>{})
                                          : with_keys(std::integral_constant<int, 64>{});
}

}  // namespace dmattn
