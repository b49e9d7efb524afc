#include "host/plan/bwd.h"

#include <algorithm>

#include "host/checks/tensor.h"
#include "host/layouts/layouts.h"
#include "host/plan/blocks.h"
#include "host/plan/bwd_parts.h"
#include "host/plan/short.h"

namespace dmattn {
namespace {

constexpr float kLog2e = 1.4426950408889634f;

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
  kernel.vec_q = is_vec16(kernel.q, kernel.q_stride, x.dtype);
  kernel.vec_k = is_vec16(kernel.k, kernel.k_stride, x.dtype);
  kernel.vec_v = is_vec16(kernel.v, kernel.v_stride, x.dtype);
  kernel.vec_dout = is_vec16(kernel.dout, kernel.dout_stride, x.dtype);
  kernel.softmax_scale = p.softmax_scale;
  kernel.softcap = std::max(p.softcap, 0.f);
  kernel.is_causal = p.is_causal != 0 && x.seqlen_q > 1;
  kernel.deterministic = p.deterministic != 0;
  kernel.seqlen_q_rounded = round_up(x.seqlen_q, kRowPitch);
  if (x.packing.is_active()) kernel.seqlen_q_rounded = packed_blocks(x.rows_q, x.batch, kRowPitch) * kRowPitch;
  kernel.group_begin = 0;
  kernel.group_end = x.head_ratio;
}

void set_gradients(BwdPlan& plan, const dmattn_bwd_params& p) {
  BwdParams& kernel = plan.kernel;
  plan.has_lse_rest = is_present(p.softmax_lse_rest);
  plan.wants_dq = is_present(p.dq);
  plan.wants_dk = is_present(p.dk);
  plan.wants_dv = is_present(p.dv);
  if (plan.wants_dk) {
    kernel.dk = p.dk.data;
    kernel.dk_stride = read_strides(p.dk);
    kernel.vec_dk = is_vec16(kernel.dk, kernel.dk_stride, plan.unit.dtype);
  }
  if (plan.wants_dv) {
    kernel.dv = p.dv.data;
    kernel.dv_stride = read_strides(p.dv);
    kernel.vec_dv = is_vec16(kernel.dv, kernel.dv_stride, plan.unit.dtype);
  }
  if (plan.wants_dq) {
    ConvertDqParams& dq = plan.convert_dq;
    dq.dq = p.dq.data;
    dq.dq_stride = read_strides(p.dq);
    dq.vec_dq = is_vec16(dq.dq, dq.dq_stride, plan.unit.dtype);
    dq.batch = kernel.packing.slabs(kernel.batch);
    dq.seqlen_q = kernel.seqlen_q;
    dq.nheads = kernel.nheads;
    dq.head_dim = kernel.head_dim;
  }
}

// Elements from one head of a spare dk or dv to the next: each starts on 16 bytes.
int64_t spare_row_size(const BwdParams& p) { return round_up<int64_t>(p.head_dim, 8); }
// Adds the gradients that were not asked for: Hopper's kernels, which always compute all three, are faster than the
// sm80 code, which leaves some out (on an H100, 1.05 to 3.2 times).
void add_spare_gradients(BwdPlan& plan) {
  BwdParams& p = plan.kernel;
  plan.spares = {!plan.wants_dq, !plan.wants_dk, !plan.wants_dv};
  plan.wants_dq = plan.wants_dk = plan.wants_dv = true;
  const int64_t head = spare_row_size(p), row = p.nheads_k * head;
  const Strides3 stride = {p.packing.is_active() ? 0 : p.seqlen_k * row, head, row};
  if (plan.spares.dk) p.dk_stride = stride;
  if (plan.spares.dv) p.dv_stride = stride;
}
void place_spare_gradients(BwdPlan& plan, Workspace& workspace) {
  BwdParams& p = plan.kernel;
  const int64_t bytes = element_bytes(plan.unit.dtype) * p.packing.slabs(p.batch) * p.packing.rows_k(p.seqlen_k) *
                        p.nheads_k * spare_row_size(p);
  if (plan.spares.dk) p.dk = workspace.take_bytes(static_cast<size_t>(bytes));
  if (plan.spares.dv) p.dv = workspace.take_bytes(static_cast<size_t>(bytes));
}

// Changes the strides of dbias from those of its sums to those of rows that are `pitch` elements apart.
void set_dbias_pitch(BwdParams& kernel, int64_t pitch) {
  const auto scaled = [&](int64_t stride) { return stride / kernel.dbias_row_stride * pitch; };
  kernel.dbias_head_stride = scaled(kernel.dbias_head_stride);
  kernel.dbias_batch_stride = scaled(kernel.dbias_batch_stride);
  kernel.dbias_row_stride = pitch;
}

// Whether each entry of dbias is the sum of two terms. These can be added up in 16 bits, in any order: the first one
// is added to zero, which is exact.
bool is_sum_of_pairs(const BwdPlan& plan) {
  const BwdParams& p = plan.kernel;
  const int64_t scores = rows_of(p) * p.seqlen_q * p.seqlen_k;
  return p.dbias_kind == DbiasKind::kAccum && p.bias.kind == BiasKind::kTile && scores == 2 * plan.dbias_elements &&
         is_vec16(plan.dbias, {0, 0, plan.dbias_pitch}, plan.dbias_dtype);  // heads and batches are whole rows apart
}

// The kernels for Hopper take a list for all rows as if each block of rows had it.
void share_list(BwdPlan& plan) {
  if (plan.walk == KeyWalk::kMaskList) {
    Workspace nowhere(nullptr);
    plan.kernel.keys = layout_key_list(plan.mask, nowhere);  // as in place_keys(); only the extents are needed here
    plan.kernel.keys.head_ratio = plan.kernel.nheads / plan.mask.heads;
  }
  plan.list_rows = kListBlock;
  plan.kernel.row_blocks = plan.whole.row_blocks = ceil_div(plan.kernel.seqlen_q, plan.list_rows);
  plan.round = plan.whole;
}

// Whether Hopper's kernels for keys that fit one tile can take the call. Each row is then in one item only, so that
// nothing is added to dq. Causality must leave each row a key, as no item would write the dq of a row without one. A
// mask need not, as rows whose keys are all masked are computed like others.
bool may_store_dq(const BwdPlan& plan, const BwdTile& tile) {
  const BwdParams& p = plan.kernel;
  const bool meets_keys = !p.is_causal || p.seqlen_q <= p.seqlen_k;
  const bool is_simple =
      p.bias.kind == BiasKind::kNone && p.softcap == 0.f && p.window == 0 && !p.deterministic && !p.packing.is_active();
  return plan.resident_blocks > 0 && tile.cluster == 1 && plan.walk == KeyWalk::kTiled && is_simple &&
         p.seqlen_k <= tile.block_n && meets_keys && !plan.spares.dq && plan.convert_dq.vec_dq;
}

// Chooses the least general of the unit's kernels that can do what is asked for, and sets what follows from its tile.
void use_kernels(BwdPlan& plan, const KernelSet& kernels, const Device& device) {
  plan.resident_blocks = kernels.is_persistent ? device.num_sms : 0;
  if (kernels.is_persistent && is_sum_of_pairs(plan)) {
    plan.kernel.dbias_kind = DbiasKind::kPair;
    set_dbias_pitch(plan.kernel, plan.dbias_pitch);
  }
  plan.choice.tiles = kernels.tiles;
  plan.choice.level = bwd_level(plan);
  BwdParams& kernel = plan.kernel;
  const bool has_bias = kernel.bias.kind != BiasKind::kNone;
  const auto tile_with = [&](bool in_64_rows) {
    const bool has_own_tile = has_bias && !has_key_bias_alone(plan);
    return kernels.bwd_tile(plan.unit.head_dim_tile, plan.unit.gathered, has_own_tile, in_64_rows);
  };
  plan.stores_dq = may_store_dq(plan, tile_with(/*in_64_rows=*/true));
  const BwdTile& tile = plan.tile = plan.choice.bwd_tile =
      tile_with(hides_keys(plan) || kernel.packing.is_active() || plan.stores_dq);
  if (plan.stores_dq) {
    kernel.dq = plan.convert_dq.dq;
    kernel.dq_stride = plan.convert_dq.dq_stride;
  }
  kernel.has_split_slots = kernel.deterministic && !kernels.is_persistent;
  kernel.dq_blocks = ceil_div(kernel.seqlen_q, tile.block_m);
  if (!kernel.packing.is_active()) {
    kernel.seqlen_q_rounded = round_up(round_up(kernel.seqlen_q, tile.block_m), kRowPitch);
  }
  if (kernel.packing.is_active()) {
    kernel.packing.m_blocks = packed_blocks(kernel.packing.total_q, kernel.batch, tile.block_m);
    kernel.dq_blocks = kernel.packing.m_blocks;
  }
  plan.convert_dq.packing = kernel.packing;
  const DqOrder order = kernels.dq_order(tile);
  // On Hopper the fragments of tiles of more than 64 columns are ordered by their columns, so that those beyond
  // head_dim can be left out, except beside a bias for each row and key (see tile_of_dq() in
  // attention/sm90/bwd_results.cuh).
  const bool has_dense_bias = kernel.bias.kind == BiasKind::kTile || kernel.bias.kind == BiasKind::kDirect;
  const bool may_cut_dims = order == DqOrder::kVectors && plan.unit.head_dim_tile > 64 && !has_dense_bias;
  kernel.dq_dims = may_cut_dims ? round_up(kernel.head_dim, 8) : plan.unit.head_dim_tile;
  plan.convert_dq.layout = {tile.block_m,    plan.unit.head_dim_tile, kernel.dq_dims,
                            32 * tile.warps, tile.warps_m_dq,         order};
  // Hopper's kernels compute probabilities as powers of 2, with lse scaled to match, and leave the factor
  // softmax_scale out of dq. With a bias they scale the difference of logit and lse, so that only the rest of lse is
  // scaled here.
  if (order != DqOrder::kRegisters) {
    plan.convert_dq.scale = kernel.softmax_scale;
    (has_bias ? plan.preprocess.rest_scale : plan.preprocess.lse_scale) = kLog2e;
  }
  if (plan.walk == KeyWalk::kRowBlockLists) plan.list_rows = kernel.keys.block_rows;
  if (!kernels.is_persistent || !is_gathered(plan.walk)) return;
  if (plan.walk != KeyWalk::kRowBlockLists) share_list(plan);
  choose_chunks(plan, device);
}

void set_preprocess(BwdPlan& plan, const dmattn_bwd_params& p) {
  BwdPreprocessParams& pre = plan.preprocess;
  const BwdParams& kernel = plan.kernel;
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
  pre.vec_out = is_vec16(pre.out, pre.out_stride, plan.unit.dtype);
  pre.vec_dout = kernel.vec_dout;
  pre.lse_rest = static_cast<const float*>(p.softmax_lse_rest.data);
}

// Places lse, its rest and delta, as the kernels read them.
void place_statistics(BwdPlan& plan, Workspace& workspace) {
  BwdPreprocessParams& pre = plan.preprocess;
  BwdParams& kernel = plan.kernel;
  if (plan.has_lse_rest) pre.rest_rounded = workspace.take<float>(rows_of(kernel) * kernel.seqlen_q_rounded);
  pre.lse_rounded = workspace.take<float>(rows_of(kernel) * kernel.seqlen_q_rounded);
  pre.delta = workspace.take<float>(rows_of(kernel) * kernel.seqlen_q_rounded);
  kernel.lse = pre.lse_rounded;
  kernel.lse_rest = pre.rest_rounded;
  kernel.delta = pre.delta;
}

// Sets the strides of a dense dbias of this shape, or of its sums. pitch: elements from one row to the next.
void set_dbias_strides(BwdParams& kernel, const int64_t* shape, int64_t pitch) {
  kernel.dbias_row_stride = pitch;
  kernel.dbias_head_stride = shape[1] == 1 ? 0 : shape[2] * pitch;
  kernel.dbias_batch_stride = shape[0] == 1 ? 0 : shape[1] * shape[2] * pitch;
}
// fp32 sums apart from dbias have rows that start on 16 bytes, whatever the number of keys.
int64_t pitch_of_sums(int64_t keys) { return round_up<int64_t>(keys, 4); }
bool has_fp32_dbias(const BwdPlan& plan) { return plan.dbias_dtype == Dtype::kFloat32; }

// Chooses how dbias is computed: without the kernel (bias constant along the keys), from column sums (bias the same
// for every row), with an entry for every score, or as sums that heads or batches share.
void choose_dbias(BwdPlan& plan, const dmattn_bwd_params& p, bool per_key) {
  if (!is_present(p.dbias)) return;
  BwdParams& kernel = plan.kernel;
  const int64_t* shape = p.dbias.shape;
  plan.dbias = p.dbias.data;
  plan.dbias_dtype = static_cast<Dtype>(p.dbias.dtype);
  plan.dbias_elements = shape[0] * shape[1] * shape[2] * shape[3];
  plan.dbias_keys = shape[3];
  plan.dbias_pitch = row_pitch(p.dbias);
  const bool is_packed = kernel.packing.is_active();
  if (!is_packed && shape[3] == 1) {
    plan.dbias_rows = true;
  } else if (is_packed ? per_key : shape[2] == 1) {
    plan.dbias_cols = true;
    kernel.dbias_kind = DbiasKind::kKey;
  } else {
    const bool own_entry = shape[0] == kernel.packing.slabs(kernel.batch) && shape[1] == kernel.nheads;
    kernel.dbias_kind = own_entry ? DbiasKind::kTile : DbiasKind::kAccum;
    kernel.dbias = own_entry ? plan.dbias : nullptr;  // sums get their place later
    plan.has_dbias_sums = !own_entry && !has_fp32_dbias(plan);
    set_dbias_strides(kernel, shape, plan.has_dbias_sums ? pitch_of_sums(shape[3]) : plan.dbias_pitch);
  }
}

void choose_sequence(BwdPlan& plan, const dmattn_bwd_params& p) {
  const BwdParams& kernel = plan.kernel;
  BwdSequence& sequence = plan.sequence;
  const bool has_groups = kernel.head_ratio > 1;
  if (has_lists_of_heads(plan)) sequence.per_group = true;
  // With per_group a thread block has the column sums of a single head, and takes one turn to add them at its end. On
  // Hopper a thread block has the sums of all heads of a group that share the bias.
  const bool dbias_turns =
      plan.walk == KeyWalk::kRowBlockLists && plan.chunk_blocks == 0 && kernel.dbias_kind == DbiasKind::kKey;
  if (kernel.deterministic && has_groups && dbias_turns) sequence.per_group = true;
  if (!kernel.deterministic || kernel.dbias_kind != DbiasKind::kAccum) return;
  plan.orders_dbias = plan.resident_blocks > 0 && plan.walk == KeyWalk::kTiled && may_order_dbias(plan);
  if (plan.orders_dbias) return;
  const int64_t bias_batch = p.bias.shape[0], bias_heads = p.bias.shape[1];
  if (has_groups && bias_heads < kernel.nheads) sequence.per_group = true;
  sequence.per_head_k = bias_heads < kernel.nheads_k;
  // A launch for one kv head has the extents of a single head, with which it cannot find a second batch in arrays of
  // all heads. So it has one batch, too.
  sequence.per_batch = kernel.packing.slabs(kernel.batch) > 1 && (bias_batch == 1 || sequence.per_head_k);
}

void choose_dbias_sums(BwdPlan& plan, const dmattn_bwd_params& p) {
  BwdParams& kernel = plan.kernel;
  if (plan.resident_blocks == 0 || plan.has_dbias_sums || !adds_up_dbias_apart(plan)) return;
  plan.has_dbias_sums = true;
  set_dbias_strides(kernel, p.dbias.shape, pitch_of_sums(plan.dbias_keys));
}

// Chooses what part of dbias itself is cleared before the launch.
void choose_dbias_zeros(BwdPlan& plan) {
  const BwdParams& kernel = plan.kernel;
  // The kernel stores whole tiles, except those that no row sees and, with packed sequences, columns behind the keys
  // of a sequence. The kernel for few keys stores every entry.
  const bool visits_all = plan.is_short() || (plan.walk == KeyWalk::kTiled && !has_mask(plan.mask) &&
                                              !kernel.is_causal && !kernel.packing.is_active());
  const bool is_added_to =
      kernel.dbias_kind == DbiasKind::kPair || (kernel.dbias_kind == DbiasKind::kAccum && !plan.has_dbias_sums);
  const bool has_zeros = is_added_to || (kernel.dbias_kind == DbiasKind::kTile && !visits_all);
  plan.dbias_zero_bytes = has_zeros ? plan.dbias_bytes() : size_t{0};
}

// Sets how dbias itself is written; place_dbias() places its sums.
void set_dbias(BwdPlan& plan, const dmattn_bwd_params& p) {
  if (!is_present(p.dbias)) return;
  const BwdParams& kernel = plan.kernel;
  if (plan.dbias_cols || plan.dbias_rows) {
    ReduceDbiasParams& reduce = plan.reduce_dbias;
    reduce.batch = kernel.packing.slabs(kernel.batch);
    reduce.nheads = kernel.nheads;
    reduce.seqlen_q = kernel.seqlen_q;
    reduce.seqlen_k = kernel.packing.rows_k(kernel.seqlen_k);
    reduce.dlse = plan.preprocess.dlse;
    reduce.dlse_stride = plan.preprocess.dlse_stride;
    reduce.seqlen_q_rounded = kernel.seqlen_q_rounded;
    reduce.dbias = plan.dbias;
    reduce.dtype = plan.dbias_dtype;
    reduce.out_batch = static_cast<int32_t>(p.dbias.shape[0]);
    reduce.out_heads = static_cast<int32_t>(p.dbias.shape[1]);
    reduce.out_rows = static_cast<int32_t>(p.dbias.shape[2]);
    reduce.out_cols = static_cast<int32_t>(p.dbias.shape[3]);
    return;
  }
  choose_dbias_sums(plan, p);
  choose_dbias_zeros(plan);
}

// Places the sums of dbias, which are zeroed once for all rounds.
void place_dbias(BwdPlan& plan, Workspace& workspace) {
  BwdParams& kernel = plan.kernel;
  plan.scratch_zeros = workspace.here();
  const size_t begin = workspace.bytes();
  if (kernel.dbias_kind == DbiasKind::kKey) {
    kernel.dbias_cols = workspace.take<float>(rows_of(kernel) * kernel.packing.rows_k(kernel.seqlen_k));
  }
  const bool has_sums = kernel.dbias_kind == DbiasKind::kAccum && plan.has_dbias_sums;
  if (has_sums) {
    const int64_t entries = plan.dbias_elements / plan.dbias_keys * kernel.dbias_row_stride;
    plan.dbias_accum = workspace.take<float>(entries);
    plan.dense_bytes += static_cast<size_t>(entries) * sizeof(float);
  }
  plan.once_zero_bytes = workspace.bytes() - begin;
  plan.reduce_dbias.src = kernel.dbias_cols;
  plan.reduce_dbias.lse_rounded = plan.preprocess.lse_rounded;
  if (kernel.dbias_kind != DbiasKind::kNone && kernel.dbias_kind != DbiasKind::kKey) {
    kernel.dbias = has_sums ? plan.dbias_accum : plan.dbias;
  }
}

void place_keys(BwdPlan& plan, Workspace& workspace) {
  BwdParams& kernel = plan.kernel;
  if (plan.walk == KeyWalk::kMaskList) {
    kernel.keys = layout_key_list(plan.mask, workspace);
    kernel.keys.head_ratio = kernel.nheads / plan.mask.heads;
    if (has_shared_list(plan) && plan.preprocess.vec_out && plan.preprocess.vec_dout) {
      plan.used_rows = workspace.take<int32_t>(int64_t{2} * kernel.keys.batch * kernel.keys.heads);
      plan.preprocess.used_rows = {plan.used_rows, kernel.keys.batch, kernel.keys.heads, kernel.keys.head_ratio};
    }
  } else if (has_mask(plan.mask)) {
    const size_t begin = workspace.bytes();
    kernel.mask = layout_mask_bits(plan.mask, workspace);
    kernel.mask.head_ratio = kernel.nheads / plan.mask.heads;
    plan.dense_bytes += workspace.bytes() - begin;
  }
  if (is_gathered(plan.walk) && !has_row_block_lists(plan)) {
    plan.schedule = workspace.take<int32_t>(int64_t{kernel.batch} * kernel.nheads_k + 3);
    kernel.schedule = plan.schedule;
  }
}

// Places everything but the sums of dq, dk and dv.
void place_before_sums(BwdPlan& plan, Workspace& workspace) {
  plan.dense_bytes = 0;
  place_statistics(plan, workspace);
  place_spare_gradients(plan, workspace);
  if (plan.launches) place_keys(plan, workspace);
  place_dbias(plan, workspace);
}

// On Hopper, whether query heads of a group have biases for each key of their own. Copies of one bias without a
// gradient do not count.
bool has_key_bias_of_heads(const BwdPlan& plan) {
  const BwdParams& p = plan.kernel;
  const bool are_copies = p.bias.head_stride == 0 && p.dbias_kind == DbiasKind::kNone;
  return plan.resident_blocks > 0 && p.bias.kind == BiasKind::kKey && p.bias.head_ratio % p.head_ratio != 0 &&
         !are_copies;
}

}  // namespace

