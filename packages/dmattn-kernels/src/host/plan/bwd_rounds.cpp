// The backward's rounds of launches: where each one's share of the operands and of the workspace starts.
#include <algorithm>
#include <type_traits>

#include "host/arithmetic.h"
#include "host/plan/bwd_parts.h"

namespace dmattn {
namespace {

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
void offset_tensor(Pointer*& ptr, const Strides3& stride, int64_t b, int64_t h, Dtype dtype) {
  offset_bytes(ptr, element_bytes(dtype) * (b * stride.batch + h * stride.head));
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

// Moves the pointers to operands and statistics on to batch b, query head h and kv head hk.
void offset_operands(BwdParams& p, Dtype dtype, int64_t b, int64_t h, int64_t hk) {
  offset_tensor(p.q, p.q_stride, b, h, dtype);
  offset_tensor(p.dout, p.dout_stride, b, h, dtype);
  offset_tensor(p.k, p.k_stride, b, hk, dtype);
  offset_tensor(p.v, p.v_stride, b, hk, dtype);
  offset_tensor(p.dq, p.dq_stride, b, h, dtype);
  offset_tensor(p.dk, p.dk_stride, b, hk, dtype);
  offset_tensor(p.dv, p.dv_stride, b, hk, dtype);
  const int64_t row = b * p.nheads + h;
  p.lse_rest = offset_by(p.lse_rest, row * p.seqlen_q_rounded);
  p.lse = offset_by(p.lse, row * p.seqlen_q_rounded);
  p.delta = offset_by(p.delta, row * p.seqlen_q_rounded);
  p.dbias_cols = offset_by(p.dbias_cols, row * p.packing.rows_k(p.seqlen_k));
  if (p.bias.kind != BiasKind::kNone) {
    const int64_t bias_head = h / p.bias.head_ratio;
    const int64_t bias_bytes = element_bytes(p.bias.dtype);
    const int64_t dbias_bytes = p.dbias_kind == DbiasKind::kAccum ? sizeof(float) : bias_bytes;
    offset_bytes(p.bias.ptr, bias_bytes * (b * p.bias.batch_stride + bias_head * p.bias.head_stride));
    offset_bytes(p.dbias, dbias_bytes * (b * p.dbias_batch_stride + bias_head * p.dbias_head_stride));
  }
  offset_mask(p, b, h);
}

int64_t dq_block_size(const BwdPlan& plan) { return static_cast<int64_t>(plan.tile.block_m) * plan.kernel.dq_dims; }

// Moves the pointers to the sums of a round in the same way; b, h and hk count within the round.
void offset_sums(BwdParams& p, int64_t b, int64_t h, int64_t hk, int64_t dq_size) {
  const int64_t block = (b * p.nheads + h) * p.dq_blocks;
  p.dq_accum = offset_by(p.dq_accum, block * dq_size);
  p.dq_semaphore = offset_by(p.dq_semaphore, block);
  const int64_t kv_row = b * p.nheads_k + hk;
  p.dkv_semaphore = offset_by(p.dkv_semaphore, kv_row);
  const int64_t kv_elements = kv_row * p.packing.rows_k(p.seqlen_k) * p.head_dim;
  p.dk_accum = offset_by(p.dk_accum, kv_elements);
  p.dv_accum = offset_by(p.dv_accum, kv_elements);
}

void narrow_heads(BwdParams& p, int32_t heads_k) {
  p.nheads_k = heads_k;
  p.nheads = heads_k * p.head_ratio;
}

// BwdParams::max_work_items of a launch: the most work that it may have.
int32_t work_items(const BwdPlan& plan, const BwdParams& p) {
  const int64_t tiles = std::max<int64_t>(key_tiles_of(p, p.batch, p.nheads_k, plan.tile.block_n), plan.max_work);
  return static_cast<int32_t>(std::min<int64_t>(tiles, INT32_MAX));
}

}  // namespace

int64_t parts_of_round(const BwdPlan& plan, const BwdRound& usual, int64_t parts, int32_t groups) {
  // Each item has one head, whose bias it reads.
  if (has_items_of_heads(plan)) return parts / usual.groups * groups;
  if (parts <= groups) return parts;
  // In a fixed order parts are whole heads. A share of the rows of a head would wait at dq for shares of other blocks
  // of keys, some of which may have higher item numbers, in a later section.
  if (plan.kernel.deterministic) return groups;
  return parts / groups * groups;  // equally many shares of the rows of each head
}

bool completes_dkv(const BwdPlan& plan, const BwdRound& round) {
  return round.group + round.groups == plan.whole.groups && round.row_block + round.row_blocks == plan.whole.row_blocks;
}

BwdParams bwd_round_params(const BwdPlan& plan, const BwdRound& round) {
  BwdParams p = plan.kernel;
  offset_operands(p, plan.unit.dtype, round.batch, static_cast<int64_t>(round.head_k) * p.head_ratio, round.head_k);
  p.batch = round.batches;
  narrow_heads(p, round.heads_k);
  p.group_begin = round.group;
  p.group_end = round.group + round.groups;
  if (plan.resident_blocks > 0) {
    p.num_splits = static_cast<int32_t>(parts_of_round(plan, plan.round, p.num_splits, round.groups));
  }
  p.row_block_begin = round.row_block;
  p.row_blocks = round.row_blocks;
  int64_t first_block = int64_t{round.group} * p.dq_blocks;
  if (round.row_blocks < plan.whole.row_blocks) {
    first_block += int64_t{round.row_block} * (plan.list_rows / plan.tile.block_m);
  }
  p.dq_accum = offset_by(p.dq_accum, -first_block * dq_block_size(plan));
  p.dq_semaphore = offset_by(p.dq_semaphore, -first_block);
  p.max_work_items = work_items(plan, p);
  return p;
}

ConvertDqParams bwd_round_dq(const BwdPlan& plan, const BwdRound& round) {
  ConvertDqParams dq = plan.convert_dq;
  const int64_t head = static_cast<int64_t>(round.head_k) * plan.kernel.head_ratio + round.group;
  offset_tensor(dq.dq, dq.dq_stride, round.batch, head, plan.unit.dtype);
  if (!dq.packing.is_active()) dq.batch = round.batches;
  dq.nheads = round.heads_k * round.groups;
  dq.dq_blocks = plan.kernel.dq_blocks;
  if (round.row_blocks < plan.whole.row_blocks) {
    const int32_t row = round.row_block * plan.list_rows;
    offset_bytes(dq.dq, element_bytes(plan.unit.dtype) * row * dq.dq_stride.row);
    dq.seqlen_q = std::min(dq.seqlen_q - row, round.row_blocks * plan.list_rows);
  }
  return dq;
}

BwdParams bwd_launch_params(const BwdPlan& plan, const BwdParams& round, int32_t b, int32_t hk, int32_t g) {
  BwdParams p = round;
  const BwdSequence& sequence = plan.sequence;
  if (sequence.is_single()) return p;
  const int64_t h = static_cast<int64_t>(hk) * p.head_ratio;
  offset_operands(p, plan.unit.dtype, b, h, hk);
  offset_sums(p, b, h, hk, dq_block_size(plan));
  const int64_t head = int64_t{b} * (sequence.per_head_k ? p.nheads_k : 1) + hk;
  const int64_t launch = sequence.per_group ? head * (p.group_end - p.group_begin) + g - p.group_begin : head;
  p.work_counter = offset_by(p.work_counter, launch * work_counters_of(plan, plan.round));
  if (sequence.per_batch) {
    p.batch = 1;
    p.mask.batch = 1;
    p.keys.batch = 1;
  }
  if (sequence.per_head_k) narrow_heads(p, 1);
  if (sequence.per_group) {
    p.group_begin = g;
    p.group_end = g + 1;
    // Hopper's kernels look for the list of a kv head, and count turns from zero: so a launch gets pointers to the
    // list of its first head and to counters of its own.
    if (plan.chunk_blocks > 0) {
      offset_mask(p, 0, g);
      p.dkv_semaphore = offset_by(p.dkv_semaphore, launch * chunk_turns_of(plan, plan.round));
    }
  }
  p.max_work_items = work_items(plan, p);
  return p;
}

int64_t bwd_blocks(const BwdPlan& plan, const BwdParams& launch) {
  const int32_t block_n = plan.tile.block_n;
  const int64_t heads = int64_t{launch.nheads_k} * launch.batch;
  if (plan.walk == KeyWalk::kTiled) {
    const int64_t blocks = ceil_div(launch.seqlen_k, block_n) * heads * launch.num_splits;
    return plan.resident_blocks > 0 ? std::min<int64_t>(blocks, plan.resident_blocks) : blocks;
  }
  if (!has_row_block_lists(plan)) return launch.max_work_items;
  if (plan.resident_blocks > 0) return std::min<int64_t>(chunk_items(plan, launch), plan.resident_blocks);
  return ceil_div(launch.keys.capacity, block_n) * heads * launch.row_blocks;
}

KeyList bwd_schedule_lists(const BwdParams& launch) {
  KeyList lists = launch.keys;
  const int32_t list = launch.group_begin / lists.head_ratio;  // 0 unless every query head has its own
  lists.idx += static_cast<int64_t>(list) * lists.capacity;
  lists.count += list;
  return lists;
}

}  // namespace dmattn
