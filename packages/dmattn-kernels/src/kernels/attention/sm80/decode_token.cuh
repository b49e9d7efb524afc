// The token that a step of decoding puts into a cache of the best keys. Which entry makes room for it is known only to
// the last block of the head: until then each warp keeps the lowest of its own entries out of its results, and the last
// block puts all of them back but one, for which the token comes in.
#pragma once

#include "../../shared/chunk.cuh"
#include "../shared/scores.cuh"
#include "atoms.cuh"
#include "decode_results.cuh"

namespace dmattn {

template <class T>
struct DecodeToken {
  using Element = typename T::Element;
  static constexpr int kHeadDim = T::kHeadDim;
  static constexpr int kChunks = kHeadDim / 8;  // of its key, and of its value
  static_assert(2 * kChunks <= T::kThreads);

  int lowest = -1;  // the warp's entry that would leave the cache first; -1: it has none

  // What is read before K and V, as it is: to look at it would be to wait for it.
  struct Reads {
    LowestEntry<32> search;  // of the warp's entries
    uint32_t score = 0;      // as its dtype has it
    int seen = 0;
    uint32_t active = 1;         // 0: the token is none
    uint32_t key[kHeadDim / 8];  // as the right operand of the first product, in all of its columns
  };

  __device__ __forceinline__ void load(const DecodeResults<T>& block, Reads& reads) const {
    const auto& p = block.p;
    const CacheToken& token = p.token;
    const int batch = block.batch, head = block.head;
    const int64_t first = first_entry(block);
    const int32_t* positions = token.entry_position + first;
    if (p.bias.dtype == Dtype::kFloat32) {
      const uint32_t* scores = static_cast<const uint32_t*>(p.bias.ptr) + first;
      reads.search.load([&](int i) { return __ldg(scores + i); }, positions, entries(block));
    } else {
      const uint16_t* scores = static_cast<const uint16_t*>(p.bias.ptr) + first;
      reads.search.load([&](int i) { return __ldg(scores + i); }, positions, entries(block));
    }
    if (block.warp != 0) return;
    reads.score = score_bits(block, token.score, batch * token.score_batch_stride + head * token.score_head_stride);
    reads.seen = token.seen[batch];
    if (token.active != nullptr) reads.active = __ldg(token.active + batch * token.active_stride);
    if (!has_logits(block)) return;
    const uint16_t* src = row(block, token.k, token.k_stride) + 2 * (block.lane & 3);
#pragma unroll
    for (int i = 0; i < kHeadDim / 8; ++i) {
      reads.key[i] = 0;
      if (8 * i >= p.head_dim) continue;
      reads.key[i] = token.vec ? __ldg(reinterpret_cast<const uint32_t*>(src + 8 * i))
                               : __ldg(src + 8 * i) | static_cast<uint32_t>(__ldg(src + 8 * i + 1)) << 16;
    }
  }

  // Once K and V are on their way.
  template <class Queries>
  __device__ __forceinline__ void begin(const DecodeResults<T>& block, const Reads& reads, const Queries& q) {
    const auto& p = block.p;
    const int64_t first = first_entry(block);
    const auto bits_at = [&](int i) { return score_bits(block, p.bias.ptr, first + i); };
    const auto value_of = [&](uint32_t bits) { return score_value(block, bits); };
    CacheEntry low = warp_lowest(reads.search.own(bits_at, value_of, p.token.entry_position + first, entries(block)));
    if (low.score == ~0u) {
      low = CacheEntry();  // every score is NaN
    } else {
      low.slot += block.begin * T::kKeys;
      lowest = low.slot;
    }
    if (block.lane == 0) block.held.entry[block.warp] = pack_entry(low);
    if (block.lane < T::kRows) block.held.logit[block.warp][block.lane] = -INFINITY;
    if (threadIdx.x == 0) {
      block.held.score = reads.active != 0 ? value_of(reads.score) : -INFINITY;
      block.held.position = reads.active != 0 ? next_cache_position(reads.seen, 1) : -1;
    }
    if (has_logits(block)) leave_logits(block, reads, q);
  }

  // The thread's eight elements of the token: first its key, then its value, for the threads that there are elements for.
  struct Chunk {
    uint4 x;
    int which, col;
    __device__ __forceinline__ bool is_any(int head_dim) const { return which < 2 && col < head_dim; }
  };
  // By the last block of the head, which also needs the value as one more row of V.
  __device__ __forceinline__ Chunk load_chunk(const DecodeResults<T>& block) const {
    const CacheToken& token = block.p.token;
    Chunk chunk = {make_uint4(0, 0, 0, 0), static_cast<int>(threadIdx.x) / kChunks,
                   static_cast<int>(threadIdx.x) % kChunks * 8};
    if (!chunk.is_any(block.p.head_dim)) return chunk;
    const bool is_key = chunk.which == 0;
    const uint16_t* src = row(block, is_key ? token.k : token.v, is_key ? token.k_stride : token.v_stride) + chunk.col;
    chunk.x = dmattn::load_chunk(src, token.vec);
    if (is_key) return chunk;
    uint4& to = block.held.token_v[chunk.col / 8];
    if (token.vec) {
      cp_async16(smem_u32(&to), src, true);  // not to wait for it
    } else {
      to = chunk.x;
    }
    return chunk;
  }

