// The state of a consumer of the Hopper backward for wide heads, and how scores become probabilities: which of them a
// row keeps, and the bias.
#pragma once

#include <climits>

#include "bwd_results.cuh"
#include "bwd_wide_bias.cuh"

namespace dmattn::sm90 {

// The place of step n in a ring.
template <int kStages>
__device__ __forceinline__ RingPlace<kStages> place_of(int n) {
  return {n % kStages, n / kStages % 2};
}

// kIsGradient: the second consumer, which computes gradients from the first one's probabilities.
template <class T, bool kIsGradient>
struct WideScores {
  using Element = typename T::Element;
  using Item = BwdItemOf<T>;
  using Steps = std::conditional_t<T::kMasked, AnnouncedSteps<T>, WideSteps<T>>;
  static constexpr int kFragmentsM = T::kBlockM / 8, kFragmentsD = T::kHeadDim / 8;
  static constexpr int kOwnBarrier = 1;  // of the warpgroup; 0 is __syncthreads()
  static constexpr int kConsumer = kIsGradient ? 1 : 0;
  using Scores = float[kFragmentsM][4];  // see BwdConsumerState
  // With softcap, two fp16 a word: the probability times the derivative of softcap, from which ds is computed.
  using SentScores = uint32_t[T::kSoftcap ? 2 * kFragmentsM : 1];
  // Probabilities are kept times 2^kLog2Scale until ds and dv are computed: the second consumer gets them in fp16,
  // where those of very long rows would otherwise be subnormal.
  static constexpr int kLog2Scale = 12;
  static constexpr float kUnscale = 1.f / (1 << kLog2Scale);
  static constexpr bool kReadsBias = T::kDenseBias && !kIsGradient;
  // The bias of the next scores, requested while these are computed.
  using BiasAhead = BiasWords<kReadsBias ? kFragmentsM : 1>;

  const BwdArguments& p;
  typename T::Shared& s;
  const Item& item;                    // of packed sequences it is in shared memory, to save registers
  const int rank, thread, warp, lane;  // thread, warp: in the warpgroup
  // The number of the step in its item. Buffers are used in turn, so that the number says which of them, and the phase
  // of their barriers.
  int step = 0;

  __device__ __forceinline__ WideScores(const BwdArguments& arguments, typename T::Shared& shared, const Item& given,
                                        int rank_in_cluster)
      : p(arguments),
        s(shared),
        item(given),
        rank(rank_in_cluster),
        thread(threadIdx.x % 128),
        warp(threadIdx.x / 32 % 4),
        lane(threadIdx.x % 32) {}

  // The first product of a step has Q or dO as its second operand, which come with lse or delta; the second product
  // has the other one.
  static constexpr int kStagesOfFirst = kIsGradient ? T::kStagesdO : T::kStagesQ;
  static constexpr int kStagesOfSecond = kIsGradient ? T::kStagesQ : T::kStagesdO;

  // Sets rows of K and V that a mask of keys hides from all rows to zero, as they may be NaN: see
  // BwdConsumerState::clear_hidden_keys(). The first consumer does so in the block's own K, the second one in V, and
  // each in its panel of the other block's K. The second consumer reads the block's own K only for dq, after it has
  // waited for a p of the first, which comes after this.
  __device__ __forceinline__ void clear_hidden_keys() const {
    if (!p.mask.is_key_only) return;
    const int own = thread / 2, first = own_block() * T::kOwnKeys;
    const int of_other = (own_block() ^ 1) * T::kOwnKeys;
    if (hides_key(p, item, first + own)) {
      constexpr int kTilePanels = kIsGradient ? T::kPanels : T::kAllPanels;
      clear_half_row<kTilePanels>(kIsGradient ? s.v : s.k, own);
    }
    if (hides_key(p, item, of_other + own)) clear_half_row<1>(s.other_k + kConsumer * T::kPanelK, own);
    cutlass::arch::fence_view_async_shared();
    sync_own();
  }
  template <int kTilePanels>
  __device__ __forceinline__ void clear_half_row(Element* tile, int row) const {
    constexpr int kWords = T::kPanelCols / 16;  // of 16 bytes: half of a panel's row
#pragma unroll
    for (int panel = 0; panel < kTilePanels; ++panel) {
      Element* const cols = tile + (panel * T::kOwnKeys + row) * T::kPanelCols;
      uint4* const part = reinterpret_cast<uint4*>(cols) + thread % 2 * kWords;
#pragma unroll
      for (int i = 0; i < kWords; ++i) part[i] = make_uint4(0, 0, 0, 0);
    }
  }

