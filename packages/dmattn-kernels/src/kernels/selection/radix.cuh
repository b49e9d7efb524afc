// Radix select: ordered scores, their digits, and the search of one thread block for the best of its candidates.
#pragma once

#include <climits>
#include <type_traits>

#include "../shared/helper.cuh"
#include "select.h"

namespace dmattn {
namespace prep {

// --- digits of an ordered score ------------------------------------------------------------------------------------

__host__ __device__ __forceinline__ constexpr int digit_shift(int digit) {
  return digit == 0 ? 21 : digit == 1 ? 10 : 0;
}
__device__ __forceinline__ uint32_t digit_of(uint32_t ord, int digit) {
  return ord >> digit_shift(digit) & (digit == 2 ? 1023u : 2047u);
}
// The digits before `digit`, as one number.
__device__ __forceinline__ uint32_t prefix_of(uint32_t ord, int digit) {
  return digit == 0 ? 0u : ord >> digit_shift(digit - 1);
}
__device__ __forceinline__ uint32_t append_digit(uint32_t prefix, int digit, uint32_t bin) {
  return prefix << (digit == 2 ? 10 : 11) | bin;
}

// Where the need-th best item of a histogram lies.
struct FoundBin {
  uint32_t bin;
  int32_t need;   // items wanted out of this bin
  int32_t count;  // items in it
};

// A histogram held by a thread block: each thread has the counts of neighbouring bins, the best bin first.
template <int kThreads>
struct BinCounts {
  static constexpr int kPerThread = kThreads * 4 > kBins ? 4 : kBins / kThreads;  // the last threads may have none
  static_assert(kPerThread % 4 == 0);
  int count[kPerThread] = {};
  int above = 0;  // items in better bins of other threads
  int sum = 0;

  __device__ __forceinline__ void read(const uint32_t* hist) {
    sum = 0;
    if (kThreads * kPerThread == kBins || threadIdx.x < kBins / kPerThread) {
      const uint4* src = reinterpret_cast<const uint4*>(hist + kBins - (threadIdx.x + 1) * kPerThread);
#pragma unroll
      for (int i = 0; i < kPerThread / 4; ++i) {
        const uint4 x = src[i];
        int* dst = count + kPerThread - 4 * i - 4;
        dst[3] = x.x, dst[2] = x.y, dst[1] = x.z, dst[0] = x.w;
        sum += x.x + x.y + x.z + x.w;
      }
    }
  }
  // Reads like read(), and finds `above`. Every thread takes part; one barrier. Returns the number of items.
  __device__ __forceinline__ int load(const uint32_t* hist, int (&warp_sums)[32]) {
    read(hist);
    int total;
    above = block_exclusive_scan<kThreads>(sum, warp_sums, total);
    return total;
  }
  // Given 1 <= need <= number of items, exactly one thread writes `found`.
  __device__ __forceinline__ void locate(int need, FoundBin* found) const {
    if (need <= above || need > above + sum) return;
    int before = above;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      if (need > before && need <= before + count[i]) {
        const uint32_t bin = kBins - 1 - (threadIdx.x * kPerThread + i);
        *found = FoundBin{bin, need - before, count[i]};
      }
      before += count[i];
    }
  }
};

// --- ordered scores ------------------------------------------------------------------------------------------------

// Grows with the score; 0 for NaN and -inf. Every other score gives at least 0x00800000.
__device__ __forceinline__ uint32_t ordered(float score) {
  uint32_t u = __float_as_uint(score);
  if ((u & 0x7fffffffu) > 0x7f800000u || u == 0xff800000u) return 0;
  if (u == 0x80000000u) u = 0;  // -0 == +0
  return u >> 31 ? ~u : u | 0x80000000u;
}
// The same for the bits of a 16-bit score, in whose type infinity has the bits `infinity`. The result lies in the
// upper half of a word, so that two digits are enough.
__device__ __forceinline__ uint32_t ordered(uint32_t bits, uint32_t infinity) {
  if ((bits & 0x7fffu) > infinity || bits == (0x8000u | infinity)) return 0;
  if (bits == 0x8000u) bits = 0;
  return (bits >> 15 ? ~bits : bits | 0x8000u) << 16;
}
constexpr uint32_t kHalfInfinity = 0x7c00, kBFloat16Infinity = 0x7f80;
__device__ __forceinline__ uint32_t ordered(__half score) { return ordered(__half_as_ushort(score), kHalfInfinity); }
__device__ __forceinline__ uint32_t ordered(__nv_bfloat16 score) {
  return ordered(__bfloat16_as_ushort(score), kBFloat16Infinity);
}

// Offset of the first score of row `row` of the selection, in elements.
__device__ __forceinline__ int64_t first_score(const SelectParams& p, int row) {
  return row / p.heads * p.score_batch_stride + row % p.heads * p.score_head_stride;
}

// The scores and the mask of a row of the selection.
template <class Score>
struct ScoreRow {
  const Score* scores;
  const uint8_t* mask;  // nullptr: every key is allowed
  int64_t score_stride, mask_stride;

