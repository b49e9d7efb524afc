// Appending to a cache of the w best keys: find the lowest entry, replace it.
#include <climits>

#include "cache.h"
#include "prep_common.cuh"

namespace dmattn {
namespace {

using namespace prep;

constexpr int kThreads = 256;

struct Entry {
  float score;
  int position;
  int slot;
};

// Whether a leaves before b.
__device__ __forceinline__ bool is_lower(const Entry& a, const Entry& b) {
  if (a.score != b.score) return a.score < b.score;
  if (a.position != b.position) return a.position < b.position;
  return a.slot < b.slot;  // empty entries are all alike
}

__device__ __forceinline__ Entry lower(const Entry& a, const Entry& b) { return is_lower(b, a) ? b : a; }

__device__ __forceinline__ Entry warp_lowest(Entry e) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const Entry other = {__shfl_xor_sync(0xffffffffu, e.score, offset),
                         __shfl_xor_sync(0xffffffffu, e.position, offset),
                         __shfl_xor_sync(0xffffffffu, e.slot, offset)};
    e = lower(e, other);
  }
  return e;
}

template <class Score>
__device__ __forceinline__ float read_score(const void* base, int64_t i) {
  return static_cast<float>(static_cast<const Score*>(base)[i]);
}

__device__ __forceinline__ void copy_row(void* dst, const void* src, int head_dim) {
  for (int i = threadIdx.x; i < head_dim; i += kThreads) {
    static_cast<uint16_t*>(dst)[i] = static_cast<const uint16_t*>(src)[i];
  }
}

// One block per (batch, kv head); the tokens follow one another, as each may push out the one before.
template <class Score>
__global__ void __launch_bounds__(kThreads) append_kernel(const CacheAppendParams p) {
  __shared__ Entry warp_low[kThreads / 32];
  const int h = blockIdx.x % p.nheads_k, b = blockIdx.x / p.nheads_k;
  const int64_t entries = static_cast<int64_t>(blockIdx.x) * p.capacity;
  for (int t = 0; t < p.tokens; ++t) {
    const int position = p.position_new[b * p.position_batch_stride + t * p.position_token_stride];
    const int64_t score_at = b * p.score_batch_stride + h * p.score_head_stride + t * p.score_token_stride;
    const float score = read_score<Score>(p.score_new, score_at);
    if (position < 0 || !(score > -INFINITY)) continue;  // the same for the whole block

    Entry low = {INFINITY, INT_MAX, INT_MAX};
    for (int i = threadIdx.x; i < p.capacity; i += kThreads) {
      low = lower(low, {read_score<Score>(p.score, entries + i), p.position[entries + i], i});
    }
    low = warp_lowest(low);
    if (threadIdx.x % 32 == 0) warp_low[threadIdx.x / 32] = low;
    __syncthreads();
    low = warp_low[0];
#pragma unroll
    for (int w = 1; w < kThreads / 32; ++w) low = lower(low, warp_low[w]);
    if (score >= low.score && low.slot < p.capacity) {
      const uint16_t* k = static_cast<const uint16_t*>(p.k_new) + row_offset(p.k_new_stride, b, h, t);
      const uint16_t* v = static_cast<const uint16_t*>(p.v_new) + row_offset(p.v_new_stride, b, h, t);
      copy_row(static_cast<uint16_t*>(p.k_cache) + row_offset(p.k_stride, b, h, low.slot), k, p.head_dim);
      copy_row(static_cast<uint16_t*>(p.v_cache) + row_offset(p.v_stride, b, h, low.slot), v, p.head_dim);
      if (threadIdx.x == 0) {
        static_cast<Score*>(p.score)[entries + low.slot] = static_cast<const Score*>(p.score_new)[score_at];
        p.position[entries + low.slot] = position;
      }
    }
    __syncthreads();  // the next token sees this one; warp_low may be overwritten
  }
}

}  // namespace

cudaError_t cache_append(const CacheAppendParams& p, cudaStream_t stream) {
  const int64_t blocks = p.capacity > 0 && p.tokens > 0 ? static_cast<int64_t>(p.batch) * p.nheads_k : 0;
  switch (p.score_dtype) {
    case Dtype::kFloat32:
      return launch(append_kernel<float>, blocks, kThreads, 0, stream, p);
    case Dtype::kFloat16:
      return launch(append_kernel<__half>, blocks, kThreads, 0, stream, p);
    case Dtype::kBFloat16:
      return launch(append_kernel<__nv_bfloat16>, blocks, kThreads, 0, stream, p);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace dmattn
