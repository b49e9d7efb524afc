#include "api/validate.h"

#include <cstring>

#include "api/checks.h"

namespace dmattn {
namespace {

constexpr int32_t kMaxSplits = 128;

// --- the attention problem -----------------------------------------------------------------------------------------

struct Extents {
  int64_t batch, seqlen_q, seqlen_k, nheads, nheads_k, head_dim;
};

Extents check_qkv(const dmattn_tensor& q, const dmattn_tensor& k, const dmattn_tensor& v) {
  check_rank("q", q, 4);
  check_rank("k", k, 4);
  const Extents e = {q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3]};
  check_dtype("q", q, {DMATTN_FLOAT16, DMATTN_BFLOAT16});
  check_dtype("k", k, {q.dtype});
  check_shape("k", k, {e.batch, e.seqlen_k, e.nheads_k, e.head_dim}, "batch and head_dim of q");
  check_shape("v", v, {e.batch, e.seqlen_k, e.nheads_k, e.head_dim}, "the shape of k");
  check_dtype("v", v, {q.dtype});
  check_head_dim("q", e.head_dim);
  if (e.nheads > 0 && (e.nheads_k == 0 || e.nheads % e.nheads_k != 0)) {
    fail(DMATTN_ERROR_INVALID_VALUE, "k has %lld heads; wanted a divisor of the %lld heads of q",
         static_cast<long long>(e.nheads_k), static_cast<long long>(e.nheads));
  }
  check_unit_last_stride("q", q);
  check_unit_last_stride("k", k);
  check_unit_last_stride("v", v);
  return e;
}

// mask or bias.
void check_broadcastable(const char* name, const dmattn_tensor& t, const Extents& e) {
  check_rank(name, t, 4);
  const bool ok = (t.shape[0] == 1 || t.shape[0] == e.batch) &&
                  (t.shape[1] == 1 || t.shape[1] == e.nheads_k || t.shape[1] == e.nheads) &&
                  (t.shape[2] == 1 || t.shape[2] == e.seqlen_q) && (t.shape[3] == 1 || t.shape[3] == e.seqlen_k);
  if (ok) return;
  fail(DMATTN_ERROR_INVALID_VALUE,
       "%s has shape %s; wanted (%lld or 1, %lld or %lld or 1, %lld or 1, %lld or 1), broadcastable to (batch, nheads "
       "or nheads_k, seqlen_q, seqlen_k)",
       name, text(t.shape, 4).c_str(), static_cast<long long>(e.batch), static_cast<long long>(e.nheads),
       static_cast<long long>(e.nheads_k), static_cast<long long>(e.seqlen_q), static_cast<long long>(e.seqlen_k));
}

void check_mask_and_bias(const dmattn_tensor& mask, const dmattn_tensor& bias, int32_t dtype, const Extents& e) {
  if (is_present(mask)) {
    check_dtype("mask", mask, {DMATTN_BOOL});
    check_broadcastable("mask", mask, e);
  }
  if (is_present(bias)) {
    check_dtype("bias", bias, {dtype, DMATTN_FLOAT32});
    check_broadcastable("bias", bias, e);
  }
}

void check_attention_selection(const dmattn_key_selection& s, const dmattn_tensor& mask, bool is_causal,
                               const Extents& e, Pointers pointers) {
  if (!is_present(s.idx)) return;
  if (is_present(mask)) fail(DMATTN_ERROR_INVALID_VALUE, "mask is given with a selection; wanted at most one of them");
  check_rank("selection.idx", s.idx, 4);
  const int64_t batch = s.idx.shape[0], heads = s.idx.shape[1];
  if ((batch != 1 && batch != e.batch) || (heads != 1 && heads != e.nheads_k && heads != e.nheads)) {
    fail(DMATTN_ERROR_INVALID_VALUE,
         "selection.idx has shape %s; wanted (%lld or 1, %lld or %lld or 1, blocks, capacity)",
         text(s.idx.shape, 4).c_str(), static_cast<long long>(e.batch), static_cast<long long>(e.nheads),
         static_cast<long long>(e.nheads_k));
  }
  if (is_causal && e.seqlen_q > e.seqlen_k) {
    fail(DMATTN_ERROR_INVALID_VALUE, "q has %lld rows for %lld keys; wanted no more rows than keys with a selection",
         static_cast<long long>(e.seqlen_q), static_cast<long long>(e.seqlen_k));
  }
  check_selection(s, {batch, heads, selection_blocks(e.seqlen_q, is_causal), s.idx.shape[3], e.seqlen_k}, is_causal,
                  pointers);
}

// A tensor that has a twin: out for q, dk for k, ...
void check_like(const char* name, const dmattn_tensor& t, const dmattn_tensor& twin, const char* meaning) {
  check_dtype(name, t, {twin.dtype});
  check_shape(name, t, {twin.shape[0], twin.shape[1], twin.shape[2], twin.shape[3]}, meaning);
  check_unit_last_stride(name, t);
}

void check_lse(const char* name, const dmattn_tensor& lse, const Extents& e) {
  check_dtype(name, lse, {DMATTN_FLOAT32});
  check_shape(name, lse, {e.batch, e.nheads, e.seqlen_q}, "(batch, nheads, seqlen_q)");
}

// Optional; read and written with the strides of lse.
void check_lse_rest(const dmattn_tensor& rest, const dmattn_tensor& lse, const Extents& e, Pointers pointers) {
  if (!is_present(rest)) return;
  check_lse("softmax_lse_rest", rest, e);
  for (int i = 0; i < 3; ++i) {
    if (rest.shape[i] > 1 && rest.stride[i] != lse.stride[i]) {
      fail(DMATTN_ERROR_INVALID_VALUE, "softmax_lse_rest has strides %s; wanted those of softmax_lse, %s",
           text(rest.stride, 3).c_str(), text(lse.stride, 3).c_str());
    }
  }
  check_pointer("softmax_lse_rest", rest, pointers);
}

template <class Params>
void check_numbers(const Params& p) {
  check_device_number(p.device);
  check_flag("is_causal", p.is_causal);
  check_finite("softmax_scale", p.softmax_scale);
  check_finite("softcap", p.softcap);
  check_reserved(p.reserved);
}

}  // namespace