  __device__ __forceinline__ ScoreRow(const SelectParams& p, int row)
      : score_stride(p.score_col_stride), mask_stride(p.mask_col_stride) {
    const int b = row / p.heads, h = row % p.heads;
    scores = static_cast<const Score*>(p.scores) + first_score(p, row);
    mask = p.key_mask == nullptr ? nullptr : p.key_mask + b * p.mask_batch_stride + h * p.mask_head_stride;
  }
  __device__ __forceinline__ uint32_t load(int key) const { return ordered(__ldg(scores + key * score_stride)); }
  __device__ __forceinline__ bool allows(int key) const {
    return mask == nullptr || __ldg(mask + key * mask_stride) != 0;
  }
};

// --- documents -----------------------------------------------------------------------------------------------------

// First key of the document that `key` is in, and the first key after it.
__device__ __forceinline__ int2 document_of(const SelectPlan& p, int key) {
  return p.document == nullptr ? make_int2(0, p.seqlen_k) : __ldg(p.document + key);
}

// --- candidates ----------------------------------------------------------------------------------------------------

// Up to two runs of keys, all keys of the first before those of the second, read four at a time, which is a quad.
// Items are numbered through both runs; the first run is padded to a multiple of four.
struct Candidates {
  const uint32_t* first_ord;  // 16-byte aligned, zeros up to the next multiple of four
  const int32_t* first_key;
  int32_t first_count;
  const uint32_t* second_ord;  // 16-byte aligned, readable up to the next multiple of four
  const int32_t* second_key;   // nullptr: second_base + i
  int32_t second_base;
  int32_t second_skip;  // its first items, at most 3, are no candidates: it starts on 16 bytes
  int32_t second_count;

  // The second run becomes the keys first .. last - 1 of a row.
  __device__ __forceinline__ void set_range(const uint32_t* ord, int first, int last) {
    second_base = first / 4 * 4;
    second_skip = first % 4;
    second_ord = ord + second_base;
    second_count = first < last ? last - second_base : 0;
  }
  __device__ __forceinline__ int first_quads() const { return ceil_div(first_count, 4); }
  __device__ __forceinline__ int quads() const { return first_quads() + ceil_div(second_count, 4); }
  __device__ __forceinline__ uint4 load(int quad) const {
    const int q = quad - first_quads();
    if (q < 0) return __ldg(reinterpret_cast<const uint4*>(first_ord) + quad);
    uint4 x = __ldg(reinterpret_cast<const uint4*>(second_ord) + q);
    const int left = second_count - 4 * q;
    if (left < 4) {
      x.w = 0;
      if (left < 3) x.z = 0;
      if (left < 2) x.y = 0;
    }
    if (q == 0 && second_skip > 0) {
      x.x = 0;
      if (second_skip > 1) x.y = 0;
      if (second_skip > 2) x.z = 0;
    }
    return x;
  }
  __device__ __forceinline__ bool exists(int item) const {
    const int i = item - 4 * first_quads();
    return i < 0 ? item < first_count : i >= second_skip && i < second_count;
  }
  __device__ __forceinline__ int key(int item) const {
    const int i = item - 4 * first_quads();
    if (i < 0) return __ldg(first_key + item);
    return second_key != nullptr ? __ldg(second_key + i) : second_base + i;
  }
  // The ordered score of an item that exists.
  __device__ __forceinline__ uint32_t ord(int item) const {
    const int i = item - 4 * first_quads();
    return i < 0 ? __ldg(first_ord + item) : __ldg(second_ord + i);
  }
  // Fills the first `quads` of `to` with the quads begin .. end - 1, and then zeros.
  template <int kQuads>
  __device__ __forceinline__ void load(uint4 (&to)[kQuads], int quads, int begin, int end) const {
#pragma unroll
    for (int u = 0; u < kQuads; ++u) {
      if (u >= quads) break;
      to[u] = begin + u < end ? load(begin + u) : make_uint4(0, 0, 0, 0);
    }
  }
};

// The same functions for the keys before a position whose scores, of kBytes each, are read from the caller's tensor.
// They are contiguous in memory, and there is no mask.
template <int kBytes>
struct RawCandidates {
  static_assert(kBytes == 2 || kBytes == 4);
  using Score = std::conditional_t<kBytes == 4, uint32_t, uint16_t>;
  using Quad = std::conditional_t<kBytes == 4, uint4, uint2>;

