// What the general forward kernels on Hopper do beyond lengths and causality: they skip tiles in which a dense mask
// keeps nothing, and change the scores by softcap, a bias and the mask.
#pragma once

#include <utility>

#include "../shared/fragment.cuh"
#include "../shared/mask_tiles.cuh"
#include "../shared/scores.cuh"
#include "../shared/softmax.cuh"
#include "fwd_items.cuh"
#include "fwd_key_bias.cuh"
#include "fwd_traits.cuh"

namespace dmattn::sm90 {

// A tile of keys as the producer announces it, beside the tile's K.
struct KeyTile {
  uint32_t word;

  static __device__ __forceinline__ KeyTile of(int n, bool is_cut, bool is_partial, bool is_last) {
    return {static_cast<uint32_t>(n) << 3 | is_last << 2 | is_partial << 1 | static_cast<uint32_t>(is_cut)};
  }
  __device__ __forceinline__ int n() const { return static_cast<int>(word >> 3); }
  // Causality, a window or the end of the keys hides some of the keys from some of the rows.
  __device__ __forceinline__ bool is_cut() const { return word & 1; }
  // The dense mask keeps only a part of the tile.
  __device__ __forceinline__ bool is_partial() const { return word & 2; }
  __device__ __forceinline__ bool is_changed() const { return word & 3; }
  // The item has no more tiles.
  __device__ __forceinline__ bool is_last() const { return word & 4; }
};

__device__ __forceinline__ int64_t find_mask_head(const MaskBits& mask, const FwdItem& item) {
  return static_cast<int64_t>(mask.batch > 1 ? item.batch : 0) * mask.heads + item.head / mask.head_ratio;
}

// The tiles of the item, from tile `begin` on, in which the mask keeps something.
template <class T>
__device__ __forceinline__ MaskTileWalk<T::kBlockM, T::kBlockN> walk_mask_tiles(const GeneralFwdArguments& p,
                                                                                const FwdItem& item, int begin) {
  if (!T::kHasMask || p.mask.bits == nullptr) return {nullptr, nullptr, 0, 0, begin};
  constexpr int kBands = T::kBlockM / kMaskBand;
  const int band = item.m_block * kBands;
  const int64_t first = (find_mask_head(p.mask, item) * p.mask.bands_q + band) * p.mask.words_k;
  return {p.mask.any_rows + first, p.mask.all_rows + first, p.mask.words_k, min(kBands, p.mask.bands_q - band), begin};
}

__device__ __forceinline__ bool has_key_bias(const GeneralFwdArguments& p) { return p.bias.kind == BiasKind::kKey; }

// A warp that writes the bias of each key into shared memory, tile by tile in the order of the producer.
template <class T>
struct KeyBiasLoader {
  using Element = typename T::Element;

  const typename T::Arguments& p;
  typename T::Shared& s;
  const int lane;
  RingPlace<2> item_place, place;  // place: in the ring of the bias

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
    auto tiles = walk_mask_tiles<T>(p, item, blocks.begin);
    for (int n = tiles.before(blocks.end).n; n >= 0; n = tiles.before(n).n) load_tile(base, n);
  }

  // Keys past the last one get the bias of the last one; their scores become -inf later.
  __device__ __forceinline__ void load_tile(int64_t base, int n) {
    float bias[T::kBlockN / 32];  // of the keys 32 i + lane
#pragma unroll
    for (int i = 0; i < T::kBlockN / 32; ++i) {
      const int key = min(n * T::kBlockN + 32 * i + lane, p.seqlen_k - 1);
      bias[i] = load_bias(p.bias, base + key * p.bias.col_stride, std::is_same_v<Element, cutlass::bfloat16_t>);
    }
    s.general.bias_empty[place.stage].wait(place.phase ^ 1);
    write_key_bias<T::kBlockN>(bias, smem_u32(s.general.bias[place.stage]), lane);
    __syncwarp();
    if (lane == 0) s.general.bias_full[place.stage].arrive();
    place.advance();
  }
};

// What a thread reads in each tile of an item, of a bias whose rows start on any two bytes. row: the first of the
// thread's two rows.
struct NoPairs {};
template <class T>
__device__ __forceinline__ auto find_shifted_pairs(const typename T::Arguments& p, const FwdItem& item, uint32_t ring,
                                                   int row, int lane) {
  if constexpr (T::kHasBoxedBias) {
    const BiasClasses& classes = p.bias_classes;
    const uint32_t number = classes.number(item.batch, item.head / p.bias.head_ratio, row);
    const auto* const keys = static_cast<const uint16_t*>(p.bias.ptr) + number * p.bias.row_stride;
    using Pairs = typename decltype(T::Shared::general)::Pairs;
    return Pairs(ring, row - item.m_block * T::kBlockM, lane % 4 * 2, classes.shift(number % kRowClasses), keys);
  } else {
    return NoPairs{};
  }
}