bool has_lists_of_heads(const BwdPlan& plan) {
  const BwdParams& p = plan.kernel;
  if (!is_gathered(plan.walk) || p.head_ratio == 1) return false;
  const int32_t lists = is_selection(plan.walk) ? p.keys.heads : plan.mask.heads;
  return lists > p.nheads_k || has_key_bias_of_heads(plan);
}
// An fp32 dbias has its sums apart, which are copied afterwards, only where at least this many scores share an entry.
constexpr int64_t kScoresOfSums = 4;
bool adds_up_dbias_apart(const BwdPlan& plan) {
  const BwdParams& p = plan.kernel;
  if (p.dbias_kind != DbiasKind::kAccum) return false;
  if (plan.has_dbias_sums) return true;
  const int64_t scores = rows_of(p) * p.seqlen_q * p.seqlen_k;
  return plan.dbias_pitch % 4 != 0 && scores >= kScoresOfSums * plan.dbias_elements;
}
bool has_items_of_heads(const BwdPlan& plan) { return !is_gathered(plan.walk) && has_key_bias_of_heads(plan); }

Level bwd_level(const BwdPlan& plan) {
  const BwdParams& p = plan.kernel;
  const bool gathered = is_gathered(plan.walk);
  const bool dbias_registers = p.dbias_kind == DbiasKind::kAccum ||
                               (p.dbias_kind == DbiasKind::kTile && (gathered || p.bias.dtype == Dtype::kFloat32));
  if (p.bias.kind == BiasKind::kDirect || p.softcap > 0.f || dbias_registers) return Level::kFull;
  const bool all_wanted = plan.wants_dq && plan.wants_dk && plan.wants_dv;
  const bool all_aligned = p.vec_q && p.vec_k && p.vec_v && p.vec_dout;
  const bool has_dense_mask = has_mask(plan.mask) && !gathered;
  // The plain kernel sets masked scores to -inf before it scales them, and they stay -inf only if the scale is
  // positive.
  const bool is_plain = p.softmax_scale > 0.f && p.bias.kind == BiasKind::kNone && !has_dense_mask &&
                        !p.deterministic && p.dbias_kind == DbiasKind::kNone && all_wanted && all_aligned;
  if (!is_plain) return Level::kGeneral;
  if (!p.packing.is_active()) return Level::kPlain;
  return gathered ? Level::kGeneral : Level::kPacked;
}

