// Putting tokens into a cache of keys: one of the w best keys of each kv head (running top-w), or one that keeps all.
#pragma once

#include <cuda_runtime_api.h>

#include "../params.h"

namespace dmattn {

struct CacheAppendParams {
  const void* k_new = nullptr;  // [batch][tokens][nheads_k][head_dim], 16-bit
  const void* v_new = nullptr;
  Strides3 k_new_stride, v_new_stride;
  const void* score_new = nullptr;  // [batch][nheads_k][tokens]
  int64_t score_batch_stride = 0, score_head_stride = 0, score_token_stride = 1;
  const uint8_t* active = nullptr;  // [batch][tokens], 0: the token is skipped; nullptr: all are put in
  int64_t active_batch_stride = 0, active_token_stride = 0;
  void* k_cache = nullptr;  // [batch][capacity][nheads_k][head_dim]
  void* v_cache = nullptr;
  Strides3 k_stride, v_stride;
  void* score = nullptr;        // [batch][nheads_k][capacity]; -inf: empty
  int32_t* position = nullptr;  // [batch][nheads_k][capacity]; -1: empty
  int32_t* seen = nullptr;      // [batch]: tokens so far, the position of the next one
  Dtype score_dtype = Dtype::kFloat32;
  bool evict = true;
  int32_t batch = 0, tokens = 0, nheads_k = 0, head_dim = 0, capacity = 0;
};

// All tokens, one after the other. evict: the lowest entry (lowest score, among equals the earliest position) makes
// room when the token's score is not lower; a token whose score is NaN or -inf is never kept. Otherwise a token goes to
// the entry of its position, with a score of -inf for NaN, and is skipped (not counted in `seen` either) when there is
// none.
cudaError_t cache_append(const CacheAppendParams& p, cudaStream_t stream);

// After the decode kernel of token t: its results combined, the token put where decode.token.place says, `seen` raised.
cudaError_t cache_commit(const CacheAppendParams& p, int32_t t, const DecodeParams& decode, Dtype dtype,
                         cudaStream_t stream);

}  // namespace dmattn