void validate(const dmattn_fwd_params& p, Pointers pointers) {
  check_numbers(p);
  if (p.num_splits < 0 || p.num_splits > kMaxSplits) {
    fail(DMATTN_ERROR_INVALID_VALUE, "num_splits is %d; wanted 0 to %d", p.num_splits, kMaxSplits);
  }
  const Extents e = check_qkv(p.q, p.k, p.v);
  check_mask_and_bias(p.mask, p.bias, p.q.dtype, e);
  check_like("out", p.out, p.q, "the shape of q");
  check_writable("out", p.out);
  check_lse("softmax_lse", p.softmax_lse, e);
  check_unit_last_stride("softmax_lse", p.softmax_lse);
  check_writable("softmax_lse", p.softmax_lse);
  check_lse_rest(p.softmax_lse_rest, p.softmax_lse, e, pointers);
  check_attention_selection(p.selection, p.mask, p.is_causal != 0, e, pointers);

  check_pointer("q", p.q, pointers);
  check_pointer("k", p.k, pointers);
  check_pointer("v", p.v, pointers);
  check_pointer("mask", p.mask, pointers);
  check_pointer("bias", p.bias, pointers);
  check_pointer("out", p.out, pointers);
  check_pointer("softmax_lse", p.softmax_lse, pointers);
}

