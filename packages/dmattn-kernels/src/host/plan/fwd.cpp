#include "host/plan/fwd.h"

#include <algorithm>
#include <cmath>

#include "host/layouts/layouts.h"
#include "host/plan/blocks.h"
#include "host/plan/decode.h"
#include "host/plan/short.h"
#include "kernels/sm90_fwd_times.h"

namespace dmattn {
namespace {

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
  kernel.vec_q = is_vec16(kernel.q, kernel.q_stride, x.dtype);
  kernel.vec_k = is_vec16(kernel.k, kernel.k_stride, x.dtype);
  kernel.vec_v = is_vec16(kernel.v, kernel.v_stride, x.dtype);
  kernel.vec_out = is_vec16(kernel.out, kernel.out_stride, x.dtype);
}

int64_t row_blocks(const FwdParams& p, const FwdTile& tile) {
  return int64_t{p.batch} * p.nheads * ceil_div(p.seqlen_q, tile.block_m);
}
// Items of a persistent kernel; for packed sequences an upper bound, as only the device knows how many there are.
int64_t resident_items(const FwdParams& p, const FwdTile& tile) {
  if (!p.packing.is_active()) return row_blocks(p, tile);
  return int64_t{packed_blocks(p.packing.total_q, p.packing.sequences, tile.block_m)} * p.nheads;
}

// Parts into which a kernel with such tiles should split the keys. Packed sequences are not split, as only the device
// knows how many key tiles each has. Splits chosen for the longest sequence would leave the others with parts too
// short to be worth combining, and each part would take memory for batch * max_seqlen_q rows.
int32_t wanted_splits(const FwdPlan& plan, const FwdTile& tile, int32_t asked_for, const Device& device) {
  const FwdParams& p = plan.kernel;
  if (p.packing.is_active()) return 1;
  int32_t keys = p.seqlen_k;
  if (is_selection(plan.walk)) keys = std::min(keys, p.keys.capacity);
  if (p.window > 0) keys = std::min(keys, p.window + tile.block_m);
  const int32_t key_tiles = std::max(1, ceil_div(keys, tile.block_n));
  if (asked_for > 0) return std::min(asked_for, key_tiles);
  // An SM has room for two thread blocks of four warps.
  const int64_t resident = int64_t{device.num_sms} * (tile.warps == 4 ? 2 : 1);
  return choose_num_splits(row_blocks(p, tile), resident, key_tiles, min_tiles_per_split(tile.block_n));
}

// Estimated nanoseconds of the sm80 kernels, which split the keys, for calls with fewer row blocks than SMs, without
// a mask and a bias: `call` for each call, and `tile` for each 128 x 128 scores of all row blocks. Fitted to times on
// H100 and H200, for the head-dim tiles 64, 128 and 256 in this order. docs/kernels/decoding.md#more-tokens says what
// depends on them.
struct LinearTime {
  double call, tile;
};
constexpr LinearTime kSplitTimes[3] = {{13500, 14.8}, {17500, 26}, {23500, 59}};
// The share of all scores that is left out under causality, if there are as many rows as keys.
constexpr double kLeftOutBySplits = 0.125;
double split_time(const FwdPlan& plan) {
  const FwdParams& p = plan.kernel;
  const LinearTime& time = kSplitTimes[plan.unit.head_dim_tile <= 64 ? 0 : plan.unit.head_dim_tile <= 128 ? 1 : 2];
  const double keys = ceil_div(p.seqlen_k, 128);
  const double scores = static_cast<double>(p.batch) * p.nheads * ceil_div(p.seqlen_q, 128) * keys;
  const double left_out = p.is_causal ? kLeftOutBySplits * std::min(1.0, double{1} * p.seqlen_q / p.seqlen_k) : 0;
  return time.call + time.tile * (1 - left_out) * scores;
}

// Limits on the shares into which Hopper's kernels split the keys. With more than kMostWavesToSplit row blocks for
// each SM there is nothing to gain. Partial results may be as large as q, k and v, or kSmallParts bytes if that is
// more. The launch that combines them also costs the host time, and so has to save kWorthALaunch nanoseconds on the
// device.
constexpr int64_t kMostWavesToSplit = 4, kSmallParts = 16 << 20;
constexpr double kWorthALaunch = 2500;
// Only the device knows how many keys a mask leaves. One in kMaskedOf keys is assumed to be masked, as with padding.
constexpr int32_t kMaskedOf = 4;
// Whether there is a persistent kernel that splits the keys: see may_split_keys() in attention/sm90/fwd_traits.cuh.
bool may_split_and_stay(const FwdPlan& plan) { return !plan.kernel.packing.is_active() && plan.kernel.window == 0; }
int32_t most_shares(const FwdParams& p, int32_t key_tiles) {
  const int64_t rows = int64_t{p.batch} * p.nheads * p.seqlen_q, keys = int64_t{p.batch} * p.nheads_k * p.seqlen_k;
  const int64_t row_bytes = int64_t{p.head_dim} * sizeof(float);
  const int64_t bytes = std::max<int64_t>(kSmallParts, (rows + 2 * keys) * row_bytes / 2);
  const int64_t by_bytes = bytes / std::max<int64_t>(1, rows * row_bytes);
  return static_cast<int32_t>(std::min<int64_t>({kMaxSplits, key_tiles, by_bytes}));
}
int32_t shares_that_stay(const FwdPlan& plan, const FwdTile& tile, int32_t asked_for, const Device& device) {
  FwdParams p = plan.kernel;  // with lists: as if the listed keys were all keys
  const bool gathered = is_gathered(plan.walk);
  if (is_selection(plan.walk)) {
    p.seqlen_k = std::min(p.seqlen_k, p.keys.capacity);
    p.is_causal = false;  // a list has only keys that causality leaves
  } else if (gathered) {
    p.seqlen_k -= p.seqlen_k / kMaskedOf;
  }
  const int32_t key_tiles = std::max(1, ceil_div(p.seqlen_k, tile.block_n));
  if (asked_for > 0) return std::min({asked_for, key_tiles, kMaxSplits});
  if (row_blocks(p, tile) > kMostWavesToSplit * device.num_sms) return 1;
  int32_t best = 1;
  double best_time = sm90_fwd_time(p, 1, device.num_sms, gathered) - kWorthALaunch;
  const int32_t most = most_shares(p, key_tiles);
  for (int32_t count = 2; count <= most; ++count) {
    const double time = sm90_fwd_time(p, count, device.num_sms, gathered);
    if (time >= best_time) continue;
    best = count;
    best_time = time;
  }
  return best;
}

// Persistent kernels do not split the keys of windows. Where the sm80 kernels would, the persistent ones are still
// faster if there is a row block for four of ten SMs; under causality, where the last row block has twice the keys of
// the average, for eight.
bool keeps_busy(const FwdPlan& plan, const FwdTile& tile, const Device& device) {
  return 10 * row_blocks(plan.kernel, tile) >= (plan.kernel.is_causal ? 8 : 4) * int64_t{device.num_sms};
}

// Whether each persistent thread block may take row blocks at a fixed distance from one another, without a counter
// that has to be cleared first: it has at most two of them, and all row blocks take the same time. With more, thread
// blocks that share an SM get out of step, which a counter evens out.
bool suits_fixed_order(const FwdPlan& plan, Level level, int64_t items) {
  const bool is_even = level == Level::kPlain && !is_gathered(plan.walk) && !plan.kernel.is_causal;
  return is_even && items <= 2 * plan.choice.blocks;
}

// Chooses the unit, the least general of its kernels that can do what is asked for, the splits and the thread blocks.
// finds_window: only kernels that find the window of keys by themselves. Returns false if there are none.
bool choose_kernel(FwdPlan& plan, int32_t asked_for, bool finds_window, const Device& device) {
  FwdParams& p = plan.kernel;
  const bool gathered = is_gathered(plan.walk);
  p.has_mask = has_mask(plan.mask) && !gathered;
  const Level level = fwd_level(p, p.has_mask, gathered);
  int32_t shares = 1;
  const KernelSet* kernels = find_unit_set(*device.kernels, plan.unit, [&](const KernelSet& set) {
    if (finds_window && !set.finds_windows) return false;
    if (set.serves_fwd != nullptr && !set.serves_fwd(p, level, gathered)) return false;
    if (!set.is_persistent) return true;
    if (may_split_and_stay(plan)) {
      FwdParams split = p;
      split.num_splits = kMaxSplits;  // all kernels that split the keys have the same tiles
      shares = shares_that_stay(plan, set.fwd_tile(split, level, gathered), asked_for, device);
      split.num_splits = shares;
      return resident_items(p, set.fwd_tile(split, level, gathered)) * shares <= kMostBlocks;
    }
    const FwdTile tile = set.fwd_tile(p, level, gathered);
    if (resident_items(p, tile) > kMostBlocks) return false;
    return wanted_splits(plan, tile, asked_for, device) == 1 || (asked_for == 0 && keeps_busy(plan, tile, device));
  });
  if (kernels == nullptr) return false;
  plan.choice.tiles = kernels->tiles;
  plan.choice.level = level;
  if (kernels->is_persistent) p.num_splits = shares;
  plan.tile = plan.choice.fwd_tile = kernels->fwd_tile(p, level, gathered);
  if (kernels->is_persistent) {
    const int64_t items = resident_items(p, plan.tile) * p.num_splits;
    plan.choice.blocks = std::min<int64_t>(items, int64_t{device.num_sms} * plan.tile.blocks_per_sm);
    plan.counts_work = items > plan.choice.blocks && !suits_fixed_order(plan, level, items);
    return true;
  }
  const int64_t blocks = row_blocks(p, plan.tile);
  p.num_splits = wanted_splits(plan, plan.tile, asked_for, device);
  plan.choice.blocks = blocks * p.num_splits;
  return true;
}

// For a selection that is a window of keys: chooses kernels that find the window by themselves. Returns false if
// there are none for this call.
bool choose_window_kernel(FwdPlan& given, const dmattn_fwd_params& p, const Problem& x, const Device& device) {
  FwdPlan plan = given;
  plan.kernel.window = read_window(p, x);
  plan.kernel.bias = read_bias(p.bias, x, /*gathered=*/false);
  if (!choose_kernel(plan, p.num_splits, /*finds_window=*/true, device)) return false;
  given = plan;
  return true;
}

// The last thread block of a row block reads a partial result from each split for each of its rows, about as fast as
// a thread block reads keys. With more splits than this, combining them would take longer than they save.
int32_t most_splits_to_combine(int32_t keys, int32_t rows) {
  return std::max(1, static_cast<int32_t>(std::sqrt(static_cast<double>(keys) / rows)));
}

void choose_decode_kernel(FwdPlan& plan, int32_t asked_for, const Device& device) {
  FwdParams& p = plan.kernel;
  const int32_t keys = is_selection(plan.walk) ? std::min(p.seqlen_k, p.keys.capacity) : p.seqlen_k;
  plan.choice.tiles = resolve_unit(*device.kernels, plan.unit).tiles;
  const int32_t block_rows = plan.rows_of_decode_block();
  p.num_splits = choose_decode_splits(p, keys, plan.unit.head_dim_tile, asked_for, device, block_rows);
  if (p.token_rows.count > 1 && asked_for == 0) {
    p.num_splits = std::min(p.num_splits, most_splits_to_combine(keys, std::min(p.seqlen_q, block_rows)));
  }
  plan.choice.level = decode_level(p, plan.unit.head_dim_tile, /*from_cache=*/false);
  plan.choice.blocks = decode_blocks(p, block_rows);
}

// Whether all rows see the same keys, but for causality, and have the same bias.
bool has_keys_for_all_rows(const FwdPlan& plan) {
  const BiasKind bias = plan.kernel.bias.kind;
  return plan.walk != KeyWalk::kRowBlockLists && (plan.walk == KeyWalk::kMaskList || !has_mask(plan.mask)) &&
         (bias == BiasKind::kNone || bias == BiasKind::kKey);
}

// The rows of a group's heads, put together, fill fewer row blocks. What that saves, in scores times head_dim, has to
// be worth the launch that combines partial results, and fewer thread blocks that read keys. It has to save
// kWorthLeavingHopper in place of kernels for Hopper that do not split the keys, as these compute a row faster than
// the sm80 kernels. Otherwise, kWorthGroupRows is enough.
constexpr int64_t kWorthGroupRows = int64_t{5} << 27, kWorthLeavingHopper = int64_t{1} << 31;
constexpr int64_t kMostGroupRows = int64_t{1} << 30;  // rows are counted in 32 bits, up to the end of the last tile

// Up to kMostDecodeRows rows of a head, the decode kernel is the faster one. The rows of a group's heads together may
// take two of its row blocks, each of which reads K and V once; the forward kernel reads them for each head. They may
// take only one if there is a single kv head with fewer bytes of K and V than kMinBytesOfTwoBlocks: the L2 cache then
// delivers these to each head as fast, and more thread blocks end sooner. They may also take only one with few kv
// heads and many keys: there the forward kernel puts the rows of a group together, too, and has more of them in
// flight. At head_dim 256, where a row block of the decode kernel has 16 rows, the forward kernel then takes all of
// these calls.
constexpr int32_t kMostDecodeRows = 16;
constexpr int64_t kMinBytesOfTwoBlocks = 8 << 20;
constexpr int64_t kFewHeads = 16, kManyKeys = 4096, kForwardRows = 128;
int32_t most_decode_group_rows(const FwdPlan& plan) {
  const FwdParams& p = plan.kernel;
  const int64_t heads = int64_t{p.batch} * p.nheads_k, head_dim_tile = plan.unit.head_dim_tile;
  const bool is_plain = plan.walk == KeyWalk::kTiled && fwd_level(p, has_mask(plan.mask), false) == Level::kPlain;
  const int64_t saved = int64_t{p.batch} * (p.nheads - p.nheads_k) * kForwardRows * p.seqlen_k * p.head_dim;
  const bool suits_forward = is_plain && heads <= kFewHeads && p.seqlen_k >= kManyKeys && saved >= kWorthLeavingHopper;
  if (suits_forward && head_dim_tile > 128) return 0;
  const bool fills_two = heads > 1 || int64_t{p.seqlen_k} * p.head_dim * 4 >= kMinBytesOfTwoBlocks;
  return (fills_two && !suits_forward ? 2 : 1) * token_rows(static_cast<int>(head_dim_tile));
}

// Chooses the decode kernel where the rows of a head, or of the heads of a group, are few enough to read keys
// together. may_share: the heads of a group see the same keys.
void choose_decode_rows(FwdPlan& plan, const Problem& x, bool may_share) {
  FwdParams& p = plan.kernel;
  if (x.packing.is_active()) return;
  if (x.seqlen_q == 1) {
    plan.unit.direction = Direction::kDecode;
    if (!may_share || x.head_ratio == 1) return;
    pack_group_as_rows(p);
    if (p.bias.kind != BiasKind::kNone) p.bias.kind = choose_bias_kind(p.bias, plan.unit.gathered);
    return;
  }
  const bool shares_bias = p.bias.kind == BiasKind::kNone || p.bias.head_ratio % x.head_ratio == 0;
  const bool packs = x.head_ratio > 1 && may_share && shares_bias;
  const int64_t rows = int64_t{x.seqlen_q} * (packs ? x.head_ratio : 1);
  const int32_t most = packs ? most_decode_group_rows(plan) : kMostDecodeRows;
  if (rows > most || !has_keys_for_all_rows(plan)) return;
  plan.unit.direction = Direction::kDecode;
  if (packs) {
    p.token_rows = pack_tokens_as_rows(p, x.seqlen_q);
  } else {
    p.token_rows = {x.seqlen_q, Divisor(1), p.q_stride.row, p.out_stride.row, p.lse_stride.row};
  }
}

// The sm80 kernels replace Hopper's own if they then have at least this many times fewer rows, in whole row blocks.
constexpr int64_t kFewerRowsThanHoppers = 3;

// Puts the rows of a group's heads together in the sm80 kernels, for calls without a bias and a mask: K and V are
// read once for all of them.
void choose_group_rows(FwdPlan& plan, const Problem& x, int32_t asked_for, const Device& device) {
  if (x.head_ratio == 1 || x.packing.is_active() || plan.walk != KeyWalk::kTiled) return;
  if (plan.choice.level != Level::kPlain || int64_t{x.seqlen_q} * x.head_ratio > kMostGroupRows) return;
  FwdPlan packed = plan;
  FwdParams& p = packed.kernel;
  const auto splits_keys = [](const KernelSet& set) { return !set.is_persistent; };
  const KernelSet* kernels = find_unit_set(*device.kernels, packed.unit, splits_keys);
  if (kernels == nullptr) return;
  p.token_rows = pack_tokens_as_rows(p, x.seqlen_q);
  packed.choice.tiles = kernels->tiles;
  packed.tile = kernels->fwd_tile(p, packed.choice.level, /*gathered=*/false);
  const int64_t rows = row_blocks(p, packed.tile) * packed.tile.block_m;
  const int64_t rows_before = row_blocks(plan.kernel, plan.tile) * plan.tile.block_m;
  const bool leaves_hopper = packed.unit.arch != plan.unit.arch;
  // If Hopper's own kernels would split the keys, the estimated times decide.
  const bool leaves_shares = leaves_hopper && asked_for == 0 && plan.kernel.num_splits > 1;
  if (leaves_shares) {
    if (sm90_fwd_time(plan.kernel, plan.kernel.num_splits, device.num_sms) <= split_time(packed)) return;
  } else if (leaves_hopper && rows * kFewerRowsThanHoppers > rows_before) {
    return;
  }
  const int64_t saved = (rows_before - rows) * p.seqlen_k * p.head_dim;
  if (saved < (leaves_hopper && !leaves_shares ? kWorthLeavingHopper : kWorthGroupRows)) return;
  p.num_splits = wanted_splits(packed, packed.tile, asked_for, device);
  packed.choice.blocks = row_blocks(p, packed.tile) * p.num_splits;
  packed.counts_work = false;
  plan = packed;
}

}  // namespace

