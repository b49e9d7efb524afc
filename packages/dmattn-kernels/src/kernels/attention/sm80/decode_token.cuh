// The token that a step of decoding puts into a cache of the best keys: which entry makes room for it, and the two
// places where it goes, the tile that the entry has been loaded into and, at the end, the cache.
#pragma once

#include "../../cache/entry.cuh"
#include "../../shared/chunk.cuh"
#include "../shared/scores.cuh"
#include "decode_results.cuh"

namespace dmattn {

// The token in shared memory, in chunks of eight elements: first its key, then its value.
template <class T>
struct SharedToken {
  uint4 chunk[T::kGathered ? 1 : T::kHeadDim / 4];
};

template <class T>
struct DecodeToken {
  using Element = typename T::Element;
  static constexpr int kHeadDim = T::kHeadDim;
  static constexpr int kChunks = kHeadDim / 8;  // of its key, and of its value
  static_assert(2 * kChunks <= T::kThreads);

  SharedToken<T>& shared;
  uint4 chunk;              // of this thread, until the search for a place is over
  float score = -INFINITY;  // -inf: there is none
  int position = -1;        // -1: there is none
  int replaced = -1;        // entry of the cache whose place the token takes
  LowestEntry<T::kThreads> search;

  __device__ __forceinline__ explicit DecodeToken(SharedToken<T>& shared_) : shared(shared_) {}

  // Starts all reads.
  __device__ __forceinline__ void load(const DecodeResults<T>& block) {
    const auto& p = block.p;
    const CacheToken& token = p.token;
    const int batch = block.batch, head = block.head;
    const int64_t entries = block.head_index() * p.seqlen_k;
    if (p.bias.dtype == Dtype::kFloat32) {
      const float* scores = static_cast<const float*>(p.bias.ptr) + entries;
      search.load([&](int i) { return __ldg(scores + i); }, token.entry_position + entries, block.keys);
    } else {
      const uint16_t* scores = static_cast<const uint16_t*>(p.bias.ptr) + entries;
      search.load([&](int i) { return ElementTraits<Element>::unpack(__ldg(scores + i)).x; },
                  token.entry_position + entries, block.keys);
    }
    const int which = threadIdx.x / kChunks, col = threadIdx.x % kChunks * 8;
    const Strides3& s = which == 0 ? token.k_stride : token.v_stride;
    const uint16_t* src =
        static_cast<const uint16_t*>(which == 0 ? token.k : token.v) + batch * s.batch + head * s.head + col;
    chunk = which < 2 && col < p.head_dim ? load_chunk(src, token.vec) : make_uint4(0, 0, 0, 0);
    if (!is_active(block)) return;
    BiasParams given;
    given.ptr = token.score;
    given.dtype = p.bias.dtype;
    score = load_bias(given, batch * token.score_batch_stride + head * token.score_head_stride, T::kIsBf16);
  }
  // After the loop, in which it would take a register.
  __device__ __forceinline__ void load_position(const DecodeResults<T>& block) {
    if (is_active(block)) position = next_cache_position(block.p.token.seen[block.batch], 1);
  }
  static __device__ __forceinline__ bool is_active(const DecodeResults<T>& block) {
    const CacheToken& token = block.p.token;
    return token.active == nullptr || token.active[block.batch * token.active_stride] != 0;
  }

  // Which entry makes room: the lowest, if the token's score is not lower. Every block of a head comes to the same answer.
  __device__ __forceinline__ void find_place(const DecodeResults<T>& block) {
    __shared__ CacheEntry warp_low[T::kWarps];
    const auto& p = block.p;
    const int64_t entries = block.head_index() * p.seqlen_k;
    if (threadIdx.x < 2 * kChunks) shared.chunk[threadIdx.x] = chunk;  // for all, after the barrier of find()
    const auto score_at = [&](int i) { return load_bias(p.bias, entries + i, T::kIsBf16); };
    const LowestSlot low = search.find(score_at, p.token.entry_position + entries, block.keys, warp_low);
    // There is no lowest entry where every score is NaN.
    if (score > -INFINITY && score >= low.score && low.slot < block.keys) replaced = low.slot;
  }

  // K (which = 0) or V (1) into its row of a tile at shared address `tile`.
  __device__ __forceinline__ void put(uint32_t tile, int which, int lane) const {
    if (lane >= kChunks) return;
    st_shared(tile + SmemTile<kHeadDim>::offset(replaced % T::kKeys, lane), shared.chunk[which * kChunks + lane]);
  }

  // By all threads of the block, once every block of the head has read the entry and every block of the sequence the
  // number of its tokens: the cache takes the token in.
  __device__ __forceinline__ void commit_entry(const DecodeResults<T>& block) const {
    if (replaced < 0) return;
    const auto& p = block.p;
    const CacheToken& token = p.token;
    const int which = threadIdx.x / kChunks, col = threadIdx.x % kChunks * 8;
    if (which < 2 && col < p.head_dim) {
      const Strides3& s = which == 0 ? p.k_stride : p.v_stride;
      uint16_t* dst = static_cast<uint16_t*>(which == 0 ? token.k_cache : token.v_cache) + block.batch * s.batch +
                      block.head * s.head + replaced * s.row + col;
      store_chunk(dst, shared.chunk[threadIdx.x], which == 0 ? p.vec_k : p.vec_v);
    }
    if (threadIdx.x != 0) return;
    const int64_t entry = block.head_index() * p.seqlen_k + replaced;
    token.entry_position[entry] = position;
    if (p.bias.dtype == Dtype::kFloat32) {
      static_cast<float*>(token.entry_score)[entry] = score;
    } else {
      static_cast<uint16_t*>(token.entry_score)[entry] =
          static_cast<uint16_t>(ElementTraits<Element>::pack(score, 0.f));
    }
  }
  __device__ __forceinline__ void commit_count(const DecodeResults<T>& block) const {
    if (threadIdx.x == 0 && position >= 0) block.p.token.seen[block.batch] = position + 1;
  }
};

}  // namespace dmattn
