// The token that a step of decoding puts into a cache of the best keys. Only the last thread block of a head finds
// out which entry makes room. Until then each thread block leaves its own lowest entry out of its results; the last
// one puts all of these entries back, except for the one that the token replaces.
#pragma once

#include "../../shared/chunk.cuh"
#include "../shared/scores.cuh"
#include "atoms.cuh"
#include "decode_results.cuh"

namespace dmattn {

// How a warp searches for the lowest of its entries. load() requests the first ones of each lane. They stay as they
// were read until find(), since converting them earlier would wait for them.
template <class Element>
struct WarpSearch {
  static constexpr int kAhead = 16;  // entries of a lane that load() requests
  static constexpr int kBatch = 4;   // entries that are skipped together if the warp has fewer
  const void* scores;                // scores and positions start at the lane's first entry
  const int32_t* positions;
  int entries, left;  // entries of the warp, and of these the ones from the lane's first on
  bool is_wide;       // scores are fp32
  uint32_t bits[kAhead];
  int32_t position[kAhead];

  __device__ __forceinline__ void load() {
    if (is_wide) {
      load(static_cast<const uint32_t*>(scores));
    } else {
      load(static_cast<const uint16_t*>(scores));
    }
  }
  // `slot`: that of the lane's first entry. Called by whole warps.
  __device__ __forceinline__ CacheEntry find(int slot) const {
    CacheEntry low;
    // The lane's slots ascend, so among equal entries the one of the lowest slot stays.
    const auto look_at = [&](uint32_t b, int32_t at, int i) {
      const CacheEntry entry = make_cache_entry(value(b), at, slot + 32 * i);
      if (32 * i < left && entry.key() < low.key()) low = entry;
    };
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (i % kBatch == 0 && 32 * i >= entries) break;
      look_at(bits[i], position[i], i);
    }
    if (__builtin_expect(entries > 32 * kAhead, 0)) {
#pragma unroll kBatch
      for (int i = kAhead; 32 * i < left; ++i) look_at(bits_at(i), positions[32 * i], i);
    }
    low = warp_lowest(low);
    return low.score == ~0u ? CacheEntry() : low;  // every score is NaN
  }
  __device__ __forceinline__ float value(uint32_t b) const {
    return is_wide ? __uint_as_float(b) : ElementTraits<Element>::unpack(b).x;
  }

 private:
  __device__ __forceinline__ uint32_t bits_at(int i) const {
    if (is_wide) return __ldg(static_cast<const uint32_t*>(scores) + 32 * i);
    return __ldg(static_cast<const uint16_t*>(scores) + 32 * i);
  }
  template <class Word>
  __device__ __forceinline__ void load(const Word* from) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (i % kBatch == 0 && 32 * i >= entries) break;
      if (32 * i >= left) continue;
      bits[i] = __ldg(from + 32 * i);
      position[i] = positions[32 * i];
    }
  }
};

template <class T>
struct DecodeToken {
  using Element = typename T::Element;
  static constexpr int kHeadDim = T::kHeadDim;
  static constexpr int kChunks = kHeadDim / 8;  // eight elements each: of the key, and as many of the value
  static_assert(2 * kChunks <= T::kThreads);

  int lowest = -1;  // the block's entry that would leave the cache first; -1: it has none

  // What is requested before most of K and V. It stays as it was read, since converting it would wait for it.
  struct Reads {
    WarpSearch<Element> search;
    uint32_t score = 0;  // bits in the dtype of scores
    int seen = 0;
    uint32_t active = 1;         // 0: there is no token
    uint32_t key[kHeadDim / 8];  // right operand of the first product, the same in all columns
  };

  __device__ __forceinline__ void load(const DecodeResults<T>& block, Reads& reads) const {
    const auto& p = block.p;
    const CacheToken& token = p.token;
    const int batch = block.batch, head = block.head;
    const int64_t first = first_entry(block) + block.lane;
    const int bytes = p.bias.dtype == Dtype::kFloat32 ? 4 : 2;
    auto& search = reads.search;
    search.scores = static_cast<const char*>(p.bias.ptr) + first * bytes;
    search.positions = token.entry_position + first;
    search.entries = min(block.end * T::kKeys, block.keys) - block.begin * T::kKeys;
    search.left = search.entries - block.lane;
    search.is_wide = bytes == 4;
    search.load();
    const Chunk own;
    if (block.is_vec(token.vec) && own.is_any(block)) cp_async16(smem_u32(&own.in(block)), own.of(block), true);
    if (block.warp != 0) return;
    reads.score = score_bits(block, token.score, batch * token.score_batch_stride + head * token.score_head_stride);
    reads.seen = token.seen[batch];
    if (token.active != nullptr) reads.active = __ldg(token.active + batch * token.active_stride);
    if (!has_logits(block)) return;
    const uint16_t* src = row(block, token.k, token.k_stride) + 2 * (block.lane & 3);
#pragma unroll
    for (int i = 0; i < kHeadDim / 8; ++i) {
      reads.key[i] = 0;
      if (8 * i >= block.head_dim()) continue;
      reads.key[i] = block.is_vec(token.vec) ? __ldg(reinterpret_cast<const uint32_t*>(src + 8 * i))
                                             : __ldg(src + 8 * i) | static_cast<uint32_t>(__ldg(src + 8 * i + 1)) << 16;
    }
  }

