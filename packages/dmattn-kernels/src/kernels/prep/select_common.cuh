// Device side of the selection: radix select of one thread block over its candidates, and the ordered compaction of what
// was selected.
#pragma once

#include <climits>

#include "prep_common.cuh"
#include "select_plan.h"

namespace dmattn {
namespace prep {

// --- digits of an ordered score ------------------------------------------------------------------------------------

__host__ __device__ __forceinline__ constexpr int digit_shift(int digit) {
  return digit == 0 ? 21 : digit == 1 ? 10 : 0;
}
__device__ __forceinline__ uint32_t digit_of(uint32_t ord, int digit) {
  return ord >> digit_shift(digit) & (digit == 2 ? 1023u : 2047u);
}
// The digits before `digit`.
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

// A histogram held by the whole thread block: neighbouring bins of each thread, best first.
template <int kThreads>
struct BinCounts {
  static constexpr int kPerThread = kBins / kThreads;
  static_assert(kPerThread % 4 == 0);
  int count[kPerThread];
  int above = 0;  // items in better bins of other threads
  int sum = 0;

  // Every thread takes part; one barrier. Returns the number of items.
  __device__ __forceinline__ int load(const uint32_t* hist, int (&warp_sums)[32]) {
    const uint4* src = reinterpret_cast<const uint4*>(hist + kBins - (threadIdx.x + 1) * kPerThread);
    sum = 0;
#pragma unroll
    for (int i = 0; i < kPerThread / 4; ++i) {
      const uint4 x = src[i];
      int* dst = count + kPerThread - 4 * i - 4;
      dst[3] = x.x, dst[2] = x.y, dst[1] = x.z, dst[0] = x.w;
      sum += x.x + x.y + x.z + x.w;
    }
    int total;
    above = block_exclusive_scan<kThreads>(sum, warp_sums, total);
    return total;
  }
  // 1 <= need <= number of items: exactly one thread writes.
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

// --- candidates ----------------------------------------------------------------------------------------------------

// Up to two runs of keys, all keys of the first before those of the second, read four at a time. Items are numbered
// through both runs; the first run is padded to a multiple of four.
struct Candidates {
  const uint32_t* first_ord = nullptr;  // 16-byte aligned, zeros up to the next multiple of four
  const int32_t* first_key = nullptr;
  int32_t first_count = 0;
  const uint32_t* second_ord = nullptr;  // 16-byte aligned, readable up to the next multiple of four
  const int32_t* second_key = nullptr;   // nullptr: second_base + i
  int32_t second_base = 0;
  int32_t second_count = 0;

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
    return x;
  }
  __device__ __forceinline__ bool exists(int item) const {
    const int i = item - 4 * first_quads();
    return i < 0 ? item < first_count : i < second_count;
  }
  __device__ __forceinline__ int key(int item) const {
    const int i = item - 4 * first_quads();
    if (i < 0) return __ldg(first_key + item);
    return second_key != nullptr ? __ldg(second_key + i) : second_base + i;
  }
};

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

// A bound between the keys that are taken and the others: those above `value`, and of those equal to it all but the
// first `skip` in key order, so that ties go to the later keys.
struct Cut {
  uint32_t value = 0;
  int32_t skip = INT_MAX;
};

// The best `kept` candidates, and among them the best `core`.
struct Selected {
  Cut core_cut, kept_cut;
  int32_t core = 0, kept = 0;
};

struct SelectSmem {
  alignas(16) uint32_t hist[2][kBins];
  int32_t warp_sums[32];
  FoundBin found[2];
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
    cut.value = wanted == 0 && total > 0 ? UINT32_MAX : 0u;
  }
  __device__ __forceinline__ void advance(const FoundBin& found, int digit, int digits, Cut& cut) {
    prefix = append_digit(prefix, digit, found.bin);
    need = found.need;
    const uint32_t lowest = prefix << digit_shift(digit);
    if (found.count == found.need) {
      cut.value = lowest - 1;
      open = false;
    } else if (digit + 1 == digits) {
      cut.value = lowest;
      cut.skip = found.count - found.need;
    }
  }
};

// kept = the best min(window, number of valid candidates); core = those of them that stay among the best `window` when
// any `added` keys join. Starts and ends with the threads in step as far as `s` is concerned.
template <int kThreads>
__device__ __forceinline__ Selected select(const Candidates& c, int digits, int window, int added, SelectSmem& s) {
  Selected result;
  Search core, kept;
  BinCounts<kThreads> bins;
  clear_bins<kThreads>(s.hist[0], kBins);
  __syncthreads();
  for_each_ord<kThreads>(c, [&](uint32_t x) {
    if (x != 0) atomicAdd(&s.hist[0][x >> digit_shift(0)], 1u);
  });
  __syncthreads();
  const int total = bins.load(s.hist[0], s.warp_sums);
  result.kept = min(window, total);
  result.core = result.kept - min(max(result.kept - window + added, 0), result.kept);
  core.start(result.core, total, result.core_cut);
  kept.start(result.kept, total, result.kept_cut);

  for (int digit = 0;; ++digit) {
    // Both bounds usually share all digits but the last ones: then one histogram serves both.
    const bool shared = core.prefix == kept.prefix;
    if (digit > 0) {
      clear_bins<kThreads>(s.hist[0], 2 * kBins);
      __syncthreads();
      const uint32_t core_prefix = core.open ? core.prefix : UINT32_MAX;
      const uint32_t kept_prefix = kept.open ? kept.prefix : UINT32_MAX;
      for_each_ord<kThreads>(c, [&](uint32_t x) {
        const uint32_t prefix = prefix_of(x, digit);
        const bool in_kept = prefix == kept_prefix;
        if (in_kept || prefix == core_prefix) atomicAdd(&s.hist[in_kept ? 1 : 0][digit_of(x, digit)], 1u);
      });
      __syncthreads();
    }
    const int kept_hist = digit > 0 ? 1 : 0;
    if (kept.open) {
      if (digit > 0) bins.load(s.hist[kept_hist], s.warp_sums);
      bins.locate(kept.need, &s.found[1]);
      if (core.open && shared) bins.locate(core.need, &s.found[0]);
      __syncthreads();
    }
    if (core.open && !(kept.open && shared)) {
      if (digit > 0) bins.load(s.hist[0], s.warp_sums);
      bins.locate(core.need, &s.found[0]);
      __syncthreads();
    }
    if (core.open) core.advance(s.found[0], digit, digits, result.core_cut);
    if (kept.open) kept.advance(s.found[1], digit, digits, result.kept_cut);
    if ((!core.open && !kept.open) || digit + 1 == digits) break;
  }
  return result;
}

// --- ordered compaction --------------------------------------------------------------------------------------------

// Inclusive sums over the lanes of a warp.
template <class Int>
__device__ __forceinline__ Int warp_inclusive_scan(Int x) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 1; i < 32; i *= 2) {
    const Int y = __shfl_up_sync(kFullWarp, x, i);
    if (lane >= i) x += y;
  }
  return x;
}
__device__ __forceinline__ int warp_sum(int x) {
#pragma unroll
  for (int i = 16; i > 0; i /= 2) x += __shfl_xor_sync(kFullWarp, x, i);
  return x;
}

