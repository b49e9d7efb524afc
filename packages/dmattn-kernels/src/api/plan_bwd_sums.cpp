// The fp32 sums of a backward call (dq, dk, dv), and what their size decides: chunks and splits.
#include <algorithm>

#include "api/plan_bwd.h"

namespace dmattn {
namespace {

// Sums of dk and dv for parts of tiles may always take this much.
constexpr int64_t kSlotBytesFloor = int64_t{256} << 10;
// Scratch below this is never worth more rounds of launches: at 10 MB they cost 40%, at 200 MB nothing. Rounds over
// interval lists have no splits to keep the GPU full with: they start later, and only while each has so many blocks for
// each SM (3% at 200 MB, 1% at twice that).
constexpr int64_t kScratchFloor = int64_t{8} << 20;
constexpr int64_t kIntervalScratchFloor = int64_t{64} << 20;
constexpr int64_t kIntervalBlocksPerSm = 8;
// What rounding rows up to whole blocks adds to many short sequences is not worth any number of rounds.
constexpr int64_t kMostRounds = 8;

// What the whole workspace, but for dense_bytes, should keep to: with the log-sum-exp and its rest that the forward
// leaves for the backward, 1.5 times the bytes of q, k and v, less a little.
int64_t scratch_limit(const BwdParams& p) {
  const int64_t rows_q = rows_of(p) * p.packing.rows_q(p.seqlen_q);
  const int64_t rows_k = int64_t{2} * p.packing.slabs(p.batch) * p.nheads_k * p.packing.rows_k(p.seqlen_k);
  const int64_t qkv_bytes = 2 * p.head_dim * (rows_q + rows_k);
  return qkv_bytes * 47 / 32 - int64_t{2 * sizeof(float)} * rows_q;
}

// The call as wide as one chunk is.
BwdParams widest_chunk(const BwdPlan& plan) {
  BwdParams p = plan.kernel;
  p.batch = plan.chunk.batches;
  p.nheads_k = plan.chunk.heads_k;
  p.nheads = p.nheads_k * p.head_ratio;
  return p;
}

bool continues_dkv(const BwdPlan& plan) {
  return plan.chunk.groups < plan.whole.groups || plan.chunk.row_blocks < plan.whole.row_blocks;
}

// --- splits ----------------------------------------------------------------------------------------------------------

// Few key tiles leave much of the GPU idle: their rows (and the heads of the group) are then split between blocks,
// which add to one accumulator for each tile or, when deterministic, have one each that are summed afterwards.
struct Splits {
  int64_t tiles = 0;      // of a chunk
  int64_t most = 1;       // parts that a tile can fall into
  int64_t work = 0;       // blocks wanted
  int64_t slots = 0;      // accumulators wanted
  int64_t slot_size = 0;  // elements of one
  int64_t slot_bytes = 0;
};

Splits wanted_splits(const BwdPlan& plan, const dmattn_bwd_params& p, const Device& device) {
  const BwdParams chunk = widest_chunk(plan);
  Splits splits;
  splits.tiles = key_tiles_of(chunk, plan.tile.block_n);
  // The lengths of packed sequences are known on the device only: so is whether splitting any of them would pay.
  if (chunk.packing.is_active() || plan.intervals || !plan.sequence.is_single()) return splits;
  // Sums that go on through several launches are in a fixed order only if each launch has one block for each.
  if (chunk.deterministic && continues_dkv(plan)) return splits;
  // From 1.7 tiles for each SM on, the unequal blocks of a causal call and the last round of an even one leave less
  // than 15% of the GPU idle. How many tiles a list fills is known on the device only, so that it may always be few.
  if (!plan.gathered && 10 * splits.tiles >= 17 * static_cast<int64_t>(device.num_sms)) return splits;
  const int64_t m_blocks = ceil_div(chunk.seqlen_q, plan.tile.block_m);
  // A deterministic column sum of a head has to come from one block.
  splits.most = chunk.deterministic ? plan.chunk.groups : plan.chunk.groups * m_blocks;
  // Blocks take unequal times when causal: four for each SM even that out.
  splits.work = (chunk.deterministic ? 2 : 4) * static_cast<int64_t>(device.num_sms);
  // Whether lists are split is decided on the device: their sums have to do for both, if they go on.
  if (plan.gathered && continues_dkv(plan)) return splits;
  const int64_t slots = chunk.deterministic ? splits.tiles * splits.most : splits.tiles;
  splits.slots = splits.most <= 1 ? 0 : std::min(slots, splits.work);
  splits.slot_size = static_cast<int64_t>(plan.tile.block_n) * plan.dim_tile;
  const int num_grads = (is_present(p.dk) ? 1 : 0) + (is_present(p.dv) ? 1 : 0);
  splits.slot_bytes = num_grads * splits.slot_size * static_cast<int64_t>(sizeof(float));
  return splits;
}

// dq, and dk and dv where they are added up over several blocks or launches: with what starts as zeros once before.
void place_accumulators(BwdPlan& plan, const dmattn_bwd_params& p, const Splits& splits, Workspace& workspace) {
  BwdParams& kernel = plan.kernel;
  const BwdParams chunk = widest_chunk(plan);
  const BwdChunk& extent = plan.chunk;
  if (extent.row_blocks < plan.whole.row_blocks) {
    kernel.dq_blocks = extent.row_blocks * (kernel.keys.block_rows / plan.tile.block_m);
  }
  const int64_t heads = int64_t{chunk.packing.slabs(chunk.batch)} * chunk.nheads_k * extent.groups;
  const size_t begin = workspace.bytes();
  if (is_present(p.dq)) {
    kernel.dq_accum = workspace.take<float>(heads * kernel.dq_blocks * plan.tile.block_m * plan.dim_tile);
    plan.convert_dq.dq_accum = kernel.dq_accum;
    if (kernel.deterministic) kernel.dq_semaphore = workspace.take<int32_t>(heads * kernel.dq_blocks);
  }
  if (kernel.deterministic && plan.intervals) {
    kernel.dkv_semaphore = workspace.take<int32_t>(int64_t{chunk.batch} * chunk.nheads_k);
  }
  plan.chunk_zero_bytes = workspace.bytes() - begin;
  if (plan.sequence.per_group || plan.intervals || (continues_dkv(plan) && splits.slots == 0)) {
    const int64_t rows =
        int64_t{chunk.packing.slabs(chunk.batch)} * chunk.nheads_k * chunk.packing.rows_k(chunk.seqlen_k);
    if (is_present(p.dk)) kernel.dk_accum = workspace.take<float>(rows * kernel.head_dim);
    if (is_present(p.dv)) kernel.dv_accum = workspace.take<float>(rows * kernel.head_dim);
  }
  plan.dkv_zero_bytes = workspace.bytes() - begin - plan.chunk_zero_bytes;
}

// Slots no more than the rest of the workspace leaves memory for.
int64_t affordable_slots(const BwdPlan& plan, const Splits& splits, size_t workspace_bytes) {
  if (splits.slot_bytes == 0) return splits.slots;
  const int64_t taken = static_cast<int64_t>(workspace_bytes - plan.dense_bytes);
  const int64_t spare = std::max(scratch_limit(plan.kernel), kScratchFloor) - taken;
  return std::min(splits.slots, std::max(spare, kSlotBytesFloor) / splits.slot_bytes);
}

void place_splits(BwdPlan& plan, const dmattn_bwd_params& p, const Splits& splits, Workspace& workspace) {
  BwdParams& kernel = plan.kernel;
  kernel.max_work_items = static_cast<int32_t>(std::min<int64_t>(splits.tiles, INT32_MAX));
  if (splits.most <= 1) return;
  int64_t slots = continues_dkv(plan) ? splits.tiles : affordable_slots(plan, splits, workspace.bytes());
  if (plan.gathered) {
    plan.max_work = static_cast<int32_t>(kernel.deterministic ? slots : splits.work);
    plan.max_tiles = static_cast<int32_t>(std::min<int64_t>(slots, INT32_MAX));
    plan.max_splits = slots == 0 ? 1 : static_cast<int32_t>(std::min<int64_t>(splits.most, plan.max_work));
    kernel.max_work_items = std::max(kernel.max_work_items, plan.max_work);
    if (plan.max_splits == 1 || continues_dkv(plan)) return;
  } else {
    if (slots < splits.tiles) return;
    const int64_t wanted = std::min((kernel.deterministic ? slots : splits.work) / splits.tiles, splits.most);
    kernel.num_splits = static_cast<int32_t>(std::max<int64_t>(1, wanted));
    if (kernel.num_splits == 1) return;
    slots = kernel.deterministic ? splits.tiles * kernel.num_splits : splits.tiles;
  }
  const size_t begin = workspace.bytes();
  if (is_present(p.dk)) kernel.dk_slots = workspace.take<float>(slots * splits.slot_size);
  if (is_present(p.dv)) kernel.dv_slots = workspace.take<float>(slots * splits.slot_size);
  if (!kernel.deterministic) plan.dkv_zero_bytes += workspace.bytes() - begin;
}

// --- chunks ----------------------------------------------------------------------------------------------------------

// `share` of the call's (batch, kv head) pairs, evened out between the chunks. Packed sequences have no batches to
// share out: their arrays go through all of them.
BwdChunk chunk_of_pairs(const BwdChunk& whole, int64_t share, bool is_packed) {
  const auto even = [](int32_t extent, int64_t most) {
    const int32_t chunks = static_cast<int32_t>(ceil_div<int64_t>(extent, most));
    return ceil_div(extent, chunks);
  };
  BwdChunk chunk = whole;
  if (!is_packed) chunk.batches = even(whole.batches, std::max<int64_t>(1, share / whole.heads_k));
  if (share < whole.heads_k) chunk.heads_k = even(whole.heads_k, share);
  return chunk;
}

class ChunkChoice {
 public:
  ChunkChoice(BwdPlan& plan, const dmattn_bwd_params& p, const Device& device, size_t bytes_before)
      : plan_(plan), p_(p), device_(device) {
    const int64_t rest = scratch_limit(plan.kernel) - static_cast<int64_t>(bytes_before - plan.dense_bytes);
    limit_ = std::max(rest, plan.intervals ? kIntervalScratchFloor : kScratchFloor);
  }