Level fwd_level(const FwdParams& p, bool has_dense_mask, bool gathered) {
  if (p.bias.kind == BiasKind::kDirect) return Level::kFull;
  // The plain kernel takes the maximum of the raw products, which needs a positive scale; the others scale first.
  const bool is_plain = p.softcap == 0.f && p.bias.kind == BiasKind::kNone && !has_dense_mask && p.window == 0 &&
                        p.softmax_scale > 0.f && p.vec_q && p.vec_k && p.vec_v && p.vec_out;
  if (!is_plain) return Level::kGeneral;
  if (!p.packing.is_active()) return Level::kPlain;
  return gathered ? Level::kGeneral : Level::kPacked;
}

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
  double fills[kMaxSplits + 1] = {};  // 0 where useless
  double best = 0;
  for (int32_t splits = 1; splits <= most; ++splits) {
    if (!is_useful(splits)) continue;
    fills[splits] = fill(splits);
    best = std::max(best, fills[splits]);
  }
  int32_t splits = 1;
  while (fills[splits] < 0.85 * best) ++splits;
  return splits;
}

namespace {

// With packed sequences, kernels that are not persistent have as many thread blocks for each sequence as the longest
// needs.
void check_blocks(const FwdPlan& plan, const Problem& x) {
  if (plan.choice.blocks <= kMostBlocks) return;
  fail(
      DMATTN_ERROR_UNSUPPORTED,
      "the call takes %lld thread blocks, for %d rows of each of %d sequences and %d heads; wanted at most %lld: fewer "
      "sequences or heads in a call%s",
      static_cast<long long>(plan.choice.blocks), x.seqlen_q, x.batch, x.nheads, static_cast<long long>(kMostBlocks),
      x.packing.is_active() ? ", or a lower max_seqlen_q" : "");
}

// `p` in the form of with_batch().
FwdPlan plan_batched_fwd(const dmattn_fwd_params& p, PerKey per_key, const Device& device) {
  const Problem x = read_problem(p);
  FwdPlan plan;
  plan.unit.dtype = x.dtype;
  plan.unit.head_dim_tile = x.dim_tile;
  plan.is_empty = x.batch == 0 || x.rows_q == 0 || x.nheads == 0;
  plan.no_keys = x.rows_k == 0;
  set_tensors(plan.kernel, p, x);
  if (plan.is_empty || plan.no_keys) return plan;

  plan.mask = read_mask(p.mask, x, per_key.mask);
  if (choose_short_kernel(plan, p, x, device)) return plan;
  const bool selected = has_selection(p.selection);
  if (has_known_window(p, x) && choose_window_kernel(plan, p, x, device)) {
    place(plan, nullptr);
    return plan;
  }
  if (selected) plan.kernel.keys = read_selection(p.selection, x);
  plan.walk = choose_walk(plan.mask, plan.kernel.keys, selected, has_dense_rows(p.bias, x));
  const bool gathered = plan.unit.gathered = is_gathered(plan.walk);
  plan.kernel.bias = read_bias(p.bias, x, gathered);
  plan.kernel.packing.bias_col_stride = packed_bias_stride(plan.kernel.bias, per_key.bias, gathered);
  // If each query head has a mask or a list of its own, the rows of a group see different keys, and cannot share a
  // row block.
  const int32_t mask_heads = selected ? plan.kernel.keys.heads : has_mask(plan.mask) ? plan.mask.heads : 1;
  choose_decode_rows(plan, x, /*may_share=*/mask_heads == 1 || mask_heads == x.nheads_k);
  if (selected) plan.kernel.keys.head_ratio = plan.kernel.nheads / plan.kernel.keys.heads;
  if (plan.is_decode()) {
    choose_decode_kernel(plan, p.num_splits, device);
  } else if (!choose_kernel(plan, p.num_splits, /*finds_window=*/false, device)) {
    fail_without_unit(plan.unit);
  } else {
    choose_group_rows(plan, x, p.num_splits, device);
  }
  check_blocks(plan, x);
  place(plan, nullptr);
  return plan;
}

}  // namespace

FwdPlan plan_fwd(const dmattn_fwd_params& given, const Device& device) {
  return in_batched_form(
      given, [&](const dmattn_fwd_params& p, PerKey per_key) { return plan_batched_fwd(p, per_key, device); });
}

void place(FwdPlan& plan, void* base) {
  if (plan.is_empty || plan.no_keys || plan.is_short()) return;
  FwdParams& p = plan.kernel;
  Workspace workspace(base);
  const bool has_parts = plan.is_decode() ? p.num_splits > 1 : plan.leaves_parts();
  if (plan.is_decode() && has_parts) plan.arrivals = workspace.take<uint64_t>(plan.choice.blocks / p.num_splits);
  if (plan.walk == KeyWalk::kMaskList) {
    p.keys = layout_key_list(plan.mask, workspace);
    p.keys.head_ratio = p.nheads / p.keys.heads;
  } else if (has_mask(plan.mask)) {
    p.mask = layout_mask_bits(plan.mask, workspace);
    p.mask.head_ratio = p.nheads / p.mask.heads;
  }
  if (has_parts) place_partials(p, workspace);
  if (plan.counts_work) p.work_counter = workspace.take<int32_t>(1);
  plan.workspace_bytes = workspace.bytes();
}

}  // namespace dmattn
