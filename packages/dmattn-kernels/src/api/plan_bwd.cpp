#include "api/plan_bwd.h"

#include <algorithm>

#include "api/operands.h"
#include "api/plan.h"
#include "api/validate.h"
#include "api/workspace.h"

namespace dmattn {
namespace {

void set_inputs(BwdPlan& plan, const dmattn_bwd_params& p, const Problem& x) {
  BwdParams& kernel = plan.kernel;
  set_problem(kernel, x);
  kernel.q = p.q.data;
  kernel.k = p.k.data;
  kernel.v = p.v.data;
  kernel.dout = p.dout.data;
  kernel.q_stride = read_strides(p.q);
  kernel.k_stride = read_strides(p.k);
  kernel.v_stride = read_strides(p.v);
  kernel.dout_stride = read_strides(p.dout);
  kernel.vec_q = is_vec16(kernel.q, kernel.q_stride);
  kernel.vec_k = is_vec16(kernel.k, kernel.k_stride);
  kernel.vec_v = is_vec16(kernel.v, kernel.v_stride);
  kernel.vec_dout = is_vec16(kernel.dout, kernel.dout_stride);
  kernel.softmax_scale = p.softmax_scale;
  kernel.softcap = std::max(p.softcap, 0.f);
  kernel.is_causal = p.is_causal != 0 && x.seqlen_q > 1;
  kernel.deterministic = p.deterministic != 0;
  kernel.seqlen_q_rounded = round_up(x.seqlen_q, kRowPitch);
  if (x.packing.is_active()) {
    kernel.seqlen_q_rounded = packed_blocks(x.rows_q, x.batch, kRowPitch) * kRowPitch;
    kernel.packing.m_blocks = packed_blocks(x.rows_q, x.batch, plan.tile.block_m);
  }
  kernel.dq_blocks = x.packing.is_active() ? kernel.packing.m_blocks : ceil_div(x.seqlen_q, plan.tile.block_m);
  kernel.group_begin = 0;
  kernel.group_end = x.head_ratio;
}

void set_gradients(BwdPlan& plan, const dmattn_bwd_params& p) {
  BwdParams& kernel = plan.kernel;
  if (is_present(p.dk)) {
    kernel.dk = p.dk.data;
    kernel.dk_stride = read_strides(p.dk);
    kernel.vec_dk = is_vec16(kernel.dk, kernel.dk_stride);
  }
  if (is_present(p.dv)) {
    kernel.dv = p.dv.data;
    kernel.dv_stride = read_strides(p.dv);
    kernel.vec_dv = is_vec16(kernel.dv, kernel.dv_stride);
  }
  if (is_present(p.dq)) {
    ConvertDqParams& dq = plan.convert_dq;
    dq.dq = p.dq.data;
    dq.dq_stride = read_strides(p.dq);
    dq.vec_dq = is_vec16(dq.dq, dq.dq_stride);
    dq.batch = kernel.packing.slabs(kernel.batch);
    dq.seqlen_q = kernel.seqlen_q;
    dq.packing = kernel.packing;
    dq.nheads = kernel.nheads;
    dq.head_dim = kernel.head_dim;
    dq.layout.block_m = plan.tile.block_m;
    dq.layout.head_dim_tile = plan.dim_tile;
    dq.layout.threads = 32 * plan.tile.warps;
    dq.layout.warps_m = plan.tile.warps_m_dq;
  }
}

void set_preprocess(BwdPlan& plan, const dmattn_bwd_params& p, Workspace& workspace) {
  BwdPreprocessParams& pre = plan.preprocess;
  BwdParams& kernel = plan.kernel;
  pre.out = p.out.data;
  pre.dout = p.dout.data;
  pre.out_stride = read_strides(p.out);
  pre.dout_stride = kernel.dout_stride;
  pre.lse = static_cast<const float*>(p.softmax_lse.data);
  pre.lse_stride = read_lse_strides(p.softmax_lse);
  if (is_present(p.dsoftmax_lse)) {
    pre.dlse = static_cast<const float*>(p.dsoftmax_lse.data);
    pre.dlse_stride = read_lse_strides(p.dsoftmax_lse);
  }
  pre.batch = kernel.packing.slabs(kernel.batch);
  pre.seqlen_q = kernel.seqlen_q;
  pre.packing = kernel.packing;
  pre.seqlen_q_rounded = kernel.seqlen_q_rounded;
  pre.nheads = kernel.nheads;
  pre.head_dim = kernel.head_dim;
  pre.vec_out = is_vec16(pre.out, pre.out_stride);
  pre.vec_dout = kernel.vec_dout;
  if (is_present(p.softmax_lse_rest)) {
    pre.lse_rest = static_cast<const float*>(p.softmax_lse_rest.data);
    pre.rest_rounded = workspace.take<float>(rows_of(kernel) * kernel.seqlen_q_rounded);
  }
  pre.lse_rounded = workspace.take<float>(rows_of(kernel) * kernel.seqlen_q_rounded);
  pre.delta = workspace.take<float>(rows_of(kernel) * kernel.seqlen_q_rounded);
  kernel.lse = pre.lse_rounded;
  kernel.lse_rest = pre.rest_rounded;
  kernel.delta = pre.delta;
}

// Which of the ways dbias takes: nothing from the kernel (constant along the keys), column sums (the same for every
// row), its own entry for every score, or an fp32 accumulator shared between heads or batches.
void choose_dbias(BwdPlan& plan, const dmattn_bwd_params& p, bool per_key) {
  if (!is_present(p.dbias)) return;
  BwdParams& kernel = plan.kernel;
  const int64_t* shape = p.dbias.shape;
  plan.dbias_elements = shape[0] * shape[1] * shape[2] * shape[3];
  const bool is_packed = kernel.packing.is_active();
  if (!is_packed && shape[3] == 1) {
    plan.dbias_rows = true;
  } else if (is_packed ? per_key : shape[2] == 1) {
    plan.dbias_cols = true;
    kernel.dbias_kind = DbiasKind::kKey;
  } else {
    const bool own_entry = shape[0] == kernel.packing.slabs(kernel.batch) && shape[1] == kernel.nheads;
    kernel.dbias_kind = own_entry ? DbiasKind::kTile : DbiasKind::kAccum;
    kernel.dbias_row_stride = shape[3];
    kernel.dbias_head_stride = shape[1] == 1 ? 0 : shape[2] * shape[3];
    kernel.dbias_batch_stride = shape[0] == 1 ? 0 : shape[1] * shape[2] * shape[3];
  }
}

void choose_sequence(BwdPlan& plan, const dmattn_bwd_params& p) {
  const BwdParams& kernel = plan.kernel;
  BwdSequence& sequence = plan.sequence;
  const bool has_groups = kernel.head_ratio > 1;
  const int32_t lists = plan.selected ? kernel.keys.heads : plan.mask.heads;
  if (plan.gathered && has_groups && lists > kernel.nheads_k) sequence.per_group = true;
  // A block then has the column sums of one head, to be added in its turn at its end.
  const bool dbias_turns = plan.intervals && kernel.dbias_kind == DbiasKind::kKey;
  if (kernel.deterministic && has_groups && dbias_turns) sequence.per_group = true;
  if (!kernel.deterministic || kernel.dbias_kind != DbiasKind::kAccum) return;
  const int64_t bias_batch = p.bias.shape[0], bias_heads = p.bias.shape[1];
  if (has_groups && bias_heads < kernel.nheads) sequence.per_group = true;
  sequence.per_head_k = bias_heads < kernel.nheads_k;
  // One kv head cannot be told from the others in arrays of several batches.
  sequence.per_batch = kernel.packing.slabs(kernel.batch) > 1 && (bias_batch == 1 || sequence.per_head_k);
}

// Of dbias: sums that start as zeros.
void place_dbias_sums(BwdPlan& plan, const dmattn_bwd_params& p, Workspace& workspace) {
  BwdParams& kernel = plan.kernel;
  plan.scratch_zeros = workspace.here();
  const size_t begin = workspace.bytes();
  if (kernel.dbias_kind == DbiasKind::kKey) {
    kernel.dbias_cols = workspace.take<float>(rows_of(kernel) * kernel.packing.rows_k(kernel.seqlen_k));
  }
  if (kernel.dbias_kind == DbiasKind::kAccum && p.dbias.dtype != DMATTN_FLOAT32) {
    plan.dbias_accum = workspace.take<float>(plan.dbias_elements);
    plan.dense_bytes += static_cast<size_t>(plan.dbias_elements) * sizeof(float);
  }
  plan.once_zero_bytes = workspace.bytes() - begin;
}

void place_dbias(BwdPlan& plan, const dmattn_bwd_params& p) {
  BwdParams& kernel = plan.kernel;
  if (!is_present(p.dbias)) return;
  if (plan.dbias_cols || plan.dbias_rows) {
    ReduceDbiasParams& reduce = plan.reduce_dbias;
    reduce.src = kernel.dbias_cols;
    reduce.batch = kernel.packing.slabs(kernel.batch);
    reduce.nheads = kernel.nheads;
    reduce.seqlen_q = kernel.seqlen_q;
    reduce.seqlen_k = kernel.packing.rows_k(kernel.seqlen_k);
    reduce.dlse = plan.preprocess.dlse;
    reduce.dlse_stride = plan.preprocess.dlse_stride;
    reduce.lse_rounded = plan.preprocess.lse_rounded;
    reduce.seqlen_q_rounded = kernel.seqlen_q_rounded;
    reduce.dbias = p.dbias.data;
    reduce.dtype = static_cast<Dtype>(p.dbias.dtype);
    reduce.out_batch = static_cast<int32_t>(p.dbias.shape[0]);
    reduce.out_heads = static_cast<int32_t>(p.dbias.shape[1]);
    reduce.out_rows = static_cast<int32_t>(p.dbias.shape[2]);
    reduce.out_cols = static_cast<int32_t>(p.dbias.shape[3]);
    return;
  }
  const bool own_accum = kernel.dbias_kind == DbiasKind::kAccum && p.dbias.dtype == DMATTN_FLOAT32;
  kernel.dbias = kernel.dbias_kind == DbiasKind::kTile || own_accum ? p.dbias.data : plan.dbias_accum;
  // The kernel stores whole tiles; only those that no row sees are left out, and columns behind a packed sequence.
  const bool visits_all = !plan.gathered && !has_mask(plan.mask) && !kernel.is_causal && !kernel.packing.is_active();
  if (own_accum || (kernel.dbias_kind == DbiasKind::kTile && !visits_all)) {
    plan.dbias_zero_bytes = static_cast<size_t>(plan.dbias_elements) * (p.dbias.dtype == DMATTN_FLOAT32 ? 4 : 2);
  }
}

void place_mask(BwdPlan& plan, Workspace& workspace) {
  BwdParams& kernel = plan.kernel;
  size_t bytes = 0;
  if (has_mask(plan.mask) && plan.gathered) {
    layout_key_list(plan.mask, nullptr, &bytes);
    kernel.keys = layout_key_list(plan.mask, workspace.take_bytes(bytes), &bytes);
    kernel.keys.head_ratio = kernel.nheads / plan.mask.heads;
  } else if (has_mask(plan.mask)) {
    layout_mask_bits(plan.mask, nullptr, &bytes);
    kernel.mask = layout_mask_bits(plan.mask, workspace.take_bytes(bytes), &bytes);
    kernel.mask.head_ratio = kernel.nheads / plan.mask.heads;
    plan.dense_bytes += bytes;
  }
  if (plan.gathered && !plan.intervals) {
    plan.schedule = workspace.take<int32_t>(static_cast<int64_t>(kernel.batch) * kernel.nheads_k + 3);
    kernel.schedule = plan.schedule;
  }
}

}  // namespace

BwdPlan plan_bwd(const dmattn_bwd_params& given, const Device& device, void* base) {
  const dmattn_bwd_params p = with_batch(given);
  const Problem x = read_problem(p);
  BwdPlan plan;
  plan.dtype = x.dtype;
  plan.family = device.family;
  plan.dim_tile = x.dim_tile;
  plan.tile = bwd_tile(plan.family, plan.dim_tile);
  plan.zeros = x.batch == 0 || x.nheads == 0 || x.rows_q == 0 || x.rows_k == 0;
  set_inputs(plan, p, x);
  set_gradients(plan, p);
  choose_dbias(plan, p, is_per_key(given.bias));
  if (plan.zeros) return plan;

  Workspace workspace(base);
  plan.mask = read_mask(p.mask, x, is_per_key(given.mask));
  plan.selected = is_present(p.selection.idx);
  plan.gathered = plan.selected || (has_mask(plan.mask) && is_key_only(plan.mask));
  if (plan.selected) plan.kernel.keys = read_selection(p.selection, x);
  plan.kernel.row_blocks = plan.kernel.keys.blocks;
  plan.whole = {0, x.batch, 0, x.nheads_k, 0, x.head_ratio, 0, plan.kernel.row_blocks};
  plan.chunk = plan.whole;
  plan.intervals = plan.kernel.keys.block_rows > 0;
  plan.kernel.bias = read_bias(p.bias, x, plan.gathered);
  plan.kernel.packing.bias_col_stride = packed_bias_stride(plan.kernel.bias, is_per_key(given.bias), plan.gathered);
  plan.launches =
      is_present(p.dq) || is_present(p.dk) || is_present(p.dv) || plan.kernel.dbias_kind != DbiasKind::kNone;
  if (!plan.launches && !plan.dbias_rows) return plan;
  set_preprocess(plan, p, workspace);
  choose_sequence(plan, p);
  if (plan.launches) place_mask(plan, workspace);
  place_dbias_sums(plan, p, workspace);
  place_dbias(plan, p);
  if (plan.launches) place_sums(plan, p, device, workspace);
  plan.workspace_bytes = workspace.bytes();
  return plan;
}

}  // namespace dmattn
