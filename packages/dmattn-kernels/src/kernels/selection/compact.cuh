// The candidates that radix select has taken, compacted in key order.
#pragma once

#include "radix.cuh"

namespace dmattn {
namespace prep {

__device__ __forceinline__ int warp_sum(int x) {
#pragma unroll
  for (int i = 16; i > 0; i /= 2) x += __shfl_xor_sync(kFullWarp, x, i);
  return x;
}

// Items above a cut and equal to it, counted in key order.
struct Tally {
  int32_t above, equal;

  // This tally with the counts in the lower two bytes of a word added.
  __device__ __forceinline__ Tally plus_bytes(uint32_t bytes) const {
    return {above + static_cast<int32_t>(bytes & 255), equal + static_cast<int32_t>(bytes >> 8 & 255)};
  }
  // taken(): how many of the counted items the cut takes. takes(): whether it takes the next item.
  __device__ __forceinline__ int taken(const Cut& cut) const { return above + max(equal - cut.skip, 0); }
  __device__ __forceinline__ bool takes(uint32_t ord, const Cut& cut) const {
    return ord > cut.value || (ord == cut.value && equal >= cut.skip);
  }
};

// Counts one item in the four bytes of a word: above the core's cut, equal to it, above the cut of all kept keys,
// equal to it.
__device__ __forceinline__ uint32_t count_bytes(uint32_t ord, uint32_t core, uint32_t kept) {
  return (ord > core ? 1u : 0u) + (ord == core ? 1u << 8 : 0u) + (ord > kept ? 1u << 16 : 0u) +
         (ord == kept ? 1u << 24 : 0u);
}

// The contiguous quads that a warp handles: a multiple of 32, but for the last ones.
struct WarpQuads {
  int32_t begin, end;

  template <int kWarps>
  static __device__ __forceinline__ WarpQuads of(int quads) {
    const int each = round_up(ceil_div(quads, kWarps), 32);
    const int begin = min(static_cast<int>(threadIdx.x / 32) * each, quads);
    return {begin, min(begin + each, quads)};
  }
};

// After select(): calls sink(item, ord, in_core, in_kept, core_rank, rest_rank) for every kept item, and, if
// `visit_all`, for every other one too, padding included. The ranks number the core items and the other kept ones in
// key order. A warp takes contiguous items, so that one barrier is enough.
template <int kThreads, class Sink>
__device__ __forceinline__ void compact(SelectSmem& s, bool visit_all, Sink&& sink) {
  const Candidates& c = s.candidates;
  const Cut core_cut = s.selected.core_cut, kept_cut = s.selected.kept_cut;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const WarpQuads mine = WarpQuads::of<kThreads / 32>(c.quads());
  const auto load = [&](int q) { return q < mine.end ? c.load(q) : make_uint4(0, 0, 0, 0); };

  Tally core{0, 0}, kept{0, 0};
#pragma unroll 4
  for (int q = mine.begin + lane; q < mine.end; q += 32) {
    const uint4 x = c.load(q);
    const uint32_t ord[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      core.above += ord[i] > core_cut.value;
      core.equal += ord[i] == core_cut.value;
      kept.above += ord[i] > kept_cut.value;
      kept.equal += ord[i] == kept_cut.value;
    }
  }
  const int4 own_tally =
      make_int4(warp_sum(core.above), warp_sum(core.equal), warp_sum(kept.above), warp_sum(kept.equal));
  if (lane == 0) s.warp_tally[warp] = own_tally;
  __syncthreads();
  core = kept = Tally{0, 0};
  for (int i = 0; i < warp; ++i) {
    const int4 x = s.warp_tally[i];
    core.above += x.x, core.equal += x.y;
    kept.above += x.z, kept.equal += x.w;
  }

  uint4 x = load(mine.begin + lane);
#pragma unroll 1
  for (int q = mine.begin + lane; q - lane < mine.end; q += 32) {
    const uint32_t ord[4] = {x.x, x.y, x.z, x.w};
    x = load(q + 32);
    // The four counts of a step as the bytes of one word: at most 128 each.
    uint32_t own = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) own += count_bytes(ord[i], core_cut.value, kept_cut.value);
    // Keys behind a set are rarely kept: skip steps of 128 items of which none is.
    if (!visit_all && __ballot_sync(kFullWarp, own >> 16 != 0) == 0) continue;
    const uint32_t inclusive = warp_inclusive_scan(own);
    const uint32_t step = __shfl_sync(kFullWarp, inclusive, 31);
    uint32_t before = inclusive - own;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (visit_all || ord[i] >= kept_cut.value) {
        const Tally core_at = core.plus_bytes(before), kept_at = kept.plus_bytes(before >> 16);
        const int core_rank = core_at.taken(core_cut);
        const bool in_kept = kept_at.takes(ord[i], kept_cut);
        if (in_kept || (visit_all && q < mine.end)) {
          sink(4 * q + i, ord[i], core_at.takes(ord[i], core_cut), in_kept, core_rank,
               kept_at.taken(kept_cut) - core_rank);
        }
      }
      before += count_bytes(ord[i], core_cut.value, kept_cut.value);
    }
    core = core.plus_bytes(step);
    kept = kept.plus_bytes(step >> 16);
  }
}

// Finishes a list of `count` keys, of which `full` are kept by all rows: writes zeros up to the next multiple of 128,
// and the counts. Called by all threads of a block, which are at least 128.
__device__ __forceinline__ void finish_list(const KeyList& keys, int64_t list, int count, int full) {
  int32_t* idx = const_cast<int32_t*>(keys.idx) + list * keys.capacity;
  if (threadIdx.x < round_up(count, 128) - count) idx[count + threadIdx.x] = 0;
  if (threadIdx.x != 0) return;
  const_cast<int32_t*>(keys.count)[list] = count;
  if (keys.full != nullptr) const_cast<int32_t*>(keys.full)[list] = full;
}

}  // namespace prep
}  // namespace dmattn
