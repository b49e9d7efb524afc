// The fp32 sums of a backward call (dq, dk, dv), and what their size decides: rounds and splits.
#include <algorithm>
#include <array>
#include <utility>

#include "host/arithmetic.h"
#include "host/plan/bwd_parts.h"
#include "host/plan/bwd_time.h"

namespace dmattn {
namespace {

// Sums of dk and dv for parts of tiles may always take this much, whatever the rest of the workspace takes.
constexpr int64_t kSlotBytesFloor = int64_t{256} << 10;
// A workspace below this never takes rounds: without them small calls took 0.6 to 0.95 of the time. Calls of up to
// kFewRows rows may have twice as much; longer calls keep to 1.5 times q, k and v.
constexpr int64_t kScratchFloor = int64_t{16} << 20, kFewRowsScratchFloor = int64_t{32} << 20;
constexpr int32_t kFewRows = 2048;
// The same for the list of a mask. It is low so that a call with few keys goes through the tiles of the mask instead,
// as it does where the list takes rounds (choose_tiles_of_mask()).
constexpr int64_t kMaskListScratchFloor = int64_t{8} << 20;
// With at least kRowsForFewKeys rows for each key, as for an image over the words of a text, the sums of dq alone
// take more than 1.5 times q, k and v. Rounds would save small calls no more than a few MB, and at 40 MB they cost
// 15% to 45% of the time.
constexpr int64_t kFewKeysScratchFloor = int64_t{48} << 20;
constexpr int64_t kRowsForFewKeys = 4;
// The same for interval lists. They have no splits to keep the GPU full with, so that there are rounds only while each
// has this many thread blocks for each SM. At 200 MB rounds cost 3% of the time, at twice that 1%.
constexpr int64_t kIntervalScratchFloor = int64_t{64} << 20;
constexpr int64_t kIntervalBlocksPerSm = 8;
// Copies of a list for all rows (see keeps_to_scratch()) may grow up to this: kernels without copies take twice as
// long.
constexpr int64_t kCopiesScratchFloor = int64_t{256} << 20;
// With ChunkTerms the sums may take a quarter more: without ChunkTerms each chunk waits for another at its end.
constexpr int64_t kTermsLimitNumerator = 5, kTermsLimitDenominator = 4;
// Upper bound on rounds: with many short sequences the scratch is mostly padding, which more rounds cannot shrink.
constexpr int64_t kMostRounds = 8;
// Rounds that only make room for splits are worth their launches where an unsplit tile takes at least this many steps
// over row blocks.
constexpr int64_t kStepsWorthRounds = 512;

// Bytes that the whole workspace without dense_bytes should not exceed. Together with the log-sum-exp and its rest,
// which the forward keeps for the backward, they are a little less than 1.5 times the bytes of q, k and v, or with 48
// thirty-seconds exactly 1.5 times.
int64_t scratch_limit(const BwdPlan& plan, int64_t thirty_seconds = 47) {
  const BwdParams& p = plan.kernel;
  const int64_t rows_q = rows_of(p) * p.packing.rows_q(p.seqlen_q);
  const int64_t rows_k = int64_t{2} * p.packing.slabs(p.batch) * p.nheads_k * p.packing.rows_k(p.seqlen_k);
  const int64_t qkv_bytes = element_bytes(plan.unit.dtype) * p.head_dim * (rows_q + rows_k);
  return qkv_bytes * thirty_seconds / 32 - int64_t{2 * sizeof(float)} * rows_q;
}

int64_t scratch_floor(const BwdPlan& plan) {
  const BwdParams& p = plan.kernel;
  const bool has_few_keys = !p.packing.is_active() && p.seqlen_q >= kRowsForFewKeys * p.seqlen_k;
  if (has_few_keys) return kFewKeysScratchFloor;
  if (is_gathered(plan.walk)) return kMaskListScratchFloor;
  return !p.packing.is_active() && p.seqlen_q <= kFewRows ? kFewRowsScratchFloor : kScratchFloor;
}

bool continues_dkv(const BwdPlan& plan, const BwdRound& round) {
  return round.groups < plan.whole.groups || round.row_blocks < plan.whole.row_blocks;
}

// --- splits ----------------------------------------------------------------------------------------------------------

// Few key tiles leave much of the GPU idle. Their rows (and the heads of the group) are then split between thread
// blocks, which add to one accumulator for each tile or, in deterministic sm80 kernels, have one each; these are
// summed afterwards.
struct Splits {
  int64_t tiles = 0;  // of a round
  int64_t most = 1;   // parts that a tile can fall into
  int64_t work = 0;   // blocks wanted
  int64_t slots = 0;  // accumulators wanted
  int64_t parts = 1;  // on Hopper, of each tile
};

// From 1.7 tiles for each SM on, the unequal thread blocks of a causal call, or the last wave of equal ones, leave
// less than 15% of the GPU idle.
int64_t tiles_that_fill(const Device& device) { return ceil_div<int64_t>(17 * int64_t{device.num_sms}, 10); }

// Elements of a tile's accumulator of one gradient, and bytes of a tile's accumulators of all gradients that are
// asked for.
int64_t slot_size(const BwdPlan& plan) { return int64_t{plan.tile.block_n} * plan.unit.head_dim_tile; }
int64_t slot_bytes(const BwdPlan& plan) {
  const int grads = (plan.wants_dk ? 1 : 0) + (plan.wants_dv ? 1 : 0);
  return grads * slot_size(plan) * static_cast<int64_t>(sizeof(float));
}

// On Hopper a part has at least this many blocks of rows, as each part copies its keys, and adds its dk and dv to
// sums. Half as many are enough where there would be fewer than 1.7 parts for each thread block.
constexpr int64_t kFewestRowBlocks = 8;
// The most parts of a tile in a fixed order, in which parts are whole heads: they wait for each other at the end.
constexpr int64_t kMostPartsInOrder = 8;
// In a fixed order tiles are divided only if thread blocks are busy for less than this share of their time without
// that, and then into parts that make them kBusy, if possible.
constexpr double kBusyWithout = 0.85;
// The most parts for each thread block, unless each head is a part.
constexpr int64_t kMostParts = 8;
// Rounds that only make room for the sums of parts are chosen if they are estimated to take less than this share of
// the time without them. With items of unequal lengths, rounds are faster than time_of_rounds() estimates. Beside a
// bias for each row and key the estimate is less exact; and if rounds divide heads or batches that share one bias, or
// several, each round reads that bias and adds to its gradient.
constexpr double kWorthRounds = 0.97, kWorthUnevenRounds = 1.05;
constexpr double kWorthRoundsOfBias = 0.92, kWorthRoundsOfSharedBias = 0.9, kWorthRoundsOfSharedBiases = 0.85;
// If persistent thread blocks would be busy for less than this share of their time, the sm80 code takes the call: it
// splits further, and takes nearly twice as long over the same rows.
constexpr double kBusyEnough = 0.45;

// Whether items have different lengths.
bool has_uneven_items(const BwdPlan& plan) { return plan.kernel.is_causal && plan.kernel.window == 0; }

// The share of their time for which persistent thread blocks are busy, if each tile is divided into `parts` parts.
// Under causality the longest items, which begin first, are twice as long as the average.
double busy_with(const BwdPlan& plan, int64_t tiles, int64_t heads, int64_t parts) {
  const int64_t blocks = std::max(1, plan.resident_blocks / plan.tile.cluster);
  const double part = parts < heads ? static_cast<double>(ceil_div(heads, parts)) / heads : 1.0 / parts;  // of a tile
  const double least = static_cast<double>(tiles) / blocks;
  if (!has_uneven_items(plan)) return least / (ceil_div(tiles * parts, blocks) * part);
  return least / std::max(least, 2 * part);
}
// The most parts into which a tile can be divided: by its heads, and by their rows.
int64_t most_parts(const BwdPlan& plan, const BwdRound& round, int64_t tiles) {
  const BwdParams& p = plan.kernel;
  const int64_t heads = round.groups, blocks = std::max(1, plan.resident_blocks / plan.tile.cluster);
  if (p.deterministic) return std::min(heads, kMostPartsInOrder);
  // Kernels with an fp32 bias for each row and key do not divide rows, so that no round, not even the last, may have
  // fewer heads than parts.
  if (p.bias.kind == BiasKind::kDirect) return plan.whole.groups - (plan.whole.groups - 1) / heads * heads;
  const int32_t seen_by = p.window > 0 ? ceil_div(p.window + plan.tile.block_n, plan.tile.block_m) : p.dq_blocks;
  const int64_t rows = std::min(seen_by, p.dq_blocks);
  const int64_t parts = heads * std::max<int64_t>(1, rows / kFewestRowBlocks);
  const bool fills = 10 * tiles * parts >= 17 * blocks;
  const int64_t most = fills ? parts : heads * std::max<int64_t>(1, rows / (kFewestRowBlocks / 2));
  return std::min(most, std::max(heads, kMostParts * blocks / tiles));
}
// The fewest parts of a tile: one for each head where heads have biases of their own.
int64_t fewest_parts(const BwdPlan& plan, const BwdRound& round) { return has_items_of_heads(plan) ? round.groups : 1; }
// As many parts as keep thread blocks busy. For a fixed order, in which parts wait for each other, so that more of
// them gain nothing.
int64_t parts_in_order(const BwdPlan& plan, const BwdRound& round, int64_t tiles, int64_t fewest, int64_t most) {
  int64_t best = fewest;
  double busiest = busy_with(plan, tiles, round.groups, best);
  if (busiest >= kBusyWithout) return best;
  for (int64_t parts = fewest + 1; parts <= most && busiest < kBusy; parts += parts < round.groups ? 1 : round.groups) {
    const double busy = busy_with(plan, tiles, round.groups, parts);
    if (busy <= busiest) continue;
    best = parts;
    busiest = busy;
  }
  return best;
}
// The number of parts with the least estimated time. Numbers that make some parts larger than others are tried only
// up to the number of heads, and only where all parts run at the same time or as the largest number, as times of
// several waves of unequal parts are not estimated so well.
int64_t fastest_parts(const BwdPlan& plan, const BwdRound& round, int64_t tiles, int64_t fewest, int64_t most) {
  const int64_t heads = round.groups, blocks = plan.resident_blocks / plan.tile.cluster;
  int64_t best = fewest;
  double least = time_of_rounds(plan, round, best);
  for (int64_t parts = fewest + 1; parts <= most; ++parts) {
    const bool is_uneven = parts % heads != 0 && heads % parts != 0;
    if (is_uneven && (parts > heads || (tiles * parts > blocks && parts < most))) continue;
    const double time = time_of_rounds(plan, round, parts);
    if (time >= least) continue;
    best = parts;
    least = time;
  }
  return best;
}
// The number of parts of each tile on Hopper.
int64_t parts_that_fill(const BwdPlan& plan, const BwdRound& round, int64_t tiles, const Device& device) {
  const int64_t fewest = fewest_parts(plan, round);
  if (suits_mirrored_items(plan, round, device)) return fewest;
  const int64_t most = most_parts(plan, round, tiles);
  if (plan.kernel.deterministic) return parts_in_order(plan, round, tiles, fewest, most);
  return fastest_parts(plan, round, tiles, fewest, most);
}

Splits wanted_splits(const BwdPlan& plan, const BwdRound& round, const Device& device) {
  const BwdParams& p = plan.kernel;
  Splits splits;
  splits.tiles = key_tiles_of(p, round.batches, round.heads_k, plan.tile.block_n);
  // Nothing is split in packed sequences, as only the device knows their lengths and so whether it would pay; over
  // lists of row blocks; and in rounds of several launches.
  if (p.packing.is_active() || has_row_block_lists(plan) || !plan.sequence.is_single()) return splits;
  const bool continues = continues_dkv(plan, round);
  if (plan.resident_blocks > 0) {
    splits.parts = plan.may_split ? parts_that_fill(plan, round, splits.tiles, device) : fewest_parts(plan, round);
    if (splits.parts > 1 || continues) splits.slots = splits.tiles;
    return splits;
  }
  // Sums to which several rounds add are in a fixed order only if each round has one thread block for each of them.
  if (p.has_split_slots && continues) return splits;
  // Only the device knows how many tiles a list fills, so that there may always be few.
  const bool gathered = is_gathered(plan.walk);
  if (!gathered && splits.tiles >= tiles_that_fill(device)) return splits;
  const int64_t m_blocks = ceil_div(p.seqlen_q, plan.tile.block_m);
  // In a deterministic call the column sums of a head have to come from one thread block: heads are not split.
  splits.most = p.has_split_slots ? round.groups : round.groups * m_blocks;
  // Under causality thread blocks take unequal times, which four for each SM even out. But each costs a prologue and
  // sums of its own: in deterministic calls and in rounds, which divide the work, there are two.
  const bool is_whole = round.batches == plan.whole.batches && round.heads_k == plan.whole.heads_k;
  splits.work = (p.has_split_slots || !is_whole ? 2 : 4) * int64_t{device.num_sms};
  // The device decides whether lists are split. Sums that go on from round to round have to suit both, so there are
  // no slots, and the sums are by key (needs_dkv_accum()).
  if (gathered && continues) return splits;
  const int64_t slots = p.has_split_slots ? splits.tiles * splits.most : splits.tiles;
  splits.slots = splits.most <= 1 ? 0 : std::min(slots, splits.work);
  return splits;
}

// The most steps of an item that is so short that splitting it between thread blocks would not pay.
constexpr int64_t kShortSteps = 24;

// --- accumulators ----------------------------------------------------------------------------------------------------

// Row blocks of a head in dq_accum.
int32_t dq_blocks_of(const BwdPlan& plan, const BwdRound& round) {
  if (round.row_blocks == plan.whole.row_blocks) return plan.kernel.dq_blocks;
  return round.row_blocks * (plan.list_rows / plan.tile.block_m);
}

// Tiles of the part of dbias that a round adds to.
int64_t dbias_tiles(const BwdPlan& plan, const BwdRound& round) {
  const BwdParams& p = plan.kernel;
  const int64_t batches = p.dbias_batch_stride == 0 ? 1 : round.batches;
  const int64_t heads = p.dbias_head_stride == 0 ? 1 : int64_t{round.heads_k} * p.head_ratio / p.bias.head_ratio;
  return batches * heads * ceil_div(p.seqlen_q, plan.tile.block_m) * ceil_div(p.seqlen_k, plan.tile.block_n);
}

// Whether dk and dv are added up by key: in launches that follow one another, or from lists of many row blocks.
bool needs_dkv_accum(const BwdPlan& plan, const BwdRound& round, const Splits& splits) {
  if (plan.sequence.per_group) return true;
  if (plan.keeps_terms || plan.has_whole_items || plan.has_sole_chunk) return false;
  return has_row_block_lists(plan) || (continues_dkv(plan, round) && splits.slots == 0);
}

// The sums of dq and, where they are added up by key, of dk and dv; the chunks of lists; and what orders
// deterministic sums.
struct Accumulators {
  int32_t* work_counter = nullptr;
  float* dq = nullptr;
  int32_t* dq_semaphore = nullptr;
  int32_t* dbias_semaphore = nullptr;
  int32_t* dkv_semaphore = nullptr;
  float* dk = nullptr;
  float* dv = nullptr;
  KeyChunks chunks;
  ChunkTerms terms;
  CarriedTerms carried;
  size_t counter_zero_bytes = 0, dq_zero_bytes = 0, dkv_zero_bytes = 0;
};

Accumulators place_accumulators(const BwdPlan& plan, const BwdRound& round, int32_t dq_blocks, bool has_dkv_accum,
                                Workspace& workspace) {
  const BwdParams& kernel = plan.kernel;
  const int64_t heads_k = int64_t{kernel.packing.slabs(round.batches)} * round.heads_k;
  const int64_t blocks = heads_k * round.groups * dq_blocks;
  Accumulators sums;
  const size_t begin = workspace.bytes();
  const bool takes_turns = kernel.deterministic || suits_turns(plan, round);
  const int64_t launches = plan.resident_blocks > 0 ? launches_of(plan.sequence, round) : 1;
  if (plan.wants_dq && takes_turns) sums.dq_semaphore = workspace.take<int32_t>(blocks);
  if (plan.orders_dbias) sums.dbias_semaphore = workspace.take<int32_t>(dbias_tiles(plan, round));
  if (plan.resident_blocks > 0) sums.work_counter = workspace.take<int32_t>(launches * work_counters_of(plan, round));
  const bool orders_dkv = kernel.deterministic && !plan.keeps_terms && !plan.has_sole_chunk;
  if (orders_dkv && has_row_block_lists(plan)) {
    sums.dkv_semaphore = workspace.take<int32_t>(launches * chunk_turns_of(plan, round));
  } else if (orders_dkv && plan.resident_blocks > 0) {
    // Parts of a tile take turns at dk and dv. Each consumer has 64 keys, and turns of its own.
    const int64_t tiles = key_tiles_of(kernel, round.batches, round.heads_k, plan.tile.block_n);
    sums.dkv_semaphore = workspace.take<int32_t>(tiles * (plan.tile.block_n / 64));
  }
  sums.counter_zero_bytes = workspace.bytes() - begin;
  if (plan.wants_dq && !plan.stores_dq) sums.dq = workspace.take<float>(blocks * plan.tile.block_m * kernel.dq_dims);
  sums.dq_zero_bytes = workspace.bytes() - begin - sums.counter_zero_bytes;
  if (has_dkv_accum) {
    const int64_t rows = heads_k * kernel.packing.rows_k(kernel.seqlen_k);
    if (plan.wants_dk) sums.dk = workspace.take<float>(rows * kernel.head_dim);
    if (plan.wants_dv) sums.dv = workspace.take<float>(rows * kernel.head_dim);
  }
  sums.dkv_zero_bytes = workspace.bytes() - begin - sums.counter_zero_bytes - sums.dq_zero_bytes;
  sums.chunks = place_chunks(plan, round, workspace);
  sums.terms = place_terms(plan, round, workspace);
  sums.carried = place_carried_terms(plan, round, workspace);
  return sums;
}

int64_t accumulator_bytes(const BwdPlan& plan, const BwdRound& round, const Splits& splits) {
  Workspace workspace(nullptr);
  place_accumulators(plan, round, dq_blocks_of(plan, round), needs_dkv_accum(plan, round, splits), workspace);
  return static_cast<int64_t>(workspace.bytes());
}

// Whether the rows of dq fill their memory without gaps, in whatever order batches, heads and rows lie.
bool fills_memory(const ConvertDqParams& dq) {
  std::array<std::pair<int64_t, int64_t>, 3> dims = {
      {{dq.dq_stride.batch, dq.batch}, {dq.dq_stride.head, dq.nheads}, {dq.dq_stride.row, dq.seqlen_q}}};
  std::sort(dims.begin(), dims.end());
  int64_t next = dq.head_dim;
  for (const auto& [stride, extent] : dims) {
    if (extent > 1 && stride != next) return false;
    if (extent > 1) next *= extent;
  }
  return true;
}
// Whether the slots fit the memory of dq: nothing is written there before the slots have been rounded.
bool has_room_in_dq(const BwdPlan& plan, const BwdRound& round, int64_t slots) {
  const ConvertDqParams& dq = plan.convert_dq;
  const bool is_one_launch = covers_all(plan, round) && plan.sequence.is_single();
  if (plan.resident_blocks == 0 || is_gathered(plan.walk) || !is_one_launch) return false;
  // dq.dq is not tested, as it may still be nullptr when the size of the workspace is asked for.
  const bool is_wanted = plan.wants_dq && !plan.spares.dq && !plan.stores_dq;
  if (!is_wanted || dq.packing.is_active() || !dq.vec_dq || !fills_memory(dq)) return false;
  const int64_t entries = int64_t{dq.batch} * dq.seqlen_q * dq.nheads * dq.head_dim;
  return slots * slot_bytes(plan) <= entries * element_bytes(plan.unit.dtype);
}

// The slots wanted, but no more than fit the memory that the rest of the workspace leaves.
int64_t affordable_slots(const BwdPlan& plan, const Splits& splits, int64_t taken) {
  const int64_t each = slot_bytes(plan);
  if (each == 0) return splits.slots;
  const int64_t spare = std::max(scratch_limit(plan), scratch_floor(plan)) - taken;
  return std::min(splits.slots, std::max(spare, kSlotBytesFloor) / each);
}

// `taken`: what the workspace holds beside the slots.
void choose_splits(BwdPlan& plan, const Splits& splits, int64_t taken, const Device& device) {
  BwdParams& kernel = plan.kernel;
  kernel.max_work_items = static_cast<int32_t>(std::min<int64_t>(splits.tiles, INT32_MAX));
  if (plan.resident_blocks > 0) {
    kernel.num_splits = static_cast<int32_t>(splits.parts);
    kernel.mirrors_items = splits.parts == 1 && suits_mirrored_items(plan, plan.round, device);
    plan.slots = splits.slots;
    return;
  }
  if (splits.most <= 1) return;
  const bool continues = continues_dkv(plan, plan.round);
  const int64_t slots = continues ? splits.tiles : affordable_slots(plan, splits, taken);
  if (is_gathered(plan.walk)) {
    plan.even_blocks = kernel.is_causal ? 0 : device.num_sms;
    plan.max_work = static_cast<int32_t>(kernel.deterministic ? slots : splits.work);
    plan.max_tiles = static_cast<int32_t>(std::min<int64_t>(slots, INT32_MAX));
    plan.max_splits = slots == 0 ? 1 : static_cast<int32_t>(std::min<int64_t>(splits.most, plan.max_work));
    kernel.max_work_items = std::max(kernel.max_work_items, plan.max_work);
    if (plan.max_splits > 1 && !continues) plan.slots = slots;
    return;
  }
  if (slots < splits.tiles) return;
  const int64_t wanted = std::min((kernel.has_split_slots ? slots : splits.work) / splits.tiles, splits.most);
  kernel.num_splits = static_cast<int32_t>(std::max<int64_t>(1, wanted));
  if (kernel.num_splits > 1) plan.slots = kernel.has_split_slots ? splits.tiles * kernel.num_splits : splits.tiles;
}

// --- rounds ----------------------------------------------------------------------------------------------------------

// Whether items with all rows, over the list of a mask, would get out of step, as each goes through its heads one by
// one. Items of unequal lengths and with more than kHeadsInStep heads then read and add to more than stays in L2. A
// fixed order keeps items in step. Clusters, which have twice the columns and half as many items at a time, lose
// nothing by it.
constexpr int64_t kHeadsInStep = 4;
bool has_drifting_items(const BwdPlan& plan) {
  return has_uneven_items(plan) && !plan.kernel.deterministic && plan.tile.cluster == 1 &&
         plan.whole.groups > kHeadsInStep;
}

// A round of at most `share` of the call's (batch, kv head) pairs, with rounds as equal as possible. Packed sequences
// are not divided by batches, as their arrays go through all sequences.
BwdRound round_of_pairs(const BwdRound& whole, int64_t share, bool is_packed) {
  const auto even = [](int32_t extent, int64_t most) {
    const int32_t rounds = static_cast<int32_t>(ceil_div<int64_t>(extent, most));
    return ceil_div(extent, rounds);
  };
  BwdRound round = whole;
  if (!is_packed) round.batches = even(whole.batches, std::max<int64_t>(1, share / whole.heads_k));
  if (share < whole.heads_k) round.heads_k = even(whole.heads_k, share);
  return round;
}

class RoundChoice {
 public:
  // bytes_before: bytes of the workspace before the sums, without dense_bytes.
  RoundChoice(BwdPlan& plan, const Device& device, int64_t bytes_before)
      : plan_(plan), device_(device), bytes_before_(bytes_before) {
    const int64_t rest = scratch_limit(plan) - bytes_before;
    limit_ = std::max(rest, has_own_lists() ? kIntervalScratchFloor : scratch_floor(plan));
  }

