#include "host/problem.h"

#include <initializer_list>

#include "kernels/selection_params.h"

namespace dmattn {
namespace {

int64_t stride_of(const dmattn_tensor& t, int dim) { return t.shape[dim] == 1 ? 0 : t.stride[dim]; }

// (a, b, ...) -> (1, a, b, ...)
dmattn_tensor in_front(dmattn_tensor t) {
  if (!is_present(t)) return t;
  for (int i = t.ndim; i > 0; --i) {
    t.shape[i] = t.shape[i - 1];
    t.stride[i] = t.stride[i - 1];
  }
  t.shape[0] = 1;
  t.stride[0] = 0;
  ++t.ndim;
  return t;
}

// (heads, keys) -> (1, heads, 1, keys), (heads, rows, keys) -> (1, heads, rows, keys)
dmattn_tensor operand_in_front(const dmattn_tensor& given) {
  dmattn_tensor t = in_front(given);
  if (!is_per_key(given)) return t;
  t.shape[3] = t.shape[2];
  t.stride[3] = t.stride[2];
  t.shape[2] = 1;
  t.stride[2] = 0;
  t.ndim = 4;
  return t;
}

template <class Params>
void put_batch_in_front(Params& p) {
  for (dmattn_tensor* t : {&p.q, &p.k, &p.v, &p.out, &p.softmax_lse, &p.softmax_lse_rest}) *t = in_front(*t);
  p.mask = operand_in_front(p.mask);
  p.bias = operand_in_front(p.bias);
}

}  // namespace

dmattn_fwd_params with_batch(dmattn_fwd_params p) {
  put_batch_in_front(p);
  return p;
}

dmattn_bwd_params with_batch(dmattn_bwd_params p) {
  put_batch_in_front(p);
  for (dmattn_tensor* t : {&p.dout, &p.dsoftmax_lse, &p.dq, &p.dk, &p.dv}) *t = in_front(*t);
  p.dbias = operand_in_front(p.dbias);
  return p;
}

Strides3 read_strides(const dmattn_tensor& t) {
  Strides3 s;
  s.batch = stride_of(t, 0);
  s.row = stride_of(t, 1);
  s.head = stride_of(t, 2);
  return s;
}

Strides3 read_lse_strides(const dmattn_tensor& t) {
  Strides3 s;
  s.batch = stride_of(t, 0);
  s.head = stride_of(t, 1);
  s.row = stride_of(t, 2);
  return s;
}

bool is_vec16(const void* ptr, const Strides3& stride, Dtype dtype) {
  const int64_t low_bits = 16 / element_bytes(dtype) - 1;
  return reinterpret_cast<uintptr_t>(ptr) % 16 == 0 && ((stride.batch | stride.head | stride.row) & low_bits) == 0;
}

MaskSource read_mask(const dmattn_tensor& t, const Problem& x, bool per_key) {
  MaskSource mask;
  mask.batch = 0;
  if (!is_present(t)) return mask;
  mask.ptr = static_cast<const uint8_t*>(t.data);
  mask.batch_stride = stride_of(t, 0);
  mask.head_stride = stride_of(t, 1);
  mask.row_stride = stride_of(t, 2);
  mask.col_stride = stride_of(t, 3);
  mask.batch = mask.batch_stride == 0 ? 1 : static_cast<int32_t>(t.shape[0]);
  mask.heads = mask.head_stride == 0 ? 1 : static_cast<int32_t>(t.shape[1]);
  mask.seqlen_q = x.rows_q;
  mask.seqlen_k = x.seqlen_k;
  mask.packing = x.packing;
  mask.per_key = per_key;
  return mask;
}

KeyList read_lists(const dmattn_key_selection& selection) {
  KeyList keys;
  keys.idx = static_cast<const int32_t*>(selection.idx.data);
  keys.count = static_cast<const int32_t*>(selection.count.data);
  keys.end = static_cast<const int32_t*>(selection.end.data);
  keys.batch = static_cast<int32_t>(selection.idx.shape[0]);
  keys.heads = static_cast<int32_t>(selection.idx.shape[1]);
  keys.blocks = static_cast<int32_t>(selection.idx.shape[2]);
  keys.capacity = static_cast<int32_t>(selection.idx.shape[3]);
  if (is_present(selection.full)) {  // causal
    keys.full = static_cast<const int32_t*>(selection.full.data);
    keys.block_rows = kSelectBlockRows;
  }
  return keys;
}

KeyList read_selection(const dmattn_key_selection& selection, const Problem& x) {
  KeyList keys = read_lists(selection);
  if (x.seqlen_q == 1) keys.block_rows = 0;
  keys.head_ratio = x.nheads / keys.heads;
  return keys;
}

bool has_dense_rows(const dmattn_tensor& bias, const Problem& x) {
  if (!is_present(bias) || x.packing.is_active()) return false;
  const BiasParams read = read_bias(bias, x, /*gathered=*/false);
  return read.row_stride != 0 && read.col_stride == 1;
}

// Beside a dense bias the keys of a mask are not listed: tiles of the bias are copied whole, but its elements at
// listed keys would be read one by one, which takes several times as long as computing the keys that the list leaves
// out.
KeyWalk choose_walk(const MaskSource& mask, const KeyList& selection, bool has_selection, bool has_dense_bias) {
  if (has_selection) return selection.block_rows > 0 ? KeyWalk::kRowBlockLists : KeyWalk::kSelectionList;
  return has_mask(mask) && is_key_only(mask) && !has_dense_bias ? KeyWalk::kMaskList : KeyWalk::kTiled;
}

BiasParams read_bias(const dmattn_tensor& t, const Problem& x, bool gathered) {
  BiasParams bias;
  if (!is_present(t)) return bias;
  bias.ptr = t.data;
  bias.dtype = static_cast<Dtype>(t.dtype);
  bias.batch_stride = stride_of(t, 0);
  bias.head_stride = stride_of(t, 1);
  bias.row_stride = stride_of(t, 2);
  bias.col_stride = stride_of(t, 3);
  // By the shape even if the bias is expanded along its heads: dbias has entries for each of these heads.
  bias.head_ratio = x.nheads / static_cast<int32_t>(t.shape[1]);
  bias.kind = choose_bias_kind(bias, gathered);
  return bias;
}

BiasKind choose_bias_kind(const BiasParams& bias, bool gathered) {
  if (bias.row_stride == 0) return BiasKind::kKey;
  const bool is_tile = bias.dtype != Dtype::kFloat32 && bias.col_stride == 1 && !gathered;
  return is_tile ? BiasKind::kTile : BiasKind::kDirect;
}

}  // namespace dmattn
