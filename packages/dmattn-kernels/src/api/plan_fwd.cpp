#include <algorithm>

#include "api/operands.h"
#include "api/plan.h"
#include "api/validate.h"
#include "api/workspace.h"

namespace dmattn {
namespace {

constexpr int32_t kMaxSplits = 128;
void set_tensors(FwdParams& kernel, const dmattn_fwd_params& p, const Problem& x) {
  set_problem(kernel, x);
  kernel.q = p.q.data;
  kernel.k = p.k.data;
  kernel.v = p.v.data;
  kernel.out = p.out.data;
  kernel.lse = static_cast<float*>(p.softmax_lse.data);
  kernel.q_stride = read_strides(p.q);
  kernel.k_stride = read_strides(p.k);
  kernel.v_stride = read_strides(p.v);
  kernel.out_stride = read_strides(p.out);
  kernel.lse_stride = read_lse_strides(p.softmax_lse);
  kernel.lse_rest = static_cast<float*>(p.softmax_lse_rest.data);
  kernel.softmax_scale = p.softmax_scale;
  kernel.softcap = std::max(p.softcap, 0.f);
  kernel.is_causal = p.is_causal != 0 && x.seqlen_q > 1;
  kernel.vec_q = is_vec16(kernel.q, kernel.q_stride);
  kernel.vec_k = is_vec16(kernel.k, kernel.k_stride);
  kernel.vec_v = is_vec16(kernel.v, kernel.v_stride);
  kernel.vec_out = is_vec16(kernel.out, kernel.out_stride);
}

void place_mask(FwdPlan& plan, Workspace& workspace) {
  if (!has_mask(plan.mask)) return;
  size_t bytes = 0;
  if (plan.gathered) {
    layout_key_list(plan.mask, nullptr, &bytes);
    plan.kernel.keys = layout_key_list(plan.mask, workspace.take_bytes(bytes), &bytes);
  } else {
    layout_mask_bits(plan.mask, nullptr, &bytes);
    plan.kernel.mask = layout_mask_bits(plan.mask, workspace.take_bytes(bytes), &bytes);
    plan.kernel.mask.head_ratio = plan.kernel.nheads / plan.mask.heads;
  }
}

void place_splits(FwdPlan& plan, int32_t wanted, const Device& device, Workspace& workspace) {
  FwdParams& p = plan.kernel;
  // How many key tiles a sequence has is known on the device only: splits chosen for the longest would leave the others
  // with parts too short to be worth combining, in memory for batch * max_seqlen_q rows of each.
  if (p.packing.is_active()) return;
  const int32_t keys = plan.selected ? std::min(p.seqlen_k, p.keys.capacity) : p.seqlen_k;
  if (plan.decode) {
    p.num_splits = choose_decode_splits(p, keys, plan.dim_tile, wanted, device);
  } else {
    const FwdTile tile = fwd_tile(plan.family, plan.dim_tile);
    const int32_t key_tiles = std::max(1, ceil_div(keys, tile.block_n));
    const int64_t blocks = static_cast<int64_t>(p.batch) * p.nheads * ceil_div(p.seqlen_q, tile.block_m);
    // Blocks of four warps fit an SM twice.
    const int64_t resident = static_cast<int64_t>(device.num_sms) * (tile.warps == 4 ? 2 : 1);
    p.num_splits = wanted > 0 ? std::min(wanted, key_tiles) : choose_num_splits(blocks, resident, key_tiles);
  }
  if (p.num_splits > 1) place_partials(p, workspace);
}

}  // namespace

int32_t choose_num_splits(int64_t blocks, int64_t resident, int32_t key_tiles, int32_t min_tiles) {
  const int32_t most = std::min(kMaxSplits, key_tiles / min_tiles);
  if (most <= 1 || 10 * blocks >= 8 * resident) return 1;
  // Share of the places that work, averaged over the waves.
  const auto fill = [&](int32_t splits) {
    const int64_t work = blocks * splits;
    return static_cast<double>(work) / static_cast<double>(ceil_div(work, resident) * resident);
  };
  // A count that leaves the longest split as long as with fewer splits gains nothing.
  const auto is_useful = [&](int32_t splits) {
    return splits == 1 || ceil_div(key_tiles, splits) < ceil_div(key_tiles, splits - 1);
  };
  double best = 0;
  for (int32_t splits = 1; splits <= most; ++splits) {
    if (is_useful(splits)) best = std::max(best, fill(splits));
  }
  for (int32_t splits = 1; splits <= most; ++splits) {
    if (is_useful(splits) && fill(splits) >= 0.85 * best) return splits;
  }
  return 1;
}

FwdPlan plan_fwd(const dmattn_fwd_params& given, const Device& device, void* base) {
  const dmattn_fwd_params p = with_batch(given);
  const Problem x = read_problem(p);
  FwdPlan plan;
  plan.dtype = x.dtype;
  plan.family = device.family;
  plan.dim_tile = x.dim_tile;
  plan.is_empty = x.batch == 0 || x.rows_q == 0 || x.nheads == 0;
  plan.no_keys = x.rows_k == 0;
  set_tensors(plan.kernel, p, x);
  if (plan.is_empty || plan.no_keys) return plan;

  Workspace workspace(base);
  plan.mask = read_mask(p.mask, x, is_per_key(given.mask));
  plan.selected = has_selection(p.selection);
  plan.gathered = plan.selected || (has_mask(plan.mask) && is_key_only(plan.mask));
  if (plan.selected) plan.kernel.keys = read_selection(p.selection, x);
  plan.kernel.bias = read_bias(p.bias, x, plan.gathered);
  plan.kernel.packing.bias_col_stride = packed_bias_stride(plan.kernel.bias, is_per_key(given.bias), plan.gathered);
  // A mask or a list of each query head's own gives the rows of a packed block different keys.
  const int32_t mask_heads = plan.selected ? plan.kernel.keys.heads : has_mask(plan.mask) ? plan.mask.heads : 1;
  plan.decode = x.seqlen_q == 1 && !is_packed(p);
  if (plan.decode && x.head_ratio > 1 && (mask_heads == 1 || mask_heads == x.nheads_k)) {
    pack_group_as_rows(plan.kernel);
    if (plan.kernel.bias.kind != BiasKind::kNone) {
      plan.kernel.bias.kind = choose_bias_kind(plan.kernel.bias, plan.gathered);
    }
  }
  place_mask(plan, workspace);
  if (plan.gathered) plan.kernel.keys.head_ratio = plan.kernel.nheads / plan.kernel.keys.heads;
  place_splits(plan, p.num_splits, device, workspace);
  plan.workspace_bytes = workspace.bytes();
  return plan;
}

}  // namespace dmattn