  // Sets plan.round to the largest round that fits or, if none does, to the smallest that keeps the GPU busy.
  void make() {
    if (search_rounds_of_whole_items() || search_rounds_of_sole_chunk()) return;
    if (lacks_list_slots() && search(/*with_list_slots=*/true)) return;
    plan_.round = plan_.whole;
    const bool wanted_parts = has_parts();
    const bool fits = search(/*with_list_slots=*/false);
    if (wanted_parts || has_parts()) weigh_parts(fits);
    if (may_keep_terms()) search_with_terms();
    if (plan_.chunk_blocks > 0 && !plan_.keeps_terms) shorten_chunks(plan_, plan_.round, device_);
  }

 private:
  // Sets plan.round to the largest round of whole kv heads whose sums take at most `limit` bytes, if there is one.
  // The search ends at the first round, from the largest on, for which suits(round) is false.
  template <class Suits>
  bool search_rounds_of_heads(int64_t limit, const Suits& suits) {
    const int64_t pairs = int64_t{plan_.whole.batches} * plan_.whole.heads_k;
    for (int64_t rounds = 1; rounds <= std::min(pairs, kMostRounds); ++rounds) {
      const BwdRound round = round_of_pairs(plan_.whole, ceil_div(pairs, rounds), /*is_packed=*/false);
      if (!suits(round)) return false;
      if (accumulator_bytes(plan_, round, Splits{}) > limit) continue;
      plan_.round = round;
      return true;
    }
    return false;
  }