  // Called when K and V have been requested; the barrier does not wait for these.
  template <class Queries>
  __device__ __forceinline__ void begin(const DecodeResults<T>& block, const Reads& reads, const Queries& q) {
    CacheEntry low = reads.search.find(block.begin * T::kKeys + block.lane);
    if (block.lane == 0) block.held.entry[block.warp] = pack_entry(low);
    if (threadIdx.x == 0) {
      block.held.score = reads.active != 0 ? reads.search.value(reads.score) : -INFINITY;
      block.held.position = reads.active != 0 ? next_cache_position(reads.seen, 1) : -1;
    }
    if (has_logits(block)) leave_logits(block, reads, q);
    const Chunk own;
    if (!block.is_vec(block.p.token.vec) && own.is_any(block)) own.in(block) = load_chunk(own.of(block), false);
    __syncthreads();
    low = warp_lowest(unpack_entry(block.held.entry[block.lane % T::kWarps]));
    if (low.slot != INT_MAX) lowest = low.slot;
    leave_entry(block, low);
  }

  // Puts the token into the place of entry `replaced`; does nothing if that is -1. Called by the last thread block of
  // the head, when all its thread blocks have read the entry.
  __device__ __forceinline__ void commit_entry(const DecodeResults<T>& block, int replaced) const {
    if (replaced < 0) return;
    const auto& p = block.p;
    const CacheToken& token = p.token;
    const Chunk own;
    if (own.is_any(block)) {
      const Strides3& s = own.is_key ? p.k_stride : p.v_stride;
      uint16_t* dst = static_cast<uint16_t*>(own.is_key ? token.k_cache : token.v_cache) + block.batch * s.batch +
                      block.head * s.head + replaced * s.row + own.col;
      store_chunk(dst, own.in(block), block.is_vec(own.is_key ? p.vec_k : p.vec_v));
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
  // Raises the number of tokens of the sequence. Called by thread 0 of the thread block that is the last one of all
  // heads. It has seen that the other heads were counted, and so have read the number: this write cannot come earlier.
  __device__ __forceinline__ void commit_count(const DecodeResults<T>& block) const {
    const int position = block.held.position;
    if (position >= 0) block.p.token.seen[block.batch] = position + 1;
  }

 private:
  // Eight elements of the token for each thread: first of its key, then of its value; the further threads have none.
  // They are copied to shared memory at the start, so that the last thread block of the head need not wait for them.
  struct Chunk {
    bool is_key = threadIdx.x < kChunks;
    int col = static_cast<int>(threadIdx.x) % kChunks * 8;
    __device__ __forceinline__ bool is_any(const DecodeResults<T>& block) const {
      return threadIdx.x < 2 * kChunks && col < block.head_dim();
    }
    __device__ __forceinline__ uint4& in(const DecodeResults<T>& block) const {
      return block.held.token[is_key ? 0 : 1][col / 8];
    }
    __device__ __forceinline__ const uint16_t* of(const DecodeResults<T>& block) const {
      const CacheToken& token = block.p.token;
      return row(block, is_key ? token.k : token.v, is_key ? token.k_stride : token.v_stride) + col;
    }
  };

  // Writes the thread block's lowest entry for the last thread block of the head. All blocks of rows find the same
  // entry, so only the first one writes it. If there is none, nothing is left out of the results.
  static __device__ __forceinline__ void leave_entry(const DecodeResults<T>& block, const CacheEntry& low) {
    const LowestEntries& to = block.p.lowest;
    if (threadIdx.x == 0 && block.row0 == 0) {
      reinterpret_cast<uint4*>(to.entry)[block.part_index(block.split)] = pack_entry(low);
    }
    const int i = threadIdx.x;
    if (low.slot == INT_MAX && i < block.rows) to.logit[block.partial_row(block.split, block.row0 + i)] = -INFINITY;
  }
  // Index of the warp's first entry among the entries of all heads.
  static __device__ __forceinline__ int64_t first_entry(const DecodeResults<T>& block) {
    return block.head_index() * block.p.seqlen_k + block.begin * T::kKeys;
  }
  static __device__ __forceinline__ const uint16_t* row(const DecodeResults<T>& block, const void* base,
                                                        const Strides3& s) {
    return static_cast<const uint16_t*>(base) + block.batch * s.batch + block.head * s.head;
  }

  // A score of the cache's dtype, not converted.
  static __device__ __forceinline__ uint32_t score_bits(const DecodeResults<T>& block, const void* scores, int64_t i) {
    if (block.p.bias.dtype == Dtype::kFloat32) return __ldg(static_cast<const uint32_t*>(scores) + i);
    return __ldg(static_cast<const uint16_t*>(scores) + i);
  }
  // One warp for each block of rows writes the token's logits, behind those of the splits' lowest entries.
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
    scale_scores(acc, p.softmax_scale, T::kPlain ? 0.f : p.softcap);
    const float score = reads.search.value(reads.score);
    if ((block.lane & 3) != 0) return;  // all columns are equal
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = block.lane / 4 + 8 * half;
      if (r < block.rows) p.lowest.logit[block.partial_row(p.num_splits, block.row0 + r)] = c[2 * half] + score;
    }
  }
};

}  // namespace dmattn
