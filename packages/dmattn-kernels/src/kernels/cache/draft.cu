// Drafts of a cache of the best keys: finds what becomes of each token if all are put in, one after the other, and
// later puts the first ones in.
//
// t tokens can push out only the t lowest entries, lowest first, or one another. So the lowest entries are searched
// for once, and one warp then goes through the tokens.
#include "cache.h"
#include "entry.cuh"
#include "score.cuh"

namespace dmattn {
namespace {

using namespace prep;

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kAhead = 8;  // entries that a thread holds in registers; any further ones are read again in each search

// The entries of a head that a thread looks at, and a warp's search for the lowest of them, one after the other.
template <class Score>
struct EntrySearch {
  const Score* scores;
  const int32_t* positions;
  int entries;
  CacheEntry held[kAhead];

  __device__ __forceinline__ CacheEntry read(int slot) const {
    return make_cache_entry(static_cast<float>(scores[slot]), positions[slot], slot);
  }
  // Scores and positions as they are read. They are converted later, since a conversion would wait for the load.
  struct Reads {
    Score score[kAhead];
    int32_t position[kAhead];
  };
  __device__ __forceinline__ void load(Reads& reads) const {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int slot = threadIdx.x + i * kThreads;
      if (slot >= entries) continue;
      reads.score[i] = scores[slot];
      reads.position[i] = positions[slot];
    }
  }
  __device__ __forceinline__ void hold(const Reads& reads) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int slot = threadIdx.x + i * kThreads;
      if (slot < entries) held[i] = make_cache_entry(static_cast<float>(reads.score[i]), reads.position[i], slot);
    }
  }
  // The warp's lowest entry above `last`; an empty one if there is none.
  __device__ __forceinline__ CacheEntry next(const CacheEntry& last) const {
    CacheEntry low;
    const auto look_at = [&](const CacheEntry& e) {
      const bool is_behind = e.key() > last.key() || (e.key() == last.key() && e.slot > last.slot);
      if (is_behind) low = lower(low, e);
    };
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (i * kThreads >= entries) break;
      look_at(held[i]);
    }
#pragma unroll 4
    for (int slot = threadIdx.x + kAhead * kThreads; slot < entries; slot += kThreads) look_at(read(slot));
    return warp_lowest(low);
  }
};

// Eight elements of the draft's keys and values: number i of 2 * tokens * head_dim / 8.
struct DraftChunk {
  bool is_value;
  int t, col;
  __device__ __forceinline__ DraftChunk(const CacheDraftParams& p, int i) {
    const int chunks = p.head_dim / 8, row = i / chunks;
    is_value = row >= p.tokens;
    t = is_value ? row - p.tokens : row;
    col = i % chunks * 8;
  }
  static __device__ __forceinline__ int count(const CacheDraftParams& p) { return 2 * p.tokens * (p.head_dim / 8); }
  // The address of this chunk in a row of the cache.
  __device__ __forceinline__ uint16_t* in_cache(const CacheDraftParams& p, int b, int h, int row) const {
    auto* rows = static_cast<uint16_t*>(is_value ? p.v_cache : p.k_cache);
    return rows + row_offset(is_value ? p.v_stride : p.k_stride, b, h, row) + col;
  }
};

// Copies new tokens to the rows behind the cache's entries.
struct DraftCopy {
  const CacheDraftParams& p;
  int b, h;

  __device__ __forceinline__ uint4 read(const DraftChunk& x) const {
    const auto* from = static_cast<const uint16_t*>(x.is_value ? p.v_new : p.k_new);
    return load_chunk(from + row_offset(x.is_value ? p.v_new_stride : p.k_new_stride, b, h, x.t) + x.col, p.vec_new);
  }
  __device__ __forceinline__ void write(const DraftChunk& x, const uint4& chunk) const {
    store_chunk(x.in_cache(p, b, h, p.capacity + x.t), chunk, p.vec_cache);
  }
};
// Copies tokens from those rows to the entries `slots`; -1: the token is not copied.
struct CommitCopy {
  const CacheDraftParams& p;
  int b, h;
  const int32_t (&slots)[kMaxDraft];

  __device__ __forceinline__ uint4 read(const DraftChunk& x) const {
    return load_chunk(x.in_cache(p, b, h, p.capacity + x.t), p.vec_cache);
  }
  __device__ __forceinline__ void write(const DraftChunk& x, const uint4& chunk) const {
    if (slots[x.t] >= 0) store_chunk(x.in_cache(p, b, h, slots[x.t]), chunk, p.vec_cache);
  }
};
// A copy by all threads: read_first() reads a thread's first chunk, `own`, ahead of time, and finish() does the rest.
template <class Copy>
__device__ __forceinline__ uint4 read_first(const Copy& copy, const DraftChunk& own) {
  return threadIdx.x < DraftChunk::count(copy.p) ? copy.read(own) : make_uint4(0, 0, 0, 0);
}
template <class Copy>
__device__ __forceinline__ void finish(const Copy& copy, const DraftChunk& own, const uint4& first) {
  const int count = DraftChunk::count(copy.p);
  if (threadIdx.x < count) copy.write(own, first);
  for (int i = threadIdx.x + kThreads; i < count; i += kThreads) {
    const DraftChunk x(copy.p, i);
    copy.write(x, copy.read(x));
  }
}