// Items above a cut and equal to it.
struct Tally {
  int32_t above = 0, equal = 0;

  __device__ __forceinline__ int taken(const Cut& cut) const { return above + max(equal - cut.skip, 0); }
};

template <int kWarps>
struct CompactSmem {
  int4 tally[kWarps];  // core.above, core.equal, kept.above, kept.equal
};

// Which contiguous quads a warp handles: whole steps of 32.
struct WarpQuads {
  int32_t begin, end;

  template <int kWarps>
  static __device__ __forceinline__ WarpQuads of(int quads) {
    const int each = round_up(ceil_div(quads, kWarps), 32);
    const int begin = min(static_cast<int>(threadIdx.x / 32) * each, quads);
    return {begin, min(begin + each, quads)};
  }
};

// Calls sink(item, ord, in_core, in_kept, core_rank, rest_rank) for every kept item, and, if `visit_all`, for every other
// one too, padding included. The ranks number the core items and the other kept ones in key order. A warp takes
// contiguous items, so that one barrier is enough.
template <int kThreads, class Sink>
__device__ __forceinline__ void compact(const Candidates& c, const Selected& sel, bool visit_all,
                                        CompactSmem<kThreads / 32>& s, Sink&& sink) {
  constexpr int kUnroll = 4;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const WarpQuads mine = WarpQuads::of<kThreads / 32>(c.quads());
  const auto load_steps = [&](uint4(&x)[kUnroll], int q0) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int q = q0 + u * 32 + lane;
      x[u] = q < mine.end ? c.load(q) : make_uint4(0, 0, 0, 0);
    }
  };

  Tally core, kept;
  for (int q0 = mine.begin; q0 < mine.end; q0 += 32 * kUnroll) {
    uint4 x[kUnroll];
    load_steps(x, q0);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const uint32_t ord[4] = {x[u].x, x[u].y, x[u].z, x[u].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        core.above += ord[i] > sel.core_cut.value;
        core.equal += ord[i] == sel.core_cut.value;
        kept.above += ord[i] > sel.kept_cut.value;
        kept.equal += ord[i] == sel.kept_cut.value;
      }
    }
  }
  const int4 own_tally = make_int4(warp_sum(core.above), warp_sum(core.equal), warp_sum(kept.above),
                                   warp_sum(kept.equal));
  if (lane == 0) s.tally[warp] = own_tally;
  __syncthreads();
  core = kept = Tally{};
  for (int i = 0; i < warp; ++i) {
    const int4 x = s.tally[i];
    core.above += x.x, core.equal += x.y;
    kept.above += x.z, kept.equal += x.w;
  }

  for (int q0 = mine.begin; q0 < mine.end; q0 += 32 * kUnroll) {
    uint4 x[kUnroll];
    load_steps(x, q0);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const uint32_t ord[4] = {x[u].x, x[u].y, x[u].z, x[u].w};
      // The four counts of a step as the bytes of one word: at most 128 each.
      uint32_t own = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        own += (ord[i] > sel.core_cut.value ? 1u : 0u) + (ord[i] == sel.core_cut.value ? 1u << 8 : 0u) +
               (ord[i] > sel.kept_cut.value ? 1u << 16 : 0u) + (ord[i] == sel.kept_cut.value ? 1u << 24 : 0u);
      }
      // Behind a set, most steps keep nothing.
      if (!visit_all && __ballot_sync(kFullWarp, own >> 16 != 0) == 0) continue;
      const uint32_t inclusive = warp_inclusive_scan(own);
      const uint32_t step = __shfl_sync(kFullWarp, inclusive, 31);
      const uint32_t before = inclusive - own;
      Tally core_at{core.above + static_cast<int>(before & 255), core.equal + static_cast<int>(before >> 8 & 255)};
      Tally kept_at{kept.above + static_cast<int>(before >> 16 & 255), kept.equal + static_cast<int>(before >> 24)};
      const int q = q0 + u * 32 + lane;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool core_equal = ord[i] == sel.core_cut.value, kept_equal = ord[i] == sel.kept_cut.value;
        const bool core_above = ord[i] > sel.core_cut.value, kept_above = ord[i] > sel.kept_cut.value;
        const bool in_core = core_above || (core_equal && core_at.equal >= sel.core_cut.skip);
        const bool in_kept = kept_above || (kept_equal && kept_at.equal >= sel.kept_cut.skip);
        const int core_rank = core_at.taken(sel.core_cut);
        if (in_kept || (visit_all && q < mine.end)) sink(4 * q + i, ord[i], in_core, in_kept, core_rank, kept_at.taken(sel.kept_cut) - core_rank);
        core_at.above += core_above, core_at.equal += core_equal;
        kept_at.above += kept_above, kept_at.equal += kept_equal;
      }
      core.above += step & 255, core.equal += step >> 8 & 255;
      kept.above += step >> 16 & 255, kept.equal += step >> 24;
    }
  }
}

}  // namespace prep
}  // namespace dmattn
