// How persistent thread blocks are kept in step, at rows that lie in the L2 cache.
#include <algorithm>

#include "host/arithmetic.h"
#include "host/plan/bwd_parts.h"

namespace dmattn {
namespace {

// Persistent thread blocks should find what they read and add to in the L2 cache. If the rows of a call take more
// than kRowBytesOfL2, this is so only while thread blocks are at the same rows at the same time. Where heads share
// keys, thread blocks are kept in step by turns at dq (suits_turns()) or by mirrored items (suits_mirrored_items()).
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

// Packed sequences of unequal lengths, of which only the device knows which rows see a tile, have to have this many
// pairs of tiles for each thread block.
constexpr int64_t kPackedPairs = 4;

}  // namespace

// Packed sequences of unequal lengths take turns at dq, as in a deterministic call. At each block of rows an item
// then goes through all heads that share its keys, and it stays behind the item before it. At head_dim 64, groups of
// fewer than four heads have too little to do between turns.
bool suits_turns(const BwdPlan& plan, const BwdRound& round) {
  const BwdParams& p = plan.kernel;
  const int32_t fewest_heads = plan.unit.head_dim_tile <= 64 ? 4 : 2;
  return plan.resident_blocks > 0 && plan.tile.cluster == 1 && p.packing.is_active() && p.is_causal &&
         has_unequal_sequences(p) && round.groups >= fewest_heads && leaves_l2(plan);
}

// Other causal calls: a thread block takes items in pairs, which all have the same number of rows (see
// find_mirrored_item()) if there are no fewer rows than keys. As all pairs take the same time, thread blocks without
// one of the last pairs have no work at the end. So pairs are used if that loses no more than a tenth of the time or,
// where only the device knows how many pairs there are, if there are several for each thread block.
bool suits_mirrored_items(const BwdPlan& plan, const BwdRound& round, const Device& device) {
  const BwdParams& p = plan.kernel;
  const Level level = plan.choice.level;
  const bool has_kernel = level == Level::kPlain || level == Level::kPacked || has_key_bias_alone(plan);
  const bool may_mirror = plan.resident_blocks > 0 && has_kernel && plan.tile.cluster == 1 && p.is_causal &&
                          p.window == 0 && round.groups > 1;
  if (p.packing.rows_q(p.seqlen_q) < p.packing.rows_k(p.seqlen_k)) return false;  // all rows see the first tiles
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