// By the first warp. Each lane has a token and, for one of the warps, the list of the lowest entries that it has
// found, lowest first. `score`: of the lane's token, -inf if there is none. `seen`: of the sequence.
__device__ __forceinline__ DraftToken place_token(const CacheDraftParams& p, float score, int seen,
                                                  const CacheEntry (&lowest)[kWarps][kMaxDraft]) {
  const int lane = threadIdx.x;
  const int position = next_cache_position(seen, p.tokens);
  DraftToken token = {-1, p.tokens, score, position + lane};
  CacheEntry entry, own;  // the lowest entry left in the lane's list; the lane's token while the cache holds it
  int taken = 0;
  if (lane < kWarps) entry = lowest[lane][0];
#pragma unroll 1
  for (int t = 0; t < p.tokens; ++t) {
    const CacheEntry low = warp_lowest(lower(entry, own));
    const float new_score = __shfl_sync(kFullWarp, score, t);
    // Where every score is NaN there is no lowest entry, and no comparison with it is true.
    if (!(new_score > -INFINITY && new_score >= score_of_order(low.score))) {
      if (lane == t) token.end = 0;
      continue;
    }
    if (entry.slot == low.slot) {
      ++taken;
      entry = taken < p.tokens ? lowest[lane][taken] : CacheEntry();
    } else if (own.slot == low.slot) {
      token.end = t;
      own = CacheEntry();
    }
    if (lane == t) {
      token.slot = low.slot;
      own = make_cache_entry(score, position + t, low.slot);
    }
  }
  return token;
}

// One block per (batch, kv head).
template <class Score>
__global__ void __launch_bounds__(kThreads) draft_kernel(const CacheDraftParams p) {
  __shared__ CacheEntry lowest[kWarps][kMaxDraft];
  follow_previous_kernel();
  const int h = blockIdx.x % p.nheads_k, b = blockIdx.x / p.nheads_k;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * p.capacity;
  EntrySearch<Score> search{static_cast<const Score*>(p.score) + first, p.position + first, p.capacity};
  // All reads are issued before any of them is waited for.
  typename EntrySearch<Score>::Reads reads;
  search.load(reads);
  const DraftCopy copy{p, b, h};
  const DraftChunk own(p, threadIdx.x);
  const uint4 chunk = read_first(copy, own);
  Score token_score = static_cast<Score>(-INFINITY);
  int seen = 0;
  if (threadIdx.x < 32) {
    if (threadIdx.x < p.tokens) token_score = read_new_score<Score>(p, b, h, threadIdx.x);
    seen = p.seen[b];
  }
  search.hold(reads);
  finish(copy, own, chunk);
  CacheEntry last = {0, 0, -1};  // lower than all entries
#pragma unroll 1
  for (int t = 0; t < p.tokens; ++t) {
    last = search.next(last);
    if (threadIdx.x % 32 == 0) lowest[threadIdx.x / 32][t] = last;
  }
  __syncthreads();
  if (threadIdx.x >= 32) return;
  const DraftToken token = place_token(p, static_cast<float>(cleaned(token_score)), seen, lowest);
  if (threadIdx.x < p.tokens) p.draft[static_cast<int64_t>(blockIdx.x) * p.tokens + threadIdx.x] = token;
}

// How many tokens of a sequence to put in.
__device__ __forceinline__ int read_count(const CacheDraftParams& p, int b) {
  const int64_t i = b * p.count_stride;
  const int64_t count =
      p.count_is_wide ? static_cast<const int64_t*>(p.count)[i] : int64_t{static_cast<const int32_t*>(p.count)[i]};
  return static_cast<int>(min(max(count, int64_t{0}), int64_t{p.tokens}));
}

// One block per (batch, kv head). Of the tokens that take the place of one entry only the last is written, so that all
// can be written at once.
template <class Score>
__global__ void __launch_bounds__(kThreads) commit_kernel(const CacheDraftParams p) {
  __shared__ int32_t slots[kMaxDraft];  // entries of the tokens that are put in and stay; else -1
  follow_previous_kernel();
  const int h = blockIdx.x % p.nheads_k, b = blockIdx.x / p.nheads_k;
  const CommitCopy copy{p, b, h, slots};
  const DraftChunk own(p, threadIdx.x);
  // By the last warp, which has no chunk to copy where tokens are few: the reads of the other warps do not wait for
  // the count.
  const int t = static_cast<int>(threadIdx.x) - (kThreads - 32);
  if (t >= 0 && t < p.tokens) {
    const DraftToken token = p.draft[static_cast<int64_t>(blockIdx.x) * p.tokens + t];
    const bool is_first = h == 0 && t == 0;
    const int seen = is_first ? p.seen[b] : 0;  // only this thread reads and writes it
    const int count = read_count(p, b);
    const bool is_held =
        t < count && token.end >= count && static_cast<uint32_t>(token.slot) < static_cast<uint32_t>(p.capacity);
    slots[t] = is_held ? token.slot : -1;
    if (is_held) {
      const int64_t entry = static_cast<int64_t>(blockIdx.x) * p.capacity + token.slot;
      static_cast<Score*>(p.score)[entry] = static_cast<Score>(token.score);
      p.position[entry] = token.position;
    }
    if (is_first) p.seen[b] = next_cache_position(seen, p.tokens) + count;
  }
  const uint4 chunk = read_first(copy, own);
  __syncthreads();
  finish(copy, own, chunk);
}

}  // namespace

cudaError_t cache_draft(const CacheDraftParams& p, cudaStream_t stream) {
  const int64_t blocks = static_cast<int64_t>(p.batch) * p.nheads_k;
  return with_score_type(
      p.score_dtype, [&](auto score) { return launch(draft_kernel<decltype(score)>, blocks, kThreads, 0, stream, p); });
}

cudaError_t cache_commit(const CacheDraftParams& p, cudaStream_t stream) {
  const int64_t blocks = static_cast<int64_t>(p.batch) * p.nheads_k;
  return with_score_type(p.score_dtype, [&](auto score) {
    return launch(commit_kernel<decltype(score)>, blocks, kThreads, 0, stream, p);
  });
}

}  // namespace dmattn
