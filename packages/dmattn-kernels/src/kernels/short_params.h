// Attention over few keys: all keys of a head fit one tile of a thread block. Plain structs as in params.h.
#pragma once

#include "params.h"
#include "tiles.h"

namespace dmattn {

// A tile of scores has kShortRows rows and room for all keys. The backward has kernels for up to 64 keys and for up
// to 128. (A forward over 128 keys was slower than the other forward kernels, which split the keys.)
constexpr int kShortRows = 64;
constexpr int kMostShortFwdKeys = 64;
constexpr int kMostShortBwdKeys = 128;
constexpr int short_bwd_keys(int seqlen_k) { return seqlen_k <= 64 ? 64 : kMostShortBwdKeys; }
// Head dimensions that have kernels of their own; others are rounded up to one of these.
constexpr int kMostShortHeadDim = 64;
constexpr int short_head_dim(int head_dim) { return head_dim <= 32 ? 32 : 64; }

// Thread blocks that an SM of Hopper has room for at the same time; they hide each other's loads. If thread blocks
// take several batches each, there should be about as many as the GPU has room for.
constexpr int short_fwd_blocks_per_sm(int head_dim, Level level) {
  return level == Level::kFull && short_head_dim(head_dim) == 64 ? 5 : 6;
}
constexpr int short_bwd_blocks_per_sm(int head_dim, int seqlen_k, Level level) {
  return short_bwd_keys(seqlen_k) == kMostShortBwdKeys ? 2
         : short_head_dim(head_dim) == 32              ? (level == Level::kPlain ? 5 : 4)
                                                       : (level == Level::kFull ? 3 : 4);
}

// What the forward and the backward share. All rows of all tensors start on 16 bytes, and there is no softcap.
struct ShortParams {
  const void* q = nullptr;
  const void* k = nullptr;
  const void* v = nullptr;
  Strides3 q_stride, k_stride, v_stride;
  int32_t batch = 0, seqlen_q = 0, seqlen_k = 0;
  int32_t nheads = 0, nheads_k = 0, head_dim = 0;
  int32_t head_ratio = 1;  // nheads / nheads_k
  float softmax_scale = 1.f;
  bool is_causal = false;
  BiasParams bias;              // only whether `kind` is kNone matters: elements are loaded one by one
  MaskSource mask;              // ptr == nullptr: none
  int32_t mask_head_ratio = 1;  // query heads per head of the mask
  // Thread blocks that divide the batches of a head among themselves: each takes every batch_slices-th batch. Less
  // than `batch` only at Level::kFull, where a thread block reads the bias, and adds to its gradient, once for all
  // its batches.
  int32_t batch_slices = 1;
};

// A thread block for each (head, block of kShortRows rows, slice of the batches); the head is the fastest index.
struct ShortFwdParams : ShortParams {
  void* out = nullptr;
  Strides3 out_stride;
  float* lse = nullptr;       // natural log
  float* lse_rest = nullptr;  // optional: see FwdParams
  Strides3 lse_stride;
};
constexpr int64_t short_fwd_blocks(const ShortFwdParams& p) {
  return int64_t{p.nheads} * ((p.seqlen_q + kShortRows - 1) / kShortRows) * p.batch_slices;
}

// A thread block for each (kv head, slice of the batches); the head is the fastest index.
struct ShortBwdParams : ShortParams {
  const void* out = nullptr;
  const void* dout = nullptr;
  Strides3 out_stride, dout_stride;
  const float* lse = nullptr;
  const float* lse_rest = nullptr;  // optional
  Strides3 lse_stride;
  const float* dlse = nullptr;  // optional
  Strides3 dlse_stride;
  void* dq = nullptr;  // nullptr: not asked for; the same for dk and dv
  void* dk = nullptr;
  void* dv = nullptr;
  Strides3 dq_stride, dk_stride, dv_stride;
  DbiasKind dbias_kind = DbiasKind::kNone;  // kNone, kTile or, with at most kShortRows rows, kAccum
  void* dbias = nullptr;                    // kTile: in bias.dtype, every entry is written; kAccum: fp32, zeroed before
  int64_t dbias_batch_stride = 0, dbias_head_stride = 0, dbias_row_stride = 0;  // unit column stride
};
// Whether a kv head has one query head, whose scores are a single tile of up to 64 keys.
constexpr bool short_bwd_is_single(const ShortBwdParams& p) {
  return p.head_ratio == 1 && p.seqlen_q <= kShortRows && short_bwd_keys(p.seqlen_k) == 64;
}
constexpr int64_t short_bwd_blocks(const ShortBwdParams& p) { return int64_t{p.nheads_k} * p.batch_slices; }

}  // namespace dmattn
