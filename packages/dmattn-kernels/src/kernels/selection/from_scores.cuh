// Selection by one thread block that reads the scores themselves, four keys at a time: no launch that orders them first.
#pragma once

#include <type_traits>

#include "in_registers.cuh"

namespace dmattn {
namespace prep {

// --- the keys of a row ---------------------------------------------------------------------------------------------

// The upper halves of the ordered scores of two bfloat16, whose lower halves are 0: see ordered().
__device__ __forceinline__ uint32_t ordered_pair(uint32_t bits) {
  constexpr uint32_t kLowest = 0x0080u, kHighest = 0xff80u;  // of finite scores, and +inf
  const uint32_t flipped = bits ^ ((bits >> 15 & 0x00010001u) * 0x7fffu) ^ 0x80008000u;
  uint32_t half[2] = {flipped & 0xffffu, flipped >> 16};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (half[i] == 0x7fffu) half[i] = 0x8000u;  // -0 == +0
    if (half[i] - kLowest > kHighest - kLowest) half[i] = 0;
  }
  return half[0] | half[1] << 16;
}

// The keys before `count` of a row. What Candidates is to ordered scores, and with the same names. A quad of bfloat16
// stays in two words.
template <class Score>
struct ScoredKeys {
  static constexpr bool kIsShort = std::is_same<Score, __nv_bfloat16>::value;
  using Quad = std::conditional_t<kIsShort, uint2, uint4>;
  using Word = std::conditional_t<sizeof(Score) == 2, uint16_t, uint32_t>;
  using Words = std::conditional_t<sizeof(Score) == 2, uint2, uint4>;  // of four keys

  const Word* scores;
  const uint8_t* mask;  // nullptr: every key is allowed
  int64_t score_stride, mask_stride;
  int32_t count;
  bool is_vector;  // whole quads may be read at once

  __device__ __forceinline__ ScoredKeys(const SelectParams& p, int row, int keys) {
    const ScoreRow<Score> from(p, row);
    scores = reinterpret_cast<const Word*>(from.scores);
    mask = from.mask;
    score_stride = from.score_stride;
    mask_stride = from.mask_stride;
    count = keys;
    is_vector = score_stride == 1 && reinterpret_cast<uintptr_t>(scores) % sizeof(Words) == 0 &&
                round_up(count, 4) <= p.seqlen_k;
  }
  __device__ __forceinline__ bool allows(int key) const {
    return mask == nullptr || __ldg(mask + key * mask_stride) != 0;
  }
  __device__ __forceinline__ Word bits(int key) const { return __ldg(scores + key * score_stride); }
  __device__ __forceinline__ int quads() const { return ceil_div(count, 4); }
  __device__ __forceinline__ bool exists(int item) const { return item < count; }
  __device__ __forceinline__ int4 keys(int quad) const {
    return make_int4(4 * quad, 4 * quad + 1, 4 * quad + 2, 4 * quad + 3);
  }
  // Any key of the row, as ordered score.
  __device__ __forceinline__ uint32_t ordered_key(int key) const {
    if (!allows(key)) return 0;
    if constexpr (kIsShort) {
      return ordered_pair(bits(key)) << 16;
    } else {
      return ordered_bits(bits(key));
    }
  }
  // The quads first, first + 32, ... before `stop`; zeros for the others. All loads are started before one is used.
  template <int kQuads>
  __device__ __forceinline__ void read(Quad (&quads)[kQuads], int first, int stop) const {
    if (is_vector) {
#pragma unroll
      for (int u = 0; u < kQuads; ++u) {
        const int quad = first + 32 * u;
        quads[u] = place_words(quad < stop ? __ldg(reinterpret_cast<const Words*>(scores) + quad) : Words{});
      }
    } else {
#pragma unroll
      for (int u = 0; u < kQuads; ++u) {
        Word word[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int key = 4 * (first + 32 * u) + i;
          word[i] = first + 32 * u < stop && key < count ? bits(key) : Word{0};
        }
        quads[u] = place_words(pack_words(word));
      }
    }
#pragma unroll
    for (int u = 0; u < kQuads; ++u) {
      const int key = 4 * (first + 32 * u);
      // Keys that are there: a bit for each of the four.
      uint32_t there = first + 32 * u >= stop ? 0u : key + 4 <= count ? 15u : (1u << (count - key)) - 1;
      if (mask != nullptr) there &= allowed_keys(key, there);
      quads[u] = keep_words(ordered_words(quads[u]), there);
    }
  }

