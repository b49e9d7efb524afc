// A bias for each key in the Hopper forward over consecutive keys: how shared memory holds its numbers, and how the
// kernel for such a bias alone (ScoreMode::kKeyBias) has the products add it (key_bias.cuh).
#pragma once

#include "../shared/fragment.cuh"
#include "../shared/smem.cuh"
#include "bias_rows.cuh"
#include "fwd_items.cuh"
#include "fwd_traits.cuh"

namespace dmattn::sm90 {

// Writes the numbers of a tile, those of keys 32 i + lane, as KeyBiasLayout says.
template <int kBlockN, int kNumbers>
__device__ __forceinline__ void write_key_bias(const float (&bias)[kNumbers], uint32_t stage, int lane) {
  static_assert(kNumbers * 32 == kBlockN);
#pragma unroll
  for (int i = 0; i < kNumbers; ++i) {
    st_shared(stage + 4 * KeyBiasLayout<kBlockN>::word(32 * i + lane), __float_as_uint(bias[i]));
  }
}
// Reads those of fragments 2 i and 2 i + 1 that a thread needs; `own` is where its numbers begin.
__device__ __forceinline__ void read_key_words(uint32_t (&words)[4], uint32_t own, int i) {
  const uint4 raw = ld_shared_v4(own + i * 16);
  words[0] = raw.x, words[1] = raw.y, words[2] = raw.z, words[3] = raw.w;
}
// Makes logits of the scores of fragments i and i + 1, with the words that read_key_words() read for them.
template <int kFragments>
__device__ __forceinline__ void add_key_words(float (&scores)[kFragments][4], int i, float factor,
                                              const uint32_t (&words)[4]) {
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    float& x = scores[i + e / 4][e % 4];
    x = __fmaf_rn(x, factor, __uint_as_float(words[e / 4 * 2 + e % 2]));
  }
}

// Three warps, beside the producer on the three other schedulers, write the operands of the bias into shared memory.
// Each takes every third tile in the order of the producer: each scheduler also has a warp of each consumer, and where
// consumers are limited by the issue of instructions, those of these warps count as well.
template <class T>
struct BiasOperandsLoader {
  static constexpr int kKeysPerLane = T::kBlockN / 32;
  static_assert(T::kBlockN % 32 == 0 && T::kStages == 2);
  using Element = typename T::Element;
  using Operands = typename T::BiasOperands;
  using Bias = float[kKeysPerLane];  // of the keys 32 i + lane

  const typename T::Arguments& p;
  typename T::Shared& s;
  int others;  // how many tiles the other warps take before this warp's next one
  const int lane;
  const float factor;
  RingPlace<2> item_place, place;  // place: in the ring of K

  // warp: among the kBiasWarps
  __device__ __forceinline__ BiasOperandsLoader(const typename T::Arguments& arguments, typename T::Shared& shared,
                                                int warp, int lane_)
      : p(arguments), s(shared), others(warp), lane(lane_), factor(1.f / arguments.softmax_scale) {}

  __device__ __forceinline__ void run() {
    while (true) {
      const AnnouncedItem item = next_item<T>(s, item_place);
      if (item.index() >= p.items) return;
      if (item.has_keys()) load_item(find_item_of<T>(p, item.index()));
    }
  }

  __device__ __forceinline__ void load_item(const typename T::Item& item) {
    const int64_t base = item.batch * p.bias.batch_stride + item.head / p.bias.head_ratio * p.bias.head_stride;
    const KeyBlocks blocks = find_key_blocks_of<T>(p, item);
#pragma unroll 1
    for (int n = blocks.end - 1; n >= blocks.begin; --n) {
      // All warps wait for the stage and arrive at its barrier. A barrier tells only two neighbouring phases apart: no
      // warp may leave one out, and none may be two phases behind the others.
      if (others == 0) {
        load_tile(base, n);
        others = kBiasWarps;
      } else {
        s.k_empty[place.stage].wait(place.phase ^ 1);
      }
      __syncwarp();
      if (lane == 0) s.k_full[place.stage].arrive();
      --others;
      place.advance();
    }
  }