  // Leaves the largest chunk that fits in plan.chunk, or the smallest that keeps the GPU busy.
  void make() {
    if (fits(plan_.whole)) return;
    const bool is_packed = plan_.kernel.packing.is_active();
    const int64_t pairs = int64_t{is_packed ? 1 : plan_.whole.batches} * plan_.whole.heads_k;
    for (int64_t rounds = 2; rounds <= std::min(pairs, kMostRounds); ++rounds) {
      if (try_chunk(chunk_of_pairs(plan_.whole, ceil_div(pairs, rounds), is_packed))) return;
    }
    const BwdChunk pair = plan_.chunk;
    const int32_t extent = plan_.intervals ? pair.row_blocks : pair.groups;
    for (int32_t parts = 2; parts <= extent && parts * pairs <= kMostRounds; ++parts) {
      BwdChunk chunk = pair;
      (plan_.intervals ? chunk.row_blocks : chunk.groups) = ceil_div(extent, parts);
      if (try_chunk(chunk)) return;
    }
  }

 private:
  // Whether the search ends: the chunk fits, or is too small to be of use.
  bool try_chunk(const BwdChunk& chunk) {
    if (!keeps_busy(chunk)) return true;
    const bool ends = fits(chunk);
    plan_.chunk = chunk;
    return ends;
  }