 private:
  __device__ __forceinline__ uint32_t allowed_keys(int key, uint32_t there) const {
    uint32_t allowed = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((there >> i & 1) != 0 && __ldg(mask + (key + i) * mask_stride) != 0) allowed |= 1u << i;
    }
    return allowed;
  }
  static __device__ __forceinline__ uint32_t ordered_bits(Word bits) {
    Score score;
    memcpy(&score, &bits, sizeof(score));
    return ordered(score);
  }
  static __device__ __forceinline__ Words pack_words(const Word (&word)[4]) {
    if constexpr (sizeof(Score) == 2) {
      return make_uint2(word[0] | static_cast<uint32_t>(word[1]) << 16, word[2] | static_cast<uint32_t>(word[3]) << 16);
    } else {
      return make_uint4(word[0], word[1], word[2], word[3]);
    }
  }
  // Scores in the place of the quad that they become.
  static __device__ __forceinline__ Quad place_words(Words x) {
    if constexpr (std::is_same<Words, Quad>::value) {
      return x;
    } else {
      return make_uint4(x.x, x.y, 0, 0);
    }
  }
  static __device__ __forceinline__ Quad ordered_words(Quad x) {
    if constexpr (kIsShort) {
      return make_uint2(ordered_pair(x.x), ordered_pair(x.y));
    } else if constexpr (sizeof(Score) == 2) {
      return make_uint4(ordered_bits(static_cast<Word>(x.x)), ordered_bits(static_cast<Word>(x.x >> 16)),
                        ordered_bits(static_cast<Word>(x.y)), ordered_bits(static_cast<Word>(x.y >> 16)));
    } else {
      return make_uint4(ordered_bits(x.x), ordered_bits(x.y), ordered_bits(x.z), ordered_bits(x.w));
    }
  }
  static __device__ __forceinline__ Quad keep_words(Quad x, uint32_t there) {
    if (there == 15) return x;
    if constexpr (kIsShort) {
      const auto halves = [](uint32_t two) { return (two & 1 ? 0xffffu : 0u) | (two & 2 ? 0xffff0000u : 0u); };
      return make_uint2(x.x & halves(there), x.y & halves(there >> 2));
    } else {
      return make_uint4(there & 1 ? x.x : 0, there & 2 ? x.y : 0, there & 4 ? x.z : 0, there & 8 ? x.w : 0);
    }
  }
};

// --- bounds of bfloat16 scores -------------------------------------------------------------------------------------

// As BoundFinder, for ordered scores of 16 bits: after the first digit five bits are left, which every warp looks through
// by itself. For at most two bounds.
template <int kThreads>
struct ShortBoundFinder {
  static constexpr int kRestBits = 5, kRestBins = 1 << kRestBits, kRestShift = 16;
  static_assert(kRestBins == 32 && digit_shift(0) == kRestShift + kRestBits, "a lane for each bin");
  static constexpr int kBinsEach = BinCounts<kThreads>::kPerThread;  // neighbouring bins of a thread, best first
  static constexpr uint32_t kNone = UINT32_MAX;

  BoundSmem& s;
  const OwnQuads<kThreads, uint2>& own;
  int above = 0, sum = 0;    // items in better bins of other threads, items in this thread's
  int total = 0;             // that can be kept
  uint32_t rest_of = kNone;  // the first digit whose rest has been counted

  __device__ __forceinline__ ShortBoundFinder(BoundSmem& shared, const OwnQuads<kThreads, uint2>& quads, int)
      : s(shared), own(quads) {}
  // Counts also what is never kept, without a test for each.
  __device__ __forceinline__ void count_first_digit() {
    clear_bins<kThreads>(s.hist[0], kBins);
    clear_bins<kThreads>(s.hist[1], 2 * kRestBins);
    __syncthreads();
    own.for_each_ord([&](uint32_t x) { atomicAdd(&s.hist[0][x >> digit_shift(0)], 1u); });
    __syncthreads();
    BinCounts<kThreads> bins;
    // The last bin holds what is never kept, and nothing else.
    total = bins.load(s.hist[0], s.warp_sums) - static_cast<int>(s.hist[0][0]);
    above = bins.above;
    sum = bins.sum;
  }
  // The bound below the best wanted(number of candidates that can be kept) candidates, and that number. A barrier has to
  // come before the next bound.
  template <class Wanted>
  __device__ __forceinline__ Cut find(Wanted&& wanted, int& number) {
    number = wanted(total);
    if (number <= 0 || number >= total) return Cut{number <= 0 && total > 0 ? UINT32_MAX : 0u, INT_MAX};
    locate(number);
    __syncthreads();
    const FoundBin found = s.found;
    if (found.count == found.need) return Cut{(found.bin << digit_shift(0)) - 1, INT_MAX};
    const uint32_t* const rest = count_rest(found.bin);
    const int lane = threadIdx.x % 32;
    const int count = static_cast<int>(rest[kRestBins - 1 - lane]), inclusive = warp_inclusive_scan(count);
    const int best = __ffs(__ballot_sync(kFullWarp, inclusive >= found.need)) - 1;
    const int in_bin = __shfl_sync(kFullWarp, count, best);
    const int need = found.need - (__shfl_sync(kFullWarp, inclusive, best) - in_bin);
    const uint32_t lowest = (found.bin << kRestBits | static_cast<uint32_t>(kRestBins - 1 - best)) << kRestShift;
    if (in_bin == need) return Cut{lowest - 1, INT_MAX};
    return Cut{lowest, in_bin - need};
  }

 private:
  // Exactly one thread finds the bin among its own.
  __device__ __forceinline__ void locate(int need) {
    if (need <= above || need > above + sum) return;
    int left = need - above;
#pragma unroll 1
    for (int bin = kBins - 1 - static_cast<int>(threadIdx.x) * kBinsEach;; --bin) {
      const int count = static_cast<int>(s.hist[0][bin]);
      if (left <= count) {
        s.found = FoundBin{static_cast<uint32_t>(bin), left, count};
        return;
      }
      left -= count;
    }
  }
  __device__ __forceinline__ const uint32_t* count_rest(uint32_t bin) {
    if (bin == rest_of) return s.hist[1];
    uint32_t* const rest = s.hist[1] + (rest_of == kNone ? 0 : kRestBins);
    if (rest_of == kNone) rest_of = bin;
    own.for_each_ord([&](uint32_t x) {
      if (x >> digit_shift(0) == bin) atomicAdd(&rest[x >> kRestShift & (kRestBins - 1)], 1u);
    });
    __syncthreads();
    return rest;
  }
};

}  // namespace prep
}  // namespace dmattn