// Changes the scores of a tile before their softmax, for the 64 rows of a consumer.
template <class T>
struct ScoreChanges {
  static constexpr int kFragments = T::kBlockN / 8, kWords = T::kBlockN / 32;
  using Scores = float[1][kFragments][4];
  using General = decltype(T::Shared::general);
  using Pairs = decltype(find_shifted_pairs<T>(std::declval<const typename T::Arguments&>(), FwdItem{}, 0, 0, 0));

  const typename T::Arguments& p;
  General& s;
  RingPlace<2>& place;   // in the ring of the bias
  const int warp, lane;  // warp: among the consumers
  const int first_row;   // the first of the two rows that this thread has, the other comes 8 later
  const uint32_t* bits;  // this lane's word of row 0 of the mask, where there is a mask
  // For both rows, one of the mask's words of the tile; the threads of a quad exchange theirs. Read while the scores
  // of the tile are computed.
  uint32_t mask_words[2];
  // The first numbers of the bias, read at the same time, as many as there are registers for. An entry has 16 bytes
  // of a bias for each key, or the 16-bit numbers of two fragments. kAny reads nothing ahead.
  static constexpr bool kReadsBiasAhead =
      T::kMode == ScoreMode::kMaskedKeyBias || T::kMode == ScoreMode::kTileBias || T::kHasBoxedBias;
  static constexpr int kAhead = kReadsBiasAhead ? (T::kConsumers == 2 ? 4 : 1) : 0;
  uint32_t ahead[kAhead + 1][4];
  // How many entries of an fp32 bias are read ahead. At head_dim 64 and 192 this made calls take up to 1.1 times as
  // long.
  static constexpr int kWideAhead = T::kHeadDim == 128 || T::kHeadDim == 256 ? kAhead : 0;
  // Where the thread begins to read the bias of the first stage. The compiler is kept from computing it again: it is
  // short of registers, and would read threadIdx and wait for it in each step, as it does at other head dimensions.
  uint32_t own_bias = 0;
  static constexpr bool kHasOwnBias = T::kHeadDim == 128 && T::kLogits && !T::kHasBoxedBias;
  const Pairs pairs;
  uint32_t last_numbers[2][2];  // of both rows, for `pairs`: also read ahead

  __device__ __forceinline__ ScoreChanges(const typename T::Arguments& arguments, General& shared,
                                          RingPlace<2>& bias_place, int warp_, int lane_, const FwdItem& item)
      : p(arguments),
        s(shared),
        place(bias_place),
        warp(warp_),
        lane(lane_),
        first_row(item.m_block * T::kBlockM + warp * 16 + lane / 4),
        bits(p.mask.bits + find_mask_head(p.mask, item) * p.mask.rows * p.mask.words_per_row + lane % kWords),
        pairs(find_shifted_pairs<T>(p, item, smem_u32(s.bias), first_row, lane)) {
    if constexpr (kHasOwnBias) {
      own_bias = smem_u32(s.bias) + bias_offset();
      asm volatile("" : "+r"(own_bias));
    }
  }

