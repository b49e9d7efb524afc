// Estimated times of the forward kernels for Hopper, in nanoseconds, by which tiles and shares of the keys are
// chosen. Fitted to times on an H200 (docs/kernels/forward.md#which-of-them).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "sm90_changed_scores.h"
#include "tiles.h"

namespace dmattn {

constexpr int32_t kSm90Sms = 132;

// The work of a call. blocks: items, each a row block with one of its shares of the keys. tiles: tiles of keys that
// all items meet together. longest, shortest: those of the item that meets the most, and of the one that meets the
// fewest.
struct Sm90FwdWork {
  double blocks, tiles, longest, shortest;
};
inline Sm90FwdWork sm90_fwd_work(const FwdParams& p, const Sm90FwdTile& tile, int32_t shares) {
  const int32_t block_m = tile.block_m();
  const int32_t key_tiles = std::max(1, (p.seqlen_k - 1) / tile.block_n + 1);
  const double longest = (key_tiles - 1) / shares + 1;
  const double row_blocks = double{1} * p.batch * p.nheads * ((p.seqlen_q - 1) / block_m + 1);
  if (!p.is_causal) return {row_blocks * shares, row_blocks * shares * longest, longest, longest};
  // The last row sees all keys, and each row before it one key less than the next.
  const double seeing = std::min(p.seqlen_q, p.seqlen_k), before = p.seqlen_k - seeing;
  const auto tiles_of = [&](double keys) { return std::min<double>(key_tiles, keys / tile.block_n + 0.5); };
  const double share_of_rows = seeing / std::max(p.seqlen_q, 1);
  return {row_blocks * shares, row_blocks * share_of_rows * tiles_of(before + (seeing + block_m) / 2), longest,
          tiles_of(before) / shares};
}

// The time if `resident` thread blocks run at once. Without causality all items take the same time, and an incomplete
// wave takes as long as a full one. Under causality thread blocks that are done take the next items, the longest
// first, and at the end some have nothing left to do for a time of `tail`. If there are n waves, at least one thread
// block has n items that are no shorter than the first one of the last wave.
inline double sm90_waves_time(const Sm90FwdWork& work, bool is_causal, double block, double tile, double tail,
                              double resident) {
  const double waves = std::ceil(work.blocks / resident);
  const auto time_of = [&](double tiles) { return block + tiles * tile; };
  if (!is_causal || waves <= 1) return waves * time_of(work.longest);
  const double place = (waves - 1) * resident / work.blocks;
  const double in_last_wave = work.longest - (work.longest - work.shortest) * place;
  const double all = (work.blocks * block + work.tiles * tile) / resident + tail;
  return std::max({time_of(work.longest), waves * time_of(in_last_wave), all});
}

// --- shapes at head_dim 64 ------------------------------------------------------------------------------------------

inline double sm90_tall_fwd_time(const Sm90FwdWork& work, bool is_causal, int32_t num_sms) {
  return 6650 + sm90_waves_time(work, is_causal, 1970, 1462, 3990, num_sms);
}
inline double sm90_short_fwd_time(const Sm90FwdWork& work, bool is_causal, int32_t num_sms) {
  return 6130 + sm90_waves_time(work, is_causal, 1740, 1155, 2230, num_sms);
}
// Two thread blocks on an SM take less than twice as long as one alone. With more than two waves they are no longer
// in step, so that waves are not rounded up. Under causality the longest item shares its SM with the one that comes
// num_sms items later.
inline double sm90_two_blocks_fwd_time(const Sm90FwdWork& work, bool is_causal, int32_t num_sms) {
  constexpr double kCall = 6840, kBlock = 894, kTile = 1322, kTail = 950, kAlone = 0.585;
  const double resident = 2.0 * num_sms;
  const double longest = kBlock + work.longest * kTile;
  if (work.blocks <= num_sms) return kCall + kAlone * longest;
  if (!is_causal && work.blocks > 2 * resident) return kCall + longest * work.blocks / resident;
  if (!is_causal) return kCall + std::ceil(work.blocks / resident) * longest;
  const double all = (work.blocks * kBlock + work.tiles * kTile) / resident + kTail;
  const double shared = 1 - num_sms / work.blocks * (1 - work.shortest / work.longest);
  return kCall + std::max((kAlone + (1 - kAlone) * shared) * longest, all);
}

inline double sm90_narrow_fwd_time(const FwdParams& p, Sm90FwdShape shape, int32_t num_sms) {
  const Sm90FwdWork work = sm90_fwd_work(p, sm90_fwd_tile(64, shape), 1);
  return shape == Sm90FwdShape::kTall    ? sm90_tall_fwd_time(work, p.is_causal, num_sms)
         : shape == Sm90FwdShape::kShort ? sm90_short_fwd_time(work, p.is_causal, num_sms)
                                         : sm90_two_blocks_fwd_time(work, p.is_causal, num_sms);
}

// Wide heads: the time of a tile of few keys over that of a tile of many. In tiles of few keys each key takes longer.
// Of 39 calls, those for which tiles of few keys are chosen took 0.78 to 0.95 of the time
// (docs/kernels/forward.md#which-of-them).
constexpr double sm90_few_keys_time(int head_dim) { return head_dim <= 192 ? 0.64 : 0.86; }
// Whether tiles of few keys take less time. Under causality a part of the last tile of a row block is empty anyway.
inline bool sm90_suits_few_keys(const FwdParams& p, int head_dim) {
  if (p.is_causal && p.seqlen_q > 1) return false;
  const auto tiles = [&](Sm90FwdShape shape) { return (p.seqlen_k - 1) / sm90_fwd_tile(head_dim, shape).block_n + 1; };
  return tiles(Sm90FwdShape::kFewKeys) * sm90_few_keys_time(head_dim) < 0.97 * tiles(Sm90FwdShape::kShort);
}

// The shape of the tiles without softcap, mask and bias. Both the plan and the launch call this and have to get the
// same shape, so that it always assumes the number of SMs of an H100 or H200. The lengths of packed sequences are
// known on the device only. Short ones leave more of tall tiles empty.
inline Sm90FwdShape sm90_fwd_shape(const FwdParams& p) {
  const int head_dim = sm90_fwd_head_dim(p.head_dim);
  if (head_dim > 64) {
    const bool is_wide = head_dim > 128 && !p.packing.is_active();
    return is_wide && sm90_suits_few_keys(p, head_dim) ? Sm90FwdShape::kFewKeys : Sm90FwdShape::kShort;
  }
  if (p.packing.is_active()) return sm90_has_few_rows(p.seqlen_q) ? Sm90FwdShape::kTwoBlocks : Sm90FwdShape::kTall;
  const double tall = sm90_narrow_fwd_time(p, Sm90FwdShape::kTall, kSm90Sms);
  const double narrow = sm90_narrow_fwd_time(p, Sm90FwdShape::kShort, kSm90Sms);
  const double two = sm90_narrow_fwd_time(p, Sm90FwdShape::kTwoBlocks, kSm90Sms);
  if (two <= std::min(tall, narrow)) return Sm90FwdShape::kTwoBlocks;
  return narrow <= tall ? Sm90FwdShape::kShort : Sm90FwdShape::kTall;
}

// --- shares of the keys ---------------------------------------------------------------------------------------------

//   call, split_call  a launch; a launch with shares and the one that combines their results
//   block, tile       an item; each of its tiles of keys
//   busy              by which fraction a tile takes longer if every SM has an item than if only one has
//   megabyte          each MB of partial results
//   bytes             bytes of K and V that are read in a nanosecond
struct Sm90FwdTime {
  double call, split_call, block, tile, busy, megabyte, bytes;
};
constexpr Sm90FwdTime sm90_fwd_time_of(int head_dim) {
  return head_dim <= 64    ? Sm90FwdTime{6130, 7700, 1660, 1185, 0.06, 480, 4380}
         : head_dim <= 96  ? Sm90FwdTime{3510, 7000, 3370, 1270, 0.15, 400, 3790}
         : head_dim <= 128 ? Sm90FwdTime{4140, 6850, 3690, 1313, 0.32, 410, 4170}
         : head_dim <= 192 ? Sm90FwdTime{6900, 9950, 2440, 1348, 0.51, 410, 4000}
                           : Sm90FwdTime{7930, 11460, 1320, 1448, 0.29, 360, 3670};
}
// At the end of a launch some SMs have nothing left to do, for the time of so many tiles.
constexpr double kSm90FwdTail = 2;

// The same if a mask, a bias or softcap changes the scores: the time of an item, and of a tile by what changes its
// scores (any: softcap beside a mask or a bias, or a scale that is not positive). Fitted to 3287 calls over 512 to
// 32768 keys, of 1 to 260 row blocks with 1 to 64 shares.
struct Sm90ChangesTime {
  double block, softcap, mask, key_bias, tile_bias, fp32_bias, any;
};
constexpr Sm90ChangesTime sm90_changes_time_of(int head_dim) {
  return head_dim <= 64    ? Sm90ChangesTime{1300, 2320, 1600, 1530, 1580, 1700, 2700}
         : head_dim <= 128 ? Sm90ChangesTime{2600, 2720, 1780, 1560, 1720, 2060, 3000}
         : head_dim <= 192 ? Sm90ChangesTime{3700, 2720, 1350, 1260, 1370, 1520, 2900}
                           : Sm90ChangesTime{5200, 2720, 1640, 1590, 1620, 1880, 2900};
}
// The time of a tile of the kernel for a bias for each key alone over that of a tile of the kernel for such a bias
// beside a mask, which has fewer keys at 192 and more columns at 96. From long calls.
constexpr double sm90_key_bias_alone_time(int head_dim) {
  return head_dim <= 64 ? 1 : head_dim <= 96 ? 0.85 : head_dim <= 128 ? 0.92 : head_dim <= 192 ? 1.1 : 0.85;
}
// The time of a tile with a mask beside the bias, and of a tall tile, over that of a short one with a bias alone.
constexpr double kSm90MaskBesideBias = 1.25, kSm90TallBias = 1.12;

inline bool sm90_changes_scores(const FwdParams& p) {
  return p.softcap > 0.f || p.has_mask || p.bias.kind != BiasKind::kNone || !(p.softmax_scale > 0.f);
}
inline Sm90FwdTime sm90_changed_fwd_time_of(const FwdParams& p, int32_t shares, bool is_tall) {
  const Sm90ChangesTime times = sm90_changes_time_of(p.head_dim);
  const BiasKind bias = p.bias.kind;
  double tile = bias == BiasKind::kKey      ? times.key_bias
                : bias == BiasKind::kTile   ? times.tile_bias
                : bias == BiasKind::kDirect ? times.fp32_bias
                                            : times.mask;
  if (p.has_mask && bias != BiasKind::kNone) tile *= kSm90MaskBesideBias;
  if (is_tall) tile *= kSm90TallBias;
  if (sm90_has_key_bias_alone(p, shares)) tile *= sm90_key_bias_alone_time(sm90_fwd_head_dim(p.head_dim));
  if (has_plain_softcap(p)) {
    tile = times.softcap;
  } else if (p.softcap > 0.f || !(p.softmax_scale > 0.f)) {
    tile = times.any;
  }
  return {6000, 9300, times.block, tile, 0.06, 430, 3000};
}

// Over lists of keys, with or without a bias for each key: fitted to 2052 calls of 1 to 260 row blocks. Each share
// adds kSm90ListShare to the time of a call that has several, as its thread blocks read the list as well.
constexpr Sm90FwdTime sm90_list_fwd_time_of(int head_dim) {
  return head_dim <= 64    ? Sm90FwdTime{6000, 9900, 3900, 1400, 0.06, 150, 3000}
         : head_dim <= 128 ? Sm90FwdTime{6000, 10400, 4300, 1680, 0.06, 410, 3000}
         : head_dim <= 192 ? Sm90FwdTime{6000, 9300, 5700, 1540, 0.06, 470, 3000}
                           : Sm90FwdTime{6000, 8900, 4800, 1415, 0.06, 510, 3000};
}
constexpr double kSm90ListShare = 80;

// The time of a call whose keys are split into `shares` shares, on a GPU with num_sms SMs. Over lists seqlen_k is the
// length of the lists.
inline double sm90_fwd_time(const FwdParams& p, int32_t shares, int32_t num_sms, bool gathered = false) {
  const int head_dim = sm90_fwd_head_dim(p.head_dim);
  Sm90FwdTime time;
  Sm90FwdTile tile;
  if (gathered) {
    const Sm90ListTile of_list = sm90_list_tile(sm90_list_head_dim(p.head_dim), /*is_short=*/false);
    tile = {kSm90ListRows / 64, of_list.block_n, of_list.stages};
    time = sm90_list_fwd_time_of(p.head_dim);
  } else if (sm90_changes_scores(p)) {
    tile = sm90_changed_fwd_tile(p, shares);
    time = sm90_changed_fwd_time_of(p, shares, /*is_tall=*/tile.consumers > 2);
  } else {
    const Sm90FwdShape shape = shares == 1 ? sm90_fwd_shape(p) : Sm90FwdShape::kShort;
    tile = sm90_fwd_tile(head_dim, shape);
    if (head_dim == 64 && shares == 1) return sm90_narrow_fwd_time(p, shape, num_sms);
    time = sm90_fwd_time_of(head_dim);
    if (shape == Sm90FwdShape::kFewKeys) time.tile *= sm90_few_keys_time(head_dim);
  }
  const Sm90FwdWork work = sm90_fwd_work(p, tile, shares);
  const double step = time.tile * (1 + time.busy * std::min(1.0, work.blocks / num_sms));
  const double steps = sm90_waves_time(work, p.is_causal, time.block, step, kSm90FwdTail * step, num_sms);
  const double kv_bytes = 4.0 * p.batch * p.nheads_k * p.seqlen_k * p.head_dim;
  // Steps and the reading of K and V overlap, but neither hides the other completely: the fourth root of the sum of
  // fourth powers.
  const double loop = std::sqrt(std::hypot(steps * steps, std::pow(kv_bytes / time.bytes, 2)));
  const double part_bytes = 4.0 * p.batch * p.nheads * p.seqlen_q * p.head_dim;
  double combine = shares == 1 ? 0 : time.megabyte * part_bytes * shares / (1 << 20);
  if (gathered && shares > 1) combine += kSm90ListShare * shares;
  return (shares == 1 ? time.call : time.split_call) + loop + combine;
}

}  // namespace dmattn
