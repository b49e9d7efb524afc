// How long the forward kernels of Hopper take, in nanoseconds: tiles and shares of the keys are chosen by it. Fitted to times on an H200 (docs/kernels/forward.md#which-of-them).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "sm90_softcap.h"
#include "tiles.h"

namespace dmattn {

constexpr int32_t kSm90Sms = 132;

// The blocks of rows of a call, each with one of so many shares of the keys, and the tiles of keys that they meet: all of
// them together, and those that meet the most and the fewest.
struct Sm90FwdWork {
  double blocks, tiles, longest, shortest;
};
inline Sm90FwdWork sm90_fwd_work(const FwdParams& p, const Sm90FwdTile& tile, int32_t shares) {
  const int32_t block_m = tile.block_m();
  const int32_t key_tiles = std::max(1, (p.seqlen_k - 1) / tile.block_n + 1);
  const double longest = (key_tiles - 1) / shares + 1;
  const double row_blocks = double{1} * p.batch * p.nheads * ((p.seqlen_q - 1) / block_m + 1);
  if (!p.is_causal) return {row_blocks * shares, row_blocks * shares * longest, longest, longest};
  // The last row sees all keys, each one before it a key less.
  const double seeing = std::min(p.seqlen_q, p.seqlen_k), before = p.seqlen_k - seeing;
  const auto tiles_of = [&](double keys) { return std::min<double>(key_tiles, keys / tile.block_n + 0.5); };
  const double share_of_rows = seeing / std::max(p.seqlen_q, 1);
  return {row_blocks * shares, row_blocks * share_of_rows * tiles_of(before + (seeing + block_m) / 2), longest,
          tiles_of(before) / shares};
}

// With so many thread blocks resident: of equal blocks a part of a wave takes as long as a whole one. Under causality
// those that are done first take the next ones, the longest first, and at the end, for `tail`, some have nothing left. Of
// n waves of blocks at least one thread block has n that are as long as the first of the last wave.
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

// --- shapes of head_dim 64 --------------------------------------------------------------------------------------------

inline double sm90_tall_fwd_time(const Sm90FwdWork& work, bool is_causal, int32_t num_sms) {
  return 6650 + sm90_waves_time(work, is_causal, 1970, 1462, 3990, num_sms);
}
inline double sm90_short_fwd_time(const Sm90FwdWork& work, bool is_causal, int32_t num_sms) {
  return 6130 + sm90_waves_time(work, is_causal, 1740, 1155, 2230, num_sms);
}
// Two thread blocks of an SM take less than twice as long as one. With those of a third wave they are no longer in step.
// Under causality the longest one shares its SM with one that comes as many behind it as there are SMs.
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

// Of wide heads, a tile of few keys over one of many: fewer keys take longer each. Of 39 calls those that were chosen
// by it took 0.78 to 0.95 of the time (docs/kernels/forward.md).
constexpr double sm90_few_keys_time(int head_dim) { return head_dim <= 192 ? 0.64 : 0.86; }
// Whether tiles of few keys take less time. Under causality the last tile of a row block is empty in part in any case.
inline bool sm90_suits_few_keys(const FwdParams& p, int head_dim) {
  if (p.is_causal && p.seqlen_q > 1) return false;
  const auto tiles = [&](Sm90FwdShape shape) { return (p.seqlen_k - 1) / sm90_fwd_tile(head_dim, shape).block_n + 1; };
  return tiles(Sm90FwdShape::kFewKeys) * sm90_few_keys_time(head_dim) < 0.97 * tiles(Sm90FwdShape::kShort);
}

// The host's plan and the launch ask for it, so that it knows of no other number of SMs than that of an H100 or H200.
// How long packed sequences are is known on the device only; of short ones tall tiles waste more.
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

// --- shares of the keys -----------------------------------------------------------------------------------------------

// Of a launch, with the one that combines partial results and without; for each block of rows, for each of its tiles, and
// by how much more for these with an SM for each of them busy than with one alone; for each MB of partial results; and
// bytes of K and V a nanosecond.
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
// Tiles at the end in which some SMs have nothing left.
constexpr double kSm90FwdTail = 2;

// Likewise where a mask, a bias or softcap changes the scores: of a block of rows, and of a tile by what does. Fitted to
// 3287 calls over 512 to 32768 keys, of 1 to 260 row blocks with 1 to 64 shares.
struct Sm90ChangesTime {
  double block, softcap, mask, key_bias, tile_bias, fp32_bias, any;
};
constexpr Sm90ChangesTime sm90_changes_time_of(int head_dim) {
  return head_dim <= 64    ? Sm90ChangesTime{1300, 2320, 1600, 1530, 1580, 1700, 2700}
         : head_dim <= 128 ? Sm90ChangesTime{2600, 2720, 1780, 1560, 1720, 2060, 3000}
         : head_dim <= 192 ? Sm90ChangesTime{3700, 2720, 1350, 1260, 1370, 1520, 2900}
                           : Sm90ChangesTime{5200, 2720, 1640, 1590, 1620, 1880, 2900};
}
// A tile with both, and a tall one, over one with the bias alone and 128 rows.
constexpr double kSm90MaskBesideBias = 1.25, kSm90TallBias = 1.12;

inline bool sm90_changes_scores(const FwdParams& p) {
  return p.softcap > 0.f || p.has_mask || p.bias.kind != BiasKind::kNone || !(p.softmax_scale > 0.f);
}
inline Sm90FwdTime sm90_changed_fwd_time_of(const FwdParams& p, bool is_tall) {
  const Sm90ChangesTime times = sm90_changes_time_of(p.head_dim);
  const BiasKind bias = p.bias.kind;
  double tile = bias == BiasKind::kKey      ? times.key_bias
                : bias == BiasKind::kTile   ? times.tile_bias
                : bias == BiasKind::kDirect ? times.fp32_bias
                                            : times.mask;
  if (p.has_mask && bias != BiasKind::kNone) tile *= kSm90MaskBesideBias;
  if (is_tall) tile *= kSm90TallBias;
  if (has_plain_softcap(p)) {
    tile = times.softcap;
  } else if (p.softcap > 0.f || !(p.softmax_scale > 0.f)) {
    tile = times.any;
  }
  return {6000, 9300, times.block, tile, 0.06, 430, 3000};
}

// Over lists of keys, with a bias for each key or without: fitted to 2052 calls of 1 to 260 row blocks. Each share more
// takes so long, as the blocks that have it look at the list, too.
constexpr Sm90FwdTime sm90_list_fwd_time_of(int head_dim) {
  return head_dim <= 64    ? Sm90FwdTime{6000, 9900, 3900, 1400, 0.06, 150, 3000}
         : head_dim <= 128 ? Sm90FwdTime{6000, 10400, 4300, 1680, 0.06, 410, 3000}
         : head_dim <= 192 ? Sm90FwdTime{6000, 9300, 5700, 1540, 0.06, 470, 3000}
                           : Sm90FwdTime{6000, 8900, 4800, 1415, 0.06, 510, 3000};
}
constexpr double kSm90ListShare = 80;

// Of a call whose row blocks have so many shares of the keys, on a GPU with so many SMs. Over lists seqlen_k is
// their length.
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
    time = sm90_changed_fwd_time_of(p, /*is_tall=*/tile.consumers > 2);
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
  // Neither hides wholly behind the other: the fourth root of the sum of fourth powers.
  const double loop = std::sqrt(std::hypot(steps * steps, std::pow(kv_bytes / time.bytes, 2)));
  const double part_bytes = 4.0 * p.batch * p.nheads * p.seqlen_q * p.head_dim;
  double combine = shares == 1 ? 0 : time.megabyte * part_bytes * shares / (1 << 20);
  if (gathered && shares > 1) combine += kSm90ListShare * shares;
  return (shares == 1 ? time.call : time.split_call) + loop + combine;
}

}  // namespace dmattn