  const Score* scores;
  uint32_t infinity;  // the bits of infinity, if scores have 16 bits
  bool is_vec;        // a row starts on a multiple of four scores
  int32_t count;

  __device__ __forceinline__ RawCandidates(const SelectParams& p, int row, int count_)
      : infinity(p.dtype == Dtype::kFloat16 ? kHalfInfinity : kBFloat16Infinity), count(count_) {
    scores = static_cast<const Score*>(p.scores) + first_score(p, row);
    is_vec = reinterpret_cast<uintptr_t>(scores) % sizeof(Quad) == 0;
  }
  __device__ __forceinline__ int quads() const { return ceil_div(count, 4); }
  __device__ __forceinline__ bool exists(int item) const { return item < count; }
  __device__ __forceinline__ int key(int item) const { return item; }
  // The ordered score of any key of the row, a candidate or not.
  __device__ __forceinline__ uint32_t ord(int key) const { return ordered_bits(__ldg(scores + key)); }
  template <int kQuads>
  __device__ __forceinline__ void load(uint4 (&to)[kQuads], int quads, int begin, int end) const {
    Quad bits[kQuads];  // all are requested before the first is used
#pragma unroll
    for (int u = 0; u < kQuads; ++u) {
      if (u >= quads) break;
      bits[u] = load_bits(begin + u < end ? 4 * (begin + u) : count);
    }
#pragma unroll
    for (int u = 0; u < kQuads; ++u) {
      if (u >= quads) break;
      if constexpr (kBytes == 4) {
        to[u] = make_uint4(ordered_bits(bits[u].x), ordered_bits(bits[u].y), ordered_bits(bits[u].z),
                           ordered_bits(bits[u].w));
      } else {
        to[u] = make_uint4(ordered_bits(bits[u].x & 0xffffu), ordered_bits(bits[u].x >> 16),
                           ordered_bits(bits[u].y & 0xffffu), ordered_bits(bits[u].y >> 16));
      }
    }
  }

 private:
  __device__ __forceinline__ uint32_t ordered_bits(uint32_t bits) const {
    if constexpr (kBytes == 4) {
      return ordered(__uint_as_float(bits));
    } else {
      return ordered(bits, infinity);
    }
  }
  // The bits of the four scores from `first` on; those of -inf for keys that are no candidates.
  __device__ __forceinline__ Quad load_bits(int first) const {
    if (is_vec && first + 4 <= count) return __ldg(reinterpret_cast<const Quad*>(scores + first));
    uint32_t bits[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      constexpr uint32_t kFloatLowest = 0xff800000u;
      bits[i] = first + i < count ? __ldg(scores + first + i) : kBytes == 4 ? kFloatLowest : 0x8000u | infinity;
    }
    if constexpr (kBytes == 4) {
      return make_uint4(bits[0], bits[1], bits[2], bits[3]);
    } else {
      return make_uint2(bits[0] | bits[1] << 16, bits[2] | bits[3] << 16);
    }
  }
};

__device__ __forceinline__ int64_t set_index(const SelectPlan& p, int row, int set, int buffer) {
  return (static_cast<int64_t>(buffer) * p.rows + row) * p.sets + set;
}

// The candidates for the best keys before position row0 of the document that starts at `start`: the last set up to
// there, and the keys behind that set.
__device__ __forceinline__ Candidates block_candidates(const SelectPlan& p, int row, int row0, int start) {
  Candidates c{};
  const int super = (row0 - p.set_origin) / p.super_keys;
  const int position = p.set_origin + super * p.super_keys;
  if (super >= p.first_set && start < position) {
    const int set = super - p.first_set;
    const int64_t i = set_index(p, row, set, __popc(set) & 1);
    c.first_ord = p.set_ord + i * p.set_capacity;
    c.first_key = p.set_key + i * p.set_capacity;
    c.first_count = __ldg(p.set_count + i);
  }
  c.set_range(p.ord + row * p.ord_pitch, max(position, start), row0);
  return c;
}

// Calls f(ordered score) for every item, padding (0) included, in no particular order.
template <int kThreads, class F>
__device__ __forceinline__ void for_each_ord(const Candidates& c, F&& f) {
  constexpr int kUnroll = 4;
  const int quads = c.quads();
  for (int q0 = threadIdx.x; q0 < quads; q0 += kUnroll * kThreads) {
    uint4 x[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int q = q0 + u * kThreads;
      x[u] = q < quads ? c.load(q) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      f(x[u].x);
      f(x[u].y);
      f(x[u].z);
      f(x[u].w);
    }
  }
}

// --- selection -----------------------------------------------------------------------------------------------------

// A bound between the keys that are taken and the others. Taken are those above `value` and, of those equal to it, all
// but the first `skip` in key order, so that ties go to later keys.
struct Cut {
  uint32_t value;
  int32_t skip;
};

// The best `kept` candidates, and among them the best `core`.
struct Selected {
  Cut core_cut, kept_cut;
  int32_t core, kept;
};

// What the threads of a selecting block share. Values that all threads have in common are here to save registers.
struct SelectSmem {
  alignas(16) uint32_t hist[2][kBins];
  int4 warp_tally[32];  // core above, core equal, kept above, kept equal
  int32_t warp_sums[32];
  FoundBin found[2];
  Candidates candidates;  // filled by one thread before select()
  Selected selected;      // by select()
};

template <int kThreads>
__device__ __forceinline__ void clear_bins(uint32_t* hist, int bins) {
  for (int i = threadIdx.x; i < bins / 4; i += kThreads) {
    reinterpret_cast<uint4*>(hist)[i] = make_uint4(0, 0, 0, 0);
  }
}

// One of the two bounds that select() narrows down digit by digit.
struct Search {
  uint32_t prefix = 0;
  int32_t need = 0;
  bool open = false;

