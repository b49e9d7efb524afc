// Radix select by one thread block that holds its candidates in registers from the first digit to the last.
#pragma once

#include "compact.cuh"

namespace dmattn {
namespace prep {

// The candidates of a thread: neighbouring quads, so that the items that it keeps have neighbouring ranks.
template <int kThreads>
struct OwnQuads {
  static constexpr int kQuads = segment_quads(kThreads);
  int32_t begin, end;  // quads
  int32_t steps;       // the most quads that a thread has
  uint4 ord[kQuads];

  // AnyCandidates: Candidates or RawCandidates, here as below.
  template <class AnyCandidates>
  __device__ __forceinline__ explicit OwnQuads(const AnyCandidates& c) : steps(ceil_div(c.quads(), kThreads)) {
    begin = static_cast<int>(threadIdx.x) * steps;
    end = min(begin + steps, c.quads());
    c.load(ord, steps, begin, end);
  }
  // Calls f(ordered score) for every item of the thread, padding (0) included.
  template <class F>
  __device__ __forceinline__ void for_each_ord(F&& f) const {
#pragma unroll
    for (int u = 0; u < kQuads; ++u) {
      if (u >= steps) break;
      f(ord[u].x);
      f(ord[u].y);
      f(ord[u].z);
      f(ord[u].w);
    }
  }
};

// --- bounds --------------------------------------------------------------------------------------------------------

struct BoundSmem {
  alignas(16) uint32_t hist[kMaxDigits][kBins];
  int32_t warp_sums[32];
  FoundBin found;

  template <int kThreads>
  __device__ __forceinline__ void clear(int digits) {
#pragma unroll
    for (int d = 0; d < kMaxDigits; ++d) {
      if (d < digits) clear_bins<kThreads>(hist[d], kBins);
    }
  }
};

// Finds bounds between the best candidates and the others. The histograms stay for the next bound, which often shares
// the first digits.
template <int kThreads>
struct BoundFinder {
  BoundSmem& s;
  const OwnQuads<kThreads>& own;
  int digits;
  uint32_t second_counted = UINT32_MAX, third_counted = UINT32_MAX;  // prefix of the items in hist[1], in hist[2]
  int first_above = 0;                                               // BinCounts::above of hist[0]
  int total = 0;                                                     // candidates that can be kept

  // Also counts items that are never kept, which spares a test for each item. Comes after BoundSmem::clear(); ends
  // with a barrier.
  __device__ __forceinline__ void count_first_digit() {
    __syncthreads();
    own.for_each_ord([&](uint32_t x) { atomicAdd(&s.hist[0][x >> digit_shift(0)], 1u); });
    __syncthreads();
    // Bin 0, the last one, holds the items that are never kept, and no others.
    BinCounts<kThreads> bins;
    total = bins.load(s.hist[0], s.warp_sums) - static_cast<int>(s.hist[0][0]);
    first_above = bins.above;
  }
  __device__ __forceinline__ void count_digit(int digit, uint32_t prefix) {
    const uint32_t before = digit == 1 ? second_counted : third_counted;
    if (before == prefix) return;
    uint32_t* hist = s.hist[digit];
    if (before != UINT32_MAX) {
      clear_bins<kThreads>(hist, kBins);
      __syncthreads();
    }
    (digit == 1 ? second_counted : third_counted) = prefix;
    own.for_each_ord([&](uint32_t x) {
      if (prefix_of(x, digit) == prefix) atomicAdd(&hist[digit_of(x, digit)], 1u);
    });
    __syncthreads();
  }
  // The bound below the best wanted(n) candidates, where n candidates can be kept. `number` becomes wanted(n).
  template <class Wanted>
  __device__ __forceinline__ Cut find(Wanted&& wanted, int& number) {
    Cut cut;
    Search search;
    number = wanted(total);
    search.start(number, total, cut);
    if (search.open) {
      BinCounts<kThreads> bins;
      bins.read(s.hist[0]);
      bins.above = first_above;
      bins.locate(search.need, &s.found);
    }
#pragma unroll 1
    for (int digit = 0; search.open; ++digit) {
      if (digit > 0) {
        count_digit(digit, search.prefix);
        BinCounts<kThreads> bins;
        bins.load(s.hist[digit], s.warp_sums);
        bins.locate(search.need, &s.found);
      }
      __syncthreads();
      search.advance(s.found, digit, digit + 1 == digits, cut);
    }
    return cut;
  }
};

// --- the candidates that are kept -----------------------------------------------------------------------------------

// Which items of a thread a cut takes, as bits in key order, and how many items before those of the thread.
template <int kThreads>
struct TakenItems {
  uint32_t above = 0, equal = 0;  // items above the cut and equal to it; take() adds to `above` the equal items taken
  int32_t before = 0;