  // By the last block of the head, all blocks of which have read the entry: the cache takes the token in.
  __device__ __forceinline__ void commit_entry(const DecodeResults<T>& block, const Chunk& chunk) const {
    const int replaced = block.held.replaced;
    if (replaced < 0) return;
    const auto& p = block.p;
    const CacheToken& token = p.token;
    if (chunk.is_any(p.head_dim)) {
      const bool is_key = chunk.which == 0;
      const Strides3& s = is_key ? p.k_stride : p.v_stride;
      uint16_t* dst = static_cast<uint16_t*>(is_key ? token.k_cache : token.v_cache) + block.batch * s.batch +
                      block.head * s.head + replaced * s.row + chunk.col;
      store_chunk(dst, chunk.x, is_key ? p.vec_k : p.vec_v);
    }
    if (threadIdx.x != 0) return;
    const int64_t entry = block.head_index() * p.seqlen_k + replaced;
    const float score = block.held.score;
    token.entry_position[entry] = block.held.position;
    if (p.bias.dtype == Dtype::kFloat32) {
      static_cast<float*>(token.entry_score)[entry] = score;
    } else {
      static_cast<uint16_t*>(token.entry_score)[entry] =
          static_cast<uint16_t>(ElementTraits<Element>::pack(score, 0.f));
    }
  }
  // By thread 0 of the sequence's last head, once the others have read the number of its tokens. That this is so is what
  // it has waited for, so the number is not written before.
  __device__ __forceinline__ void commit_count(const DecodeResults<T>& block) const {
    const int position = block.held.position;
    if (position >= 0) block.p.token.seen[block.batch] = position + 1;
  }

 private:
  // The warp's entries among those of all heads, and how many they are.
  static __device__ __forceinline__ int64_t first_entry(const DecodeResults<T>& block) {
    return block.head_index() * block.p.seqlen_k + block.begin * T::kKeys;
  }
  static __device__ __forceinline__ int entries(const DecodeResults<T>& block) {
    return min(block.end * T::kKeys, block.keys) - block.begin * T::kKeys;
  }
  static __device__ __forceinline__ const uint16_t* row(const DecodeResults<T>& block, const void* base,
                                                        const Strides3& s) {
    return static_cast<const uint16_t*>(base) + block.batch * s.batch + block.head * s.head;
  }

  // A score of the cache's dtype, read and valued separately.
  static __device__ __forceinline__ uint32_t score_bits(const DecodeResults<T>& block, const void* scores, int64_t i) {
    if (block.p.bias.dtype == Dtype::kFloat32) return __ldg(static_cast<const uint32_t*>(scores) + i);
    return __ldg(static_cast<const uint16_t*>(scores) + i);
  }
  static __device__ __forceinline__ float score_value(const DecodeResults<T>& block, uint32_t bits) {
    return block.p.bias.dtype == Dtype::kFloat32 ? __uint_as_float(bits) : ElementTraits<Element>::unpack(bits).x;
  }

  // The token's logits are left by one warp of each block of rows, beside those of the splits' lowest entries.
  static __device__ __forceinline__ bool has_logits(const DecodeResults<T>& block) {
    return block.split == 0 && block.warp == 0;
  }
  template <class Queries>
  __device__ __forceinline__ void leave_logits(const DecodeResults<T>& block, const Reads& reads,
                                               const Queries& q) const {
    using Mma = MmaAtom<Element>;
    const auto& p = block.p;
    float acc[1][1][4];
    clear(acc);
    float (&c)[4] = acc[0][0];
#pragma unroll
    for (int i = 0; i < kHeadDim / 16; ++i) {
      Mma::fma(c[0], c[1], c[2], c[3], q[i][0], q[i][1], q[i][2], q[i][3], reads.key[2 * i], reads.key[2 * i + 1], c[0],
               c[1], c[2], c[3]);
    }
    scale_scores(acc, p.softmax_scale, p.softcap);
    const float score = score_value(block, reads.score);
    if ((block.lane & 3) != 0) return;  // all columns are the same
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = block.lane / 4 + 8 * half;
      if (r < block.rows) p.lowest.logit[block.partial_row(p.num_splits, block.row0 + r)] = c[2 * half] + score;
    }
  }
};

}  // namespace dmattn
