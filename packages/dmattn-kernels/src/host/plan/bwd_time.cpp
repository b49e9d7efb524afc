// The times are fitted to 2177 calls on an H200, each with several numbers of parts
// (docs/kernels/backward.md#parts-of-a-block-of-keys).
#include "host/plan/bwd_time.h"

#include <algorithm>
#include <cmath>

#include "host/arithmetic.h"
#include "host/plan/bwd_parts.h"

namespace dmattn {
namespace {

// Beside its steps, in microseconds: a round; an item that has all rows and heads of its tile, and one that adds to
// sums with others; the launches around these sums, and each MB of them.
struct RoundTime {
  double round, whole_item, item, sums, megabyte;
};
// A step over 64 rows, by what changes the scores.
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
// At the end some thread blocks have no item: for so long, and for such a share of an item.
constexpr double kTail = 3, kTailOfItem = 0.2;

// Items that go through several heads, each in its own time, read more from memory than is in L2, and add to more
// there, so that a step takes longer. That shows for parts of tiles beside biases of so many bytes for each row and
// key: in 16 bits where steps are short, at head_dim 64, and in fp32 under causality up to 128. It shows for items of
// unequal lengths, too, with several kv heads whose rows are several times what L2 holds. In a fixed order items stay
// in step.
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

// Of pairs that share a bias, for each of the two.
constexpr double kPairedStep = 0.8;

double step_time(const BwdPlan& plan) {
  const BwdParams& p = plan.kernel;
  const StepTime step = bwd_time_of(p.head_dim).step;
  const BiasKind bias = p.bias.kind;
  double time = step.plain;
  if (p.softcap > 0.f) time = std::max(time, step.softcap);
  if (p.window > 0) time = std::max(time, step.window);
  if (has_mask(plan.mask)) time = std::max(time, step.mask);
  if (bias == BiasKind::kKey) time = std::max(time, step.key_bias);
  if (bias == BiasKind::kTile) time = std::max(time, step.tile_bias);
  if (bias == BiasKind::kDirect) time = std::max(time, step.fp32_bias);
  return time * plan.tile.block_m / 64;
}

// The blocks of rows that see tiles of keys: the most, the fewest, and those of all tiles of a head. Under causality
// the last tiles, such a share of them, have the fewer the later they come.
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

// Items of a round: how many, the steps of all of them, of the longest and of the shortest, and the share of the items,
// the last ones, that have fewer the later they come.
struct Items {
  double count, steps, longest, shortest, uneven_share;
};

// Of thread blocks that take the items one by one, the longest first. Of n waves at least one block has n items that
// are as long as the first of the last wave.
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
  const double share = static_cast<double>(heads_of_part) / ceil_div(parts, heads);  // of the rows of a head
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
  // In a fixed order the parts of a tile add one after the other, when all have come to their ends.
  const double turns = plan.kernel.deterministic ? static_cast<double>(parts - 1) * beside.item : 0;
  return beside.round + time + turns + beside.sums + beside.megabyte * bytes / (1 << 20);
}

}  // namespace

double time_of_rounds(const BwdPlan& plan, const BwdRound& round, int64_t parts, bool is_even) {
  const RowsOfTiles rows = rows_of_tiles(plan);
  const BwdRound& all = plan.whole;
  double time = 0;
  // The last ones may have less to do.
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
