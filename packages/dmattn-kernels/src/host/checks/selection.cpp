// Checks on selections of keys.
#include <cstdint>

#include "host/arithmetic.h"
#include "host/checks/tensor.h"
#include "host/plan/select.h"

namespace dmattn {

void check_selection(const dmattn_key_selection& s, const SelectionExtents& e, bool is_causal, PointerCheck& pointers) {
  const auto check = [&](const char* name, const dmattn_tensor& t, std::initializer_list<int64_t> shape,
                         const char* meaning) {
    check_shape(name, t, shape, meaning);
    check_dtype(name, t, {DMATTN_INT32});
    check_contiguous(name, t);
    check_pointer(name, t, pointers);
  };
  check("selection.idx", s.idx, {e.batch, e.heads, e.blocks, e.capacity}, "(batch, heads, blocks, capacity)");
  if (e.capacity % 128 != 0) {
    fail(DMATTN_ERROR_INVALID_VALUE, "selection.idx has capacity %lld; wanted a multiple of 128",
         static_cast<long long>(e.capacity));
  }
  check("selection.count", s.count, {e.batch, e.heads, e.blocks}, "(batch, heads, blocks)");
  check("selection.end", s.end, {e.batch, e.heads, e.seqlen_k}, "(batch, heads, seqlen_k)");
  if (is_causal) {
    check("selection.full", s.full, {e.batch, e.heads, e.blocks}, "(batch, heads, blocks)");
  } else if (is_present(s.full)) {
    fail(DMATTN_ERROR_INVALID_VALUE,
         "selection.full is given but is_causal is 0; wanted it absent, as all entries of these lists are full keys");
  }
}

int64_t selection_blocks(int64_t seqlen_q, bool is_causal) {
  return is_causal ? ceil_div<int64_t>(seqlen_q, kSelectBlockRows) : 1;
}

namespace {

void check_documents(const dmattn_select_params& p, int64_t seqlen_k, PointerCheck& pointers) {
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

void check_keys(const char* name, int64_t seqlen_k) {
  if (seqlen_k <= kMaxSelectKeys) return;
  fail(DMATTN_ERROR_INVALID_VALUE, "%s has %lld keys; wanted at most %d", name, static_cast<long long>(seqlen_k),
       kMaxSelectKeys);
}

}  // namespace

void validate(const dmattn_select_params& p, PointerCheck& pointers) {
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
  check_keys("scores", seqlen_k);
  if (batch * heads > INT32_MAX) {
    fail(DMATTN_ERROR_INVALID_VALUE, "scores and key_mask have %lld rows together (batch x heads); wanted at most %d",
         static_cast<long long>(batch * heads), INT32_MAX);
  }
  const int64_t capacity = select_capacity(p.window, seqlen_k, p.is_causal != 0);
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

void validate(const dmattn_build_key_lists_params& p, PointerCheck& pointers) {
  check_device_number(p.device);
  check_reserved(p.reserved);
  check_rank("selection.end", p.selection.end, 3);
  const int64_t* shape = p.selection.end.shape;
  if (p.seqlen_q < 0 || p.seqlen_q > shape[2]) {
    fail(DMATTN_ERROR_INVALID_VALUE, "seqlen_q is %lld; wanted 0 to the %lld keys of selection.end",
         static_cast<long long>(p.seqlen_q), static_cast<long long>(shape[2]));
  }
  check_keys("selection.end", shape[2]);
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

}  // namespace dmattn
