// Checks on calls that append to a cache of keys, or draft what might be appended.
#include "host/checks/tensor.h"
#include "kernels/tiles.h"

namespace dmattn {
namespace {

// The queries of the tokens and their results.
template <class Params>
void check_queries(const Params& p, PointerCheck& pointers) {
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

void check_cache_queries(const dmattn_cache_append_params& p, PointerCheck& pointers) {
  if (!is_present(p.q)) {
    if (is_present(p.out)) fail(DMATTN_ERROR_INVALID_VALUE, "out is given but q is absent; wanted both or neither");
    return;
  }
  if (!p.evict) fail(DMATTN_ERROR_INVALID_VALUE, "evict is 0 with q; wanted 1, or no q");
  check_queries(p, pointers);
}

// A cache of the best keys with rows for a draft behind its entries, and the draft.
template <class Params>
void check_drafted_cache(const Params& p, PointerCheck& pointers) {
  check_device_number(p.device);
  check_reserved(p.reserved);
  check_rank("k_cache", p.k_cache, 4);
  check_rank("score", p.score, 3);
  check_rank("draft", p.draft, 4);
  const int64_t batch = p.k_cache.shape[0], rows = p.k_cache.shape[1], nheads_k = p.k_cache.shape[2];
  const int64_t head_dim = p.k_cache.shape[3], capacity = p.score.shape[2], tokens = p.draft.shape[2];
  check_dtype("k_cache", p.k_cache, {DMATTN_FLOAT16, DMATTN_BFLOAT16});
  check_head_dim("k_cache", head_dim);
  const auto check_rows = [&](const char* name, const dmattn_tensor& t, const char* meaning) {
    check_shape(name, t, {batch, rows, nheads_k, head_dim}, meaning);
    check_dtype(name, t, {p.k_cache.dtype});
    check_unit_last_stride(name, t);
    check_writable(name, t);
    check_pointer(name, t, pointers);
  };
  check_rows("k_cache", p.k_cache, "(batch, rows, nheads_k, head_dim)");
  check_rows("v_cache", p.v_cache, "the shape of k_cache");
  check_dtype("score", p.score, {DMATTN_FLOAT32, p.k_cache.dtype});
  const auto check_state = [&](const char* name, const dmattn_tensor& t, std::initializer_list<int64_t> shape,
                               const char* meaning) {
    check_shape(name, t, shape, meaning);
    check_contiguous(name, t);
    check_pointer(name, t, pointers);
  };
  check_state("score", p.score, {batch, nheads_k, capacity}, "(batch, nheads_k, capacity)");
  check_dtype("position", p.position, {DMATTN_INT32});
  check_state("position", p.position, {batch, nheads_k, capacity}, "the shape of score");
  check_dtype("seen", p.seen, {DMATTN_INT32});
  check_state("seen", p.seen, {batch}, "(batch)");
  if (tokens > kMaxDraft) {
    fail(DMATTN_ERROR_UNSUPPORTED, "draft has %lld tokens; wanted at most %d", static_cast<long long>(tokens),
         kMaxDraft);
  }
  if (capacity < 1) fail(DMATTN_ERROR_INVALID_VALUE, "score has no entries; wanted at least one");
  if (rows < capacity + tokens) {
    fail(DMATTN_ERROR_INVALID_VALUE, "k_cache has %lld rows; wanted at least %lld, the entries of score and the draft",
         static_cast<long long>(rows), static_cast<long long>(capacity + tokens));
  }
  check_dtype("draft", p.draft, {DMATTN_INT32});
  check_state("draft", p.draft, {batch, nheads_k, tokens, 4}, "(batch, nheads_k, tokens, 4)");
  // A DraftToken is read and written as one vector.
  const bool is_aligned = reinterpret_cast<uintptr_t>(p.draft.data) % sizeof(DraftToken) == 0;
  pointers.complete = pointers.complete && is_aligned;
  if (!is_aligned && pointers.required) {
    fail(DMATTN_ERROR_INVALID_VALUE, "draft has data pointer %p; wanted a multiple of %d", p.draft.data,
         static_cast<int>(sizeof(DraftToken)));
  }
}

}  // namespace

void validate(const dmattn_cache_draft_params& p, PointerCheck& pointers) {
  check_drafted_cache(p, pointers);
  const int64_t batch = p.k_cache.shape[0], nheads_k = p.k_cache.shape[2], head_dim = p.k_cache.shape[3];
  const int64_t tokens = p.draft.shape[2];
  const auto check_rows = [&](const char* name, const dmattn_tensor& t, const char* meaning) {
    check_shape(name, t, {batch, tokens, nheads_k, head_dim}, meaning);
    check_dtype(name, t, {p.k_cache.dtype});
    check_unit_last_stride(name, t);
    check_pointer(name, t, pointers);
  };
  check_rows("k_new", p.k_new, "(batch, tokens, nheads_k, head_dim) of k_cache and draft");
  check_rows("v_new", p.v_new, "the shape of k_new");
  check_dtype("score_new", p.score_new, {p.score.dtype});
  check_shape("score_new", p.score_new, {batch, nheads_k, tokens}, "(batch, nheads_k, tokens)");
  check_pointer("score_new", p.score_new, pointers);
  check_queries(p, pointers);
}

void validate(const dmattn_cache_commit_params& p, PointerCheck& pointers) {
  check_drafted_cache(p, pointers);
  check_dtype("count", p.count, {DMATTN_INT32, DMATTN_INT64});
  check_shape("count", p.count, {p.k_cache.shape[0]}, "(batch)");
  check_pointer("count", p.count, pointers);
}

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
