// What happens to a tile of scores between q k^T and the softmax: scale, softcap, bias, mask, causality, lengths. The
// forward and the backward share this code, so that both compute the same scores.
#pragma once

#include <climits>
#include <type_traits>

#include "../../params.h"
#include "element.cuh"
#include "fragment.cuh"
#include "smem.cuh"

namespace dmattn {

__device__ __forceinline__ float load_bias(const BiasParams& bias, int64_t offset, bool is_bf16) {
  if (bias.dtype == Dtype::kFloat32) return __ldg(static_cast<const float*>(bias.ptr) + offset);
  const uint32_t bits = __ldg(static_cast<const uint16_t*>(bias.ptr) + offset);
  return is_bf16 ? ElementTraits<cutlass::bfloat16_t>::unpack(bits).x : ElementTraits<cutlass::half_t>::unpack(bits).x;
}

// What the functions below read for a tile.
struct ScoreInputs {
  uint32_t bias_tile = 0;                // kTile: shared address of a SmemTile<kBlockN> of 16-bit bias
  const float* key_bias = nullptr;       // kKey: shared, one fp32 per key of the tile
  const uint32_t* mask_words = nullptr;  // partial dense mask: shared, kBlockN / 32 words a row (at least 1)
  const int32_t* key_idx = nullptr;      // gathered: shared, position of each key of the tile
  uint32_t key_intervals = 0;  // interval lists: shared address, a KeyInterval per key (length 0 past the end)
  int key0 = 0;                // position (or list index, when gathered) of the tile's first key
  int keys = 0;                // keys of the tile that exist
  int row0 = 0;                // first row of the tile
  int rows = 0;                // rows that exist, counted from row0
};

// acc = scale * acc, softcapped. tanh(x) is not kept: the backward recomputes its derivative from the raw products.
template <int MT, int NT>
__device__ __forceinline__ void scale_scores(float (&acc)[MT][NT][4], float scale, float softcap) {
  if (softcap > 0.f) {
    const float inner = scale / softcap;
#pragma unroll
    for (int mt = 0; mt < MT; ++mt)
#pragma unroll
      for (int nt = 0; nt < NT; ++nt)
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[mt][nt][e] = softcap * tanh_fast(acc[mt][nt][e] * inner);
  } else {
#pragma unroll
    for (int mt = 0; mt < MT; ++mt)
#pragma unroll
      for (int nt = 0; nt < NT; ++nt)
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[mt][nt][e] *= scale;
  }
}

// acc += bias, in natural units: multiplied by log2(e), a bias of finfo.min would overflow.
template <class Element, int kBlockN, bool kGathered, bool kElementLoads, int MT, int NT>
__device__ __forceinline__ void add_bias(float (&acc)[MT][NT][4], const BiasParams& bias, int64_t bias_base,
                                         const ScoreInputs& in, const FragmentMap& map) {
  constexpr bool kIsBf16 = std::is_same_v<Element, cutlass::bfloat16_t>;
  if (bias.kind == BiasKind::kKey) {
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
      const float2 b = *reinterpret_cast<const float2*>(in.key_bias + map.col(nt, 0));
#pragma unroll
      for (int mt = 0; mt < MT; ++mt)
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[mt][nt][e] += (e & 1) ? b.y : b.x;
    }
  } else if (!kGathered && bias.kind == BiasKind::kTile) {
    using Tile = SmemTile<kBlockN>;
    const uint32_t base = in.bias_tile + map.row0 * Tile::kRowBytes + (map.col0 & 7) * 2;
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
      const uint32_t chunk = ((map.col0 / 8 + nt) ^ Tile::swizzle(map.row0)) << 4;
#pragma unroll
      for (int mt = 0; mt < MT; ++mt)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float2 b =
              ElementTraits<Element>::unpack(ld_shared(base + chunk + (16 * mt + 8 * half) * Tile::kRowBytes));
          acc[mt][nt][2 * half] += b.x;
          acc[mt][nt][2 * half + 1] += b.y;
        }
    }
  } else if (kElementLoads && bias.kind == BiasKind::kDirect) {
#pragma unroll
    for (int mt = 0; mt < MT; ++mt)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = map.row(mt, 2 * half);
        const int64_t row_base = bias_base + static_cast<int64_t>(in.row0 + row) * bias.row_stride;
#pragma unroll
        for (int nt = 0; nt < NT; ++nt)
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const int col = map.col(nt, c);
            if (row < in.rows && col < in.keys) {
              const int64_t key = kGathered ? in.key_idx[col] : in.key0 + col;
              acc[mt][nt][2 * half + c] += load_bias(bias, row_base + key * bias.col_stride, kIsBf16);
            }
          }
      }
  }
}

