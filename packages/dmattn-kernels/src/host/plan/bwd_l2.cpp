// How thread blocks that stay on their SM are kept at rows that lie in the L2 cache.
#include <algorithm>

#include "host/arithmetic.h"
#include "host/plan/bwd_parts.h"

namespace dmattn {
namespace {

// What blocks that stay read and add to should be found in L2. Rows of so many bytes leave it, unless blocks are at the
// same ones at the same time. Where heads share keys, there are two ways to keep them in step.
constexpr int64_t kRowBytesOfL2 = int64_t{32} << 20;
bool leaves_l2(const BwdPlan& plan) {
  const BwdParams& p = plan.kernel;
  const int64_t row_bytes = p.head_dim * (2 * element_bytes(plan.unit.dtype) + int64_t{sizeof(float)});
  return rows_of(p) * p.packing.rows_q(p.seqlen_q) * row_bytes > kRowBytesOfL2;
}
bool has_unequal_sequences(const BwdParams& p) {
  const int64_t sequences = p.packing.sequences;
  return sequences * p.seqlen_q != p.packing.total_q || sequences * p.seqlen_k != p.packing.total_k;
}

// Pairs of tiles for each block where only the device knows how many rows see them.
constexpr int64_t kPackedPairs = 4;

}  // namespace

// Packed sequences of unequal lengths: turns at dq, as sums in a fixed order have them. Heads that share keys then come
// one after the other at each block of rows, and a thread block stays behind the one before it. At head_dim 64 two
// heads of a group have too little to do between turns.
bool suits_turns(const BwdPlan& plan, const BwdRound& round) {
  const BwdParams& p = plan.kernel;
  const int32_t fewest_heads = plan.unit.head_dim_tile <= 64 ? 4 : 2;
  return plan.resident_blocks > 0 && plan.tile.cluster == 1 && p.packing.is_active() && p.is_causal &&
         has_unequal_sequences(p) && round.groups >= fewest_heads && leaves_l2(plan);
}

// Others: two items, one after the other, that together have as many rows as any other two (see find_mirrored_item()).
// They all take the same time where there are no fewer rows than keys: so they are for calls in which the last ones
// leave no more than a tenth of the blocks without work, or, where only the device knows how many there are, with
// several pairs for each block.
bool suits_mirrored_items(const BwdPlan& plan, const BwdRound& round, const Device& device) {
  const BwdParams& p = plan.kernel;
  const Level level = plan.choice.level;
  const bool may_mirror = plan.resident_blocks > 0 && (level == Level::kPlain || level == Level::kPacked) &&
                          plan.tile.cluster == 1 && p.is_causal && p.window == 0 && round.groups > 1;
  if (p.packing.rows_q(p.seqlen_q) < p.packing.rows_k(p.seqlen_k)) return false;  // the first keys have all rows
  if (!may_mirror || !leaves_l2(plan)) return false;
  const int64_t blocks = device.num_sms;
  if (p.packing.is_active() && has_unequal_sequences(p)) {
    const int64_t tiles = ceil_div(p.packing.total_k, plan.tile.block_n);
    return !suits_turns(plan, round) && round.heads_k * tiles >= 2 * kPackedPairs * blocks;
  }
  const int64_t sequences = p.packing.is_active() ? p.packing.sequences : round.batches;
  const int64_t heads = sequences * round.heads_k, tiles = ceil_div(p.seqlen_k, plan.tile.block_n);
  const int64_t pairs = heads * ceil_div<int64_t>(tiles, 2);
  return static_cast<double>(heads * tiles) >= kBusy * 2 * blocks * ceil_div(pairs, blocks);
}

}  // namespace dmattn