  __device__ __forceinline__ bool is_speaker() const { return thread == 0; }
  __device__ __forceinline__ void sync_own() const { cutlass::arch::NamedBarrier::sync(128, kOwnBarrier + kConsumer); }

  // For cuts_tile(): a tile of the thread block's own keys.
  struct OwnTile {
    static constexpr int kBlockM = T::kBlockM, kBlockN = T::kOwnKeys;
    static constexpr bool kWindows = T::kWindows;
  };
  __device__ __forceinline__ int own_block() const { return item.n_block * T::kCluster + rank; }
  // The lengths of the item's packed sequence, or of all rows and keys.
  __device__ __forceinline__ decltype(auto) lengths() const {
    if constexpr (T::kPacked) {
      return PackedLengths{item.q.length, item.k.length, p.is_causal};
    } else {
      return (p);
    }
  }

  __device__ __forceinline__ void take_exp(const Scores& scores, Scores& probabilities, SentScores& capped,
                                           const Steps& steps, KeptScores kept, const float (&key_bias)[2],
                                           const BiasAhead& bias_ahead) const {
    if (is_cut(steps)) {
      take_exp<true>(scores, probabilities, capped, steps, kept, key_bias, bias_ahead);
    } else {
      take_exp<false>(scores, probabilities, capped, steps, kept, key_bias, bias_ahead);
    }
  }
  // Whether some scores of the tile have to be masked.
  __device__ __forceinline__ bool is_cut(const Steps& steps) const {
    if constexpr (T::kGathered) {
      const int2 all = s.facts.seen_by_all;
      const int first = first_row(steps);
      return first < all.x || first + T::kBlockM > all.y;
    } else if constexpr (T::kMasked) {
      return steps.tile.is_checked();
    } else {
      return cuts_tile<OwnTile>(lengths(), steps.m, own_block());
    }
  }
  // The first row of the step, over lists counted from the item's first row.
  __device__ __forceinline__ int first_row(const Steps& steps) const {
    return (T::kGathered ? steps.m - item.m_begin : steps.m) * T::kBlockM;
  }
  // The thread's key `half` of its two, which are 8 apart, counted in the thread block's keys.
  __device__ __forceinline__ int own_key(int half) const { return 16 * warp + lane / 4 + 8 * half; }
  // The rows that see a key, counted from the first one that the thread has.
  struct SeenBy {
    int first;
    uint32_t rows;
    __device__ __forceinline__ bool has(int row) const {
      return T::kGathered || T::kWindows ? static_cast<uint32_t>(row - first) < rows : row >= first;
    }
  };
  __device__ __forceinline__ SeenBy seen_by(int half, const Steps& steps) const {
    const int own_row = first_row(steps) + lane % 4 * 2;
    if constexpr (T::kGathered) {
      const uint32_t rows = s.facts.rows[own_key(half)];
      return {static_cast<int>(rows & 0xffff) - own_row, rows >> 16};
    } else {
      const auto& own = lengths();
      const int key = own_block() * T::kOwnKeys + own_key(half);
      const int seen_from = own.is_causal ? key - (own.seqlen_k - own.seqlen_q) : INT_MIN / 2;
      if constexpr (T::kWindows) {
        const uint32_t rows = own.window > 0 ? own.window : INT_MAX;
        return {seen_from - own_row, key >= own.seqlen_k ? 0 : rows};
      }
      return {(key >= own.seqlen_k ? INT_MAX / 2 : seen_from) - own_row, 0};
    }
  }
  // The thread's first row and key.
  __device__ __forceinline__ int first_own_row(const Steps& steps) const { return steps.m * T::kBlockM + lane % 4 * 2; }
  __device__ __forceinline__ int first_own_key() const { return own_block() * T::kOwnKeys + own_key(0); }
  template <bool kAhead, class Announced>
  __device__ __forceinline__ void read_mask(MaskWords& words, const Announced& steps) const {
    words.template read<kAhead>(p.mask, item.batch, steps.head, first_own_row(steps), first_own_key());
  }
  template <class Announced>
  __device__ __forceinline__ KeptScores find_kept(const Announced& steps, MaskWords words) const {
    KeptScores kept;
    if (steps.tile.is_partial()) {
      if constexpr (kReadsBias) read_mask<false>(words, steps);
      kept = words.kept(first_own_key());
    }
    if (steps.tile.is_cut()) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const SeenBy seen = seen_by(half, steps);
        if (seen.rows == 0) kept.cut(half, INT_MAX / 2);  // there is no key
        kept.cut(half, seen.first);
        if (p.window > 0) kept.cut_from(half, seen.first + p.window);
      }
    }
    return kept;
  }
  __device__ __forceinline__ void read_bias(BiasAhead& words, const Steps& steps) const {
    const BiasRows& bias = p.bias_rows;
    const char* const map = bias.data + item.batch * p.bias_batch_step * bias.batch_stride +
                            steps.head / p.bias_head_ratio * bias.head_stride;
    if (bias.key_bytes == 4) {
      read_bias_words<4>(words, bias, map, first_own_row(steps), first_own_key());
    } else {
      read_bias_words<2>(words, bias, map, first_own_row(steps), first_own_key());
    }
  }
  __device__ __forceinline__ void read_key_bias(float (&bias)[2]) const {
    const int head = heads_of(p, item).begin / p.bias.head_ratio;
    const int64_t base = item.batch * p.bias.batch_stride + head * p.bias.head_stride;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = min(own_block() * T::kOwnKeys + own_key(half), p.seqlen_k - 1);  // the others are masked
      bias[half] = load_bias(p.bias, base + key * p.bias.col_stride, std::is_same_v<Element, cutlass::bfloat16_t>);
    }
  }
  template <bool kIsCut>
  __device__ __forceinline__ void take_exp(const Scores& scores, Scores& probabilities, SentScores& capped,
                                           const Steps& steps, KeptScores kept, const float (&key_bias)[2],
                                           const BiasAhead& bias_ahead) const {
    const float scale_log2 = (T::kSoftcap ? p.softcap : p.softmax_scale) * kLog2e;
    const float inner = T::kSoftcap ? p.softmax_scale / p.softcap : 1.f;
    SeenBy seen[2];
    float bias[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (kIsCut && !T::kMasked) seen[half] = seen_by(half, steps);
      if constexpr (T::kListBias) bias[half] = s.facts.bias[own_key(half)];
      if constexpr (T::kKeyBias && !T::kListBias) bias[half] = key_bias[half];
    }
    const float* lse = s.lse[step % T::kStagesQ] + lane % 4 * 2;
    const float* lse_rest = s.lse_rest[step % T::kStagesQ] + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < kFragmentsM; ++i) {
      const float2 row_lse = *reinterpret_cast<const float2*>(lse + 8 * i);
      float2 row_rest;
      if constexpr (T::kBias) row_rest = *reinterpret_cast<const float2*>(lse_rest + 8 * i);
      float slopes[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const bool is_seen = !kIsCut || (T::kMasked ? kept.has(i, e / 2, e % 2) : seen[e / 2].has(8 * i + e % 2));
        const float own_lse = e % 2 == 0 ? row_lse.x : row_lse.y;
        float x = scores[i][e];
        if constexpr (T::kSoftcap) {
          x = tanh_fast(x * inner);
          slopes[e] = __fmaf_rn(-x, x, 1.f);
        }
        if constexpr (T::kBias) {
          // In natural units, as the forward adds it: a bias of finfo.min times log2(e) would overflow.
          float own_bias;
          if constexpr (T::kDenseBias) {
            own_bias = __uint_as_float(bias_ahead[i][e]);
          } else {
            own_bias = bias[e / 2];
          }
          x = __fmaf_rn(x, p.softmax_scale, own_bias);
          x = is_seen ? x : -INFINITY;  // after the bias: that of a masked score may be anything, even NaN
          x = __fmaf_rn(x - own_lse, kLog2e, kLog2Scale - (e % 2 == 0 ? row_rest.x : row_rest.y));
        } else {
          x = __fmaf_rn(is_seen ? x : -INFINITY, scale_log2, -(own_lse - kLog2Scale));
        }
        probabilities[i][e] = exp2_approx(x);
        if constexpr (T::kSoftcap) slopes[e] *= probabilities[i][e];
      }
      if constexpr (T::kSoftcap) {
        capped[2 * i] = ElementTraits<cutlass::half_t>::pack(slopes[0], slopes[1]);
        capped[2 * i + 1] = ElementTraits<cutlass::half_t>::pack(slopes[2], slopes[3]);
      }
    }
  }
};

}  // namespace dmattn::sm90