// acc = -inf where the packed mask has a 0.
template <int kBlockN, int MT, int NT>
__device__ __forceinline__ void apply_mask_words(float (&acc)[MT][NT][4], const ScoreInputs& in,
                                                 const FragmentMap& map) {
  constexpr int kWords = kBlockN >= 32 ? kBlockN / 32 : 1;
#pragma unroll
  for (int mt = 0; mt < MT; ++mt)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t* words = in.mask_words + map.row(mt, 2 * half) * kWords;
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
        const int col = map.col(nt, 0);
        const uint32_t bits = words[col / 32] >> (col & 31);
        if (!(bits & 1)) acc[mt][nt][2 * half] = -INFINITY;
        if (!(bits & 2)) acc[mt][nt][2 * half + 1] = -INFINITY;
      }
    }
}

// acc = -inf for keys past the end and, when causal, keys after the row's last one: position > row + causal_offset.
template <bool kGathered, int MT, int NT>
__device__ __forceinline__ void apply_limits(float (&acc)[MT][NT][4], const ScoreInputs& in, const FragmentMap& map,
                                             bool is_causal, int causal_offset) {
#pragma unroll
  for (int nt = 0; nt < NT; ++nt)
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int col = map.col(nt, c);
      int position = kGathered ? in.key_idx[col] : in.key0 + col;
      if (col >= in.keys) position = INT_MAX;
#pragma unroll
      for (int mt = 0; mt < MT; ++mt)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int limit = is_causal ? in.row0 + map.row(mt, 2 * half) + causal_offset : INT_MAX - 1;
          if (position > limit) acc[mt][nt][2 * half + c] = -INFINITY;
        }
    }
}

// The same for neighbouring keys, where the positions of rows do not follow one another: last_of(row) is the last
// position that a row sees.
template <int MT, int NT, class LastOf>
__device__ __forceinline__ void apply_limits_of_rows(float (&acc)[MT][NT][4], const ScoreInputs& in,
                                                     const FragmentMap& map, const LastOf& last_of) {
#pragma unroll
  for (int mt = 0; mt < MT; ++mt)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int last = min(last_of(in.row0 + map.row(mt, 2 * half)) - in.key0, in.keys - 1);
#pragma unroll
      for (int nt = 0; nt < NT; ++nt)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          if (map.col(nt, c) > last) acc[mt][nt][2 * half + c] = -INFINITY;
        }
    }
}

// The row positions r that keep a key of an interval list: begin <= r < begin + length.
struct KeyInterval {
  int32_t begin, length;
};

// acc = -inf for rows outside a key's interval.
template <int MT, int NT>
__device__ __forceinline__ void apply_intervals(float (&acc)[MT][NT][4], const ScoreInputs& in, const FragmentMap& map,
                                                int causal_offset) {
  const int position = in.row0 + map.row0 + causal_offset;
#pragma unroll
  for (int nt = 0; nt < NT; ++nt) {
    // Keeps the compiler from loading all intervals first, which spills where the accumulators fill the registers.
    __syncwarp();
    const uint4 pair = ld_shared_v4(in.key_intervals + map.col(nt, 0) * sizeof(KeyInterval));
#pragma unroll
    for (int mt = 0; mt < MT; ++mt)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t r = position + 16 * mt + 8 * half;
        if (r - pair.x >= pair.y) acc[mt][nt][2 * half] = -INFINITY;
        if (r - pair.z >= pair.w) acc[mt][nt][2 * half + 1] = -INFINITY;
      }
  }
}

}  // namespace dmattn
