// Selection of keys by score: running top-w (causal) and top-w of all keys. Architecture independent, no host
// synchronisation, nothing allocated.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "../params.h"

namespace dmattn {

// Query rows that share a key list.
constexpr int kSelectBlockRows = 128;
// The longest sequence (positions and lengths are rounded up in int32).
constexpr int32_t kMaxSelectKeys = INT32_MAX / 2;

// Total order of keys: higher score first, among equal scores the later key first. A key whose score is NaN or -inf, or
// that key_mask forbids, is never selected.
struct SelectParams {
  const void* scores = nullptr;   // [score_batch][score_heads][seqlen_k], strides in elements, 0 where broadcast
  Dtype dtype = Dtype::kFloat32;  // f16, bf16 or f32
  int64_t score_batch_stride = 0, score_head_stride = 0, score_col_stride = 1;
  const uint8_t* key_mask = nullptr;  // optional, nonzero = allowed
  int64_t mask_batch_stride = 0, mask_head_stride = 0, mask_col_stride = 0;
  int32_t mask_head_ratio = 1;         // selection heads per mask head
  int32_t batch = 1, heads = 1;        // of the selection: the broadcast of scores and mask
  int32_t score_head_ratio = 1;        // selection heads per score head
  int32_t seqlen_q = 0, seqlen_k = 0;  // seqlen_q <= seqlen_k when causal
  int32_t window = 0;                  // w >= 1
  bool is_causal = true;
  // Documents packed one behind the other, the same in every row: [documents + 1], rising from 0 to seqlen_k. Keys
  // compete, and are seen, within their document only. Causal, seqlen_q == seqlen_k. 0 documents: all keys are one.
  const int32_t* cu_seqlens = nullptr;
  int32_t documents = 0;
  int32_t num_sms = 0;  // of the device; 0: not known, a long single list then takes more launches
};

// Causal: row i, at position r = i + seqlen_k - seqlen_q, keeps the min(r + 1, w) best keys among 0..r (fewer when keys
// are forbidden). end[j]: first position > j at which key j is no longer kept; j when no query row ever sees it;
// the end of its document, or seqlen_k, when it stays to the end. The lists: see KeyList with block_rows =
// kSelectBlockRows and blocks = ceil(seqlen_q / block_rows). Order of a list: the keys that no row of the block can
// lose to a better one, ascending; the others that all its rows keep, ascending; the rest, ascending.
// Not causal: one list (block_rows 0) of the w best keys, ascending; end[j] = seqlen_k for those and 0 for the others.
// seqlen_q is not looked at.
int32_t select_capacity(const SelectParams& p);
size_t select_workspace_size(const SelectParams& p);
// `keys`: idx, count, full and end are written (full not when !is_causal; end not when it is null), for batch x heads
// of `p`. capacity at least select_capacity(). Entries of idx from count up to the next multiple of 128 are 0; what
// lies behind is left as it was. The workspace starts on 16 bytes. The result is the same bit by bit in every run.
// Whatever cu_seqlens holds, nothing is read or written out of bounds.
// cudaErrorInvalidValue: window < 1, seqlen_q > seqlen_k when causal, lengths out of range, lists of another layout.
cudaError_t select_keys(const SelectParams& p, const KeyList& keys, void* workspace, cudaStream_t stream);

// Lists from given intervals (`end` as above, causal): sliding windows, packed documents, a selection of one's own.
struct IntervalParams {
  int32_t seqlen_q = 0, seqlen_k = 0;  // seqlen_q <= seqlen_k
  // Keys further than this before a block's first row are not looked for: the largest end[j] - j, or seqlen_k.
  int32_t reach = 0;
  int32_t* needed = nullptr;  // optional [batch][heads][blocks]: entries of each list, also of one that does not fit
};
size_t interval_workspace_size(const IntervalParams& p, const KeyList& keys);
// `keys`: end is read; idx, count and full are written. A list that does not fit the capacity (0 is one) is left
// empty. Any block_rows > 0. Both sections ascending, zeros as above. Time: the keys within reach; where that is far,
// the runs of 32 keys of which one is kept, and a number for each of the others.
cudaError_t build_interval_lists(const IntervalParams& p, const KeyList& keys, void* workspace, cudaStream_t stream);

}  // namespace dmattn
