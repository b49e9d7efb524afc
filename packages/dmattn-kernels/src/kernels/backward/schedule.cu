// Before the backward kernel over lists of keys: which tiles each list has, and into how many splits the tiles are
// divided.
#include "../attention/shared/key_source.cuh"
#include "../shared/helper.cuh"
#include "backward.h"

namespace dmattn {
namespace {

using namespace prep;

constexpr int kScheduleThreads = 1024;

// The share of places that are busy, averaged over the waves that equal `blocks` take. places: blocks that run at once.
__device__ __forceinline__ float fill(int blocks, int places) {
  return static_cast<float>(blocks) / static_cast<float>(ceil_div(blocks, places) * places);
}

// Of 1 to `most` splits, the fewest with which equal blocks fill the GPU nearly as well as with any other number.
__device__ __forceinline__ int fewest_that_fill(int tiles, int most, int places) {
  float best = 0.f;
  for (int splits = 1; splits <= most; ++splits) best = fmaxf(best, fill(tiles * splits, places));
  int splits = 1;
  while (splits < most && fill(tiles * splits, places) < 0.96f * best) ++splits;
  return splits;
}

__global__ void __launch_bounds__(kScheduleThreads)
    schedule_kernel(const KeyList keys, int lists, int nheads_k, int head_ratio, int block_n, int max_work,
                    int max_tiles, int max_splits, int even_blocks, int32_t* schedule) {
  __shared__ int warp_sums[32];
  follow_previous_kernel();
  int tiles = 0;
  for (int list0 = 0; list0 < lists; list0 += kScheduleThreads) {
    const int list = list0 + threadIdx.x;
    int list_tiles = 0;
    if (list < lists) {
      const int b = keys.batch == 1 ? 0 : list / nheads_k;
      const int head = list % nheads_k * head_ratio / keys.head_ratio;
      list_tiles = ceil_div(read_list_count(keys, static_cast<int64_t>(b) * keys.heads + head), block_n);
    }
    int pass_tiles;
    const int before = block_exclusive_scan<kScheduleThreads>(list_tiles, warp_sums, pass_tiles);
    if (list < lists) schedule[2 + list] = tiles + before;
    tiles += pass_tiles;
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    const int most = tiles == 0 || tiles > max_tiles ? 1 : max(1, min(max_work / tiles, max_splits));
    schedule[0] = even_blocks > 0 && most > 1 ? fewest_that_fill(tiles, most, even_blocks) : most;
    schedule[1] = tiles;
    schedule[2 + lists] = tiles;
  }
}

}  // namespace

cudaError_t bwd_schedule(const KeyList& keys, int batch, int nheads_k, int head_ratio, int block_n, int max_work,
                         int max_tiles, int max_splits, int even_blocks, int32_t* schedule, cudaStream_t stream) {
  return launch(schedule_kernel, 1, kScheduleThreads, 0, stream, keys, batch * nheads_k, nheads_k, head_ratio, block_n,
                max_work, max_tiles, max_splits, even_blocks, schedule);
}

}  // namespace dmattn
