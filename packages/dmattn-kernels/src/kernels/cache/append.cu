// Putting tokens into a cache: finds the entry that makes room, and writes the token there.
#include <type_traits>

#include "cache.h"
#include "entry.cuh"
#include "score.cuh"

namespace dmattn {
namespace {

using namespace prep;

constexpr int kThreads = 256;

// The bits of a score (16 or 32), and the value that they stand for.
template <class Score>
using Bits = std::conditional_t<sizeof(Score) == 4, uint32_t, uint16_t>;
template <class Score>
__device__ __forceinline__ float value_of(uint32_t bits) {
  const auto own_bits = static_cast<Bits<Score>>(bits);
  Score score;
  memcpy(&score, &own_bits, sizeof(score));
  return static_cast<float>(score);
}
__device__ __forceinline__ bool is_active(const CacheAppendParams& p, int b, int t) {
  return p.active == nullptr || p.active[b * p.active_batch_stride + t * p.active_token_stride] != 0;
}

__device__ __forceinline__ void copy_row(void* dst, const void* src, int head_dim) {
  for (int i = threadIdx.x; i < head_dim; i += blockDim.x) {
    static_cast<uint16_t*>(dst)[i] = static_cast<const uint16_t*>(src)[i];
  }
}

// Writes token t to entry `slot`. By all threads of a block.
template <class Score>
__device__ __forceinline__ void write_entry(const CacheAppendParams& p, int b, int h, int t, int slot, int position) {
  const uint16_t* k = static_cast<const uint16_t*>(p.k_new) + row_offset(p.k_new_stride, b, h, t);
  const uint16_t* v = static_cast<const uint16_t*>(p.v_new) + row_offset(p.v_new_stride, b, h, t);
  copy_row(static_cast<uint16_t*>(p.k_cache) + row_offset(p.k_stride, b, h, slot), k, p.head_dim);
  copy_row(static_cast<uint16_t*>(p.v_cache) + row_offset(p.v_stride, b, h, slot), v, p.head_dim);
  if (threadIdx.x == 0) {
    const int64_t entry = (static_cast<int64_t>(b) * p.nheads_k + h) * p.capacity + slot;
    static_cast<Score*>(p.score)[entry] = cleaned(read_new_score<Score>(p, b, h, t));
    p.position[entry] = position;
  }
}

// One block per (batch, kv head); the tokens follow one another, as each may push out the one before.
template <class Score>
__global__ void __launch_bounds__(kThreads) append_kernel(const CacheAppendParams p) {
  __shared__ CacheEntry warp_low[kThreads / 32];
  follow_previous_kernel();
  const int h = blockIdx.x % p.nheads_k, b = blockIdx.x / p.nheads_k;
  const int64_t entries = static_cast<int64_t>(blockIdx.x) * p.capacity;
  int position = next_cache_position(p.seen[b], p.tokens);
  for (int t = 0; t < p.tokens; ++t) {
    if (!is_active(p, b, t)) continue;  // the same for the whole block
    int slot = position;
    bool taken = position < p.capacity;
    if (p.evict) {
      const float score = static_cast<float>(read_new_score<Score>(p, b, h, t));
      const auto bits_at = [&](int i) { return static_cast<const Bits<Score>*>(p.score)[entries + i]; };
      LowestEntry<kThreads> search;
      search.load(bits_at, p.position + entries, p.capacity);
      const LowestSlot low = search.find(bits_at, value_of<Score>, p.position + entries, p.capacity, warp_low);
      taken = score > -INFINITY && score >= low.score && low.slot < p.capacity;
      slot = low.slot;
    }
    if (taken) write_entry<Score>(p, b, h, t, slot, position);
    if (p.evict || taken) ++position;
    __syncthreads();  // the next token sees this one; warp_low may be overwritten
  }
}

// A launch of its own, since all blocks of append_kernel read `seen`.
__global__ void advance_kernel(const CacheAppendParams p) {
  follow_previous_kernel();
  const int b = blockIdx.x * blockDim.x + threadIdx.x;
  if (b >= p.batch) return;
  int position = next_cache_position(p.seen[b], p.tokens);
  for (int t = 0; t < p.tokens; ++t) {
    if (is_active(p, b, t) && (p.evict || position < p.capacity)) ++position;
  }
  p.seen[b] = position;
}

template <class Score>
cudaError_t launch_append(const CacheAppendParams& p, cudaStream_t stream) {
  const int64_t blocks = p.tokens > 0 ? static_cast<int64_t>(p.batch) * p.nheads_k : 0;
  const cudaError_t status = launch(append_kernel<Score>, blocks, kThreads, 0, stream, p);
  if (status != cudaSuccess || p.tokens == 0) return status;
  return launch(advance_kernel, ceil_div<int64_t>(p.batch, 128), 128, 0, stream, p);
}

}  // namespace

cudaError_t cache_append(const CacheAppendParams& p, cudaStream_t stream) {
  return with_score_type(p.score_dtype, [&](auto score) { return launch_append<decltype(score)>(p, stream); });
}

}  // namespace dmattn
