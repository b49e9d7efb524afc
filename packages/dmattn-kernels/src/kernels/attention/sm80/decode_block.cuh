// What a thread block of the decode kernel works on: a block of the rows of a head, and one split of its keys.
#pragma once

#include "../../cache/entry.cuh"
#include "../../decode_level.h"
#include "../../divisor.h"
#include "../../tiles.h"
#include "../shared/attention_block.cuh"
#include "../shared/work_index.cuh"
#include "atoms.cuh"

namespace dmattn {

// The cases that have separate kernels, so that each has little code that a call does not use: where other kernels have
// run in between, instructions have to be fetched from memory.
//   kDense   all keys
//   kList    the keys of a list
//   kToken   the entries of a cache, and a token that comes to it (see CacheToken)
//   kDraft   the entries of a cache and the tokens of a draft, which are the last keys; rows of all tokens (CacheDraft)
//   kRows, kListRows   as kDense and kList, with rows of several tokens (see TokenRows)
enum class DecodeCase { kDense, kList, kToken, kDraft, kRows, kListRows };

// kLevel: kPlain and kCut are for the calls that decode_level() in host/plan/decode.h finds; kGeneral is for all calls.
template <class Element_, int kHeadDim_, DecodeCase kCase, Level kLevel>
struct DecodeTraits {
  using Element = Element_;
  static constexpr bool kIsBf16 = std::is_same_v<Element, cutlass::bfloat16_t>;
  static constexpr int kHeadDim = kHeadDim_, kKeys = kDecodeKeys;
  static constexpr bool kGathered = kCase == DecodeCase::kList || kCase == DecodeCase::kListRows;
  static constexpr bool kDraft = kCase == DecodeCase::kDraft;
  static constexpr bool kTakesToken = kCase == DecodeCase::kToken;
  static constexpr bool kHasTokenRows = kDraft || kCase == DecodeCase::kRows || kCase == DecodeCase::kListRows;
  static constexpr bool kFromCache = kDraft || kTakesToken;  // whose scores are a bias for each key
  static_assert(kLevel == Level::kPlain || kLevel == Level::kCut || kLevel == Level::kGeneral);
  static constexpr bool kPlain = kLevel != Level::kGeneral;    // Level::kPlain or Level::kCut
  static constexpr bool kWholeRows = kLevel == Level::kPlain;  // head_dim fills the tile
  static constexpr int kRows = kHasTokenRows ? token_rows(kHeadDim) : kDecodeRows;
  static constexpr bool kPacked = false, kMayBePacked = false, kKeepsSeqlens = false;
  static constexpr uint32_t kSeqlens = 0;  // not used
  static constexpr int kWarps = decode_tile(kHeadDim).warps, kStages = decode_tile(kHeadDim).stages;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int MT = kRows / 16, OT = kHeadDim / 8, NT = kKeys / 8;

  static constexpr uint32_t kTile = kKeys * kHeadDim * sizeof(Element);
  static constexpr uint32_t kWarpBytes = 2 * kStages * kTile;  // [stage][K, V]
  static constexpr uint32_t kSmemBytes = kWarps * kWarpBytes;
  static_assert(kSmemBytes == decode_smem_bytes(kHeadDim));
  // Whether a launch may mark K and V to leave the L2 cache first: see DecodeArguments.
  static constexpr bool kMayEvictFirst = (kCase == DecodeCase::kDense || kCase == DecodeCase::kRows) && kHeadDim <= 128;
  // Whether a draft requests its queries and all but one stage of K and V before it waits for the previous kernel. At
  // head_dim 256 the queries would be kept in local memory for that.
  static constexpr bool kReadsAhead = kDraft && kPlain && kHeadDim <= 128;
  // Whether the weights of the warps in a row are computed once and shared: where there are many rows, or few
  // registers.
  static constexpr bool kSharesWeights = kHasTokenRows || kHeadDim > 128;
  // Whether there is code to combine splits by whole warps, each of which has a row, or eight rows of tokens.
  static constexpr bool kReducesByWarps = kPlain && !kHasTokenRows && kHeadDim <= 128;
  static constexpr bool kReducesTokenRows = kPlain && kHasTokenRows && kHeadDim <= 128;
  // List entries and bias are loaded for several steps at once (a chunk), one chunk ahead: if they were loaded after
  // the copies of K and V of a step, they would arrive after these.
  static constexpr int kChunkSteps = 4, kChunkKeys = kChunkSteps * kKeys;
  static_assert(kStages <= kChunkSteps);  // a step and the one loaded in its place: the same or the next chunk
  // A warp's results, and the maxima and sums of its rows, replace its ring. The pitch puts rows on different banks.
  static constexpr int kMergePitch = kHeadDim + 8;
  // When splits are combined, the rings are replaced by the weights in each row (of the splits, their lowest entries
  // and the token), the sums over the splits so far, and the results of as many splits as there is room for.
  static constexpr int kSplits = kPlain ? plain_decode_splits(kFromCache) : kMaxSplits;  // at most
  static constexpr int kEntryWeights = kSplits, kTokenWeight = 2 * kSplits;
  static constexpr int kWeightPitch = kTakesToken ? kTokenWeight + 4 : kSplits;
  static constexpr int kWeightFloats = kRows * kWeightPitch, kSumFloats = kRows * kHeadDim;
  static constexpr int kPartFloats = kSmemBytes / sizeof(float) - kWeightFloats - kSumFloats;
  // The rings and up to 3 KB of static arrays have to fit GPUs with 99 KB for a thread block.
  static_assert(kSmemBytes + 3 * 1024 <= 99 * 1024);
  static_assert(kRows * (kMergePitch + 2) * 4 <= kWarpBytes);
  static_assert(kPartFloats >= kRows * kHeadDim + kHeadDim / 2);
};

// Reads a bias without converting it, and converts what was read.
__device__ __forceinline__ uint32_t bias_bits(const BiasParams& bias, int64_t at) {
  if (bias.dtype == Dtype::kFloat32) return __ldg(static_cast<const uint32_t*>(bias.ptr) + at);
  return __ldg(static_cast<const uint16_t*>(bias.ptr) + at);
}
template <class Element>
__device__ __forceinline__ float bias_value(const BiasParams& bias, uint32_t bits) {
  return bias.dtype == Dtype::kFloat32 ? __uint_as_float(bits) : ElementTraits<Element>::unpack(bits).x;
}

__device__ __forceinline__ uint4 pack_entry(const CacheEntry& e) {
  return {e.score, e.position, static_cast<uint32_t>(e.slot), 0};
}
__device__ __forceinline__ CacheEntry unpack_entry(const uint4& x) { return {x.x, x.y, static_cast<int32_t>(x.z)}; }

// With a token: what the warps of a thread block pass to each other, and what the last thread block of a head needs.
template <class T>
struct SharedToken {
  static constexpr int kWarps = T::kTakesToken ? T::kWarps : 1;
  static constexpr int kChunks = T::kTakesToken ? T::kHeadDim / 8 : 1;
  uint4 entry[kWarps];      // pack_entry() of each warp's entry that would leave the cache first
  uint4 token[2][kChunks];  // the key and the value of the token
  float score;              // of the token; -inf where there is none
  int32_t position;         // of the token; -1 where there is none
};

// The parameters, and what the launcher computes from them so that no thread has to divide.
struct DecodeArguments : DecodeParams {
  int32_t row_blocks = 1;                // blocks of rows of a head
  int64_t parts = 0, rows_of_split = 0;  // heads of all sequences, and their rows
  Divisor by_splits, by_row_blocks, by_heads;
  Divisor by_shares;                // number of warps of all splits
  Divisor by_ratio, by_bias_ratio;  // heads per head of K and V, and per head of the bias
  // K and V are read once. They are marked to replace each other in the L2 cache rather than lines of other kernels:
  // lines that have been changed would first have to be written to memory.
  bool evicts_first = false;
};

template <class T>
struct DecodeBlock : AttentionBlock<T, DecodeArguments> {
  using Base = AttentionBlock<T, DecodeArguments>;
  using Base::batch, Base::p, Base::warp;