  // Tries items with all rows, in rounds of whole kv heads. If such items would drift apart, there are chunks of rows
  // instead, whose items end before they are far from each other.
  bool search_rounds_of_whole_items() {
    if (!may_have_whole_items(plan_) || has_drifting_items(plan_)) return false;
    const int32_t chunk_blocks = plan_.chunk_blocks;
    plan_.has_whole_items = true;
    plan_.chunk_blocks = plan_.whole.row_blocks;
    const auto suits = [&](const BwdRound& round) { return keeps_busy_with_whole_items(plan_, round, device_); };
    if (search_rounds_of_heads(limit_, suits)) return true;
    plan_.has_whole_items = false;
    plan_.chunk_blocks = chunk_blocks;
    return false;
  }

  bool search_rounds_of_sole_chunk() {
    if (!may_have_sole_chunk(plan_)) return false;
    plan_.has_sole_chunk = true;
    const auto suits = [&](const BwdRound& round) { return keeps_sole_chunk(plan_, round, device_); };
    if (search_rounds_of_heads(limit_, suits)) return true;
    plan_.has_sole_chunk = false;
    return false;
  }

  // Whether sums over lists may be put in order by adding them up at the end (ChunkTerms).
  bool may_keep_terms() const { return plan_.kernel.deterministic && plan_.chunk_blocks > 0 && has_own_lists(); }

