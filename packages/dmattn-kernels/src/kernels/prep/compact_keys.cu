// A key-only mask as the ascending list of the keys it keeps.
#include "mask_row.cuh"
#include "prep.h"

namespace dmattn {
namespace {

using namespace prep;

// One block a list, 16 keys a thread and pass: 16384 keys are one pass.
constexpr int kThreads = 1024;
constexpr int kPassKeys = kThreads * 16;

// Keep bits of this thread's sixteen keys from `key0`.
__device__ __forceinline__ uint32_t load_keys(const MaskSource& mask, const uint8_t* src, int64_t pass0) {
  const int lane = threadIdx.x % 32;
  if (mask.col_stride == 1) {
    const MaskRow row(src, mask.seqlen_k);
    const int64_t warp0 = pass0 + (threadIdx.x - lane) * 16;
    const uintptr_t chunk = lane_chunk(row, warp0, lane);
    return align_lane_bits(row, warp0, lane, mask_chunk_bits(row, chunk, load_mask_chunk(row, chunk)));
  }
  uint32_t bits = 0;
  const int64_t key0 = pass0 + threadIdx.x * 16;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    if (key0 + i < mask.seqlen_k) {
      bits |= static_cast<uint32_t>(__ldg(src + (key0 + i) * mask.col_stride) != 0) << i;
    }
  }
  return bits;
}

__global__ void __launch_bounds__(kThreads) compact_kernel(const MaskSource mask, const KeyList keys) {
  __shared__ int warp_sums[32];
  __shared__ uint16_t group_bits[kThreads];
  __shared__ int group_begin[kThreads];
  const int64_t list = blockIdx.x;
  const uint8_t* src = mask.ptr + list / mask.heads * mask.batch_stride + list % mask.heads * mask.head_stride;
  int32_t* idx = const_cast<int32_t*>(keys.idx) + list * keys.capacity;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

  int count = 0;
  uint32_t bits = load_keys(mask, src, 0);
  for (int64_t pass0 = 0; pass0 < mask.seqlen_k; pass0 += kPassKeys) {
    int pass_count;
    const int before = block_exclusive_scan<kThreads>(__popc(bits), warp_sums, pass_count);
    group_bits[threadIdx.x] = static_cast<uint16_t>(bits);
    group_begin[threadIdx.x] = count + before;
    if (pass0 + kPassKeys < mask.seqlen_k) bits = load_keys(mask, src, pass0 + kPassKeys);
    __syncthreads();
    // A lane a key: the kept ones of a warp fall on consecutive entries.
#pragma unroll 4
    for (int i = 0; i < kPassKeys; i += kThreads) {
      const int key = i + warp * 32 + lane;
      const uint32_t group = group_bits[key / 16];
      const int bit = key % 16;
      if (group >> bit & 1) {
        idx[group_begin[key / 16] + __popc(group & ((1u << bit) - 1))] = static_cast<int32_t>(pass0 + key);
      }
    }
    count += pass_count;
    __syncthreads();
  }
  for (int i = count + threadIdx.x; i < keys.capacity; i += kThreads) idx[i] = 0;
  if (threadIdx.x == 0) const_cast<int32_t*>(keys.count)[list] = count;
}

}  // namespace

KeyList layout_key_list(const MaskSource& mask, void* base, size_t* bytes) {
  KeyList keys;
  keys.capacity = round_up(mask.seqlen_k, 128);
  keys.batch = mask.batch;
  keys.heads = mask.heads;
  const int64_t lists = static_cast<int64_t>(mask.batch) * mask.heads;
  const size_t idx_bytes = static_cast<size_t>(lists * keys.capacity) * sizeof(int32_t);
  if (base != nullptr) {
    keys.idx = static_cast<const int32_t*>(base);
    keys.count = reinterpret_cast<const int32_t*>(static_cast<const char*>(base) + idx_bytes);
  }
  *bytes = round_up(idx_bytes + static_cast<size_t>(lists) * sizeof(int32_t), size_t{16});
  return keys;
}

cudaError_t compact_keys(const MaskSource& mask, const KeyList& keys, cudaStream_t stream) {
  const int64_t lists = static_cast<int64_t>(mask.batch) * mask.heads;
  return launch(compact_kernel, lists, kThreads, 0, stream, mask, keys);
}

}  // namespace dmattn