  __device__ __forceinline__ TakenItems(const OwnQuads<kThreads>& own, const Cut& cut) {
    static_assert(4 * OwnQuads<kThreads>::kQuads <= 32, "a bit for each item");
    const auto add = [&](uint32_t& bits, auto&& is_in) {
#pragma unroll
      for (int u = 0; u < OwnQuads<kThreads>::kQuads; ++u) {
        if (u >= own.steps) break;
        const uint32_t ord[4] = {own.ord[u].x, own.ord[u].y, own.ord[u].z, own.ord[u].w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (is_in(ord[i])) bits |= 1u << (4 * u + i);
        }
      }
    };
    add(above, [&](uint32_t ord) { return ord > cut.value; });
    if (cut.skip != INT_MAX) add(equal, [&](uint32_t ord) { return ord == cut.value; });
  }
  // The number of items above the cut in the lower half of a word, of equal ones in the upper half.
  __device__ __forceinline__ uint32_t counts() const { return __popc(above) | __popc(equal) << 16; }
  // Afterwards `above` has all items that are taken. earlier: the sum of counts() of all threads before this one.
  __device__ __forceinline__ void take(const Cut& cut, uint32_t earlier) {
    const int earlier_equal = static_cast<int>(earlier >> 16);
    before = static_cast<int>(earlier & 0xffff) + max(earlier_equal - cut.skip, 0);
    int skip = cut.skip - earlier_equal;
    if (skip >= __popc(equal)) return;
    for (; skip > 0; --skip) equal &= equal - 1;
    above |= equal;
  }
  __device__ __forceinline__ bool takes(int item) const { return (above >> item & 1) != 0; }
  __device__ __forceinline__ int rank(int item) const { return before + __popc(above & ((1u << item) - 1)); }
};

// Calls sink(item, read(item), in_core, in_kept, core_rank, rest_rank) for every candidate that is kept, and, if
// `visit_all`, for every other one too. core_rank numbers the core, rest_rank the other kept candidates, both in key
// order. One barrier. kAtOnce: items that are read together.
template <int kAtOnce, int kThreads, class AnyCandidates, class Read, class Sink>
__device__ __forceinline__ void for_each_kept(uint2 (&warp_tally)[32], const AnyCandidates& c,
                                              const OwnQuads<kThreads>& own, const Cut& core_cut, const Cut& kept_cut,
                                              bool visit_all, Read&& read, Sink&& sink) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  TakenItems<kThreads> core(own, core_cut), kept(own, kept_cut);
  const uint2 sum = make_uint2(warp_inclusive_scan(core.counts()), warp_inclusive_scan(kept.counts()));
  if (lane == 31) warp_tally[warp] = sum;
  __syncthreads();
  const uint2 before_warp = lane < warp ? warp_tally[lane] : make_uint2(0, 0);
  core.take(core_cut, __reduce_add_sync(kFullWarp, before_warp.x) + sum.x - core.counts());
  kept.take(kept_cut, __reduce_add_sync(kFullWarp, before_warp.y) + sum.y - kept.counts());

  uint32_t left = kept.above;
  if (visit_all) {
    for (int i = 0; i < 4 * (own.end - own.begin); ++i) left |= c.exists(4 * own.begin + i) ? 1u << i : 0u;
  }
#pragma unroll 1
  while (left != 0) {
    int item[kAtOnce];
    decltype(read(0)) found[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      item[i] = left != 0 ? __ffs(left) - 1 : -1;
      left &= left - 1;
      if (item[i] >= 0) found[i] = read(4 * own.begin + item[i]);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (item[i] < 0) continue;
      const int core_rank = core.rank(item[i]);
      sink(4 * own.begin + item[i], found[i], core.takes(item[i]), kept.takes(item[i]), core_rank,
           kept.rank(item[i]) - core_rank);
    }
  }
}

}  // namespace prep
}  // namespace dmattn
