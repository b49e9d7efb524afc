// The cache of running top-w: the w best keys of each kv head, whatever the length of the context.
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
  const int32_t* position_new = nullptr;  // [batch][tokens]; negative: the token is skipped
  int64_t position_batch_stride = 0, position_token_stride = 1;
  void* k_cache = nullptr;  // [batch][capacity][nheads_k][head_dim]
  void* v_cache = nullptr;
  Strides3 k_stride, v_stride;
  void* score = nullptr;        // [batch][nheads_k][capacity]; -inf: empty
  int32_t* position = nullptr;  // [batch][nheads_k][capacity]; -1: empty
  Dtype score_dtype = Dtype::kFloat32;
  int32_t batch = 0, tokens = 0, nheads_k = 0, head_dim = 0, capacity = 0;
};

// For each token in turn: the lowest entry (lowest score, among equals the earliest position) makes room when the
// token's score is not lower. A token whose score is NaN or -inf is never kept.
cudaError_t cache_append(const CacheAppendParams& p, cudaStream_t stream);

}  // namespace dmattn
