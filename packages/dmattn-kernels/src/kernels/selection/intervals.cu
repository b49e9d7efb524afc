// Key lists of the blocks of query rows from given key intervals.
#include "../shared/helper.cuh"
#include "intervals.h"

namespace dmattn {
namespace {

using namespace prep;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
// Keys that a warp looks at together. `latest` has the largest end of each such chunk, so that a block skips chunks
// whose keys have all left before its first row.
constexpr int kChunk = kIntervalChunk;
// Chunks that a warp loads before it looks at the first of them.
constexpr int kAtOnce = 4;

__global__ void __launch_bounds__(kThreads)
    latest_end_kernel(const int32_t* end, int32_t* latest, int seqlen_k, int chunks, int64_t rows) {
  follow_previous_kernel();
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (at >= rows * chunks) return;
  const int64_t row = at / chunks;
  const int key = static_cast<int>(at % chunks) * kChunk + threadIdx.x % 32;
  int most = key < seqlen_k ? __ldg(end + row * seqlen_k + key) : INT_MIN;
#pragma unroll
  for (int i = 16; i > 0; i /= 2) most = max(most, __shfl_xor_sync(kFullWarp, most, i));
  if (threadIdx.x % 32 == 0) latest[at] = most;
}

// The rows of a block, and the keys that they can keep.
struct BlockView {
  const int32_t* end;
  const int32_t* latest;  // nullptr: look at every chunk
  int first, last;        // positions of the first and the last row
  int lowest;             // first key within reach of the first row

  __device__ __forceinline__ bool kept_by_any(int key, int until) const { return until > max(key, first); }
  __device__ __forceinline__ bool kept_by_all(int key, int until) const { return key <= first && until > last; }
  // Calls f(kept by all, kept by some, key) for each key of the chunks begin, ..., stop - 1 that may have kept keys,
  // in key order. Each lane has one key of a chunk, and all lanes make the call.
  template <class F>
  __device__ __forceinline__ void for_each_key(int begin, int stop, F&& f) const {
    const int lane = threadIdx.x % 32;
    const auto may_keep = [&](int chunk) {
      return chunk < stop && (latest == nullptr || __ldg(latest + chunk) > first);
    };
    bool next = may_keep(begin + lane);
    for (int chunk0 = begin; chunk0 < stop; chunk0 += 32) {
      uint32_t left = __ballot_sync(kFullWarp, next);
      next = may_keep(chunk0 + 32 + lane);
      while (left != 0) {
        int key[kAtOnce], until[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          key[i] = left != 0 ? (chunk0 + __ffs(left) - 1) * kChunk + lane : -1;
          left &= left - 1;
          until[i] = key[i] >= lowest && key[i] <= last ? __ldg(end + key[i]) : INT_MIN;
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const bool any = kept_by_any(key[i], until[i]), all = any && kept_by_all(key[i], until[i]);
          f(all, any && !all, key[i]);
        }
      }
    }
  }
};

__global__ void __launch_bounds__(kThreads) interval_kernel(const IntervalParams p, const KeyList lists) {
  __shared__ int2 warp_sums[kWarps];
  follow_previous_kernel();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // Blocks with the most keys before them start first.
  const int rows = lists.batch * lists.heads;
  const int row = blockIdx.x % rows, block = lists.blocks - 1 - blockIdx.x / rows;
  const int64_t list = static_cast<int64_t>(row) * lists.blocks + block;
  int32_t* idx = const_cast<int32_t*>(lists.idx) + list * lists.capacity;
  BlockView view;
  view.end = lists.end + static_cast<int64_t>(row) * p.seqlen_k;
  view.latest = p.latest == nullptr ? nullptr : p.latest + static_cast<int64_t>(row) * p.chunks;
  view.first = block * lists.block_rows + (p.seqlen_k - p.seqlen_q);
  view.last = static_cast<int>(min(static_cast<int64_t>(view.first) + lists.block_rows, int64_t{p.seqlen_k}) - 1);
  view.lowest = max(view.first - p.reach + 1, 0);
  // Each warp has neighbouring chunks.
  const int chunk0 = view.lowest / kChunk, chunk1 = view.last / kChunk + 1;
  const int each = ceil_div(chunk1 - chunk0, kWarps);
  const int begin = min(chunk0 + warp * each, chunk1), stop = min(begin + each, chunk1);

  int2 sum = make_int2(0, 0);  // kept by all rows, by some
  view.for_each_key(begin, stop, [&](bool all, bool some, int) {
    sum.x += __popc(__ballot_sync(kFullWarp, all));
    sum.y += __popc(__ballot_sync(kFullWarp, some));
  });
  if (lane == 0) warp_sums[warp] = sum;
  __syncthreads();
  int2 at = make_int2(0, 0), total = make_int2(0, 0);
#pragma unroll
  for (int i = 0; i < kWarps; ++i) {
    if (i < warp) at.x += warp_sums[i].x, at.y += warp_sums[i].y;
    total.x += warp_sums[i].x, total.y += warp_sums[i].y;
  }
  const int needed = total.x + total.y;
  const bool fits = needed <= lists.capacity;
  if (threadIdx.x == 0) {
    const_cast<int32_t*>(lists.count)[list] = fits ? needed : 0;
    const_cast<int32_t*>(lists.full)[list] = fits ? total.x : 0;
    if (p.needed != nullptr) p.needed[list] = needed;
  }
  if (!fits) return;
  if (threadIdx.x < round_up(needed, 128) - needed) idx[needed + threadIdx.x] = 0;

  at.y += total.x;
  const uint32_t lower_lanes = (1u << lane) - 1;
  view.for_each_key(begin, stop, [&](bool all, bool some, int key) {
    const uint32_t all_warp = __ballot_sync(kFullWarp, all), some_warp = __ballot_sync(kFullWarp, some);
    if (all) idx[at.x + __popc(all_warp & lower_lanes)] = key;
    if (some) idx[at.y + __popc(some_warp & lower_lanes)] = key;
    at.x += __popc(all_warp);
    at.y += __popc(some_warp);
  });
}

}  // namespace

cudaError_t build_interval_lists(const IntervalParams& p, const KeyList& keys, cudaStream_t stream) {
  if (p.seqlen_q < 0 || p.seqlen_q > p.seqlen_k || p.seqlen_k > kMaxSelectKeys || p.reach < 0 || keys.block_rows <= 0 ||
      keys.blocks != ceil_div(p.seqlen_q, keys.block_rows) || keys.capacity % 128 != 0) {
    return cudaErrorInvalidValue;
  }
  const int64_t rows = static_cast<int64_t>(keys.batch) * keys.heads;
  if (rows * keys.blocks == 0) return cudaSuccess;
  cudaError_t status = cudaSuccess;
  if (p.latest != nullptr) {
    status = launch(latest_end_kernel, ceil_div<int64_t>(rows * p.chunks, kWarps), kThreads, 0, stream, keys.end,
                    p.latest, p.seqlen_k, p.chunks, rows);
  }
  if (status != cudaSuccess) return status;
  return launch(interval_kernel, rows * keys.blocks, kThreads, 0, stream, p, keys);
}

}  // namespace dmattn
