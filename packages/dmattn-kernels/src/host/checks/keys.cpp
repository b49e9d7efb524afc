// Checks on calls that move whole keys.
#include <cstdint>

#include "host/checks/tensor.h"
#include "kernels/selection_params.h"

namespace dmattn {
namespace {

// Elements of a key, all heads together: up to here a thread block can count the words that it copies in 31 bits.
constexpr int64_t kMaxKeyElements = int64_t{1} << 22;

// The extents and dtypes of the result, which the other tensors have to match.
struct KeyExtents {
  int64_t batch, seqlen, heads, head_dim, head_dim_v;
  int32_t dtype, score_dtype;
};

void check_divides(const char* name, int64_t few, int64_t heads) {
  if (few == heads || (few > 0 && heads % few == 0)) return;
  fail(DMATTN_ERROR_INVALID_VALUE, "%s has %lld heads; wanted a divisor of the %lld of the result", name,
       static_cast<long long>(few), static_cast<long long>(heads));
}

// Rows that are read: (batch, seqlen, heads or a divisor of them, head_dim).
void check_rows(const char* name, const dmattn_tensor& t, const KeyExtents& e, int64_t seqlen, int64_t head_dim,
                PointerCheck& pointers) {
  check_rank(name, t, 4);
  check_shape(name, t, {e.batch, seqlen, t.shape[2], head_dim}, "(batch, keys, heads, head_dim) of the result");
  check_divides(name, t.shape[2], e.heads);
  check_dtype(name, t, {e.dtype});
  check_unit_last_stride(name, t);
  check_pointer(name, t, pointers);
}

// Numbers that are read: (batch or 1, heads or a divisor of them, seqlen).
void check_numbers(const char* name, const dmattn_tensor& t, const KeyExtents& e, int64_t seqlen,
                   PointerCheck& pointers) {
  check_rank(name, t, 3);
  const int64_t batch = t.shape[0] == 1 ? 1 : e.batch;
  check_shape(name, t, {batch, t.shape[1], seqlen}, "(batch or 1, heads, keys) of the result");
  check_divides(name, t.shape[1], e.heads);
  check_pointer(name, t, pointers);
}

void check_scores(const char* name, const dmattn_tensor& t, const KeyExtents& e, int64_t seqlen,
                  PointerCheck& pointers) {
  check_numbers(name, t, e, seqlen, pointers);
  if (e.score_dtype == DMATTN_FLOAT32) {
    check_dtype(name, t, {DMATTN_FLOAT32, DMATTN_FLOAT16, DMATTN_BFLOAT16});
  } else {
    check_dtype(name, t, {e.score_dtype});
  }
}

void check_contiguous_ints(const char* name, const dmattn_tensor& t, std::initializer_list<int64_t> shape,
                           const char* meaning, PointerCheck& pointers) {
  check_dtype(name, t, {DMATTN_INT32});
  check_shape(name, t, shape, meaning);
  check_contiguous(name, t);
  check_pointer(name, t, pointers);
}

// Checks the result and returns its extents.
KeyExtents check_result(const char* const (&names)[3], const dmattn_tensor& k, const dmattn_tensor& v,
                        const dmattn_tensor& score, PointerCheck& pointers) {
  check_rank(names[0], k, 4);
  check_rank(names[1], v, 4);
  const KeyExtents e = {k.shape[0], k.shape[1], k.shape[2], k.shape[3], v.shape[3], k.dtype, score.dtype};
  check_shape(names[1], v, {e.batch, e.seqlen, e.heads, e.head_dim_v},
              "(batch, keys, heads) of the keys, and head_dim");
  check_shape(names[2], score, {e.batch, e.heads, e.seqlen}, "(batch, heads, keys)");
  check_dtype(names[0], k, {DMATTN_FLOAT16, DMATTN_BFLOAT16, DMATTN_FLOAT32});
  check_dtype(names[1], v, {k.dtype});
  check_dtype(names[2], score, {DMATTN_FLOAT32, DMATTN_FLOAT16, DMATTN_BFLOAT16});
  int number = 0;
  for (const dmattn_tensor* t : {&k, &v}) {
    const char* name = names[number++];
    if (t->shape[3] < 1) {
      fail(DMATTN_ERROR_INVALID_VALUE, "%s has shape %s; wanted a head_dim of at least 1", name,
           text(t->shape, 4).c_str());
    }
    if (t->shape[2] * t->shape[3] > kMaxKeyElements) {
      fail(DMATTN_ERROR_INVALID_VALUE, "%s has shape %s; wanted heads x head_dim of at most %lld", name,
           text(t->shape, 4).c_str(), static_cast<long long>(kMaxKeyElements));
    }
    check_unit_last_stride(name, *t);
    check_writable(name, *t);
    check_pointer(name, *t, pointers);
  }
  check_writable(names[2], score);
  check_pointer(names[2], score, pointers);
  if (e.batch * e.heads > INT32_MAX) {
    fail(DMATTN_ERROR_INVALID_VALUE, "%s has %lld rows (batch x heads); wanted at most %d", names[0],
         static_cast<long long>(e.batch * e.heads), INT32_MAX);
  }
  return e;
}

void check_length(const char* name, int64_t seqlen) {
  if (seqlen <= kMaxSelectKeys) return;
  fail(DMATTN_ERROR_INVALID_VALUE, "%s has %lld keys; wanted at most %d", name, static_cast<long long>(seqlen),
       kMaxSelectKeys);
}

}  // namespace

void validate(const dmattn_join_keys_params& p, PointerCheck& pointers) {
  check_device_number(p.device);
  check_reserved(p.reserved);
  const KeyExtents e = check_result({"k", "v", "score"}, p.k, p.v, p.score, pointers);
  check_length("k", e.seqlen);
  check_rank("k_first", p.k_first, 4);
  check_rank("k_new", p.k_new, 4);
  const int64_t first = p.k_first.shape[1], fresh = p.k_new.shape[1];
  if (first + fresh > e.seqlen) {
    fail(DMATTN_ERROR_INVALID_VALUE, "k has %lld keys; wanted at least the %lld of k_first and %lld of k_new",
         static_cast<long long>(e.seqlen), static_cast<long long>(first), static_cast<long long>(fresh));
  }
  check_rows("k_first", p.k_first, e, first, e.head_dim, pointers);
  check_rows("v_first", p.v_first, e, first, e.head_dim_v, pointers);
  check_scores("score_first", p.score_first, e, first, pointers);
  check_rows("k_new", p.k_new, e, fresh, e.head_dim, pointers);
  check_rows("v_new", p.v_new, e, fresh, e.head_dim_v, pointers);
  check_scores("score_new", p.score_new, e, fresh, pointers);
  if (is_present(p.mask_new)) {
    check_dtype("mask_new", p.mask_new, {DMATTN_BOOL});
    check_numbers("mask_new", p.mask_new, e, fresh, pointers);
  }
  if (is_present(p.place_first)) {
    check_contiguous_ints("place_first", p.place_first, {e.batch, e.heads, first}, "(batch, heads, keys)", pointers);
  }
}

void validate(const dmattn_keep_keys_params& p, PointerCheck& pointers) {
  check_device_number(p.device);
  check_flag("starts_early", p.starts_early);
  const KeyExtents e = check_result({"k_kept", "v_kept", "score_kept"}, p.k_kept, p.v_kept, p.score_kept, pointers);
  check_length("k_kept", e.seqlen);
  check_rank("k", p.k, 4);
  const int64_t seqlen = p.k.shape[1];
  check_length("k", seqlen);
  if (p.row < seqlen - 1) {
    fail(DMATTN_ERROR_INVALID_VALUE, "row is %lld; wanted at least %lld, the position of the last key",
         static_cast<long long>(p.row), static_cast<long long>(seqlen - 1));
  }
  check_rows("k", p.k, e, seqlen, e.head_dim, pointers);
  check_rows("v", p.v, e, seqlen, e.head_dim_v, pointers);
  check_scores("score", p.score, e, seqlen, pointers);
  check_numbers("end", p.end, e, seqlen, pointers);
  check_dtype("end", p.end, {DMATTN_INT32});
  check_unit_last_stride("end", p.end);
  if (is_present(p.place)) {
    check_contiguous_ints("place", p.place, {e.batch, e.heads, seqlen}, "(batch, heads, keys)", pointers);
  }
  if (is_present(p.position)) {
    check_rank("position", p.position, 3);
    check_dtype("position", p.position, {DMATTN_INT32});
    if (p.position.shape[2] > seqlen) {
      fail(DMATTN_ERROR_INVALID_VALUE, "position has %lld entries; wanted at most %lld, the keys of k",
           static_cast<long long>(p.position.shape[2]), static_cast<long long>(seqlen));
    }
    check_numbers("position", p.position, e, p.position.shape[2], pointers);
  }
  if (is_present(p.seen)) check_contiguous_ints("seen", p.seen, {e.batch}, "(batch)", pointers);
  check_contiguous_ints("position_kept", p.position_kept, {e.batch, e.heads, e.seqlen}, "(batch, heads, keys)",
                        pointers);
  if (is_present(p.seen_kept)) check_contiguous_ints("seen_kept", p.seen_kept, {e.batch}, "(batch)", pointers);
}

}  // namespace dmattn
