// Converts the caller's tensors of a cache to what kernels read; shared by the plans of all calls that have a cache.
#pragma once

#include <algorithm>

#include "dmattn/dmattn.h"
#include "host/problem.h"
#include "kernels/helper_params.h"

namespace dmattn {

// The cache itself.
template <class Params>
void read_cache(CacheAppendParams& to, const Params& p) {
  to.k_cache = p.k_cache.data;
  to.v_cache = p.v_cache.data;
  to.k_stride = read_strides(p.k_cache);
  to.v_stride = read_strides(p.v_cache);
  to.score = p.score.data;
  to.position = static_cast<int32_t*>(p.position.data);
  to.seen = static_cast<int32_t*>(p.seen.data);
  to.score_dtype = static_cast<Dtype>(p.score.dtype);
  to.batch = static_cast<int32_t>(p.k_cache.shape[0]);
  to.nheads_k = static_cast<int32_t>(p.k_cache.shape[2]);
  to.head_dim = static_cast<int32_t>(p.k_cache.shape[3]);
  to.capacity = static_cast<int32_t>(p.score.shape[2]);
}

// The new tokens.
template <class Params>
void read_tokens(CacheAppendParams& to, const Params& p) {
  to.k_new = p.k_new.data;
  to.v_new = p.v_new.data;
  to.k_new_stride = read_strides(p.k_new);
  to.v_new_stride = read_strides(p.v_new);
  to.score_new = p.score_new.data;
  to.score_batch_stride = p.score_new.stride[0];
  to.score_head_stride = p.score_new.stride[1];
  to.score_token_stride = p.score_new.stride[2];
}

// The cache's entries as keys, their scores as bias.
inline void set_entries(DecodeParams& d, const CacheAppendParams& cache, Dtype dtype, int32_t nheads) {
  d.k = cache.k_cache;
  d.v = cache.v_cache;
  d.k_stride = cache.k_stride;
  d.v_stride = cache.v_stride;
  d.vec_k = is_vec16(d.k, d.k_stride, dtype);
  d.vec_v = is_vec16(d.v, d.v_stride, dtype);
  d.batch = cache.batch;
  d.seqlen_q = 1;
  d.seqlen_k = cache.capacity;
  d.nheads = nheads;
  d.nheads_k = cache.nheads_k;
  d.head_dim = cache.head_dim;
  d.head_ratio = d.nheads / d.nheads_k;
  d.bias.ptr = cache.score;
  d.bias.dtype = cache.score_dtype;
  d.bias.kind = BiasKind::kKey;
  d.bias.head_stride = cache.capacity;
  d.bias.batch_stride = static_cast<int64_t>(cache.nheads_k) * cache.capacity;
  d.bias.col_stride = 1;
  d.bias.head_ratio = d.head_ratio;
}

// The tokens' queries, a row for each token, and their results.
template <class Params>
void set_queries(DecodeParams& d, const Params& p) {
  d.q = p.q.data;
  d.out = p.out.data;
  d.q_stride = read_strides(p.q);
  d.out_stride = read_strides(p.out);
  const auto dtype = static_cast<Dtype>(p.q.dtype);
  d.vec_q = is_vec16(d.q, d.q_stride, dtype);
  d.vec_out = is_vec16(d.out, d.out_stride, dtype);
  d.softmax_scale = p.softmax_scale;
  d.softcap = std::max(p.softcap, 0.f);
}

}  // namespace dmattn