  bool has_parts() const { return wanted_splits(plan_, plan_.round, device_).parts > 1; }

  // The sums of parts may take rounds, each of which has fewer tiles. Then parts have to gain more than the rounds
  // lose.
  void weigh_parts(bool fits) {
    const BwdRound with_parts = plan_.round;
    const double time = time_of_rounds();
    plan_.may_split = false;
    plan_.round = plan_.whole;
    search(/*with_list_slots=*/false);
    const int64_t tiles = wanted_splits(plan_, plan_.round, device_).tiles;
    const bool suits_whole_tiles = keeps_residents_busy(plan_, plan_.round, tiles, /*parts=*/1);
    const BwdRound& without = plan_.round;
    const bool takes_rounds = with_parts.batches < without.batches || with_parts.heads_k < without.heads_k ||
                              with_parts.groups < without.groups;
    const double worth = share_worth_rounds(with_parts, without);
    if (!fits || (takes_rounds && suits_whole_tiles && time > worth * time_of_rounds())) return;
    plan_.may_split = true;
    plan_.round = with_parts;
  }
  // The share of the time without rounds that rounds may take at most, by the estimate.
  double share_worth_rounds(const BwdRound& rounds, const BwdRound& without) const {
    const BwdParams& p = plan_.kernel;
    if (p.bias.kind != BiasKind::kTile && p.bias.kind != BiasKind::kDirect) {
      return has_uneven_items(plan_) ? kWorthUnevenRounds : kWorthRounds;
    }
    const bool shares_batches = rounds.batches < without.batches && p.bias.batch_stride == 0;
    const bool shares_heads = rounds.heads_k < without.heads_k && p.bias.head_stride == 0;
    const bool shares_groups = rounds.groups < without.groups && p.bias.head_ratio > 1;
    if (!shares_batches && !shares_heads && !shares_groups) return kWorthRoundsOfBias;
    const bool is_one = p.bias.batch_stride == 0 && p.bias.head_stride == 0;
    return is_one ? kWorthRoundsOfSharedBias : kWorthRoundsOfSharedBiases;
  }
  double time_of_rounds() const {
    const int64_t parts = wanted_splits(plan_, plan_.round, device_).parts;
    const bool is_mirrored = parts == 1 && suits_mirrored_items(plan_, plan_.round, device_);
    return dmattn::time_of_rounds(plan_, plan_.round, parts, is_mirrored);
  }