  bool fits(const BwdChunk& chunk) const {
    BwdPlan trial = plan_;
    trial.chunk = chunk;
    Workspace sums(nullptr);
    const Splits splits = wanted_splits(trial, p_, device_);
    place_accumulators(trial, p_, splits, sums);
    // Those of a list are cut down to what fits; a tiled kernel has them all or none.
    const int64_t slots = plan_.gathered ? 0 : splits.slots * splits.slot_bytes;
    return static_cast<int64_t>(sums.bytes()) + slots <= limit_;
  }

  bool keeps_busy(const BwdChunk& chunk) const {
    if (!plan_.intervals) return true;
    const int64_t tiles = ceil_div(plan_.kernel.keys.capacity, plan_.tile.block_n);
    return tiles * chunk.row_blocks * chunk.heads_k * chunk.batches >= kIntervalBlocksPerSm * device_.num_sms;
  }

  BwdPlan& plan_;
  const dmattn_bwd_params& p_;
  const Device& device_;
  int64_t limit_;  // of the sums
};

}  // namespace

int64_t key_tiles_of(const BwdParams& p, int32_t block_n) {
  const int64_t tiles = p.packing.is_active() ? packed_blocks(p.packing.total_k, p.packing.sequences, block_n)
                                              : int64_t{p.batch} * ceil_div(p.seqlen_k, block_n);
  return tiles * p.nheads_k;
}

void place_sums(BwdPlan& plan, const dmattn_bwd_params& p, const Device& device, Workspace& workspace) {
  ChunkChoice(plan, p, device, workspace.bytes()).make();
  const Splits splits = wanted_splits(plan, p, device);
  place_accumulators(plan, p, splits, workspace);
  place_splits(plan, p, splits, workspace);
}

}  // namespace dmattn