namespace {

// Sets what depends on the chosen kernels, apart from the sums.
void complete(BwdPlan& plan, const dmattn_bwd_params& p) {
  set_preprocess(plan, p);
  set_dbias(plan, p);
  choose_sequence(plan, p);
}

}  // namespace

// No pairs where items half as many and twice as long would leave too many thread blocks without work at the end.
BiasPairs find_pairs(const BwdPlan& plan, const BwdRound& round, int64_t parts) {
  const BwdParams& p = plan.kernel;
  const bool is_shared = p.dbias_kind == DbiasKind::kAccum || p.dbias_kind == DbiasKind::kPair;
  const bool is_whole =
      round.batches == plan.whole.batches && round.heads_k == plan.whole.heads_k && round.groups == plan.whole.groups;
  // The kernel for pairs copies tiles of the bias by TMA only.
  const bool has_tma_tiles =
      is_vec16(p.bias.ptr, {p.bias.batch_stride, p.bias.head_stride, p.bias.row_stride}, p.bias.dtype);
  if (plan.resident_blocks == 0 || p.deterministic || plan.unit.head_dim_tile > 64 || plan.walk != KeyWalk::kTiled ||
      !is_shared || p.bias.kind != BiasKind::kTile || !has_tma_tiles || hides_keys(plan) || parts > 1 || !is_whole) {
    return BiasPairs::kNone;
  }
  const int64_t blocks = plan.resident_blocks, items = key_tiles_of(p, p.batch, p.nheads_k, plan.tile.block_n);
  const int64_t rounds = 2 * ceil_div(items / 2, blocks);
  const bool fills = p.is_causal ? items >= 6 * blocks : 20 * rounds <= 23 * ceil_div(items, blocks);
  if (!fills) return BiasPairs::kNone;
  if (p.batch % 2 == 0 && p.bias.batch_stride == 0 && p.dbias_batch_stride == 0) return BiasPairs::kBatches;
  if (p.nheads_k % 2 == 0 && p.bias.head_stride == 0 && p.dbias_head_stride == 0) return BiasPairs::kHeads;
  return BiasPairs::kNone;
}