  __device__ __forceinline__ void start(int wanted, int total, Cut& cut) {
    need = wanted;
    open = wanted > 0 && wanted < total;
    cut = Cut{wanted == 0 && total > 0 ? UINT32_MAX : 0u, INT_MAX};
  }
  __device__ __forceinline__ void advance(const FoundBin& found, int digit, bool is_last, Cut& cut) {
    prefix = append_digit(prefix, digit, found.bin);
    need = found.need;
    const uint32_t lowest = prefix << digit_shift(digit);
    if (found.count == found.need) {
      cut.value = lowest - 1;
      open = false;
    } else if (is_last) {
      cut.value = lowest;
      cut.skip = found.count - found.need;
      open = false;
    }
  }
};

// kept = the best min(window, number of valid candidates); core = those of them that stay among the best `window` when
// any `added` keys join. Starts and ends with a barrier.
template <int kThreads>
__device__ __forceinline__ void select(SelectSmem& s, int digits, int window, int added) {
  const Candidates& c = s.candidates;
  Selected result;
  Search core, kept;
  clear_bins<kThreads>(s.hist[0], kBins);
  __syncthreads();
  for_each_ord<kThreads>(c, [&](uint32_t x) {
    if (x != 0) atomicAdd(&s.hist[0][x >> digit_shift(0)], 1u);
  });
  __syncthreads();
  {
    BinCounts<kThreads> bins;
    const int total = bins.load(s.hist[0], s.warp_sums);
    result.kept = min(window, total);
    result.core = result.kept - min(max(result.kept - window + added, 0), result.kept);
    core.start(result.core, total, result.core_cut);
    kept.start(result.kept, total, result.kept_cut);
    if (core.open) bins.locate(core.need, &s.found[0]);
    if (kept.open) bins.locate(kept.need, &s.found[1]);
  }
#pragma unroll 1
  for (int digit = 0; core.open || kept.open; ++digit) {
    if (digit > 0) {
      clear_bins<kThreads>(s.hist[0], 2 * kBins);
      __syncthreads();
      // While both bounds share their digits, the second histogram serves both.
      const uint32_t core_prefix = core.open ? core.prefix : UINT32_MAX;
      const uint32_t kept_prefix = kept.open ? kept.prefix : UINT32_MAX;
      for_each_ord<kThreads>(c, [&](uint32_t x) {
        const uint32_t prefix = prefix_of(x, digit);
        const bool in_kept = prefix == kept_prefix;
        if (in_kept || prefix == core_prefix) atomicAdd(&s.hist[in_kept ? 1 : 0][digit_of(x, digit)], 1u);
      });
      __syncthreads();
#pragma unroll 1
      for (int h = 0; h < 2; ++h) {
        const bool for_core = core.open && (core_prefix == kept_prefix ? 1 : 0) == h, for_kept = kept.open && h == 1;
        if (!for_core && !for_kept) continue;
        BinCounts<kThreads> bins;
        bins.load(s.hist[h], s.warp_sums);
        if (for_core) bins.locate(core.need, &s.found[0]);
        if (for_kept) bins.locate(kept.need, &s.found[1]);
        __syncthreads();
      }
    } else {
      __syncthreads();
    }
    const bool is_last = digit + 1 == digits;
    if (core.open) core.advance(s.found[0], digit, is_last, result.core_cut);
    if (kept.open) kept.advance(s.found[1], digit, is_last, result.kept_cut);
  }
  if (threadIdx.x == 0) s.selected = result;
  __syncthreads();
}

}  // namespace prep
}  // namespace dmattn
