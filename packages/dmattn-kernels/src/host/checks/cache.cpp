// Checks on calls that append to a cache of keys.
#include "host/checks/tensor.h"

namespace dmattn {
namespace {

// The queries of the tokens, if there are any, and what they become.
void check_cache_queries(const dmattn_cache_append_params& p, PointerCheck& pointers) {
  if (!is_present(p.q)) {
    if (is_present(p.out)) fail(DMATTN_ERROR_INVALID_VALUE, "out is given but q is absent; wanted both or neither");
    return;
  }
  if (!p.evict) fail(DMATTN_ERROR_INVALID_VALUE, "evict is 0 with q; wanted 1, or no q");
  check_rank("q", p.q, 4);
  const int64_t nheads = p.q.shape[2], nheads_k = p.k_cache.shape[2], head_dim = p.k_cache.shape[3];
  if (nheads_k < 1 || nheads < 1 || nheads % nheads_k != 0) {
    fail(DMATTN_ERROR_INVALID_VALUE, "q has %lld heads; wanted a multiple of the %lld of k_cache",
         static_cast<long long>(nheads), static_cast<long long>(nheads_k));
  }
  if (p.k_cache.shape[1] < 1) fail(DMATTN_ERROR_INVALID_VALUE, "k_cache has no entries; wanted at least one with q");
  check_head_dim("q", head_dim);
  const auto check_rows = [&](const char* name, const dmattn_tensor& t, const char* meaning) {
    check_shape(name, t, {p.k_cache.shape[0], p.k_new.shape[1], nheads, head_dim}, meaning);
    check_dtype(name, t, {p.k_cache.dtype});
    check_unit_last_stride(name, t);
    check_pointer(name, t, pointers);
  };
  check_rows("q", p.q, "(batch, tokens, nheads, head_dim) of k_cache and k_new");
  check_rows("out", p.out, "the shape of q");
  check_writable("out", p.out);
  check_finite("softmax_scale", p.softmax_scale);
  check_finite("softcap", p.softcap);
}

}  // namespace

void validate(const dmattn_cache_append_params& p, PointerCheck& pointers) {
  check_device_number(p.device);
  check_flag("evict", p.evict);
  check_rank("k_cache", p.k_cache, 4);
  check_rank("k_new", p.k_new, 4);
  const int64_t batch = p.k_cache.shape[0], capacity = p.k_cache.shape[1], nheads_k = p.k_cache.shape[2];
  const int64_t head_dim = p.k_cache.shape[3], tokens = p.k_new.shape[1];
  const auto check_rows = [&](const char* name, const dmattn_tensor& t, int64_t rows, const char* meaning) {
    check_shape(name, t, {batch, rows, nheads_k, head_dim}, meaning);
    check_dtype(name, t, {p.k_cache.dtype});
    check_unit_last_stride(name, t);
    check_pointer(name, t, pointers);
  };
  check_dtype("k_cache", p.k_cache, {DMATTN_FLOAT16, DMATTN_BFLOAT16});
  check_rows("k_cache", p.k_cache, capacity, "(batch, capacity, nheads_k, head_dim)");
  check_rows("v_cache", p.v_cache, capacity, "the shape of k_cache");
  check_rows("k_new", p.k_new, tokens, "(batch, tokens, nheads_k, head_dim) of k_cache");
  check_rows("v_new", p.v_new, tokens, "the shape of k_new");
  check_writable("k_cache", p.k_cache);
  check_writable("v_cache", p.v_cache);
  check_dtype("score", p.score, {DMATTN_FLOAT32, p.k_cache.dtype});
  check_shape("score", p.score, {batch, nheads_k, capacity}, "(batch, nheads_k, capacity)");
  check_contiguous("score", p.score);
  check_dtype("score_new", p.score_new, {p.score.dtype});
  check_shape("score_new", p.score_new, {batch, nheads_k, tokens}, "(batch, nheads_k, tokens)");
  check_dtype("position", p.position, {DMATTN_INT32});
  check_shape("position", p.position, {batch, nheads_k, capacity}, "(batch, nheads_k, capacity)");
  check_contiguous("position", p.position);
  check_dtype("seen", p.seen, {DMATTN_INT32});
  check_shape("seen", p.seen, {batch}, "(batch)");
  check_contiguous("seen", p.seen);
  if (is_present(p.active)) {
    check_dtype("active", p.active, {DMATTN_BOOL});
    check_shape("active", p.active, {batch, tokens}, "(batch, tokens)");
  }
  check_cache_queries(p, pointers);
  check_pointer("score", p.score, pointers);
  check_pointer("score_new", p.score_new, pointers);
  check_pointer("position", p.position, pointers);
  check_pointer("seen", p.seen, pointers);
  check_pointer("active", p.active, pointers);
}

}  // namespace dmattn