  SharedToken<T>& held;
  int head, row0, split;
  int rows;        // rows of this thread block
  int keys;        // keys, entries of the list, or entries of the cache
  int begin, end;  // steps of this warp
  const int32_t* list = nullptr;

  __device__ __forceinline__ DecodeBlock(const DecodeArguments& params, char* smem, SharedToken<T>& held_)
      : Base(params, smem), held(held_) {
    uint32_t rest = blockIdx.x;
    split = take(rest, p.by_splits);
    const int row_block = take(rest, p.by_row_blocks);
    row0 = row_block * T::kRows;
    head = take(rest, p.by_heads);
    batch = static_cast<int>(rest);
    rows = min(T::kRows, p.seqlen_q - row0);
    keys = p.seqlen_k;
    if constexpr (T::kGathered) {
      const int64_t i = Base::list_index(head);
      list = Base::list_of(head, i);
      keys = read_list_count(p.keys, i);
    }
    // The steps are divided evenly between the warps of all splits. The first warps take one more if some are left
    // over.
    uint32_t each = (keys + T::kKeys - 1) / T::kKeys;
    const int over = take(each, p.by_shares);
    const int share = split * T::kWarps + warp;
    begin = static_cast<int>(each) * share + min(share, over);
    end = begin + static_cast<int>(each) + (share < over ? 1 : 0);
  }

  // What is known at compile time at some levels or in some cases.
  __device__ __forceinline__ int head_dim() const { return T::kWholeRows ? T::kHeadDim : p.head_dim; }
  static __device__ __forceinline__ bool is_vec(bool flag) { return T::kPlain || flag; }
  __device__ __forceinline__ bool has_key_bias() const { return T::kFromCache || p.bias.kind == BiasKind::kKey; }

  // The token that a row of the head belongs to.
  __device__ __forceinline__ int token_of(int row) const {
    uint32_t rest = row;
    take(rest, p.token_rows.group);
    return static_cast<int>(rest);
  }
  // Offset in elements of a row of the head from its first one, in the queries, the results or the log-sum-exps. With
  // several tokens, `token_stride` lies between tokens, and s.row between the rows of a token.
  __device__ __forceinline__ int64_t row_at(const Strides3& s, int64_t token_stride, int row) const {
    if constexpr (!T::kHasTokenRows) return row * s.row;
    return token_row_offset(p.token_rows.group, token_stride, s.row, row);
  }
  // Where the head's keys or values, or its bias, start. Computed at each use, as registers are short in the loop.
  __device__ __forceinline__ const typename T::Element* head_of(const void* base, const Strides3& s) const {
    return Base::template head_ptr<typename T::Element>(base, s, shared_head(p.by_ratio));
  }
  __device__ __forceinline__ int64_t bias_base() const {
    return batch * p.bias.batch_stride + shared_head(p.by_bias_ratio) * p.bias.head_stride;
  }
  // Index of the head among those of all sequences.
  __device__ __forceinline__ int64_t head_index() const { return static_cast<int64_t>(batch) * p.nheads + head; }

 private:
  __device__ __forceinline__ int shared_head(const Divisor& ratio) const {
    uint32_t rest = head;
    take(rest, ratio);
    return static_cast<int>(rest);
  }
};

}  // namespace dmattn
