// Attention over few keys, all of which fit one tile: what the forward and the backward have in common.
#pragma once

#include "../../short_params.h"
#include "../../tiles.h"
#include "../shared/launch.cuh"
#include "../shared/scores.cuh"
#include "../shared/work_index.cuh"
#include "copy.cuh"

namespace dmattn {

// threadIdx.x, but the compiler has to assume that each call returns another number. So it computes addresses again
// for each tile: when it kept them from tile to tile, they took more registers than there are.
__device__ __forceinline__ int renewed_thread() {
  int thread = static_cast<int>(threadIdx.x);
  asm volatile("" : "+r"(thread));
  return thread;
}

// Keys that a mask hides from all rows may hold NaN, which a weight of 0 would not keep out of the results. So their
// rows of a tile of K or V are set to zero. Called by all threads, with a barrier before and after it.
template <int kHeadDim, int kThreads>
__device__ __forceinline__ void clear_hidden_keys(uint32_t tile, const uint8_t* mask, int64_t col_stride, int keys,
                                                  int thread) {
  using Tile = SmemTile<kHeadDim>;
  for (int i = thread; i < keys * Tile::kChunks; i += kThreads) {
    const int key = i / Tile::kChunks, chunk = i % Tile::kChunks;
    if (__ldg(mask + key * col_stride) == 0) st_shared(tile + Tile::offset(key, chunk), make_uint4(0, 0, 0, 0));
  }
}
// Whether a mask is the same for all rows. In the backward it then is the same for all query heads of a kv head, too.
__device__ __forceinline__ bool hides_keys(const ShortParams& p) {
  return p.mask.ptr != nullptr && p.mask.row_stride == 0;
}
__device__ __forceinline__ const uint8_t* mask_of(const ShortParams& p, int batch, int head) {
  return p.mask.ptr + batch * p.mask.batch_stride + (head / p.mask_head_ratio) * p.mask.head_stride;
}

// The levels of these kernels:
//   kPlain    neither bias nor mask, a positive scale; in the backward all three gradients
//   kGeneral  any bias and mask, any gradients
//   kFull     any mask, and a bias that all batches share: a thread block reads it once for all of its batches, and
//             sums its gradient in registers

// What a bias and a mask do to the scores of a warp: 16 rows and 8 NT keys. `map` is their place in a tile of
// kShortRows rows, of which row0 is the first.
template <class Element, int NT>
struct ShortScores {
  using Fragments = float[1][NT][4];
  const ShortParams& p;
  FragmentMap map;
  int row0;

  __device__ __forceinline__ bool exists(int row, int col) const { return row < p.seqlen_q && col < p.seqlen_k; }

  // Whether a tile with room for `keys` keys has places without a key, or keys that some row does not see.
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