  // Looks for chunks whose ChunkTerms fit beside the other sums, in rounds of whole kv heads, and takes the shortest
  // of them, as longer ones make fewer items. If there are none, looks for rounds of row blocks, with which the
  // workspace may take all of 1.5 times q, k and v. If there are none either, chunks take turns, with the rounds and
  // chunks chosen before.
  void search_with_terms() {
    const int32_t chunk_blocks = plan_.chunk_blocks;
    const int64_t limit = std::max(limit_, accumulator_bytes(plan_, plan_.round, Splits{}));
    plan_.keeps_terms = true;
    choose_chunks(plan_, device_);
    const int32_t shortest = plan_.chunk_blocks;
    for (; has_chunks_so_long(); plan_.chunk_blocks *= 2) {
      if (search_rounds_with_terms(limit * kTermsLimitNumerator / kTermsLimitDenominator)) return;
    }
    plan_.chunk_blocks = shortest;
    if (search_row_rounds_with_terms(std::max(limit, scratch_limit(plan_, 48) - bytes_before_))) return;
    plan_.keeps_terms = false;
    plan_.chunk_blocks = chunk_blocks;
  }
  // Whether chunks of plan.chunk_blocks row blocks are worth trying: not beyond kMostChunkRows rows, nor if half as
  // many row blocks are already all there are.
  bool has_chunks_so_long() const {
    return plan_.chunk_blocks * plan_.list_rows <= kMostChunkRows && plan_.chunk_blocks < 2 * plan_.whole.row_blocks;
  }
  bool search_rounds_with_terms(int64_t limit) {
    if (!fits_terms(plan_, plan_.whole)) return false;
    return search_rounds_of_heads(limit, [&](const BwdRound& round) {
      return covers_all(plan_, round) || keeps_busy_with_chunks(plan_, round, device_);
    });
  }