namespace {

struct Gradient {
  const char* name;
  const dmattn_tensor& gradient;
  const dmattn_tensor& of;
  const char* meaning;
};

void check_gradient(const Gradient& g, Pointers pointers) {
  if (!is_present(g.gradient)) return;
  check_like(g.name, g.gradient, g.of, g.meaning);
  check_writable(g.name, g.gradient);
  check_pointer(g.name, g.gradient, pointers);
}

void check_dbias(const dmattn_bwd_params& p, Pointers pointers) {
  if (!is_present(p.dbias)) return;
  if (!is_present(p.bias))
    fail(DMATTN_ERROR_INVALID_VALUE, "dbias is given but bias is absent; wanted both or neither");
  check_dtype("dbias", p.dbias, {p.bias.dtype});
  const int64_t* shape = p.bias.shape;
  check_shape("dbias", p.dbias, {shape[0], shape[1], shape[2], shape[3]}, "the shape of bias");
  check_contiguous("dbias", p.dbias);
  check_pointer("dbias", p.dbias, pointers);
}

}  // namespace

void validate(const dmattn_bwd_params& p, Pointers pointers) {
  check_numbers(p);
  check_flag("deterministic", p.deterministic);
  const Extents e = check_qkv(p.q, p.k, p.v);
  check_mask_and_bias(p.mask, p.bias, p.q.dtype, e);
  check_like("out", p.out, p.q, "the shape of q");
  check_like("dout", p.dout, p.q, "the shape of q");
  check_lse("softmax_lse", p.softmax_lse, e);
  check_unit_last_stride("softmax_lse", p.softmax_lse);
  check_lse_rest(p.softmax_lse_rest, p.softmax_lse, e, pointers);
  check_attention_selection(p.selection, p.mask, p.is_causal != 0, e, pointers);
  if (is_present(p.dsoftmax_lse)) check_lse("dsoftmax_lse", p.dsoftmax_lse, e);

  check_pointer("q", p.q, pointers);
  check_pointer("k", p.k, pointers);
  check_pointer("v", p.v, pointers);
  check_pointer("mask", p.mask, pointers);
  check_pointer("bias", p.bias, pointers);
  check_pointer("out", p.out, pointers);
  check_pointer("softmax_lse", p.softmax_lse, pointers);
  check_pointer("dout", p.dout, pointers);
  check_pointer("dsoftmax_lse", p.dsoftmax_lse, pointers);
  check_gradient({"dq", p.dq, p.q, "the shape of q"}, pointers);
  check_gradient({"dk", p.dk, p.k, "the shape of k"}, pointers);
  check_gradient({"dv", p.dv, p.v, "the shape of v"}, pointers);
  check_dbias(p, pointers);
}

void validate_workspace(const void* workspace, size_t bytes, size_t wanted) {
  if (bytes < wanted) {
    fail(DMATTN_ERROR_INVALID_VALUE, "workspace has %zu bytes; wanted at least %zu", bytes, wanted);
  }
  if (wanted > 0 && (workspace == nullptr || reinterpret_cast<uintptr_t>(workspace) % 256 != 0)) {
    fail(DMATTN_ERROR_INVALID_VALUE, "workspace is at %p; wanted device memory that starts on 256 bytes", workspace);
  }
}

void copy_params(const void* given, size_t known, const char* type, void* to) {
  if (given == nullptr) fail(DMATTN_ERROR_INVALID_VALUE, "params is null; wanted a %s", type);
  size_t size;
  std::memcpy(&size, given, sizeof(size));
  if (size < sizeof(size)) {
    fail(DMATTN_ERROR_INVALID_VALUE, "struct_size is %zu; wanted sizeof(%s), %zu", size, type, known);
  }
  const auto* bytes = static_cast<const unsigned char*>(given);
  for (size_t i = known; i < size; ++i) {
    if (bytes[i] != 0) {
      fail(DMATTN_ERROR_INVALID_VALUE,
           "struct_size is %zu and byte %zu of the %s is set; this library knows the first %zu bytes, wanted zeros "
           "after them",
           size, i, type, known);
    }
  }
  std::memcpy(to, given, size < known ? size : known);
}

}  // namespace dmattn