  // Which scores of the lane's two rows the mask of a batch and query head keeps: a word for each row and each 32
  // keys (four fragments). Bit 8 i + c is for the lane's column c, 0 or 1, in fragment i of the four.
  struct Kept {
    uint32_t words[(NT + 3) / 4][2];
  };
  // first ? a : b, in a form that leaves both in registers.
  static __device__ __forceinline__ Kept choose(bool first, const Kept& a, const Kept& b) {
    Kept chosen;
#pragma unroll
    for (int i = 0; i < (NT + 3) / 4; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) chosen.words[i][half] = first ? a.words[i][half] : b.words[i][half];
    return chosen;
  }
  __device__ __forceinline__ Kept load_mask(int batch, int head, int lane) const {
    const MaskSource& mask = p.mask;
    const uint8_t* of_head = mask_of(p, batch, head);
    if (mask.row_stride == 0) return load_key_mask(of_head, lane);
    if (mask.col_stride == 1) return load_row_mask(of_head, std::integral_constant<int, 1>{});
    return load_row_mask(of_head, mask.col_stride);
  }
  // A mask that is the same for all rows: each lane reads the entry of one key, and a vote gives the warp all of them.
  __device__ __forceinline__ Kept load_key_mask(const uint8_t* of_head, int lane) const {
    Kept kept;
#pragma unroll
    for (int i = 0; i < (NT + 3) / 4; ++i) {
      const int col = map.col0 - 2 * (lane & 3) + 32 * i + lane;
      const bool keeps = col < p.seqlen_k && __ldg(of_head + col * p.mask.col_stride) != 0;
      kept.words[i][0] = kept.words[i][1] = __ballot_sync(0xffffffffu, keeps) >> 2 * (lane & 3);
    }
    return kept;
  }
  template <class Stride>
  __device__ __forceinline__ Kept load_row_mask(const uint8_t* of_head, Stride col_stride) const {
    Kept kept = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row0 + map.row(0, 2 * half);
      const uint8_t* of_row = of_head + row * p.mask.row_stride + map.col0 * col_stride;
#pragma unroll
      for (int nt = 0; nt < NT; ++nt)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const bool keeps = exists(row, map.col(nt, c)) && __ldg(of_row + (8 * nt + c) * col_stride) != 0;
          kept.words[nt / 4][half] |= static_cast<uint32_t>(keeps) << (8 * (nt % 4) + c);
        }
    }
    return kept;
  }
  static __device__ __forceinline__ void apply_mask(Fragments& acc, const Kept& kept) {
#pragma unroll
    for (int nt = 0; nt < NT; ++nt)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if ((kept.words[nt / 4][e / 2] >> (8 * (nt % 4) + (e & 1)) & 1) == 0) acc[0][nt][e] = -INFINITY;
      }
  }

  // Calls f(nt, bias) with the lane's entries of each fragment of the bias of a batch and query head; entries beyond
  // the last row or key are 0.
  template <class F>
  __device__ __forceinline__ void for_each_bias(int batch, int head, F&& f) const {
    const BiasParams& bias = p.bias;
    const int64_t base = batch * bias.batch_stride + (head / bias.head_ratio) * bias.head_stride;
    if (bias.dtype == Dtype::kFloat32) {
      for_each_bias_as(static_cast<const float*>(bias.ptr) + base, f);
    } else {
      for_each_bias_as(static_cast<const Element*>(bias.ptr) + base, f);
    }
  }
  // Entries of neighbouring keys are read in pairs where they are contiguous and pairs are aligned.
  template <class B, class F>
  __device__ __forceinline__ void for_each_bias_as(const B* base, F&& f) const {
    const BiasParams& bias = p.bias;
    const bool has_pairs =
        bias.col_stride == 1 && bias.row_stride % 2 == 0 && reinterpret_cast<uintptr_t>(base) % (2 * sizeof(B)) == 0;
    if (has_pairs) {
      for_each_bias_pair(base, f);
    } else {
      for_each_bias_at(base, bias.col_stride, f);
    }
  }
  template <class B, class F>
  __device__ __forceinline__ void for_each_bias_at(const B* base, int64_t col_stride, F&& f) const {
    const B* of_rows[2];
    bool has_row[2];
    find_bias_rows(base + map.col0 * col_stride, of_rows, has_row);
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
      float values[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const bool is_there = has_row[e / 2] && map.col(nt, e) < p.seqlen_k;
        values[e] = is_there ? read_bias(of_rows[e / 2] + (8 * nt + (e & 1)) * col_stride) : 0.f;
      }
      f(nt, make_float4(values[0], values[1], values[2], values[3]));
    }
  }
  template <class B, class F>
  __device__ __forceinline__ void for_each_bias_pair(const B* base, F&& f) const {
    const B* of_rows[2];
    bool has_row[2];
    find_bias_rows(base + map.col0, of_rows, has_row);
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
      float2 values[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        values[half] = {0.f, 0.f};
        if (half == 1 && p.bias.row_stride == 0) {
          values[1] = values[0];
        } else if (has_row[half] && map.col(nt, 1) < p.seqlen_k) {
          values[half] = read_bias_pair(of_rows[half] + 8 * nt);
        } else if (has_row[half] && map.col(nt, 0) < p.seqlen_k) {
          values[half].x = read_bias(of_rows[half] + 8 * nt);
        }
      }
      f(nt, make_float4(values[0].x, values[0].y, values[1].x, values[1].y));
    }
  }
  // Where the lane's two rows of the bias start, and whether these rows exist. from: row 0 of the bias.
  template <class B>
  __device__ __forceinline__ void find_bias_rows(const B* from, const B* (&of_rows)[2], bool (&has_row)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row0 + map.row(0, 2 * half);
      of_rows[half] = from + row * p.bias.row_stride;
      has_row[half] = row < p.seqlen_q;
    }
    // A bias that is the same for all rows can be read for rows that do not exist, too.
    if (p.bias.row_stride == 0) has_row[0] = has_row[1] = true;
  }
  static __device__ __forceinline__ float read_bias(const float* at) { return __ldg(at); }
  static __device__ __forceinline__ float read_bias(const Element* at) {
    return ElementTraits<Element>::unpack(__ldg(reinterpret_cast<const uint16_t*>(at))).x;
  }
  static __device__ __forceinline__ float2 read_bias_pair(const float* at) {
    return __ldg(reinterpret_cast<const float2*>(at));
  }
  static __device__ __forceinline__ float2 read_bias_pair(const Element* at) {
    return ElementTraits<Element>::unpack(__ldg(reinterpret_cast<const uint32_t*>(at)));
  }

  static __device__ __forceinline__ void add(Fragments& acc, int nt, const float4& bias) {
    acc[0][nt][0] += bias.x;
    acc[0][nt][1] += bias.y;
    acc[0][nt][2] += bias.z;
    acc[0][nt][3] += bias.w;
  }
};

// Row row0 of a batch and a head.
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

// Transposes the words of a quad of lanes: lane i gets word i of lanes 0 to 3, in this order.
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

// Rounds the 16 rows that a warp holds and writes them from registers to global memory, 16 bytes a lane: the rows of
// `out` below `rows`, and the columns from col0 on that are below `cols`. If there are only two fragments, a lane
// writes 8 bytes.
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

// Calls f(head dimension, level) with those of the kernel that serves `p`, as compile-time constants.
template <class F>
cudaError_t with_short_shape(const ShortParams& p, Level level, F&& f) {
  const auto with_level = [&](auto head_dim) {
    return level == Level::kPlain  ? f(head_dim, std::integral_constant<Level, Level::kPlain>{})
           : level == Level::kFull ? f(head_dim, std::integral_constant<Level, Level::kFull>{})
                                   : f(head_dim, std::integral_constant<Level, Level::kGeneral>{});
  };
  return short_head_dim(p.head_dim) == 32 ? with_level(std::integral_constant<int, 32>{})
                                          : with_level(std::integral_constant<int, 64>{});
}

}  // namespace dmattn
