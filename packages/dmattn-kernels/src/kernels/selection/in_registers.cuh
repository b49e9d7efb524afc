// Radix select by one thread block that holds its candidates in registers from the first digit to the last.
#pragma once

#include "compact.cuh"

namespace dmattn {
namespace prep {

// The candidates of a thread: the quads begin + lane, begin + 32 + lane, ... of its warp.
template <int kThreads>
struct OwnQuads {
  static constexpr int kQuads = segment_quads(kThreads);
  WarpQuads mine;
  uint4 ord[kQuads];

  __device__ __forceinline__ explicit OwnQuads(const Candidates& c) : mine(WarpQuads::of<kThreads / 32>(c.quads())) {
#pragma unroll
    for (int u = 0; u < kQuads; ++u) ord[u] = quad(u) < mine.end ? c.load(quad(u)) : make_uint4(0, 0, 0, 0);
  }
  __device__ __forceinline__ int quad(int u) const { return mine.begin + u * 32 + static_cast<int>(threadIdx.x % 32); }
  // Whether the warp has a u-th quad in any lane.
  __device__ __forceinline__ bool any(int u) const { return mine.begin + u * 32 < mine.end; }
  // Calls f(ordered score) for every item of the thread, padding (0) included.
  template <class F>
  __device__ __forceinline__ void for_each_ord(F&& f) const {
#pragma unroll
    for (int u = 0; u < kQuads; ++u) {
      if (!any(u)) break;
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
};

// Finds bounds between the best candidates and the others. The histograms stay for the next bound, which often shares
// the first digits.
template <int kThreads>
struct BoundFinder {
  BoundSmem& s;
  const OwnQuads<kThreads>& own;
  int digits;
  uint32_t second_counted = UINT32_MAX, third_counted = UINT32_MAX;  // the prefixes whose items hist[1], hist[2] count

  // Counts also what is never kept, without a test for each. Ends with a barrier.
  __device__ __forceinline__ void count_first_digit() {
#pragma unroll
    for (int d = 0; d < kMaxDigits; ++d) {
      if (d < digits) clear_bins<kThreads>(s.hist[d], kBins);
    }
    __syncthreads();
    own.for_each_ord([&](uint32_t x) { atomicAdd(&s.hist[0][x >> digit_shift(0)], 1u); });
    __syncthreads();
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
  // The bound below the best wanted(number of candidates that can be kept) candidates, and that number.
  template <class Wanted>
  __device__ __forceinline__ Cut find(Wanted&& wanted, int& number) {
    Cut cut;
    Search search;
    {
      BinCounts<kThreads> bins;
      // The last bin holds what is never kept, and nothing else.
      const int total = bins.load(s.hist[0], s.warp_sums) - static_cast<int>(s.hist[0][0]);
      number = wanted(total);
      search.start(number, total, cut);
      if (search.open) bins.locate(search.need, &s.found);
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

// Candidates above a cut (lower half) and equal to it (upper half).
__device__ __forceinline__ uint32_t count_halves(uint32_t ord, uint32_t cut) {
  return ord > cut ? 1u : ord == cut ? 1u << 16 : 0u;
}
__device__ __forceinline__ Tally halves(uint32_t x) {
  return {static_cast<int32_t>(x & 0xffff), static_cast<int32_t>(x >> 16)};
}

// Calls sink(key, ord, in_core, in_kept, core_rank, rest_rank) for every candidate that is kept, and, if `visit_all`, for
// every other one too. The ranks number those of the core and the other kept ones in key order. One barrier.
template <int kThreads, class Sink>
__device__ __forceinline__ void for_each_kept(uint2 (&warp_tally)[32], const Candidates& c,
                                              const OwnQuads<kThreads>& own, const Cut& core_cut, const Cut& kept_cut,
                                              bool visit_all, Sink&& sink) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint32_t core_sum = 0, kept_sum = 0;
  own.for_each_ord([&](uint32_t x) {
    core_sum += count_halves(x, core_cut.value);
    kept_sum += count_halves(x, kept_cut.value);
  });
  core_sum = __reduce_add_sync(kFullWarp, core_sum);
  kept_sum = __reduce_add_sync(kFullWarp, kept_sum);
  if (lane == 0) warp_tally[warp] = make_uint2(core_sum, kept_sum);
  __syncthreads();
  const uint2 before_warp = lane < warp ? warp_tally[lane] : make_uint2(0, 0);
  Tally core = halves(__reduce_add_sync(kFullWarp, before_warp.x));
  Tally kept = halves(__reduce_add_sync(kFullWarp, before_warp.y));

#pragma unroll
  for (int u = 0; u < own.kQuads; ++u) {
    if (!own.any(u)) break;
    const uint32_t ord[4] = {own.ord[u].x, own.ord[u].y, own.ord[u].z, own.ord[u].w};
    uint32_t sum = 0;  // the four counts of a step as the bytes of one word: at most 128 each
#pragma unroll
    for (int i = 0; i < 4; ++i) sum += count_bytes(ord[i], core_cut.value, kept_cut.value);
    if (!visit_all && __ballot_sync(kFullWarp, sum >> 16 != 0) == 0) continue;
    const int quad = own.quad(u);
    const int4 four = quad < own.mine.end ? c.keys(quad) : make_int4(0, 0, 0, 0);
    const int key[4] = {four.x, four.y, four.z, four.w};
    const uint32_t inclusive = warp_inclusive_scan(sum);
    const uint32_t step = __shfl_sync(kFullWarp, inclusive, 31);
    Tally core_at = core.plus_bytes(inclusive - sum), kept_at = kept.plus_bytes((inclusive - sum) >> 16);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool in_kept = kept_at.takes(ord[i], kept_cut);
      if (in_kept || (visit_all && quad < own.mine.end && c.exists(4 * quad + i))) {
        const int core_rank = core_at.taken(core_cut);
        sink(key[i], ord[i], core_at.takes(ord[i], core_cut), in_kept, core_rank, kept_at.taken(kept_cut) - core_rank);
      }
      core_at.add(ord[i], core_cut);
      kept_at.add(ord[i], kept_cut);
    }
    core = core.plus_bytes(step);
    kept = kept.plus_bytes(step >> 16);
  }
}

}  // namespace prep
}  // namespace dmattn
