// Converts the caller's tensor views to what the kernels read.
#pragma once

#include <cstdint>

#include "dmattn/dmattn.h"
#include "host/checks/validate.h"
#include "host/dtype.h"
#include "kernels/params.h"
#include "kernels/tiles.h"

namespace dmattn {

// --- packed sequences -----------------------------------------------------------------------------------------------

inline bool is_packed(const dmattn_fwd_params& p) { return is_present(p.cu_seqlens_q); }
inline bool is_packed(const dmattn_bwd_params& p) { return is_present(p.cu_seqlens_q); }
// A mask or bias of packed sequences with an entry for each key, the same for all rows.
inline bool is_per_key(const dmattn_tensor& packed) { return packed.ndim == 2; }

// Which operands of a call over packed sequences have an entry for each key. with_batch() gives all operands four
// dimensions, after which their shapes no longer tell.
struct PerKey {
  bool mask = false, bias = false;
};

// A call over packed sequences, with a batch dimension of 1 in front of every shape. A mask or bias for each key also
// gets a dimension of 1 for its rows. All code after validation takes the tensors in this form.
dmattn_fwd_params with_batch(dmattn_fwd_params p);
dmattn_bwd_params with_batch(dmattn_bwd_params p);

// Returns f(call, per_key) with the call in the form of with_batch(). The parameters are copied only if that changes
// them.
template <class Params, class F>
auto in_batched_form(const Params& given, F&& f) {
  if (!is_packed(given)) return f(given, PerKey{});
  return f(with_batch(given), PerKey{is_per_key(given.mask), is_per_key(given.bias)});
}

// --- extents --------------------------------------------------------------------------------------------------------

// The extents of a call. Packed: batch is the number of sequences, seqlen_q and seqlen_k bound their lengths.
struct Problem {
  Dtype dtype;
  int32_t batch, seqlen_q, seqlen_k, nheads, nheads_k, head_dim;
  int32_t head_ratio;      // query heads per kv head
  int32_t dim_tile;        // head_dim rounded up to a tile
  int32_t rows_q, rows_k;  // lengths of the tensors: total_q and total_k when packed
  Packing packing;
};

// The extents of a call in the form of with_batch().
template <class Params>
Problem read_problem(const Params& p) {
  const auto extent = [](int64_t x) { return static_cast<int32_t>(x); };
  Problem x = {};
  x.dtype = static_cast<Dtype>(p.q.dtype);
  x.batch = extent(p.q.shape[0]);
  x.rows_q = x.seqlen_q = extent(p.q.shape[1]);
  x.rows_k = x.seqlen_k = extent(p.k.shape[1]);
  x.nheads = extent(p.q.shape[2]);
  x.nheads_k = extent(p.k.shape[2]);
  x.head_dim = extent(p.q.shape[3]);
  x.head_ratio = x.nheads_k > 0 ? x.nheads / x.nheads_k : 0;
  x.dim_tile = head_dim_tile(x.head_dim);
  if (is_packed(p)) {
    x.batch = extent(p.cu_seqlens_q.shape[0] - 1);
    x.seqlen_q = p.max_seqlen_q;
    x.seqlen_k = p.max_seqlen_k;
    x.packing.cu_seqlens_q = static_cast<const int32_t*>(p.cu_seqlens_q.data);
    x.packing.cu_seqlens_k = static_cast<const int32_t*>(p.cu_seqlens_k.data);
    x.packing.sequences = x.batch;
    x.packing.total_q = x.rows_q;
    x.packing.total_k = x.rows_k;
  }
  return x;
}

// Sets the fields that the parameters of the forward and the backward kernels share.
template <class KernelParams>
void set_problem(KernelParams& kernel, const Problem& x) {
  kernel.batch = x.batch;
  kernel.seqlen_q = x.seqlen_q;
  kernel.seqlen_k = x.seqlen_k;
  kernel.nheads = x.nheads;
  kernel.nheads_k = x.nheads_k;
  kernel.head_dim = x.head_dim;
  kernel.head_ratio = x.head_ratio;
  kernel.packing = x.packing;
}

// Strides of a (batch, seqlen, heads, head_dim) tensor. 0 where an extent is 1, so that such a stride does not count
// as unaligned.
Strides3 read_strides(const dmattn_tensor& t);
// Strides of a (batch, heads, seqlen) tensor.
Strides3 read_lse_strides(const dmattn_tensor& t);
// Whether every row starts on 16 bytes.
bool is_vec16(const void* ptr, const Strides3& stride, Dtype dtype);

// Without a mask, the result has batch == 0. Dimensions that are expanded by a stride of 0 count as broadcast, so
// that an expanded mask is read once.
MaskSource read_mask(const dmattn_tensor& mask, const Problem& x, bool per_key);
inline bool has_mask(const MaskSource& mask) { return mask.batch > 0; }
// Whether all rows keep the same keys. Such a mask can become a list of keys.
inline bool is_key_only(const MaskSource& mask) { return mask.row_stride == 0; }

// How the keys of a query row are found.
enum class KeyWalk : int32_t {
  kTiled,          // tile by tile; tiles that a dense mask or causality leaves out are skipped
  kMaskList,       // a list for all rows, made from a key-only mask; not beside a dense bias
  kSelectionList,  // a list for all rows, that of a selection
  kRowBlockLists,  // a causal selection: a list for each block of rows
};
constexpr bool is_gathered(KeyWalk walk) { return walk != KeyWalk::kTiled; }
constexpr bool is_selection(KeyWalk walk) { return walk == KeyWalk::kSelectionList || walk == KeyWalk::kRowBlockLists; }

// The lists of a selection as they were written; head_ratio is left for the caller to set.
KeyList read_lists(const dmattn_key_selection& selection);
// The same as attention reads them: a single query row keeps every key of its list, which needs no intervals then.
KeyList read_selection(const dmattn_key_selection& selection, const Problem& x);
// Whether the bias has rows of its own, and the keys of a row are contiguous in memory.
bool has_dense_rows(const dmattn_tensor& bias, const Problem& x);
// `selection`: the result of read_selection(), or an empty list if there is no selection.
KeyWalk choose_walk(const MaskSource& mask, const KeyList& selection, bool has_selection, bool has_dense_bias);

// Whether a selection is known to be a window of keys, which kernels may find by themselves. A single row reads its
// list instead.
template <class Params>
bool has_known_window(const Params& p, const Problem& x) {
  // The limit on seqlen_k keeps all numbers that the kernels count with within 32 bits.
  return p.window > 0 && x.seqlen_q > 1 && x.seqlen_k <= INT32_MAX / 4;
}
// FwdParams::window. A window of all keys is the same as none.
template <class Params>
int32_t read_window(const Params& p, const Problem& x) {
  return p.window < x.seqlen_k ? p.window : 0;
}

// kind stays kNone if there is no bias.
BiasParams read_bias(const dmattn_tensor& bias, const Problem& x, bool gathered);
// Packing::bias_col_stride. The columns of a bias for each key count through all sequences, those of a bias with rows
// from the sequence's first key. Tiled kernels number keys from the sequence's first key, gathered ones through all
// sequences.
inline int64_t packed_bias_stride(const BiasParams& bias, bool per_key, bool gathered) {
  return bias.col_stride * ((per_key ? 1 : 0) - (gathered ? 1 : 0));
}
// How kernels read a bias with these strides.
BiasKind choose_bias_kind(const BiasParams& bias, bool gathered);

}  // namespace dmattn