namespace {

// Where only two share an entry of dbias (DbiasKind::kPair), it belongs to one pair, which stores it.
void choose_pairs(BwdPlan& plan) {
  BwdParams& kernel = plan.kernel;
  kernel.bias_pairs = find_pairs(plan, plan.round, kernel.num_splits);
  if (kernel.bias_pairs == BiasPairs::kNone || kernel.dbias_kind != DbiasKind::kPair) return;
  kernel.dbias_kind = DbiasKind::kTile;
  choose_dbias_zeros(plan);
}

BwdPlan plan_with(const KernelSet& kernels, BwdPlan plan, const dmattn_bwd_params& p, const Device& device) {
  use_kernels(plan, kernels, device);
  complete(plan, p);
  Workspace workspace(nullptr);
  place_before_sums(plan, workspace);
  choose_sums(plan, device, workspace.bytes());
  choose_pairs(plan);
  return plan;
}

// Whether the items of a persistent kernel, or the thread blocks of another kernel, can be counted in 32 bits.
bool counts_in_32_bits(const BwdPlan& plan) {
  const BwdParams& p = plan.kernel;
  if (plan.resident_blocks == 0) return bwd_blocks(plan, bwd_round_params(plan, plan.round)) <= kMostBlocks;
  if (has_row_block_lists(plan)) return chunk_items(plan, bwd_round_params(plan, plan.round)) <= kMostBlocks;
  return 2 * key_tiles_of(p, plan.round.batches, plan.round.heads_k, plan.tile.block_n) * p.num_splits <= kMostBlocks;
}
// With packed sequences, kernels that are not persistent have as many thread blocks for each sequence as the longest
// needs.
void check_blocks(const BwdPlan& plan, const Problem& x) {
  if (!plan.launches || counts_in_32_bits(plan)) return;
  fail(DMATTN_ERROR_UNSUPPORTED,
       "the call takes more than %lld thread blocks, for %d keys of each of %d sequences and %d heads: fewer sequences "
       "or heads in a call%s",
       static_cast<long long>(kMostBlocks), x.seqlen_k, x.batch, x.nheads,
       x.packing.is_active() ? ", or a lower max_seqlen_k" : "");
}

// Whether the workspace keeps to its limit, in two cases in which the sm80 code needs less. A list for all rows is
// copied for each chunk of rows, so that the copies grow with the square of the length. And where each item has a
// single head, dk and dv are fp32 sums over the items of a group, which take much memory where few heads have many
// keys.
bool keeps_to_scratch(const BwdPlan& plan) {
  const bool copies_list = plan.chunk_blocks > 0 && !plan.has_whole_items && has_shared_list(plan);
  if (!copies_list && !has_items_of_heads(plan)) return true;
  BwdPlan placed = plan;
  place(placed, nullptr);
  return keeps_to_limit(plan, static_cast<int64_t>(placed.workspace_bytes - placed.dense_bytes));
}

// Chooses the kernels of the newest architecture that serve the call. finds_window: only kernels that find the window
// of keys by themselves. Returns false if there are none.
bool choose_kernel(BwdPlan& plan, const dmattn_bwd_params& p, bool finds_window, const Device& device) {
  BwdPlan chosen;
  const KernelSet* found = find_unit_set(*device.kernels, plan.unit, [&](const KernelSet& kernels) {
    if (finds_window && !kernels.finds_windows) return false;
    chosen = plan;
    if (kernels.serves_bwd != nullptr) {
      add_spare_gradients(chosen);
      if (!is_for_residents(chosen) || !kernels.serves_bwd(chosen.kernel, chosen.unit.gathered)) return false;
    }
    chosen = plan_with(kernels, chosen, p, device);
    if (chosen.resident_blocks == 0) return true;
    return suits_residents(chosen) && counts_in_32_bits(chosen) && keeps_to_scratch(chosen);
  });
  if (found == nullptr) return false;
  plan = chosen;
  return true;
}

// Decides how the keys of a row are found, and sets what follows from that. by_lists: by the lists of a selection.
// by_tiles: not by a list made from a mask.
void set_keys(BwdPlan& plan, const dmattn_bwd_params& p, const Problem& x, PerKey per_key, bool by_lists,
              bool by_tiles = false) {
  BwdParams& kernel = plan.kernel;
  if (by_lists) kernel.keys = read_selection(p.selection, x);
  plan.walk = choose_walk(plan.mask, kernel.keys, by_lists, by_tiles || has_dense_rows(p.bias, x));
  const bool gathered = plan.unit.gathered = is_gathered(plan.walk);
  kernel.row_blocks = kernel.keys.blocks;
  plan.whole = {0, x.batch, 0, x.nheads_k, 0, x.head_ratio, 0, kernel.row_blocks};
  plan.round = plan.whole;
  kernel.bias = read_bias(p.bias, x, gathered);
  kernel.packing.bias_col_stride = packed_bias_stride(kernel.bias, per_key.bias, gathered);
}

// For a selection that is a window of keys: chooses kernels that find the window by themselves. Returns false if
// there are none for this call.
bool choose_window_kernel(BwdPlan& given, const dmattn_bwd_params& p, const Problem& x, const Device& device) {
  BwdPlan plan = given;
  plan.kernel.window = read_window(p, x);
  set_keys(plan, p, x, PerKey{}, /*by_lists=*/false);
  if (!choose_kernel(plan, p, /*finds_window=*/true, device)) return false;
  given = plan;
  return true;
}

// Choosing between the list of a mask and the tiles of the mask. Up to this much work (pairs of rows and keys that
// causality leaves, times head_dim), tiles take less time than a list whose sums take rounds, or whose items with all
// rows are so few that SMs wait for the last of them.
constexpr double kWorkWorthLists = 3e9;
double work_of(const Problem& x) {
  return static_cast<double>(x.batch) * x.nheads * x.seqlen_q * x.seqlen_k * x.head_dim;
}
// Up to this much work, tiles take less time than any list, because of the launches that make the list and round its
// sums: without a bias and in any order, if head_dim is up to 128 or all keys are in one tile. With more work a list
// gains by leaving out rows whose gradient is zero, such as those of padding.
constexpr double kWorkOfSmallCalls = 1e9;
constexpr int32_t kKeysOfTile = 128;
bool takes_longer_to_list(const dmattn_bwd_params& p, const Problem& x, double work) {
  if (is_present(p.bias) || p.deterministic != 0 || work > kWorkOfSmallCalls) return false;
  return x.head_dim <= 128 || x.seqlen_k <= kKeysOfTile;
}

// Replaces `listed`, the plan of a call with a mask of keys that are listed, by one with kernels that go through the
// tiles of the mask, unless the list is better or there is no such kernel. `plan`: the plan before set_keys(). If all
// keys fit one tile, the kernel that stores dq is faster than a list, however much work there is.
void choose_tiles_of_mask(BwdPlan plan, BwdPlan& listed, const dmattn_bwd_params& p, const Problem& x, PerKey per_key,
                          const Device& device) {
  if (x.packing.is_active()) return;
  const bool loses_nothing =
      covers_all(listed, listed.round) && (!listed.has_whole_items || has_many_whole_items(listed, device));
  const double work = work_of(x);
  const bool is_small = work <= kWorkWorthLists * (plan.kernel.is_causal ? 2 : 1);
  const bool is_fast = listed.has_whole_items || !takes_longer_to_list(p, x, work);
  const bool suits_tiles = is_small && !(loses_nothing && is_fast);
  if (!suits_tiles && x.seqlen_k > kKeysOfTile) return;
  set_keys(plan, p, x, per_key, /*by_lists=*/false, /*by_tiles=*/true);
  if (!choose_kernel(plan, p, /*finds_window=*/false, device) || plan.resident_blocks == 0) return;
  if (plan.stores_dq || (suits_tiles && covers_all(plan, plan.round))) listed = plan;
}

// Replaces `chosen`, which has the kernel for few keys, by a plan with the kernel that stores dq (keys of one tile).
// `plan`: the plan before set_keys(). Returns false if there is no such kernel for this call. From 65 keys and 33
// columns on, that kernel took 0.74 to 0.995 of the time on an H200; with 32 columns, which it computes as 64, 1.2.
// It needs masks as bits. With less work than kWorkWorthBits, the launch that makes the bits costs the host more than
// the GPU gains (1% to 4%); with more work the GPU gains 4% to 40%.
constexpr double kWorkWorthBits = 3e7;
bool choose_storing_kernel(BwdPlan plan, BwdPlan& chosen, const dmattn_bwd_params& p, const Problem& x, PerKey per_key,
                           const Device& device) {
  if (short_bwd_keys(x.seqlen_k) == 64 || short_head_dim(x.head_dim) == 32) return false;
  if (has_mask(plan.mask) && work_of(x) < kWorkWorthBits) return false;
  set_keys(plan, p, x, per_key, /*by_lists=*/false, /*by_tiles=*/true);
  // The kernel that stores dq computes all three gradients, the one for few keys only those that are wanted.
  const bool all_wanted = plan.wants_dq && plan.wants_dk && plan.wants_dv;
  if (!all_wanted || !choose_kernel(plan, p, /*finds_window=*/false, device) || !plan.stores_dq) return false;
  chosen = plan;
  return true;
}

// `p` in the form of with_batch().
BwdPlan plan_batched_bwd(const dmattn_bwd_params& p, PerKey per_key, const Device& device) {
  const Problem x = read_problem(p);
  BwdPlan plan;
  plan.unit.direction = Direction::kBackward;
  plan.unit.dtype = x.dtype;
  plan.unit.head_dim_tile = x.dim_tile;
  plan.zeros = x.batch == 0 || x.nheads == 0 || x.rows_q == 0 || x.rows_k == 0;
  set_inputs(plan, p, x);
  set_gradients(plan, p);
  choose_dbias(plan, p, per_key.bias);
  if (plan.zeros) return plan;

  plan.launches = plan.wants_dq || plan.wants_dk || plan.wants_dv || plan.kernel.dbias_kind != DbiasKind::kNone;
  if (plan.is_empty()) return plan;

  plan.mask = read_mask(p.mask, x, per_key.mask);
  const BwdPlan without_keys = plan;
  if (plan.launches && choose_short_kernel(plan, p, x, device)) {
    if (!choose_storing_kernel(without_keys, plan, p, x, per_key, device)) choose_dbias_zeros(plan);
    place(plan, nullptr);
    return plan;
  }
  if (has_known_window(p, x) && plan.launches && choose_window_kernel(plan, p, x, device)) {
    place(plan, nullptr);
    return plan;
  }
  set_keys(plan, p, x, per_key, has_selection(p.selection));
  if (!plan.launches) {
    complete(plan, p);
  } else if (!choose_kernel(plan, p, /*finds_window=*/false, device)) {
    fail_without_unit(plan.unit);
  } else if (plan.walk == KeyWalk::kMaskList) {
    choose_tiles_of_mask(without_keys, plan, p, x, per_key, device);
  }
  check_blocks(plan, x);
  place(plan, nullptr);
  return plan;
}

}  // namespace

BwdPlan plan_bwd(const dmattn_bwd_params& given, const Device& device) {
  return in_batched_form(
      given, [&](const dmattn_bwd_params& p, PerKey per_key) { return plan_batched_bwd(p, per_key, device); });
}

void place(BwdPlan& plan, void* base) {
  if (plan.zeros || plan.is_empty()) return;
  Workspace workspace(base);
  if (plan.is_short()) {
    plan.dense_bytes = 0;
    place_dbias(plan, workspace);
    plan.short_kernel.dbias = plan.kernel.dbias;
  } else {
    place_before_sums(plan, workspace);
    if (plan.launches) place_sums(plan, workspace);
  }
  plan.workspace_bytes = workspace.bytes();
}

}  // namespace dmattn
