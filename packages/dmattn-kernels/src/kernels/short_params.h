// Attention over few keys: all keys of a head fit one tile of a thread block. Plain structs as in params.h.
#pragma once

#include "params.h"
#include "tiles.h"

namespace dmattn {

// A tile of scores has so many rows, and room for all keys: of the forward, and of the backward, whose kernels exist
// for two numbers of keys. (The forward over 128 keys was slower than the other kernels, which split them.)
constexpr int kShortRows = 64;
constexpr int kMostShortFwdKeys = 64;
constexpr int kMostShortBwdKeys = 128;
constexpr int short_bwd_keys(int seqlen_k) { return seqlen_k <= 64 ? 64 : kMostShortBwdKeys; }
// Head dimensions that have kernels of their own; others are rounded up to one of these.
constexpr int kMostShortHeadDim = 64;
constexpr int short_head_dim(int head_dim) { return head_dim <= 32 ? 32 : 64; }

// Thread blocks that an SM of Hopper has room for side by side: they hide each other's loads. Where each takes many
// batches, there should be as many.
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
  BiasParams bias;              // kind: kNone, or anything else: elements are loaded one by one
  MaskSource mask;              // ptr == nullptr: none
  int32_t mask_head_ratio = 1;  // query heads per head of the mask
  // Thread blocks that share the batches of a head: each takes every so many-th batch. Fewer than batches only at
  // Level::kFull: the bias is read, and its gradient added to, once for each thread block.
  int32_t batch_slices = 1;
};

// A thread block for each (head, block of kShortRows rows, slice of the batches), in this order, the heads first.
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

// A thread block for each (kv head, slice of the batches), the heads first.
struct ShortBwdParams : ShortParams {
  const void* out = nullptr;
  const void* dout = nullptr;
  Strides3 out_stride, dout_stride;
  const float* lse = nullptr;
  const float* lse_rest = nullptr;  // optional
  Strides3 lse_stride;
  const float* dlse = nullptr;  // optional
  Strides3 dlse_stride;
  void* dq = nullptr;  // nullptr: not asked for; so are dk and dv
  void* dk = nullptr;
  void* dv = nullptr;
  Strides3 dq_stride, dk_stride, dv_stride;
  DbiasKind dbias_kind = DbiasKind::kNone;  // kNone, kTile, or, of at most kShortRows rows, kAccum
  void* dbias = nullptr;                    // kTile: in bias.dtype, every entry is written; kAccum: fp32, zeroed before
  int64_t dbias_batch_stride = 0, dbias_head_stride = 0, dbias_row_stride = 0;  // unit column stride
};
// Whether a kv head has one query head of one tile.
constexpr bool short_bwd_is_single(const ShortBwdParams& p) {
  return p.head_ratio == 1 && p.seqlen_q <= kShortRows && short_bwd_keys(p.seqlen_k) == 64;
}
constexpr int64_t short_bwd_blocks(const ShortBwdParams& p) { return int64_t{p.nheads_k} * p.batch_slices; }

}  // namespace dmattn
