// What the general forward kernels on Hopper do beyond lengths and causality: tiles that a dense mask leaves, and scores
// that softcap, a bias and the mask change.
#pragma once

#include "../shared/fragment.cuh"
#include "../shared/mask_tiles.cuh"
#include "../shared/scores.cuh"
#include "fwd_items.cuh"
#include "fwd_traits.cuh"

namespace dmattn::sm90 {

// A tile of keys as the producer announces it.
struct KeyTile {
  int32_t word;  // -1: the item has no more

  static __device__ __forceinline__ KeyTile of(int n, bool is_cut, bool is_partial) {
    return {n << 2 | (is_partial ? 2 : 0) | (is_cut ? 1 : 0)};
  }
  static __device__ __forceinline__ KeyTile none() { return {-1}; }
  __device__ __forceinline__ bool exists() const { return word >= 0; }
  __device__ __forceinline__ int n() const { return word >> 2; }
  // Rows meet keys past those that they may see, or past the last one.
  __device__ __forceinline__ bool is_cut() const { return word & 1; }
  // The dense mask leaves some of it.
  __device__ __forceinline__ bool is_partial() const { return word & 2; }
};

__device__ __forceinline__ int64_t find_mask_head(const MaskBits& mask, const FwdItem& item) {
  return static_cast<int64_t>(mask.batch > 1 ? item.batch : 0) * mask.heads + item.head / mask.head_ratio;
}

// The tiles of the item that the mask leaves.
template <class T>
__device__ __forceinline__ MaskTiles<T::kBlockM, T::kBlockN> find_mask_tiles(const GeneralFwdArguments& p,
                                                                             const FwdItem& item) {
  if (p.mask.bits == nullptr) return {};
  const int64_t first = find_mask_head(p.mask, item) * p.mask.bands_q * p.mask.words_k;
  return {p.mask.any_rows + first, p.mask.all_rows + first, p.mask.words_k, p.mask.bands_q, item.m_block};
}

// Between the scores of a tile and their softmax, for the 64 rows of a consumer.
template <class T>
struct ScoreChanges {
  static constexpr int kFragments = T::kBlockN / 8, kWords = T::kBlockN / 32;
  using Scores = float[1][kFragments][4];
  using General = decltype(T::Shared::general);

  const GeneralFwdArguments& p;
  General& s;
  RingPlace<2>& place;   // of the bias
  const int warp, lane;  // warp: among the consumers
  const int first_row;   // the first of the two rows that this thread has, the other comes 8 later
  const uint32_t* bits;  // of the first row, where there is a mask
  int64_t bias_base;     // of the first key, where there is a bias for each key
  // Read while the scores of the tile are computed.
  uint32_t mask_words[2][kWords];
  uint32_t key_bias[kWords];  // as it lies in memory, of the keys lane + 32 * i

  __device__ __forceinline__ ScoreChanges(const GeneralFwdArguments& arguments, General& shared,
                                          RingPlace<2>& bias_place, int warp_, int lane_, const FwdItem& item)
      : p(arguments),
        s(shared),
        place(bias_place),
        warp(warp_),
        lane(lane_),
        first_row(item.m_block * T::kBlockM + warp * 16 + lane / 4),
        bits(p.mask.bits + find_mask_head(p.mask, item) * p.mask.rows * p.mask.words_per_row),
        bias_base(item.batch * p.bias.batch_stride + item.head / p.bias.head_ratio * p.bias.head_stride) {}