  // Keys past the last one get the bias of the last one; their scores become -inf later.
  __device__ __forceinline__ void load_tile(int64_t base, int n) const {
    Bias bias;
    if (p.bias.dtype == Dtype::kFloat32) {
      read_tile<float>(bias, base, n);
    } else {
      read_tile<uint16_t>(bias, base, n);
    }
    write_operands(bias);
  }
  // Takes as few instructions as possible for a whole tile. Number: float, or uint16_t with the bits of an Element.
  template <class Number>
  __device__ __forceinline__ void read_tile(Bias& bias, int64_t base, int n) const {
    const int first = n * T::kBlockN + lane;
    const int64_t stride = p.bias.col_stride;
    const Number* const from = static_cast<const Number*>(p.bias.ptr) + (base + first * stride);
    Number numbers[kKeysPerLane];
    if (n * T::kBlockN + T::kBlockN <= p.seqlen_k) {
#pragma unroll
      for (int i = 0; i < kKeysPerLane; ++i) numbers[i] = __ldg(from + 32 * i * stride);
    } else {
#pragma unroll
      for (int i = 0; i < kKeysPerLane; ++i) numbers[i] = __ldg(from + min(32 * i, p.seqlen_k - 1 - first) * stride);
    }
#pragma unroll
    for (int i = 0; i < kKeysPerLane; ++i) {
      if constexpr (sizeof(Number) == sizeof(float)) {
        bias[i] = numbers[i];
      } else {
        bias[i] = ElementTraits<Element>::unpack(numbers[i]).x;
      }
    }
  }

  // Writes the operands beside the tile's K: consumers wait for both at once and release both at once. All that can
  // be done before the stage is free comes before the wait for it.
  __device__ __forceinline__ void write_operands(const Bias& bias) const {
    const float most = most_bias_in_product<Element>(p.softmax_scale);
    bool is_small = true;
#pragma unroll
    for (int i = 0; i < kKeysPerLane; ++i) is_small &= fabsf(bias[i]) <= most;  // NaN counts as large
    const float middle = __all_sync(0xffffffffu, is_small) ? 0.f : find_middle(bias, most);
    const bool is_large = middle != middle;
    uint2 columns[kKeysPerLane];
#pragma unroll
    for (int i = 0; i < kKeysPerLane; ++i) {
      columns[i] = split_in_three<Element>(is_large ? 0.f : (bias[i] - middle) * factor);
    }
    const uint32_t own_row =
        smem_u32(s.general.keys) + place.stage * (T::kBlockN * Operands::kRowBytes) + Operands::row_offset(lane);
    s.k_empty[place.stage].wait(place.phase ^ 1);
#pragma unroll
    for (int i = 0; i < kKeysPerLane; ++i) st_shared_v2(own_row + i * (32 * Operands::kRowBytes), columns[i]);
    if (is_large) write_key_bias<T::kBlockN>(bias, smem_u32(s.general.large[place.stage]), lane);
    if (lane == 0) st_shared(smem_u32(s.general.middle + place.stage), __float_as_uint(middle));
    cutlass::arch::fence_view_async_shared();  // the tensor cores see what was written
  }
  // A number from which no number of the tile's bias is further away than `most`; NaN if there is none, or if it is too
  // large.
  __device__ __forceinline__ float find_middle(const Bias& bias, float most) const {
    float low = bias[0], high = bias[0];
#pragma unroll
    for (int i = 1; i < kKeysPerLane; ++i) low = fminf(low, bias[i]), high = fmaxf(high, bias[i]);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      low = fminf(low, __shfl_xor_sync(0xffffffffu, low, step));
      high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, step));
    }
    const float middle = 0.5f * low + 0.5f * high;
    bool is_near = fabsf(middle) <= most_middle_of_bias<Element>();
#pragma unroll
    for (int i = 0; i < kKeysPerLane; ++i) is_near &= fabsf(bias[i] - middle) <= most;  // NaN and infinities never are
    return __all_sync(0xffffffffu, is_near) ? middle : NAN;
  }
};

// Adds a large bias, which the products did not add. Afterwards all lanes have read it.
template <class T, int kFragments>
__device__ __forceinline__ void add_large_bias(float (&scores)[1][kFragments][4], const char* stage, float scale,
                                               int lane) {
  const uint32_t own = smem_u32(stage) + KeyBiasLayout<T::kBlockN>::thread_offset(lane);
#pragma unroll
  for (int i = 0; i < kFragments; i += 2) {
    uint32_t words[4];
    read_key_words(words, own, i / 2);
    add_key_words(scores[0], i, scale, words);
  }
  __syncwarp();
}

}  // namespace dmattn::sm90
