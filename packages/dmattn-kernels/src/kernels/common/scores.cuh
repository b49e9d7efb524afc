// What happens to a tile of scores between q k^T and the softmax: scale, softcap, bias, mask, causality, lengths.
// One authority for the forward and the backward.
#pragma once

#include "../params.h"
#include "atoms.cuh"
#include "tile_copy.cuh"

namespace dmattn {

__device__ __forceinline__ float tanh_fast(float x) {
  // 1 - 2 / (1 + e^2x): absolute error about 1e-7 over the whole range; tanh.approx has 5e-4, too much for fp16.
  return 1.f - __fdividef(2.f, 1.f + exp2_approx(2.f * kLog2e * x));
}

__device__ __forceinline__ float load_bias(const BiasParams& bias, int64_t offset, bool is_bf16) {
  if (bias.dtype == Dtype::kFloat32) return __ldg(static_cast<const float*>(bias.ptr) + offset);
  const uint32_t bits = __ldg(static_cast<const uint16_t*>(bias.ptr) + offset);
  return is_bf16 ? ElementTraits<cutlass::bfloat16_t>::unpack(bits).x : ElementTraits<cutlass::half_t>::unpack(bits).x;
}

// Where a thread's accumulators lie in a kBlockM x kBlockN tile: element e of fragment (mt, nt) is at
// row(mt, e), col(nt, e).
struct FragmentMap {
  int row0, col0;  // first row and column of this lane
  __device__ __forceinline__ FragmentMap(int warp_row0, int warp_col0, int lane)
      : row0(warp_row0 + lane / 4), col0(warp_col0 + 2 * (lane & 3)) {}
  __device__ __forceinline__ int row(int mt, int e) const { return row0 + 16 * mt + 8 * (e >> 1); }
  __device__ __forceinline__ int col(int nt, int e) const { return col0 + 8 * nt + (e & 1); }
};

// Per-tile inputs of the score modification.
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
  int bit0 = 0;                // first bit of the tile inside its mask words (tiles of 32 keys)
};

// acc = scale * acc, softcapped. Leaves tanh in place of nothing: the backward recomputes its derivative itself.
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

// acc += bias, in natural units: a bias of finfo.min may not overflow, as it would after a multiplication by log2(e).
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

// The forward's bias tile: rows of kCols + 8 elements at any alignment, copied by cp.async from the 16 bytes around
// their start. Element (row, col) then lies 2 col bytes behind the row's own offset into those 16 bytes.
template <int kCols>
struct ShiftedTile {
  static constexpr int kPitch = (kCols + 8) * 2;  // 16 (mod 128) bytes or 80: eight rows fall on different banks
  const uint16_t* src;                            // element (0, 0)
  int64_t row_stride;

  __device__ __forceinline__ uint32_t shift(int row) const {
    return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(src + row * row_stride)) & 15;
  }
  template <int kRows, int kThreads>
  __device__ __forceinline__ void load(uint32_t dst, int rows, int cols, int thread) const {
    constexpr int kChunks = kPitch / 16;
#pragma unroll
    for (int i = 0; i < (kRows * kChunks + kThreads - 1) / kThreads; ++i) {
      if (kRows * kChunks % kThreads != 0 && thread + i * kThreads >= kRows * kChunks) break;
      const int chunk = (thread + i * kThreads) % kChunks, row = (thread + i * kThreads) / kChunks;
      const int skipped = shift(row);
      const int bytes = row < rows ? 2 * min(cols, kCols) + skipped - 16 * chunk : 0;
      const char* from = reinterpret_cast<const char*>(src + row * row_stride) - skipped + 16 * chunk;
      if (row + 1 != rows || bytes <= 0 || bytes >= 16) {
        cp_async16_bytes(dst + row * kPitch + chunk * 16, from, max(0, min(bytes, 16)));
      }
    }
    if (rows <= kRows && thread < 8) load_end(dst, rows - 1, 2 * min(cols, kCols), thread);
  }
  // The last 16 bytes of the last row, where the memory of the bias may end: element by element, nothing past the end.
  __device__ __forceinline__ void load_end(uint32_t dst, int row, int row_bytes, int element) const {
    const int skipped = shift(row), chunk = (row_bytes + skipped) / 16, bytes = (row_bytes + skipped) % 16;
    const uint16_t* from = src + row * row_stride + (8 * chunk - skipped / 2) + element;
    if (bytes > 0) {
      st_shared_u16(dst + row * kPitch + chunk * 16 + 2 * element, 2 * element < bytes ? __ldg(from) : uint16_t{0});
    }
  }
  // Elements (row, col) and (row, col + 1), col even.
  __device__ __forceinline__ uint32_t pair(uint32_t tile, int row, uint32_t row_shift, int col) const {
    const uint32_t addr = tile + row * kPitch + row_shift + col * 2;
    if ((row_shift & 2) == 0) return ld_shared(addr);
    return __funnelshift_r(ld_shared(addr - 2), ld_shared(addr + 2), 16);
  }
};

// acc += bias from a ShiftedTile.
template <class Element, int kBlockN, int MT, int NT>
__device__ __forceinline__ void add_shifted_bias(float (&acc)[MT][NT][4], const ShiftedTile<kBlockN>& bias,
                                                 uint32_t tile, const FragmentMap& map) {
#pragma unroll
  for (int mt = 0; mt < MT; ++mt)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = map.row(mt, 2 * half);
      const uint32_t row_shift = bias.shift(row);
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
        const float2 b = ElementTraits<Element>::unpack(bias.pair(tile, row, row_shift, map.col(nt, 0)));
        acc[mt][nt][2 * half] += b.x;
        acc[mt][nt][2 * half + 1] += b.y;
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

// The positions that keep a key of an interval list: begin <= r < begin + length.
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