  __device__ __forceinline__ void read_ahead(KeyTile tile) {
    if (tile.is_partial()) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = min(first_row + 8 * half, p.seqlen_q - 1);
        const uint32_t* const from = bits + static_cast<int64_t>(row) * p.mask.words_per_row + tile.n() * kWords;
        if constexpr (kWords == 4) {
          const uint4 x = __ldg(reinterpret_cast<const uint4*>(from));
          mask_words[half][0] = x.x, mask_words[half][1] = x.y, mask_words[half][2] = x.z, mask_words[half][3] = x.w;
        } else {
          const uint2 x = __ldg(reinterpret_cast<const uint2*>(from));
          mask_words[half][0] = x.x, mask_words[half][1] = x.y;
        }
      }
    }
    if (T::kLogits && p.bias.kind == BiasKind::kKey) read_key_bias(tile.n() * T::kBlockN);
  }
  // Keys past the last one get its number, and -inf later. Nothing here waits for what is read.
  __device__ __forceinline__ void read_key_bias(int key0) {
    const bool is_wide = p.bias.dtype == Dtype::kFloat32;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const int64_t at = bias_base + min(key0 + 32 * i + lane, p.seqlen_k - 1) * p.bias.col_stride;
      if (is_wide) {
        key_bias[i] = __ldg(static_cast<const uint32_t*>(p.bias.ptr) + at);
      } else {
        key_bias[i] = __ldg(static_cast<const uint16_t*>(p.bias.ptr) + at);
      }
    }
  }

  __device__ __forceinline__ void change(Scores& scores, KeyTile tile) {
    if constexpr (T::kLogits) to_logits(scores);
    if (tile.is_partial()) apply_mask(scores);
    if (tile.is_cut()) cut_keys(p, scores, tile.n() * T::kBlockN, first_row, lane);
  }

  __device__ __forceinline__ void to_logits(Scores& scores) {
    float factor = p.softmax_scale;
    if (T::kMode == ScoreMode::kAny && p.softcap > 0.f) {
      scale_scores(scores, p.softmax_scale, p.softcap);
      factor = 1.f;
    }
    if (p.bias.kind == BiasKind::kTile) {
      add_bias_stage<2, 0>(scores, factor);
    } else if (p.bias.kind == BiasKind::kDirect) {
      add_bias_stage<4, 0>(scores, factor);
      add_bias_stage<4, kFragments / 2>(scores, factor);
    } else if (p.bias.kind == BiasKind::kKey) {
      add_key_bias(scores, factor);
    } else {
      scale_scores(scores, factor, 0.f);
    }
  }

  // The fragments from kFirst on that a stage has, of kBytes a number.
  template <int kBytes, int kFirst>
  __device__ __forceinline__ void add_bias_stage(Scores& scores, float factor) {
    constexpr int kInPanel = 128 / (8 * kBytes), kInStage = kFragments * 2 / kBytes;
    s.bias_full[place.stage].wait(place.phase);
    const int in_fragment = lane % 4 * 2 * kBytes;  // bytes
    const uint32_t stage = smem_u32(s.bias[place.stage]) + (warp * 16 + lane / 4) * 128 + in_fragment % 16;
    // Some at a time, so that few of the reads are waited for.
    constexpr int kBatch = 16 / kBytes;
#pragma unroll
    for (int begin = 0; begin < kInStage; begin += kBatch) {
      uint2 read[kBatch][2];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int chunk = ((begin + i) % kInPanel * 8 * kBytes + in_fragment) / 16 ^ lane / 4;
        const uint32_t from = stage + (begin + i) / kInPanel * T::kBlockM * 128 + chunk * 16;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if constexpr (kBytes == 2) {
            read[i][half].x = ld_shared(from + half * 8 * 128);
          } else {
            asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
                         : "=r"(read[i][half].x), "=r"(read[i][half].y)
                         : "r"(from + half * 8 * 128));
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint2 raw = read[i][half];
          float2 b = {__uint_as_float(raw.x), __uint_as_float(raw.y)};
          if constexpr (kBytes == 2) b = ElementTraits<typename T::Element>::unpack(raw.x);
          float* const two = scores[0][kFirst + begin + i] + 2 * half;
          two[0] = __fmaf_rn(two[0], factor, b.x);
          two[1] = __fmaf_rn(two[1], factor, b.y);
        }
    }
    __syncwarp();
    if (lane == 0) s.bias_empty[place.stage].arrive();
    place.advance();
  }

  // The warp's threads exchange what they have read. The stages of bias tiles are not used otherwise then.
  __device__ __forceinline__ void add_key_bias(Scores& scores, float factor) {
    float* const keys = reinterpret_cast<float*>(s.bias[0]) + warp * T::kBlockN;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      keys[32 * i + lane] = p.bias.dtype == Dtype::kFloat32 ? __uint_as_float(key_bias[i])
                                                            : ElementTraits<typename T::Element>::unpack(key_bias[i]).x;
    }
    __syncwarp();
    constexpr int kBatch = 8;
#pragma unroll
    for (int begin = 0; begin < kFragments; begin += kBatch) {
      float2 b[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        b[i] = *reinterpret_cast<const float2*>(keys + 8 * (begin + i) + lane % 4 * 2);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& x = scores[0][begin + i][e];
          x = __fmaf_rn(x, factor, e & 1 ? b[i].y : b[i].x);
        }
    }
  }

  __device__ __forceinline__ void apply_mask(Scores& scores) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < kFragments; ++i) {
        const uint32_t word = mask_words[half][i / 4] >> (lane % 4 * 2 + i % 4 * 8);
        if (!(word & 1)) scores[0][i][2 * half] = -INFINITY;
        if (!(word & 2)) scores[0][i][2 * half + 1] = -INFINITY;
      }
  }
};

}  // namespace dmattn::sm90