  // Called while the scores of the tile are computed. Nothing here uses what is loaded, so no load is waited for.
  __device__ __forceinline__ void read_ahead(KeyTile tile) {
    if constexpr (T::kHasBoxedBias) {
      const int key = tile.n() * T::kBlockN;
      pairs.read_last(last_numbers, key, p.bias.row_stride, p.seqlen_q - first_row,
                      p.seqlen_k - (key + T::kBlockN - 8 + lane % 4 * 2));
    }
    if constexpr (kReadsBiasAhead) read_bias_ahead();
    if constexpr (T::kHasMask) {
      if (!tile.is_partial()) return;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = min(first_row + 8 * half, p.seqlen_q - 1);
        mask_words[half] = __ldg(bits + static_cast<int64_t>(row) * p.mask.words_per_row + tile.n() * kWords);
      }
    }
  }

  __device__ __forceinline__ void change(Scores& scores, KeyTile tile) {
    if constexpr (T::kLogits) to_logits(scores);
    cut(scores, tile);
  }
  __device__ __forceinline__ void cut(Scores& scores, KeyTile tile) {
    if (!tile.is_changed()) return;  // one branch in the common case
    if (T::kHasMask && tile.is_partial()) apply_mask(scores);
    if (tile.is_cut()) {
      cut_keys(p, scores, tile.n() * T::kBlockN, first_row, lane);
      if (has_window<T>(p)) cut_keys_before_window(p, scores, tile.n() * T::kBlockN, first_row, lane);
    }
  }

  __device__ __forceinline__ void to_logits(Scores& scores) {
    float factor = p.softmax_scale;
    if (T::kMode == ScoreMode::kAny && p.softcap > 0.f) {
      scale_scores(scores, p.softmax_scale, p.softcap);
      factor = 1.f;
    }
    constexpr bool kSure = T::kMode != ScoreMode::kAny;  // whether the mode implies a bias
    if constexpr (T::kHasTileBias && !T::kHasWideBias) {
      add_narrow_bias(scores, factor);
    } else if (T::kHasKeyBias && (kSure || has_key_bias(p))) {
      add_key_bias(scores, factor);
    } else if (T::kHasTileBias && p.bias.kind == BiasKind::kTile) {
      add_narrow_bias(scores, factor);
    } else if (T::kHasTileBias && (kSure || p.bias.kind == BiasKind::kDirect)) {
      add_wide_bias(scores, factor);
    } else if (factor != 1.f) {
      scale_scores(scores, factor, 0.f);
    }
  }

  __device__ __forceinline__ void read_bias_ahead() {
    wait_for_stage();
    if (T::kMode == ScoreMode::kTileBias && T::kHasWideBias && p.bias.kind != BiasKind::kTile) {
#pragma unroll
      for (int i = 0; i < kWideAhead; ++i) read_wide_bias(ahead[i], i, place.stage);
      return;
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if constexpr (T::kMode == ScoreMode::kMaskedKeyBias) {
        read_key_bias(ahead[i], i, place.stage);
      } else {
        read_narrow_bias(ahead[i], i);
      }
    }
  }

  // The two fragments of which the i-th read_narrow_bias() reads the bias.
  static __device__ __forceinline__ constexpr int fragment(int i, int which) {
    return T::kHasBoxedBias ? i + which * (kFragments / 2) : 2 * i + which;
  }
  // Reads the bias of two fragments: ldmatrix brings 16-bit numbers to the threads that hold the scores.
  __device__ __forceinline__ void read_narrow_bias(uint32_t (&words)[4], int i) const {
    if constexpr (T::kHasBoxedBias) {
      pairs.read(words, i, place.stage);
      if (i < kFragments / 2 - 1) return;
#pragma unroll
      for (int half = 0; half < 2; ++half) words[2 + half] = Pairs::pack_last(last_numbers[half]);
    } else {
      ldmatrix_x4<false>(words, (own_bias_of(place.stage, narrow_rows()) ^ (i % 4 << 5)) + i / 4 * T::kBlockM * 128);
    }
  }
  __device__ __forceinline__ uint32_t narrow_rows() const {
    return (warp * 16 + lane % 16) * 128 + ((lane / 16 ^ lane % 8) << 4);
  }
  __device__ __forceinline__ uint32_t key_words() const { return KeyBiasLayout<T::kBlockN>::thread_offset(lane); }
  __device__ __forceinline__ uint32_t bias_offset() const {
    if constexpr (T::kHasTileBias) {
      if (T::kHasWideBias && p.bias.kind == BiasKind::kDirect) return wide_rows();
      if (T::kMode == ScoreMode::kTileBias || p.bias.kind == BiasKind::kTile) return narrow_rows();
    }
    return key_words();
  }
  __device__ __forceinline__ uint32_t own_bias_of(int stage, uint32_t offset) const {
    const uint32_t first = kHasOwnBias ? own_bias : smem_u32(s.bias) + offset;
    return first + stage * sizeof(s.bias[0]);
  }
  __device__ __forceinline__ void add_narrow_bias(Scores& scores, float factor) {
    if constexpr (!kReadsBiasAhead) wait_for_stage();
#pragma unroll
    for (int i = 0; i < kFragments / 2; ++i) {
      uint32_t words[4];
      if (i < kAhead) {
        copy_words(words, ahead[i]);
      } else {
        read_narrow_bias(words, i);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 b = ElementTraits<typename T::Element>::unpack(words[j]);
        float* const two = scores[0][fragment(i, j / 2)] + j % 2 * 2;
        two[0] = __fmaf_rn(two[0], factor, b.x);
        two[1] = __fmaf_rn(two[1], factor, b.y);
      }
    }
    release_stage();
  }

  // An fp32 stage has half of a tile's fragments. A thread reads eight bytes at a time, and half a warp is served at
  // once: 32 bytes of each of four rows. The swizzle puts the bytes of an odd row on the same banks as those of the
  // row before. So threads of odd rows read the fragment two further on, or two before, and exchange the two
  // afterwards.
  static constexpr int kWideReads = kFragments / 2;  // of a stage; each is of two fragments and one of the two rows
  static __device__ __forceinline__ constexpr int wide_fragment(int read) { return read / 4 * 4 + read / 2 % 2; }

  __device__ __forceinline__ uint32_t wide_rows() const {
    const int row = warp * 16 + lane / 4;
    const uint32_t own_row = row * 128 + ((lane % 4 / 2 ^ row % 8) << 4) + lane % 2 * 8;
    return own_row ^ (row % 2 != 0 ? 2 << 5 : 0);
  }
  __device__ __forceinline__ bool is_odd_row() const {
    // s.bias starts on 1 KB, so bit 7 of an address tells whether the row is odd.
    return kHasOwnBias ? (own_bias & 128) != 0 : lane / 4 % 2 != 0;
  }

  __device__ __forceinline__ void read_wide_bias(uint32_t (&words)[4], int read, int stage) const {
    const uint32_t rows = own_bias_of(stage, wide_rows()), half = read % 2;
    const uint32_t panel = wide_fragment(read) / 4 * T::kBlockM * 128 + half * 8 * 128;
    const uint2 x = ld_shared_v2((rows ^ (wide_fragment(read) % 4 << 5)) + panel),
                y = ld_shared_v2((rows ^ (wide_fragment(read) % 4 + 2 << 5)) + panel);
    words[0] = x.x, words[1] = x.y, words[2] = y.x, words[3] = y.y;
  }
  // Each entry of `ahead` is read again as soon as its numbers have been added, so that several reads are in flight.
  // The second stage is therefore waited for before all of the first has been added.
  __device__ __forceinline__ void add_wide_bias(Scores& scores, float factor) {
    constexpr int kSlots = kWideAhead > 0 ? kWideAhead : 1;
    auto second = place;
    second.advance();
    const bool is_odd = is_odd_row();
#pragma unroll
    for (int read = 0; read < 2 * kWideReads; ++read) {
      auto& words = ahead[read % kSlots];
      if constexpr (kWideAhead == 0) {
        if (read == kWideReads || (read == 0 && !kReadsBiasAhead)) wait_for_stage();
        read_wide_bias(words, read % kWideReads, place.stage);
      }
      const int fragment = read / kWideReads * (kFragments / 2) + wide_fragment(read % kWideReads), row = read % 2 * 2;
      add_two(scores[0][fragment] + row, factor, is_odd ? words[2] : words[0], is_odd ? words[3] : words[1]);
      add_two(scores[0][fragment + 2] + row, factor, is_odd ? words[0] : words[2], is_odd ? words[1] : words[3]);
      if constexpr (kWideAhead > 0) {
        const int next = read + kSlots;
        if (next == kWideReads) s.bias_full[second.stage].wait(second.phase);
        if (next < 2 * kWideReads) {
          read_wide_bias(words, next % kWideReads, next < kWideReads ? place.stage : second.stage);
        }
      }
      if (read % kWideReads == kWideReads - 1) release_stage();
    }
  }
  static __device__ __forceinline__ void add_two(float* two, float factor, uint32_t bias_x, uint32_t bias_y) {
    two[0] = __fmaf_rn(two[0], factor, __uint_as_float(bias_x));
    two[1] = __fmaf_rn(two[1], factor, __uint_as_float(bias_y));
  }

  // Reads the bias of fragments 2 i and 2 i + 1.
  __device__ __forceinline__ void read_key_bias(uint32_t (&words)[4], int i, int stage) const {
    read_key_words(words, own_bias_of(stage, key_words()), i);
  }
  __device__ __forceinline__ void add_key_bias(Scores& scores, float factor) {
    if constexpr (!kReadsBiasAhead) wait_for_stage();
#pragma unroll
    for (int i = 0; i < kFragments; i += 2) {
      uint32_t words[4];
      if (i / 2 < kAhead) {
        copy_words(words, ahead[i / 2]);
      } else {
        read_key_bias(words, i / 2, place.stage);
      }
      add_key_words(scores[0], i, factor, words);
    }
    release_stage();
  }
  static __device__ __forceinline__ void copy_words(uint32_t (&to)[4], const uint32_t (&from)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = from[i];
  }

  __device__ __forceinline__ void wait_for_stage() { s.bias_full[place.stage].wait(place.phase); }
  __device__ __forceinline__ void release_stage() {
    __syncwarp();
    if (lane == 0) s.bias_empty[place.stage].arrive();
    place.advance();
  }

  __device__ __forceinline__ void apply_mask(Scores& scores) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        const uint32_t word = __shfl_sync(0xffffffffu, mask_words[half], w, 4) >> lane % 4 * 2;
#pragma unroll
        for (int i = 4 * w; i < 4 * w + 4; ++i) {
          if (!(word >> i % 4 * 8 & 1)) scores[0][i][2 * half] = -INFINITY;
          if (!(word >> i % 4 * 8 & 2)) scores[0][i][2 * half + 1] = -INFINITY;
        }
      }
  }
};

}  // namespace dmattn::sm90
