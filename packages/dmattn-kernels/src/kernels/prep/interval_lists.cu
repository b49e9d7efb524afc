// Key lists of the blocks of query rows from given key intervals.
#include "select.h"
#include "select_common.cuh"

namespace dmattn {
namespace {

using namespace prep;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

// The ends of four keys from `key`; keys at and past `keys` get an end that no row keeps.
__device__ __forceinline__ int4 load_ends(const int32_t* end, int key, int keys, bool vec) {
  if (vec && key + 3 < keys) return __ldg(reinterpret_cast<const int4*>(end + key));
  int e[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) e[i] = key + i < keys ? __ldg(end + key + i) : INT_MIN;
  return make_int4(e[0], e[1], e[2], e[3]);
}

// The positions of a block's rows, and how a key stands to them.
struct RowRange {
  int first, last;

  __device__ __forceinline__ bool kept_by_any(int key, int end) const { return end > max(key, first); }
  __device__ __forceinline__ bool kept_by_all(int key, int end) const { return key <= first && end > last; }
  // A lane's four keys: those kept by all rows in the lower half, the others in the upper half.
  __device__ __forceinline__ uint32_t tally(int key, int4 end) const {
    const int e[4] = {end.x, end.y, end.z, end.w};
    uint32_t sum = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (kept_by_any(key + i, e[i])) sum += kept_by_all(key + i, e[i]) ? 1u : 1u << 16;
    }
    return sum;
  }
};

__global__ void __launch_bounds__(kThreads) interval_kernel(const KeyList lists, int seqlen_q, int seqlen_k, bool vec) {
  __shared__ int2 warp_sums[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // Blocks with most keys before them first.
  const int rows = lists.batch * lists.heads;
  const int row = blockIdx.x % rows, block = lists.blocks - 1 - blockIdx.x / rows;
  const int64_t first = static_cast<int64_t>(block) * lists.block_rows + (seqlen_k - seqlen_q);
  const RowRange range{static_cast<int>(first), static_cast<int>(min(first + lists.block_rows, int64_t{seqlen_k}) - 1)};
  const int keys = range.last + 1;
  const int32_t* end = lists.end + static_cast<int64_t>(row) * seqlen_k;
  const int64_t list = static_cast<int64_t>(row) * lists.blocks + block;
  int32_t* idx = const_cast<int32_t*>(lists.idx) + list * lists.capacity;
  const WarpQuads mine = WarpQuads::of<kWarps>(ceil_div(keys, 4));

  int2 sum = make_int2(0, 0);  // kept by all rows, by some
#pragma unroll 4
  for (int q = mine.begin + lane; q < mine.end; q += 32) {
    const uint32_t own = range.tally(4 * q, load_ends(end, 4 * q, keys, vec));
    sum.x += own & 0xffff;
    sum.y += own >> 16;
  }
  sum = make_int2(warp_sum(sum.x), warp_sum(sum.y));
  if (lane == 0) warp_sums[warp] = sum;
  __syncthreads();
  int2 at = make_int2(0, 0), total = make_int2(0, 0);
#pragma unroll
  for (int i = 0; i < kWarps; ++i) {
    if (i < warp) at.x += warp_sums[i].x, at.y += warp_sums[i].y;
    total.x += warp_sums[i].x, total.y += warp_sums[i].y;
  }
  at.y += total.x;

#pragma unroll 4
  for (int q0 = mine.begin; q0 < mine.end; q0 += 32) {
    const int q = q0 + lane;
    const int4 ends = q < mine.end ? load_ends(end, 4 * q, keys, vec) : make_int4(INT_MIN, INT_MIN, INT_MIN, INT_MIN);
    const uint32_t own = range.tally(4 * q, ends);
    if (__ballot_sync(kFullWarp, own != 0) == 0) continue;
    const uint32_t inclusive = warp_inclusive_scan(own);
    const uint32_t step = __shfl_sync(kFullWarp, inclusive, 31);
    int full_at = at.x + static_cast<int>((inclusive - own) & 0xffff);
    int part_at = at.y + static_cast<int>((inclusive - own) >> 16);
    const int e[4] = {ends.x, ends.y, ends.z, ends.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = 4 * q + i;
      if (!range.kept_by_any(key, e[i])) continue;
      const int to = range.kept_by_all(key, e[i]) ? full_at++ : part_at++;
      if (to < lists.capacity) idx[to] = key;
    }
    at.x += static_cast<int>(step & 0xffff);
    at.y += static_cast<int>(step >> 16);
  }
  const int count = min(total.x + total.y, lists.capacity);
  if (threadIdx.x < round_up(count, 128) - count) idx[count + threadIdx.x] = 0;
  if (threadIdx.x == 0) {
    const_cast<int32_t*>(lists.count)[list] = count;
    const_cast<int32_t*>(lists.full)[list] = min(total.x, count);
  }
}

}  // namespace

cudaError_t build_interval_lists(const KeyList& keys, int32_t seqlen_q, int32_t seqlen_k, cudaStream_t stream) {
  if (seqlen_q < 0 || seqlen_q > seqlen_k || seqlen_k > kMaxSelectKeys || keys.block_rows <= 0 ||
      keys.blocks != ceil_div(seqlen_q, keys.block_rows) || keys.capacity % 128 != 0) {
    return cudaErrorInvalidValue;
  }
  const bool vec = seqlen_k % 4 == 0 && reinterpret_cast<uintptr_t>(keys.end) % 16 == 0;
  const int64_t blocks = static_cast<int64_t>(keys.batch) * keys.heads * keys.blocks;
  return launch(interval_kernel, blocks, kThreads, 0, stream, keys, seqlen_q, seqlen_k, vec);
}

}  // namespace dmattn