  // Looks for rounds of row blocks, each with as few kv heads as kMostRounds allows: the fastest combination of
  // rounds and of chunks, from plan.chunk_blocks row blocks on. Each round leaves its sums of the keys that the next
  // one sees to the next one (CarriedTerms).
  bool search_row_rounds_with_terms(int64_t limit) {
    const int64_t pairs = int64_t{plan_.whole.batches} * plan_.whole.heads_k,
                  pair_rounds = std::min(pairs, kMostRounds);
    const BwdRound pair = round_of_pairs(plan_.whole, ceil_div(pairs, pair_rounds), /*is_packed=*/false);
    BwdRound best = pair;
    int32_t best_chunk_blocks = 0;
    int64_t fewest = INT64_MAX;  // steps
    for (; has_chunks_so_long(); plan_.chunk_blocks *= 2) {
      const int32_t chunks = ceil_div(pair.row_blocks, plan_.chunk_blocks);
      for (int32_t parts = 2; parts <= chunks && parts * pair_rounds <= kMostRounds; ++parts) {
        BwdRound round = pair;
        round.row_blocks = ceil_div(chunks, parts) * plan_.chunk_blocks;
        if (!keeps_busy_with_chunks(plan_, round, device_) || !fits_terms(plan_, round)) continue;
        const int64_t steps = steps_with_chunks(plan_, round, device_);
        if (steps >= fewest || accumulator_bytes(plan_, round, Splits{}) > limit) continue;
        best = round;
        best_chunk_blocks = plan_.chunk_blocks;
        fewest = steps;
      }
    }
    if (best_chunk_blocks == 0) return false;
    plan_.chunk_blocks = best_chunk_blocks;
    plan_.round = best;
    return true;
  }

