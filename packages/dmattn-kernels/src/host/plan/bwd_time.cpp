// The times are fitted to those of 2177 calls on an H200, each with several numbers of parts
// (docs/kernels/backward.md#parts-of-a-block-of-keys).
#include "host/plan/bwd_time.h"

#include <algorithm>
#include <cmath>

#include "host/arithmetic.h"
#include "host/plan/bwd_parts.h"

namespace dmattn {
namespace {

// Microseconds in addition to those of steps: of a round; of an item that has all rows and heads of its tile; of an
// item that adds to sums with others; of the launches that these sums take; and of each MB of these sums.
struct RoundTime {
  double round, whole_item, item, sums, megabyte;
};
// Microseconds of a step over 64 rows, by what changes the scores.
struct StepTime {
  double plain, softcap, window, mask, key_bias, tile_bias, fp32_bias;
};
struct BwdTime {
  RoundTime beside;
  StepTime step;
};
constexpr BwdTime bwd_time_of(int head_dim) {
  return head_dim <= 64    ? BwdTime{{6, 5.5, 5.5, 4, 1.15}, {1.4, 2.3, 1.65, 2.3, 1.85, 3.0, 2.7}}
         : head_dim <= 128 ? BwdTime{{2, 11, 10.5, 7, 0.9}, {2.2, 3.1, 2.6, 3.2, 2.7, 4.0, 3.85}}
         : head_dim <= 192 ? BwdTime{{2, 11, 10, 5.5, 0.9}, {1.95, 2.2, 2.05, 3.2, 2.4, 3.65, 4.6}}
                           : BwdTime{{3, 20, 12, 11.5, 1.3}, {2.65, 3.1, 2.8, 3.7, 3.2, 4.3, 5.3}};
}
// At the end some thread blocks have no item: for kTail microseconds and kTailOfItem of the time of an average item.
constexpr double kTail = 3, kTailOfItem = 0.2;

// By how much longer a step takes where items go through several heads without staying in step: together they then
// read and add to more than L2 holds. Beside biases for each row and key of at least kBiasBytes, this is so for parts
// of tiles and for items of unequal lengths: up to head_dim 64, where steps are short, and in fp32 under causality up
// to 128. Without such a bias it is so for items of unequal lengths, with at least kDriftingLists kv heads whose rows
// take kRowBytes, several times what L2 holds. In a fixed order items stay in step.
constexpr double kBiasBytes = 32 << 20, kBiasFromMemory = 1.3, kRowBytes = 256 << 20, kRowsFromMemory = 1.2;
constexpr int64_t kDriftingLists = 4;
double drift_of(const BwdPlan& plan, const BwdRound& round, int64_t parts, bool is_uneven) {
  const BwdParams& p = plan.kernel;
  if (p.deterministic) return 1;
  const int64_t lists = int64_t{round.batches} * round.heads_k;
  const bool is_direct = p.bias.kind == BiasKind::kDirect;
  if (is_direct || p.bias.kind == BiasKind::kTile) {
    const double of_heads = std::max(1, round.heads_k * round.groups / p.bias.head_ratio);
    const double biases = (p.bias.batch_stride == 0 ? 1.0 : round.batches) * (p.bias.head_stride == 0 ? 1.0 : of_heads);
    const double bytes = biases * p.seqlen_q * p.seqlen_k * static_cast<double>(element_bytes(p.bias.dtype));
    const bool shows = p.head_dim <= 64 || (is_direct && is_uneven && p.head_dim <= 128);
    return shows && (parts > 1 || is_uneven) && bytes >= kBiasBytes ? kBiasFromMemory : 1;
  }
  const double row_bytes = p.head_dim * (2.0 * element_bytes(plan.unit.dtype) + sizeof(float));
  const double bytes = row_bytes * static_cast<double>(lists * round.groups) * p.seqlen_q;
  const bool drifts = is_uneven && p.window == 0 && lists >= kDriftingLists && plan.tile.cluster == 1;
  return drifts && bytes >= kRowBytes ? kRowsFromMemory : 1;
}

// The time of a step in a pair that shares a bias (find_pairs()), relative to that of a step without pairs; and with a
// bias for each key alone, relative to that of a step without a bias.
constexpr double kPairedStep = 0.8, kKeyBiasAlone = 1.05;

double step_time(const BwdPlan& plan) {
  const BwdParams& p = plan.kernel;
  const StepTime step = bwd_time_of(p.head_dim).step;
  const BiasKind bias = p.bias.kind;
  double time = step.plain;
  if (p.softcap > 0.f) time = std::max(time, step.softcap);
  if (p.window > 0) time = std::max(time, step.window);
  if (has_mask(plan.mask)) time = std::max(time, step.mask);
  if (bias == BiasKind::kKey) {
    time = std::max(time, has_key_bias_alone(plan) ? kKeyBiasAlone * step.plain : step.key_bias);
  }
  if (bias == BiasKind::kTile) time = std::max(time, step.tile_bias);
  if (bias == BiasKind::kDirect) time = std::max(time, step.fp32_bias);
  return time * plan.tile.block_m / 64;
}

// How many blocks of rows see a tile of keys: at most, at least, and added up over all tiles of a head. uneven_share:
// the share of the tiles, the last ones, of which under causality each is seen by fewer rows than the one before it.
struct RowsOfTiles {
  double most, fewest, all, uneven_share;
};
RowsOfTiles rows_of_tiles(const BwdPlan& plan) {
  const BwdParams& p = plan.kernel;
  const double block_m = plan.tile.block_m, tiles = ceil_div(p.seqlen_k, plan.tile.block_n);
  const auto blocks = [&](double rows) { return std::ceil(rows / block_m); };
  if (!p.is_causal) return {blocks(p.seqlen_q), blocks(p.seqlen_q), tiles * blocks(p.seqlen_q), 0};
  double most = blocks(std::min(p.seqlen_q, p.seqlen_k));
  if (p.window > 0) most = std::min(most, blocks(static_cast<double>(p.window) + plan.tile.block_n));
  const double fewest = std::min(most, blocks(plan.tile.block_n));
  const double uneven = std::min(1.0, most * block_m / p.seqlen_k);
  return {most, fewest, tiles * (most - uneven * (most - fewest) / 2), uneven};
}

// Items of a round: their number, the steps of all of them, of the longest and of the shortest item. uneven_share is
// as in RowsOfTiles.
struct Items {
  double count, steps, longest, shortest, uneven_share;
};

// The time of thread blocks that take the items one by one, the longest first. With n waves, at least one thread
// block has n items that are no shorter than the first of the last wave.
double time_of_items(const Items& items, double step, double item, double blocks, bool is_even) {
  const double waves = std::ceil(items.count / blocks), longest = item + step * items.longest;
  const double all = items.count * item + step * items.steps;
  const double evenly = all / blocks + kTail + kTailOfItem * all / items.count;
  if (is_even) return evenly;
  if (items.uneven_share == 0 || waves <= 1) return waves * longest;
  const double behind = 1 - (waves - 1) * blocks / items.count;  // the share of the items from the last wave on
  const double in_last_wave =
      items.shortest + (items.longest - items.shortest) * std::min(1.0, behind / items.uneven_share);
  return std::max({longest, waves * (item + step * in_last_wave), evenly});
}

double time_of_round(const BwdPlan& plan, const BwdRound& round, const RowsOfTiles& rows, int64_t parts, bool is_even) {
  const RoundTime beside = bwd_time_of(plan.kernel.head_dim).beside;
  const int64_t heads = round.groups, lists = int64_t{round.batches} * round.heads_k;
  const int64_t tiles = lists * ceil_div(plan.kernel.seqlen_k, plan.tile.block_n);
  const int64_t heads_of_part = ceil_div(heads, parts);
  // The rows of a part, counted in those of a head.
  const double share = static_cast<double>(heads_of_part) / ceil_div(parts, heads);
  const Items items = {static_cast<double>(tiles * parts), static_cast<double>(lists * heads) * rows.all,
                       std::ceil(rows.most * share), rows.fewest * share, rows.uneven_share};
  double step = step_time(plan);
  if (find_pairs(plan, round, parts) != BiasPairs::kNone) step *= kPairedStep;
  if (heads_of_part > 1 && !is_even) step *= drift_of(plan, round, parts, rows.uneven_share > 0);
  const bool has_sums = parts > 1 || heads < plan.whole.groups;
  const double time = time_of_items(items, step, has_sums ? beside.item : beside.whole_item,
                                    std::max(1, plan.resident_blocks / plan.tile.cluster), is_even);
  if (!has_sums) return beside.round + time;
  const double bytes = 2.0 * sizeof(float) * plan.tile.block_n * plan.unit.head_dim_tile * static_cast<double>(tiles);
  // In a fixed order the parts of a tile add to its sums one after the other, when all have come to their ends.
  const double turns = plan.kernel.deterministic ? static_cast<double>(parts - 1) * beside.item : 0;
  return beside.round + time + turns + beside.sums + beside.megabyte * bytes / (1 << 20);
}

}  // namespace

double time_of_rounds(const BwdPlan& plan, const BwdRound& round, int64_t parts, bool is_even) {
  const RowsOfTiles rows = rows_of_tiles(plan);
  const BwdRound& all = plan.whole;
  double time = 0;
  // Calls f(size, number) for the rounds along one dimension, the last of which may be smaller.
  const auto each = [](int32_t extent, int32_t most, auto&& f) {
    if (extent / most > 0) f(most, extent / most);
    if (extent % most > 0) f(extent % most, 1);
  };
  BwdRound r = round;
  each(all.batches, round.batches, [&](int32_t batches, int32_t of_batches) {
    each(all.heads_k, round.heads_k, [&](int32_t heads_k, int32_t of_heads) {
      each(all.groups, round.groups, [&](int32_t groups, int32_t of_groups) {
        r.batches = batches, r.heads_k = heads_k, r.groups = groups;
        const int64_t its_parts = parts_of_round(plan, round, parts, groups);
        time +=
            static_cast<double>(of_batches) * of_heads * of_groups * time_of_round(plan, r, rows, its_parts, is_even);
      });
    });
  });
  return time;
}

}  // namespace dmattn
