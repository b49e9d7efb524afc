// Which backward calls are for persistent kernels, which are those for Hopper.
#include "host/plan/bwd_parts.h"

namespace dmattn {

namespace {

// Whether all heads or batches that share entries of dbias have the same mask.
bool have_same_mask(const BwdPlan& plan) {
  const BwdParams& p = plan.kernel;
  if (!has_mask(plan.mask)) return true;
  if (p.dbias_batch_stride == 0 && plan.mask.batch > 1) return false;
  return plan.mask.heads <= (p.dbias_head_stride == 0 ? 1 : p.nheads / p.bias.head_ratio);
}

}  // namespace

bool hides_keys(const BwdPlan& plan) { return has_mask(plan.mask) || plan.kernel.window > 0; }

bool has_key_bias_alone(const BwdPlan& plan) {
  const BwdParams& p = plan.kernel;
  return plan.resident_blocks > 0 && p.bias.kind == BiasKind::kKey && !hides_keys(plan) && !p.deterministic;
}

bool may_order_dbias(const BwdPlan& plan) { return plan.unit.head_dim_tile <= 128 && have_same_mask(plan); }

namespace {

// Whether Hopper's kernels take this fp32 bias for each row and key. Up to head_dim 128 they copy tiles of the bias
// and of its gradient, which leave no room in shared memory for tiles of a mask: a mask has to be the same for all
// rows, and for the heads of a group.
bool suits_wide_bias(const BwdPlan& plan) {
  const BwdParams& p = plan.kernel;
  const MaskSource& mask = plan.mask;
  if (p.bias.kind != BiasKind::kDirect || p.bias.dtype != Dtype::kFloat32) return false;
  if (plan.unit.head_dim_tile > 128) return true;
  const bool has_key_mask = has_mask(mask) && is_key_only(mask) && p.nheads_k % mask.heads == 0;
  return p.window == 0 && (!has_mask(mask) || has_key_mask);
}

// Whether the bias is for each key, and its gradient, if asked for, too.
bool is_of_keys(const BwdParams& p) {
  const bool has_dbias_of_keys = p.dbias_kind == DbiasKind::kNone || p.dbias_kind == DbiasKind::kKey;
  return p.bias.kind == BiasKind::kKey && has_dbias_of_keys;
}

// Whether Hopper's kernels can compute a call with a mask, a window or a bias in a fixed order. They cannot where
// heads of a group share dbias but cannot take turns at it: each head would need a launch of its own, and all of
// these would add to the same dk and dv. Up to head_dim 128 no kernel both takes turns and handles rows of a bias or
// of its gradient that TMA does not take.
bool may_order_sums(const BwdPlan& plan) {
  const BwdParams& p = plan.kernel;
  if (p.bias.kind == BiasKind::kNone || p.bias.kind == BiasKind::kKey) return true;
  const Strides3 of_bias = {p.bias.batch_stride, p.bias.head_stride, p.bias.row_stride};
  const Strides3 of_dbias = {p.dbias_batch_stride, p.dbias_head_stride, p.dbias_row_stride};
  const bool is_shared_in_groups = p.dbias_kind == DbiasKind::kAccum && p.head_ratio > 1 && p.bias.head_ratio > 1;
  const bool adds_in_groups = is_shared_in_groups && !may_order_dbias(plan);
  if (plan.unit.head_dim_tile > 128) return !adds_in_groups;
  // Sums apart from dbias have rows that start on 16 bytes, wherever the rows of dbias start.
  const bool has_rows_of_dbias = p.dbias_kind != DbiasKind::kNone && !adds_up_dbias_apart(plan);
  return !adds_in_groups && is_vec16(p.bias.ptr, of_bias, p.bias.dtype) &&
         (!has_rows_of_dbias || is_vec16(plan.dbias, of_dbias, plan.dbias_dtype));
}

// Whether Hopper's kernels take the call's lists, and the bias beside them.
bool suits_lists(const BwdPlan& plan) {
  const BwdParams& p = plan.kernel;
  if (has_mask(plan.mask) && plan.walk != KeyWalk::kMaskList) return false;
  return p.softcap == 0.f && (p.bias.kind == BiasKind::kNone || is_of_keys(p));
}

}  // namespace

bool is_for_residents(const BwdPlan& plan) {
  const BwdParams& p = plan.kernel;
  const bool has_bias = p.bias.kind != BiasKind::kNone;
  if (plan.has_lse_rest != has_bias) return false;  // the kernels read the rest with a bias, and only then
  if (p.packing.is_active()) return plan.walk == KeyWalk::kTiled && !has_bias && !has_mask(plan.mask);
  if (plan.walk == KeyWalk::kTiled) {
    if (!has_bias && !hides_keys(plan)) return true;
    const bool is_served = !has_bias || p.bias.kind == BiasKind::kTile || suits_wide_bias(plan) || is_of_keys(p);
    const bool is_plain_window = !has_bias && !has_mask(plan.mask);
    return is_served && (p.softcap == 0.f || is_plain_window) && (!p.deterministic || may_order_sums(plan));
  }
  return suits_lists(plan);
}

bool suits_residents(const BwdPlan& plan) {
  const BwdParams& p = plan.kernel;
  if (is_gathered(plan.walk) || p.packing.is_active() || p.deterministic) return true;
  return keeps_residents_busy(plan, plan.round, p.max_work_items, most_useful_parts(plan, p.max_work_items));
}

}  // namespace dmattn