  // Whether a single round leaves too little memory for splitting the tiles of lists. Lists that fill a few more
  // tiles than there are slots for are not split, and take as long as lists that fill every SM: with four query heads
  // to a kv head, 2048 kept keys of 16384 took as long as 4096. The launches of more rounds take little time beside
  // tiles of kStepsWorthRounds steps.
  bool lacks_list_slots() const {
    if (!is_gathered(plan_.walk)) return false;
    const Splits splits = wanted_splits(plan_, plan_.whole, device_);
    const int64_t steps = int64_t{plan_.whole.groups} * ceil_div(plan_.kernel.seqlen_q, plan_.tile.block_m);
    const int64_t taken = bytes_before_ + accumulator_bytes(plan_, plan_.whole, splits);
    const int64_t enough = std::min<int64_t>(splits.slots, device_.num_sms * 3 / 4);
    return steps >= kStepsWorthRounds && affordable_slots(plan_, splits, taken) < enough;
  }

  // Sets plan.round to the largest round that fits, or to the last one tried. Returns true if that round fits, or if
  // a smaller one would not keep the GPU busy. Deterministic lists are not split in rounds that add to the sums of
  // other rounds, so that such rounds are not tried for the sake of slots.
  bool search(bool with_list_slots) {
    if (fits(plan_.whole, with_list_slots)) return true;
    const bool is_packed = plan_.kernel.packing.is_active();
    const int64_t pairs = int64_t{is_packed ? 1 : plan_.whole.batches} * plan_.whole.heads_k;
    for (int64_t rounds = 2; rounds <= std::min(pairs, kMostRounds); ++rounds) {
      if (try_round(round_of_pairs(plan_.whole, ceil_div(pairs, rounds), is_packed), with_list_slots)) return true;
    }
    if (with_list_slots && plan_.kernel.deterministic) return false;
    const BwdRound pair = plan_.round;
    const int32_t extent = has_row_block_lists(plan_) ? pair.row_blocks : pair.groups;
    for (int32_t parts = 2; parts <= extent && parts * pairs <= kMostRounds; ++parts) {
      BwdRound round = pair;
      (has_row_block_lists(plan_) ? round.row_blocks : round.groups) = ceil_div(extent, parts);
      if (try_round(round, with_list_slots)) return true;
    }
    return false;
  }

  // Whether row blocks have lists that differ.
  bool has_own_lists() const { return has_row_block_lists(plan_) && !has_shared_list(plan_); }

  // Whether the search ends: the round fits, or is too small to be of use (plan.round is then left as it was).
  bool try_round(const BwdRound& round, bool with_list_slots) {
    if (!keeps_busy(round)) return true;
    const bool ends = fits(round, with_list_slots);
    plan_.round = round;
    return ends;
  }

  bool fits(const BwdRound& round, bool with_list_slots) const {
    const Splits splits = wanted_splits(plan_, round, device_);
    int64_t slots = splits.slots;  // a tiled kernel has them all or none
    if (is_gathered(plan_.walk)) slots = with_list_slots ? std::min(slots, tiles_that_fill(device_)) : 0;
    const int64_t beside = has_room_in_dq(plan_, round, slots) ? 0 : slots * slot_bytes(plan_);
    return accumulator_bytes(plan_, round, splits) + beside <= limit_;
  }

