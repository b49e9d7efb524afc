#include "host/checks/tensor.h"
#include "host/problem.h"

namespace dmattn {
namespace {

constexpr int32_t kMaxSeqlen = int32_t{1} << 30;
// Each sequence may start a new block of 128 rows in the workspace, and rows are counted in 32 bits.
constexpr int64_t kMaxSequences = int64_t{1} << 22;

// --- the attention problem -----------------------------------------------------------------------------------------

struct Extents {
  int64_t batch, seqlen_q, seqlen_k, nheads, nheads_k, head_dim;
  bool is_packed;        // batch is then 1 and in no shape, and the lengths are those of all sequences together
  int64_t max_seqlen_k;  // columns of a packed mask or bias that has rows
};

// Expects (batch, a, b, ...), or (a, b, ...) if sequences are packed.
void check_batched(const char* name, const dmattn_tensor& t, const Extents& e, std::initializer_list<int64_t> shape,
                   const char* meaning) {
  if (!e.is_packed) return check_shape(name, t, shape, meaning);
  const int64_t* s = shape.begin();
  shape.size() == 4 ? check_shape(name, t, {s[1], s[2], s[3]}, meaning) : check_shape(name, t, {s[1], s[2]}, meaning);
}

Extents check_qkv(const dmattn_tensor& q, const dmattn_tensor& k, const dmattn_tensor& v, bool is_packed,
                  int64_t max_seqlen_k) {
  const int rows = is_packed ? 0 : 1;  // dimension of the rows
  check_rank("q", q, rows + 3);
  check_rank("k", k, rows + 3);
  const int64_t batch = is_packed ? 1 : q.shape[0];
  const Extents e = {batch,     q.shape[rows], k.shape[rows], q.shape[rows + 1], k.shape[rows + 1], q.shape[rows + 2],
                     is_packed, max_seqlen_k};
  check_dtype("q", q, {DMATTN_FLOAT16, DMATTN_BFLOAT16});
  check_dtype("k", k, {q.dtype});
  check_batched("k", k, e, {e.batch, e.seqlen_k, e.nheads_k, e.head_dim}, "batch and head_dim of q");
  check_batched("v", v, e, {e.batch, e.seqlen_k, e.nheads_k, e.head_dim}, "the shape of k");
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

// A mask or bias of packed sequences.
void check_packed_operand(const char* name, const dmattn_tensor& t, const Extents& e) {
  check_rank(name, t, t.ndim == 2 ? 2 : 3);
  const bool heads_fit = t.shape[0] == 1 || t.shape[0] == e.nheads_k || t.shape[0] == e.nheads;
  const bool rows_fit =
      t.ndim == 2 ? t.shape[1] == e.seqlen_k : t.shape[1] == e.seqlen_q && t.shape[2] == e.max_seqlen_k;
  if (heads_fit && rows_fit) return;
  fail(DMATTN_ERROR_INVALID_VALUE,
       "%s has shape %s; wanted (%lld or %lld or 1, %lld), (heads, total_k), or (%lld or %lld or 1, %lld, %lld), "
       "(heads, total_q, max_seqlen_k), with cu_seqlens",
       name, text(t.shape, t.ndim).c_str(), static_cast<long long>(e.nheads), static_cast<long long>(e.nheads_k),
       static_cast<long long>(e.seqlen_k), static_cast<long long>(e.nheads), static_cast<long long>(e.nheads_k),
       static_cast<long long>(e.seqlen_q), static_cast<long long>(e.max_seqlen_k));
}

// A mask or bias.
void check_broadcastable(const char* name, const dmattn_tensor& t, const Extents& e) {
  if (e.is_packed) return check_packed_operand(name, t, e);
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
                               const Extents& e, PointerCheck& pointers) {
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

// The window that a call says its selection to be.
template <class Params>
void check_window(const Params& p) {
  if (p.window < 0) fail(DMATTN_ERROR_INVALID_VALUE, "window is %d; wanted at least 1, or 0 for none", p.window);
  if (p.window > 0 && !(is_present(p.selection.idx) && p.is_causal)) {
    fail(DMATTN_ERROR_INVALID_VALUE, "window is %d; wanted 0 without a causal selection", p.window);
  }
}

// A tensor with the shape and dtype of another one: out as q, dk as k, ...
void check_like(const char* name, const dmattn_tensor& t, const dmattn_tensor& twin, const char* meaning) {
  check_dtype(name, t, {twin.dtype});
  const int64_t* s = twin.shape;
  twin.ndim == 4 ? check_shape(name, t, {s[0], s[1], s[2], s[3]}, meaning)
                 : check_shape(name, t, {s[0], s[1], s[2]}, meaning);
  check_unit_last_stride(name, t);
}

void check_lse(const char* name, const dmattn_tensor& lse, const Extents& e) {
  check_dtype(name, lse, {DMATTN_FLOAT32});
  check_batched(name, lse, e, {e.batch, e.nheads, e.seqlen_q},
                e.is_packed ? "(nheads, total_q)" : "(batch, nheads, seqlen_q)");
}

// Optional. Kernels use the strides of lse for it.
void check_lse_rest(const dmattn_tensor& rest, const dmattn_tensor& lse, const Extents& e, PointerCheck& pointers) {
  if (!is_present(rest)) return;
  check_lse("softmax_lse_rest", rest, e);
  for (int i = 0; i < rest.ndim; ++i) {
    if (rest.shape[i] > 1 && rest.stride[i] != lse.stride[i]) {
      fail(DMATTN_ERROR_INVALID_VALUE, "softmax_lse_rest has strides %s; wanted those of softmax_lse, %s",
           text(rest.stride, rest.ndim).c_str(), text(lse.stride, rest.ndim).c_str());
    }
  }
  check_pointer("softmax_lse_rest", rest, pointers);
}

// --- packed sequences -----------------------------------------------------------------------------------------------

template <class Params>
bool has_packing(const Params& p) {
  return is_present(p.cu_seqlens_q) || is_present(p.cu_seqlens_k);
}

void check_cu_seqlens(const char* name, const dmattn_tensor& t, PointerCheck& pointers) {
  check_rank(name, t, 1);
  check_dtype(name, t, {DMATTN_INT32});
  check_contiguous(name, t);
  check_pointer(name, t, pointers);
}

// `total`: the sum of all lengths, each of which is at most max_seqlen.
void check_max_seqlen(const char* name, int32_t max_seqlen, int64_t sequences, int64_t total, const char* total_name) {
  if (max_seqlen < 0 || max_seqlen > kMaxSeqlen) {
    fail(DMATTN_ERROR_INVALID_VALUE, "%s is %d; wanted 0 to %d", name, max_seqlen, kMaxSeqlen);
  }
  if (sequences * max_seqlen < total) {
    fail(DMATTN_ERROR_INVALID_VALUE, "%s is %d; wanted a bound on the lengths of %lld sequences with %s = %lld", name,
         max_seqlen, static_cast<long long>(sequences), total_name, static_cast<long long>(total));
  }
}

// Checks all that can be checked without reading cu_seqlens.
template <class Params>
void check_packing(const Params& p, const Extents& e, PointerCheck& pointers) {
  if (!e.is_packed) {
    for (const int32_t max_seqlen : {p.max_seqlen_q, p.max_seqlen_k}) {
      if (max_seqlen != 0) {
        fail(DMATTN_ERROR_INVALID_VALUE, "max_seqlen_q and max_seqlen_k are %d and %d; wanted 0 without cu_seqlens",
             p.max_seqlen_q, p.max_seqlen_k);
      }
    }
    return;
  }
  check_cu_seqlens("cu_seqlens_q", p.cu_seqlens_q, pointers);
  check_cu_seqlens("cu_seqlens_k", p.cu_seqlens_k, pointers);
  const int64_t bounds = p.cu_seqlens_q.shape[0];
  if (bounds < 1 || bounds - 1 > kMaxSequences) {
    fail(DMATTN_ERROR_INVALID_VALUE, "cu_seqlens_q has %lld entries; wanted 1 more than the sequences, at most %lld",
         static_cast<long long>(bounds), static_cast<long long>(kMaxSequences + 1));
  }
  check_shape("cu_seqlens_k", p.cu_seqlens_k, {bounds}, "the shape of cu_seqlens_q");
  check_max_seqlen("max_seqlen_q", p.max_seqlen_q, bounds - 1, e.seqlen_q, "total_q");
  check_max_seqlen("max_seqlen_k", p.max_seqlen_k, bounds - 1, e.seqlen_k, "total_k");
  if (is_present(p.selection.idx)) {
    fail(DMATTN_ERROR_INVALID_VALUE, "selection is given with cu_seqlens_q; wanted at most one of them");
  }
}

template <class Params>
void check_numbers(const Params& p) {
  check_device_number(p.device);
  check_flag("is_causal", p.is_causal);
  check_finite("softmax_scale", p.softmax_scale);
  check_finite("softcap", p.softcap);
  check_reserved(p.reserved);
  check_reserved(p.reserved_end, "reserved_end");
  check_window(p);
}

}  // namespace

void validate(const dmattn_fwd_params& p, PointerCheck& pointers) {
  check_numbers(p);
  if (p.num_splits < 0 || p.num_splits > kMaxSplits) {
    fail(DMATTN_ERROR_INVALID_VALUE, "num_splits is %d; wanted 0 to %d", p.num_splits, kMaxSplits);
  }
  const Extents e = check_qkv(p.q, p.k, p.v, has_packing(p), p.max_seqlen_k);
  check_packing(p, e, pointers);
  if (e.is_packed && p.num_splits > 1) {
    fail(DMATTN_ERROR_INVALID_VALUE, "num_splits is %d; wanted 0 or 1 with cu_seqlens_q", p.num_splits);
  }
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

void check_gradient(const Gradient& g, PointerCheck& pointers) {
  if (!is_present(g.gradient)) return;
  check_like(g.name, g.gradient, g.of, g.meaning);
  check_writable(g.name, g.gradient);
  check_pointer(g.name, g.gradient, pointers);
}

void check_dbias(const dmattn_bwd_params& p, PointerCheck& pointers) {
  if (!is_present(p.dbias)) return;
  if (!is_present(p.bias))
    fail(DMATTN_ERROR_INVALID_VALUE, "dbias is given but bias is absent; wanted both or neither");
  check_dtype("dbias", p.dbias, {p.bias.dtype});
  const int64_t* s = p.bias.shape;
  p.bias.ndim == 4   ? check_shape("dbias", p.dbias, {s[0], s[1], s[2], s[3]}, "the shape of bias")
  : p.bias.ndim == 3 ? check_shape("dbias", p.dbias, {s[0], s[1], s[2]}, "the shape of bias")
                     : check_shape("dbias", p.dbias, {s[0], s[1]}, "the shape of bias");
  // Padded rows are for gradients with both rows and columns. Others are sums, which need a contiguous dbias.
  const bool has_rows = p.bias.ndim == 4 && s[2] > 1 && s[3] > 1;
  has_rows ? check_rows_apart("dbias", p.dbias) : check_contiguous("dbias", p.dbias);
  check_pointer("dbias", p.dbias, pointers);
}

}  // namespace

void validate(const dmattn_bwd_params& p, PointerCheck& pointers) {
  check_numbers(p);
  check_flag("deterministic", p.deterministic);
  const Extents e = check_qkv(p.q, p.k, p.v, has_packing(p), p.max_seqlen_k);
  check_packing(p, e, pointers);
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

}  // namespace dmattn
