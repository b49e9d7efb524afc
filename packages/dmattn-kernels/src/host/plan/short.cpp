#include "host/plan/short.h"

#include <algorithm>

#include "host/arithmetic.h"

namespace dmattn {
namespace {

// A thread block of the backward goes through all rows that see its keys, so that it writes dk and dv once. For more
// rows than this, the other kernels have more thread blocks, each with less work.
constexpr int32_t kMostBwdRows = 256;
// The most tiles of rows, over all heads of a group, that a thread block goes through one after the other. Calls with
// more are left to the other kernels, which divide the tiles between thread blocks, unless there are two thread
// blocks for every three SMs, and so work for most of the GPU. On an H200 a tile takes a thread block 4.4 us. 64
// thread blocks with 16 tiles each took 0.072 ms (the other kernels 0.082), 16 with 16 tiles 0.070 (0.026), 4 with 8
// tiles 0.037 (0.018), 128 with 16 tiles of 128 keys 0.089 (0.133).
constexpr int32_t kMostBwdTiles = 4;

// What the forward and the backward for few keys ask of a call that has some rows and some keys.
template <class Params, class KernelParams>
bool suits(const Params& p, const KernelParams& kernel, int32_t most_keys) {
  const bool has_few_keys = kernel.seqlen_k <= most_keys && kernel.head_dim <= kMostShortHeadDim;
  // One row is for the decode kernel.
  return has_few_keys && kernel.seqlen_q > 1 && !is_packed(p) && !has_selection(p.selection) && kernel.softcap == 0.f &&
         kernel.vec_q && kernel.vec_k && kernel.vec_v;
}

bool suits_fwd(const FwdPlan& plan, const dmattn_fwd_params& p) {
  return suits(p, plan.kernel, kMostShortFwdKeys) && plan.kernel.vec_out && p.num_splits <= 1;
}

// The gradient of a bias is stored for each score or, if a thread block has a single tile of rows, added to sums in
// any order.
bool suits_dbias(const BwdPlan& plan) {
  const BwdParams& p = plan.kernel;
  if (plan.dbias_rows || plan.dbias_cols) return false;
  return p.dbias_kind != DbiasKind::kAccum || (p.seqlen_q <= kShortRows && !p.deterministic);
}

// With more than 64 keys and more than 32 columns there are too few registers for loading a bias or a mask with rows
// in advance: the other kernels are faster then (0.27 against 0.35 ms for 256 x 128 rows, 12 heads, on an H200).
bool suits_wide_scores(const BwdPlan& plan, const dmattn_bwd_params& p) {
  const BwdParams& kernel = plan.kernel;
  if (short_bwd_keys(kernel.seqlen_k) == 64 || short_head_dim(kernel.head_dim) == 32) return true;
  return !is_present(p.bias) && (!has_mask(plan.mask) || is_key_only(plan.mask));
}

// Keys that a mask hides from all rows, as in padding, may hold NaN. The kernels set them to zero, for all query
// heads of a kv head at once, so that these need the same mask.
bool suits_mask(const BwdPlan& plan) {
  const MaskSource& mask = plan.mask;
  return !has_mask(mask) || !is_key_only(mask) || plan.kernel.nheads / mask.heads % plan.kernel.head_ratio == 0;
}

bool suits_bwd(const BwdPlan& plan, const dmattn_bwd_params& p, const Device& device) {
  const BwdParams& kernel = plan.kernel;
  if (!suits(p, kernel, kMostShortBwdKeys) || kernel.seqlen_q > kMostBwdRows || !suits_dbias(plan) ||
      !suits_wide_scores(plan, p) || !suits_mask(plan)) {
    return false;
  }
  const bool has_few_tiles = kernel.head_ratio * ceil_div(kernel.seqlen_q, kShortRows) <= kMostBwdTiles;
  const bool fills = 3 * int64_t{kernel.batch} * kernel.nheads_k >= 2 * int64_t{device.num_sms};
  return (has_few_tiles || fills) && kernel.vec_dout && is_vec16(p.out.data, read_strides(p.out), plan.unit.dtype) &&
         plan.convert_dq.vec_dq && kernel.vec_dk && kernel.vec_dv;
}

// Finds the unit, which is the same for all GPUs, as the tiles of its kernels fit each of them.
template <class Plan>
bool find_unit(Plan& plan, Direction direction, const Device& device) {
  Unit unit = plan.unit;
  unit.direction = direction;
  const KernelSet* kernels = find_unit_set(*device.kernels, unit, [](const KernelSet&) { return true; });
  if (kernels == nullptr) return false;
  plan.unit = unit;
  plan.choice.tiles = kernels->tiles;
  return true;
}

template <class KernelParams>
void set_short(ShortParams& to, const KernelParams& from, const BiasParams& bias, const MaskSource& mask) {
  to.q = from.q;
  to.k = from.k;
  to.v = from.v;
  to.q_stride = from.q_stride;
  to.k_stride = from.k_stride;
  to.v_stride = from.v_stride;
  to.batch = from.batch;
  to.seqlen_q = from.seqlen_q;
  to.seqlen_k = from.seqlen_k;
  to.nheads = from.nheads;
  to.nheads_k = from.nheads_k;
  to.head_dim = from.head_dim;
  to.head_ratio = from.head_ratio;
  to.softmax_scale = from.softmax_scale;
  to.is_causal = from.is_causal;
  to.bias = bias;
  to.mask = mask;
  to.mask_head_ratio = from.nheads / mask.heads;
}

// The plain kernels set masked scores to -inf before they scale them, and they stay -inf only if the scale is
// positive.
bool is_plain(const ShortParams& p) {
  return p.bias.kind == BiasKind::kNone && p.mask.ptr == nullptr && p.softmax_scale > 0.f;
}
// Whether the bias is the same for all batches.
bool has_shared_bias(const ShortParams& p) { return p.bias.kind != BiasKind::kNone && p.bias.batch_stride == 0; }
// Whether Level::kFull serves the backward: all batches share the bias, a thread block has a single tile of rows, and
// the gradient of the bias, if asked for, is a sum over all batches.
bool suits_full(const ShortBwdParams& p) {
  const bool has_sums = p.dbias_kind == DbiasKind::kAccum && p.dbias_batch_stride == 0;
  return has_shared_bias(p) && short_bwd_is_single(p) && (p.dbias_kind == DbiasKind::kNone || has_sums);
}

// Chooses the number of slices of the batches. Thread blocks that share a bias take several batches each, so that all
// of them fit the GPU at a time. Slices that would not make the longest one shorter are left out. blocks: thread
// blocks of one slice.
int32_t choose_slices(int32_t batch, int64_t blocks, int64_t resident) {
  const auto wanted = static_cast<int32_t>(std::clamp<int64_t>(resident / blocks, 1, batch));
  return ceil_div(batch, ceil_div(batch, wanted));
}
// Chooses the level, and sets the number of slices of the batches: one for each batch, except at kFull.
Level choose_level(ShortParams& p, bool is_plain, bool suits_full, int64_t blocks, int64_t resident) {
  p.batch_slices = p.batch;
  if (is_plain) return Level::kPlain;
  // If the GPU has room for less than two slices, there would be a single one, and part of the GPU would be idle.
  if (!suits_full || 2 * blocks > resident) return Level::kGeneral;
  p.batch_slices = choose_slices(p.batch, blocks, resident);
  return p.batch_slices < p.batch ? Level::kFull : Level::kGeneral;
}

void set_statistics(ShortBwdParams& to, const dmattn_bwd_params& p) {
  to.out = p.out.data;
  to.out_stride = read_strides(p.out);
  to.lse = static_cast<const float*>(p.softmax_lse.data);
  to.lse_rest = static_cast<const float*>(p.softmax_lse_rest.data);
  to.lse_stride = read_lse_strides(p.softmax_lse);
  if (!is_present(p.dsoftmax_lse)) return;
  to.dlse = static_cast<const float*>(p.dsoftmax_lse.data);
  to.dlse_stride = read_lse_strides(p.dsoftmax_lse);
}

// dbias itself gets its place later.
void set_gradients(ShortBwdParams& to, const BwdPlan& plan) {
  const BwdParams& from = plan.kernel;
  to.dq = plan.convert_dq.dq;
  to.dk = from.dk;
  to.dv = from.dv;
  to.dq_stride = plan.convert_dq.dq_stride;
  to.dk_stride = from.dk_stride;
  to.dv_stride = from.dv_stride;
  to.dbias_kind = from.dbias_kind;
  to.dbias_batch_stride = from.dbias_batch_stride;
  to.dbias_head_stride = from.dbias_head_stride;
  to.dbias_row_stride = from.dbias_row_stride;
}

}  // namespace

bool choose_short_kernel(FwdPlan& plan, const dmattn_fwd_params& p, const Problem& x, const Device& device) {
  const FwdParams& from = plan.kernel;
  if (!suits_fwd(plan, p) || !find_unit(plan, Direction::kShortForward, device)) return false;
  ShortFwdParams& to = plan.short_kernel;
  set_short(to, from, read_bias(p.bias, x, /*gathered=*/false), plan.mask);
  to.out = from.out;
  to.out_stride = from.out_stride;
  to.lse = from.lse;
  to.lse_rest = from.lse_rest;
  to.lse_stride = from.lse_stride;
  const int64_t resident = int64_t{device.num_sms} * short_fwd_blocks_per_sm(to.head_dim, Level::kFull);
  plan.choice.level = choose_level(to, is_plain(to), has_shared_bias(to), short_fwd_blocks(to), resident);
  plan.choice.blocks = short_fwd_blocks(to);
  return true;
}

bool choose_short_kernel(BwdPlan& plan, const dmattn_bwd_params& p, const Problem& x, const Device& device) {
  const BwdParams& from = plan.kernel;
  if (!suits_bwd(plan, p, device) || !find_unit(plan, Direction::kShortBackward, device)) return false;
  ShortBwdParams& to = plan.short_kernel;
  set_short(to, from, read_bias(p.bias, x, /*gathered=*/false), plan.mask);
  to.dout = from.dout;
  to.dout_stride = from.dout_stride;
  set_statistics(to, p);
  set_gradients(to, plan);
  const bool all_wanted = plan.wants_dq && plan.wants_dk && plan.wants_dv;
  const int64_t resident = int64_t{device.num_sms} * short_bwd_blocks_per_sm(to.head_dim, to.seqlen_k, Level::kFull);
  plan.choice.level = choose_level(to, is_plain(to) && all_wanted, suits_full(to), short_bwd_blocks(to), resident);
  plan.choice.blocks = short_bwd_blocks(to);
  return true;
}

}  // namespace dmattn
