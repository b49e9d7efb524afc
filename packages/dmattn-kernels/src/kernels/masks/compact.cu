// A key-only mask as the ascending list of the keys it keeps.
#include "../attention/shared/seqlen.cuh"
#include "masks.h"
#include "row.cuh"

namespace dmattn {
namespace {

using namespace prep;

// One thread block for each list, and 16 keys for each thread in a pass: 16384 keys are one pass.
constexpr int kThreads = 1024;
constexpr int kPassKeys = kThreads * 16;

// Keep bits of this thread's sixteen keys in the pass that begins at key `pass0`.
__device__ __forceinline__ uint32_t load_keys(const uint8_t* src, int64_t stride, int keys, const MaskExtent& extent,
                                              int64_t pass0) {
  const int lane = threadIdx.x % 32;
  if (stride == 1) {
    const MaskRow row{src, keys};
    const int warp0 = static_cast<int>(pass0) + (threadIdx.x - lane) * 16;
    const int chunk = row.lane_chunk(warp0, lane);
    bool is_at_end;
    const uint4 x = load_mask_chunk(row, chunk, extent, is_at_end);
    return align_lane_bits(row, warp0, lane, extent, mask_chunk_bits(row, chunk, x, is_at_end));
  }
  uint32_t bits = 0;
  const int64_t key0 = pass0 + threadIdx.x * 16;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    if (key0 + i < keys) {
      bits |= static_cast<uint32_t>(__ldg(src + (key0 + i) * stride) != 0) << i;
    }
  }
  return bits;
}

// The mask bytes that a list is made from, and where the list is written.
struct List {
  const uint8_t* src;
  int keys;
  int first;  // number of the first key
  int32_t* idx;
  int capacity;
};
__device__ __forceinline__ List find_list(const MaskSource& mask, const KeyList& keys, int64_t list) {
  const int64_t b = list / mask.heads, head = list % mask.heads;
  const uint8_t* src = mask.ptr + b * mask.batch_stride + head * mask.head_stride;
  int32_t* idx = const_cast<int32_t*>(keys.idx);
  if (!mask.packing.is_active()) return {src, mask.seqlen_k, 0, idx + list * keys.capacity, keys.capacity};
  const Packing& packing = mask.packing;
  const SeqRange own = read_packed_range(packing.cu_seqlens_k, static_cast<int>(b), packing.total_k, mask.seqlen_k);
  const int64_t first =
      static_cast<int64_t>(first_packed_block(own.first, static_cast<int>(b), kListBlock)) * kListBlock;
  return {src + (mask.per_key ? own.first * mask.col_stride : 0), own.length, own.first,
          idx + head * keys.capacity + first, round_up(own.length, kListBlock)};
}

__global__ void __launch_bounds__(kThreads)
    compact_kernel(const MaskSource mask, const MaskExtent extent, const KeyList keys, int32_t* used_rows) {
  __shared__ int warp_sums[32];
  __shared__ uint16_t group_bits[kThreads];
  __shared__ int group_begin[kThreads];
  follow_previous_kernel();
  const List list = find_list(mask, keys, blockIdx.x);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

  int count = 0;
  uint32_t bits = load_keys(list.src, mask.col_stride, list.keys, extent, 0);
  for (int64_t pass0 = 0; pass0 < list.keys; pass0 += kPassKeys) {
    int pass_count;
    const int before = block_exclusive_scan<kThreads>(__popc(bits), warp_sums, pass_count);
    group_bits[threadIdx.x] = static_cast<uint16_t>(bits);
    group_begin[threadIdx.x] = count + before;
    if (pass0 + kPassKeys < list.keys)
      bits = load_keys(list.src, mask.col_stride, list.keys, extent, pass0 + kPassKeys);
    __syncthreads();
    // One lane for each key, so that the kept keys of a warp are written to neighbouring entries.
#pragma unroll 4
    for (int i = 0; i < kPassKeys; i += kThreads) {
      const int key = i + warp * 32 + lane;
      const uint32_t group = group_bits[key / 16];
      const int bit = key % 16;
      if (group >> bit & 1) {
        list.idx[group_begin[key / 16] + __popc(group & ((1u << bit) - 1))] =
            list.first + static_cast<int32_t>(pass0 + key);
      }
    }
    count += pass_count;
    __syncthreads();
  }
  for (int i = count + threadIdx.x; i < list.capacity; i += kThreads) list.idx[i] = 0;
  if (threadIdx.x == 0) const_cast<int32_t*>(keys.count)[blockIdx.x] = count;
  if (used_rows != nullptr && threadIdx.x < 2) used_rows[2 * blockIdx.x + threadIdx.x] = 0;
}

}  // namespace

cudaError_t compact_keys(const MaskSource& mask, const KeyList& keys, int32_t* used_rows, cudaStream_t stream) {
  const int64_t lists = static_cast<int64_t>(keys.batch) * keys.heads;
  return launch(compact_kernel, lists, kThreads, 0, stream, mask, find_extent(mask), keys, used_rows);
}

}  // namespace dmattn
