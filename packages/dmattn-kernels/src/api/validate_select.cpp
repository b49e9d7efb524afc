// Checks on selections of keys and on the cache of the best keys.
#include "api/checks.h"
#include "api/error.h"
#include "api/validate.h"

namespace dmattn {
namespace {

void check_documents(const dmattn_select_params& p, int64_t seqlen_k, Pointers pointers) {
  check_rank("cu_seqlens", p.cu_seqlens, 1);
  check_dtype("cu_seqlens", p.cu_seqlens, {DMATTN_INT32});
  if (p.cu_seqlens.shape[0] < 1) {
    fail(DMATTN_ERROR_INVALID_VALUE, "cu_seqlens has shape (0); wanted (documents + 1)");
  }
  check_contiguous("cu_seqlens", p.cu_seqlens);
  if (!p.is_causal) fail(DMATTN_ERROR_INVALID_VALUE, "cu_seqlens is given but is_causal is 0; wanted 1");
  if (p.seqlen_q != seqlen_k) {
    fail(DMATTN_ERROR_INVALID_VALUE, "seqlen_q is %lld; wanted the %lld keys of scores with cu_seqlens",
         static_cast<long long>(p.seqlen_q), static_cast<long long>(seqlen_k));
  }
  check_pointer("cu_seqlens", p.cu_seqlens, pointers);
}

}  // namespace

void validate(const dmattn_select_params& p, Pointers pointers) {
  check_device_number(p.device);
  check_flag("is_causal", p.is_causal);
  if (p.window < 1) fail(DMATTN_ERROR_INVALID_VALUE, "window is %d; wanted at least 1", p.window);
  check_reserved(p.reserved);
  check_rank("scores", p.scores, 3);
  check_dtype("scores", p.scores, {DMATTN_FLOAT16, DMATTN_BFLOAT16, DMATTN_FLOAT32});
  const int64_t seqlen_k = p.scores.shape[2];
  if (p.seqlen_q < 0 || (p.is_causal && p.seqlen_q > seqlen_k)) {
    fail(DMATTN_ERROR_INVALID_VALUE, "seqlen_q is %lld; wanted 0 to the %lld keys of scores",
         static_cast<long long>(p.seqlen_q), static_cast<long long>(seqlen_k));
  }
  int64_t batch = p.scores.shape[0], heads = p.scores.shape[1];
  if (is_present(p.key_mask)) {
    check_rank("key_mask", p.key_mask, 3);
    check_dtype("key_mask", p.key_mask, {DMATTN_BOOL});
    const int64_t* shape = p.key_mask.shape;
    const bool ok = shape[2] == seqlen_k && (batch == 1 || shape[0] == 1 || shape[0] == batch) &&
                    (heads == 1 || shape[1] == 1 || shape[1] == heads);
    if (!ok) {
      fail(DMATTN_ERROR_INVALID_VALUE, "key_mask has shape %s; wanted one that broadcasts with the %s of scores",
           text(shape, 3).c_str(), text(p.scores.shape, 3).c_str());
    }
    if (batch == 1) batch = shape[0];
    if (heads == 1) heads = shape[1];
  }
  const int64_t capacity = dmattn_select_capacity(p.window, seqlen_k, p.is_causal);
  check_rank("selection.idx", p.selection.idx, 4);
  if (p.selection.idx.shape[3] < capacity) {
    fail(DMATTN_ERROR_INVALID_VALUE, "selection.idx has capacity %lld; wanted at least %lld (dmattn_select_capacity)",
         static_cast<long long>(p.selection.idx.shape[3]), static_cast<long long>(capacity));
  }
  const bool is_causal = p.is_causal != 0;
  check_selection(p.selection,
                  {batch, heads, selection_blocks(p.seqlen_q, is_causal), p.selection.idx.shape[3], seqlen_k},
                  is_causal, pointers);
  if (is_present(p.cu_seqlens)) check_documents(p, seqlen_k, pointers);
  check_pointer("scores", p.scores, pointers);
  check_pointer("key_mask", p.key_mask, pointers);
}

void validate(const dmattn_build_key_lists_params& p, Pointers pointers) {
  check_device_number(p.device);
  check_reserved(p.reserved);
  check_rank("selection.end", p.selection.end, 3);
  const int64_t* shape = p.selection.end.shape;
  if (p.seqlen_q < 0 || p.seqlen_q > shape[2]) {
    fail(DMATTN_ERROR_INVALID_VALUE, "seqlen_q is %lld; wanted 0 to the %lld keys of selection.end",
         static_cast<long long>(p.seqlen_q), static_cast<long long>(shape[2]));
  }
  if (p.reach < 0) {
    fail(DMATTN_ERROR_INVALID_VALUE, "reach is %lld; wanted the largest end[j] - j, or 0 where that is unknown",
         static_cast<long long>(p.reach));
  }
  check_rank("selection.idx", p.selection.idx, 4);
  const int64_t blocks = selection_blocks(p.seqlen_q, true);
  check_selection(p.selection, {shape[0], shape[1], blocks, p.selection.idx.shape[3], shape[2]}, true, pointers);
  if (is_present(p.needed)) {
    check_shape("needed", p.needed, {shape[0], shape[1], blocks}, "the shape of selection.count");
    check_dtype("needed", p.needed, {DMATTN_INT32});
    check_contiguous("needed", p.needed);
    check_pointer("needed", p.needed, pointers);
  }
}

namespace {

// The queries of the tokens, if there are any, and what they become.
void check_cache_queries(const dmattn_cache_append_params& p, Pointers pointers) {
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

void validate(const dmattn_cache_append_params& p, Pointers pointers) {
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
