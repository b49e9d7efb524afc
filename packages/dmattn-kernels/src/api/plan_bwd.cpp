#include <algorithm>
#include <type_traits>

#include "api/operands.h"
#include "api/plan.h"
#include "api/validate.h"
#include "api/workspace.h"

namespace dmattn {
namespace {

// Partial dk and dv may always take this much, and beyond it only what keeps the whole workspace below 1.5 times the
// bytes of q, k and v.
constexpr int64_t kSlotBytesFloor = int64_t{256} << 10;

// The (batch, head) pairs of arrays in the workspace.
int64_t rows_of(const BwdParams& p) { return static_cast<int64_t>(p.packing.slabs(p.batch)) * p.nheads; }
int64_t kv_rows_of(const BwdParams& p) { return static_cast<int64_t>(p.packing.slabs(p.batch)) * p.nheads_k; }
// Row blocks of dq for each of them.
int64_t m_blocks_of(const BwdParams& p, int64_t block_m) {
  return p.packing.is_active() ? p.packing.m_blocks : ceil_div<int64_t>(p.seqlen_q, block_m);
}
// Key tiles that a launch has to provide blocks for.
int64_t key_tiles_of(const BwdParams& p, int32_t block_n) {
  const int64_t tiles = p.packing.is_active() ? packed_blocks(p.packing.total_k, p.packing.sequences, block_n)
                                              : int64_t{p.batch} * ceil_div(p.seqlen_k, block_n);
  return tiles * p.nheads_k;
}

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

// Arrays that start as zeros, next to each other so that one memset does it.
void place_zeroed(BwdPlan& plan, const dmattn_bwd_params& p, Workspace& workspace) {
  BwdParams& kernel = plan.kernel;
  const int64_t m_blocks = m_blocks_of(kernel, plan.tile.block_m);
  const size_t begin = workspace.bytes();
  plan.scratch_zeros = workspace.here();
  if (is_present(p.dq)) {
    kernel.dq_accum = workspace.take<float>(rows_of(kernel) * m_blocks * plan.tile.block_m * plan.dim_tile);
    plan.convert_dq.dq_accum = kernel.dq_accum;
    if (kernel.deterministic) kernel.dq_semaphore = workspace.take<int32_t>(rows_of(kernel) * m_blocks);
  }
  if (kernel.dbias_kind == DbiasKind::kKey) {
    kernel.dbias_cols = workspace.take<float>(rows_of(kernel) * kernel.packing.rows_k(kernel.seqlen_k));
  }
  if (kernel.dbias_kind == DbiasKind::kAccum && p.dbias.dtype != DMATTN_FLOAT32) {
    plan.dbias_accum = workspace.take<float>(plan.dbias_elements);
  }
  if (kernel.deterministic && plan.intervals) {
    kernel.dkv_semaphore = workspace.take<int32_t>(static_cast<int64_t>(kernel.batch) * kernel.nheads_k);
  }
  if (plan.sequence.per_group || plan.intervals) {
    const int64_t elements = kv_rows_of(kernel) * kernel.packing.rows_k(kernel.seqlen_k) * kernel.head_dim;
    if (is_present(p.dk)) kernel.dk_accum = workspace.take<float>(elements);
    if (is_present(p.dv)) kernel.dv_accum = workspace.take<float>(elements);
  }
  plan.scratch_zero_bytes = workspace.bytes() - begin;
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
  }
  if (plan.gathered && !plan.intervals) {
    plan.schedule = workspace.take<int32_t>(static_cast<int64_t>(kernel.batch) * kernel.nheads_k + 3);
    kernel.schedule = plan.schedule;
  }
}

// Sums of dk and dv for `slots` blocks, no more of them than the memory allowed for; returns how many.
int64_t affordable_slots(const BwdPlan& plan, int64_t slots, int64_t slot_bytes, size_t workspace_bytes) {
  const BwdParams& p = plan.kernel;
  const int64_t row_bytes = int64_t{2} * p.batch * p.head_dim;
  const int64_t qkv_bytes =
      row_bytes * (static_cast<int64_t>(p.seqlen_q) * p.nheads + int64_t{2} * p.seqlen_k * p.nheads_k);
  const int64_t spare = std::min(qkv_bytes / 2, qkv_bytes * 23 / 16 - static_cast<int64_t>(workspace_bytes));
  return slot_bytes == 0 ? slots : std::min(slots, std::max(spare, kSlotBytesFloor) / slot_bytes);
}

// Few key tiles leave most of the GPU idle: their rows (and the heads of the group) are then split between blocks,
// which add to one accumulator for each tile or, when deterministic, have one each that are summed afterwards. In
// place last, because what is spare depends on all the rest.
void place_splits(BwdPlan& plan, const dmattn_bwd_params& p, const Device& device, Workspace& workspace) {
  BwdParams& kernel = plan.kernel;
  const int64_t tiles = key_tiles_of(kernel, plan.tile.block_n);
  kernel.max_work_items = static_cast<int32_t>(std::min<int64_t>(tiles, INT32_MAX));
  // The lengths of packed sequences are known on the device only: so is whether splitting any of them would pay.
  if (kernel.packing.is_active()) return;
  const int64_t m_blocks = ceil_div(kernel.seqlen_q, plan.tile.block_m);
  // A deterministic column sum of a head has to come from one block.
  const int64_t most = kernel.deterministic ? kernel.head_ratio : kernel.head_ratio * m_blocks;
  // How many of the tiles a list fills is known on the device only, so that it may always turn out to be few.
  const bool enough = plan.intervals || (!plan.gathered && tiles >= device.num_sms);
  if (most <= 1 || enough || !plan.sequence.is_single()) return;

  const int64_t slot_size = static_cast<int64_t>(plan.tile.block_n) * plan.dim_tile;
  const int num_grads = (is_present(p.dk) ? 1 : 0) + (is_present(p.dv) ? 1 : 0);
  const int64_t slot_bytes = num_grads * slot_size * static_cast<int64_t>(sizeof(float));
  // Blocks take unequal times when causal: four for each SM even that out.
  const int64_t work = (kernel.deterministic ? 2 : 4) * static_cast<int64_t>(device.num_sms);
  const int64_t wanted = kernel.deterministic ? work : std::min<int64_t>(tiles, work);
  int64_t slots = affordable_slots(plan, wanted, slot_bytes, workspace.bytes());
  if (plan.gathered) {
    plan.max_work = static_cast<int32_t>(kernel.deterministic ? slots : work);
    plan.max_tiles = static_cast<int32_t>(slots);
    plan.max_splits = slots == 0 ? 1 : static_cast<int32_t>(std::min<int64_t>(most, plan.max_work));
    kernel.max_work_items = std::max(kernel.max_work_items, plan.max_work);
    if (plan.max_splits == 1) return;
  } else {
    if (slots < tiles) return;
    const int64_t splits = std::min((kernel.deterministic ? slots : work) / tiles, most);
    kernel.num_splits = static_cast<int32_t>(std::max<int64_t>(1, splits));
    if (kernel.num_splits == 1) return;
    slots = kernel.deterministic ? tiles * kernel.num_splits : tiles;
  }
  const size_t begin = workspace.bytes();
  plan.slot_zeros = workspace.here();
  if (is_present(p.dk)) kernel.dk_slots = workspace.take<float>(slots * slot_size);
  if (is_present(p.dv)) kernel.dv_slots = workspace.take<float>(slots * slot_size);
  if (!kernel.deterministic) plan.slot_zero_bytes = workspace.bytes() - begin;
}

template <class T>
T* offset_by(T* ptr, int64_t n) {
  return ptr == nullptr ? nullptr : ptr + n;
}
template <class Pointer>
void offset_bytes(Pointer*& ptr, int64_t bytes) {
  using Byte = std::conditional_t<std::is_const_v<Pointer>, const char, char>;
  ptr = static_cast<Pointer*>(offset_by(static_cast<Byte*>(ptr), bytes));
}
template <class Pointer>
void offset_half(Pointer*& ptr, const Strides3& stride, int64_t b, int64_t h) {
  offset_bytes(ptr, 2 * (b * stride.batch + h * stride.head));
}

// Moves every pointer of p to batch b and to head h (kv head hk).
void offset_tensors(BwdParams& p, int64_t b, int64_t h, int64_t hk, int64_t block_m, int64_t dim_tile) {
  offset_half(p.q, p.q_stride, b, h);
  offset_half(p.dout, p.dout_stride, b, h);
  offset_half(p.k, p.k_stride, b, hk);
  offset_half(p.v, p.v_stride, b, hk);
  offset_half(p.dk, p.dk_stride, b, hk);
  offset_half(p.dv, p.dv_stride, b, hk);
  const int64_t row = b * p.nheads + h;
  const int64_t m_blocks = m_blocks_of(p, block_m);
  p.lse_rest = offset_by(p.lse_rest, row * p.seqlen_q_rounded);
  p.lse = offset_by(p.lse, row * p.seqlen_q_rounded);
  p.delta = offset_by(p.delta, row * p.seqlen_q_rounded);
  p.dq_accum = offset_by(p.dq_accum, row * m_blocks * block_m * dim_tile);
  p.dq_semaphore = offset_by(p.dq_semaphore, row * m_blocks);
  p.dkv_semaphore = offset_by(p.dkv_semaphore, b * p.nheads_k + hk);
  const int64_t kv_elements = (b * p.nheads_k + hk) * p.packing.rows_k(p.seqlen_k) * p.head_dim;
  p.dk_accum = offset_by(p.dk_accum, kv_elements);
  p.dv_accum = offset_by(p.dv_accum, kv_elements);
  if (p.bias.kind != BiasKind::kNone) {
    const int64_t bias_head = h / p.bias.head_ratio;
    const int64_t bias_bytes = p.bias.dtype == Dtype::kFloat32 ? 4 : 2;
    offset_bytes(p.bias.ptr, bias_bytes * (b * p.bias.batch_stride + bias_head * p.bias.head_stride));
    // Only accumulators, which are fp32, are shared between launches.
    offset_bytes(p.dbias, 4 * (b * p.dbias_batch_stride + bias_head * p.dbias_head_stride));
  }
}

void offset_mask(BwdParams& p, int64_t b, int64_t h) {
  if (p.mask.bits != nullptr) {
    MaskBits& m = p.mask;
    const int64_t i = (m.batch > 1 ? b : 0) * m.heads + h / m.head_ratio;
    m.bits += i * m.rows * m.words_per_row;
    m.any_rows += i * m.bands_q * m.words_k;
    m.all_rows += i * m.bands_q * m.words_k;
    m.any_cols += i * m.bands_k * m.words_q;
    m.all_cols += i * m.bands_k * m.words_q;
  }
  if (p.keys.idx != nullptr) {
    const int64_t i = (p.keys.batch > 1 ? b : 0) * p.keys.heads + h / p.keys.head_ratio;
    p.keys.idx += i * p.keys.blocks * p.keys.capacity;
    p.keys.count += i * p.keys.blocks;
    p.keys.full = offset_by(p.keys.full, i * p.keys.blocks);
    p.keys.end = offset_by(p.keys.end, i * p.seqlen_k);
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
  plan.intervals = plan.kernel.keys.block_rows > 0;
  plan.kernel.bias = read_bias(p.bias, x, plan.gathered);
  plan.kernel.packing.bias_col_stride = packed_bias_stride(plan.kernel.bias, is_per_key(given.bias), plan.gathered);
  plan.launches =
      is_present(p.dq) || is_present(p.dk) || is_present(p.dv) || plan.kernel.dbias_kind != DbiasKind::kNone;
  if (!plan.launches && !plan.dbias_rows) return plan;
  set_preprocess(plan, p, workspace);
  choose_sequence(plan, p);
  place_zeroed(plan, p, workspace);
  place_dbias(plan, p);
  if (plan.launches) {
    place_mask(plan, workspace);
    place_splits(plan, p, device, workspace);
  }
  plan.workspace_bytes = workspace.bytes();
  return plan;
}

BwdParams bwd_launch_params(const BwdPlan& plan, int32_t b, int32_t hk, int32_t g) {
  BwdParams p = plan.kernel;
  const BwdSequence& sequence = plan.sequence;
  if (sequence.is_single()) return p;
  const int64_t h = static_cast<int64_t>(hk) * p.head_ratio;
  offset_tensors(p, b, h, hk, plan.tile.block_m, plan.dim_tile);
  offset_mask(p, b, h);
  if (sequence.per_batch) {
    p.batch = 1;
    p.mask.batch = 1;
    p.keys.batch = 1;
  }
  if (sequence.per_head_k) {
    p.nheads = p.head_ratio;
    p.nheads_k = 1;
  }
  if (sequence.per_group) {
    p.group_begin = g;
    p.group_end = g + 1;
  }
  p.max_work_items = static_cast<int32_t>(std::min<int64_t>(key_tiles_of(p, plan.tile.block_n), INT32_MAX));
  return p;
}

KeyList bwd_schedule_lists(const BwdParams& launch) {
  KeyList lists = launch.keys;
  const int32_t list = launch.group_begin / lists.head_ratio;  // 0 unless every query head has its own
  lists.idx += static_cast<int64_t>(list) * lists.capacity;
  lists.count += list;
  return lists;
}

}  // namespace dmattn