  bool keeps_busy(const BwdRound& round) const {
    if (!has_own_lists()) return true;
    const int64_t tiles = ceil_div(plan_.kernel.keys.capacity, plan_.tile.block_n);
    return tiles * round.row_blocks * round.heads_k * round.batches >= kIntervalBlocksPerSm * device_.num_sms;
  }

  BwdPlan& plan_;
  const Device& device_;
  int64_t bytes_before_;
  int64_t limit_;  // bytes that the sums may take
};

}  // namespace

// If fewer parts than this were chosen, they are faster still.
int64_t most_useful_parts(const BwdPlan& plan, int64_t tiles) {
  const int64_t fewest = std::max<int64_t>(plan.kernel.num_splits, 1);
  if (!plan.may_split) return fewest;
  return parts_in_order(plan, plan.round, tiles, fewest, most_parts(plan, plan.round, tiles));
}

// The sm80 code splits tiles further, but takes nearly twice as long over the same rows (at Level::kFull four times
// as long). Under causality, but not with a window of keys, the longest items take twice as long as the average.
bool keeps_residents_busy(const BwdPlan& plan, const BwdRound& round, int64_t tiles, int64_t parts) {
  const BwdParams& p = plan.kernel;
  const bool is_uneven = has_uneven_items(plan), is_full = plan.choice.level == Level::kFull;
  const int64_t of_ten = is_uneven ? (is_full ? 8 : 17) : (is_full ? 3 : 7);
  return 10 * tiles * parts * plan.tile.cluster >= of_ten * plan.resident_blocks ||
         ceil_div<int64_t>(int64_t{round.groups} * p.dq_blocks, parts) <= kShortSteps ||
         busy_with(plan, tiles, round.groups, parts) >= kBusyEnough;
}

bool keeps_to_limit(const BwdPlan& plan, int64_t bytes) {
  const int64_t limit =
      std::max(scratch_limit(plan), has_items_of_heads(plan) ? scratch_floor(plan) : kCopiesScratchFloor);
  return bytes <= (plan.keeps_terms ? limit * kTermsLimitNumerator / kTermsLimitDenominator : limit);
}

int64_t key_tiles_of(const BwdParams& p, int32_t batches, int32_t heads_k, int32_t block_n) {
  const int64_t tiles = p.packing.is_active() ? packed_blocks(p.packing.total_k, p.packing.sequences, block_n)
                                              : int64_t{batches} * ceil_div(p.seqlen_k, block_n);
  return tiles * heads_k;
}

void choose_sums(BwdPlan& plan, const Device& device, size_t bytes_before) {
  const int64_t before = static_cast<int64_t>(bytes_before - plan.dense_bytes);
  RoundChoice(plan, device, before).make();
  const Splits splits = wanted_splits(plan, plan.round, device);
  plan.has_dkv_accum = needs_dkv_accum(plan, plan.round, splits);
  const int64_t taken = before + accumulator_bytes(plan, plan.round, splits);
  plan.kernel.dq_blocks = dq_blocks_of(plan, plan.round);
  choose_splits(plan, splits, taken, device);
  const bool in_dq = plan.slots > 0 && has_room_in_dq(plan, plan.round, plan.slots);
  plan.dq_slot_bytes = in_dq ? static_cast<size_t>(plan.slots * slot_bytes(plan)) : size_t{0};
}

void place_sums(BwdPlan& plan, Workspace& workspace) {
  BwdParams& kernel = plan.kernel;
  const Accumulators sums = place_accumulators(plan, plan.round, kernel.dq_blocks, plan.has_dkv_accum, workspace);
  kernel.dq_accum = sums.dq;
  kernel.dq_semaphore = sums.dq_semaphore;
  kernel.dbias_semaphore = sums.dbias_semaphore;
  kernel.work_counter = sums.work_counter;
  kernel.dkv_semaphore = sums.dkv_semaphore;
  kernel.dk_accum = sums.dk;
  kernel.dv_accum = sums.dv;
  kernel.chunks = sums.chunks;
  kernel.terms = sums.terms;
  plan.carried = sums.carried;
  plan.convert_dq.dq_accum = sums.dq;
  plan.counter_zero_bytes = sums.counter_zero_bytes;
  plan.dq_zero_bytes = sums.dq_zero_bytes;
  plan.dkv_zero_bytes = sums.dkv_zero_bytes;
  if (plan.slots == 0) return;
  if (plan.dq_slot_bytes > 0) {
    float* const room = static_cast<float*>(plan.convert_dq.dq);
    if (room == nullptr) return;
    if (plan.wants_dk) kernel.dk_slots = room;
    if (plan.wants_dv) kernel.dv_slots = room + (plan.wants_dk ? plan.slots * slot_size(plan) : 0);
    return;
  }
  const size_t begin = workspace.bytes();
  if (plan.wants_dk) kernel.dk_slots = workspace.take<float>(plan.slots * slot_size(plan));
  if (plan.wants_dv) kernel.dv_slots = workspace.take<float>(plan.slots * slot_size(plan));
  if (!kernel.has_split_slots) plan.dkv_zero_bytes += workspace.bytes() - begin;
}

}  // namespace dmattn
