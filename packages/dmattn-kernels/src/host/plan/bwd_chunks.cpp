// The backward on Hopper over lists: how many row blocks make a chunk, and where the chunks' lists lie.
#include <algorithm>

#include "host/arithmetic.h"
#include "host/plan/bwd_parts.h"

namespace dmattn {
namespace {

// Steps over a block of rows that are worth an item's prologue and its additions to dk and dv. Items are long where
// chunks take turns, as an item then also waits for those of other chunks, and over a list for all rows without
// causality, which may keep many keys. Under causality such a list has half as many items, all of one length. As the
// host does not know how few, long items might leave many SMs without work at the end.
constexpr int64_t kStepsOfItem = 32, kStepsOfLongItem = 64;
// With fewer items for each SM, many SMs would wait for the last ones.
constexpr int64_t kItemsPerSm = 4;
// In chunks of more rows than this many times the keys that a row keeps, a row would not see most of the keys.
constexpr int64_t kChunkRowsOfKey = 4;
// The most rows of a chunk over a list for all rows, as the host does not know how few keys it has, and in rounds
// with few items for each SM.
constexpr int64_t kMostRowsOfSharedList = 1024, kMostRowsOfFewItems = 1024;
// Items with all rows, over the list of a mask: no other item adds to their dk and dv, and there is one prologue for
// all rows, so that they pay even if SMs wait for the last of them. Every ten SMs have to have kWholeItemsPerTenSms
// such items, counted as if all keys were kept. One SM computes all rows of an item, for each head of the group. If
// these are more than kMostRowsOfShortItem and the mask keeps few keys, the few items take long while other SMs wait:
// so there have to be more items, and beyond kMostRowsOfWholeItem rows there are none of this kind.
constexpr int64_t kWholeItemsPerTenSms = 25, kLongWholeItemsPerTenSms = 60;
constexpr int64_t kMostRowsOfShortItem = 8192, kMostRowsOfWholeItem = 32768;
// With so many of them, little time is lost at the end.
constexpr int64_t kManyWholeItemsPerSm = 12;
// Items for each SM of a round that is made smaller for ChunkTerms: with fewer, taking turns would cost no more.
constexpr int64_t kItemsPerSmWithTerms = 2;
// In steps, what an item takes beside its own steps, and a round beside its items. From measured times: 17000 cycles
// for an item, and for a round 25 us for five launches and for its end, where SMs are left without work.
constexpr int64_t kStepsOfPrologue = 7, kStepsOfRound = 18;

// The capacity of a chunk's list: that of its first row block, and one more key for each further row, as a row brings
// at most one new key.
int32_t chunk_capacity(const BwdPlan& plan) {
  const int32_t new_keys = has_shared_list(plan) ? 0 : (plan.chunk_blocks - 1) * plan.list_rows;
  return round_up(plan.kernel.keys.capacity + new_keys, kChunkTileKeys);
}
int32_t chunks_of(const BwdPlan& plan, int32_t row_blocks) { return ceil_div(row_blocks, plan.chunk_blocks); }

// Sets the extents of the chunks' lists for a round or a launch with so many batches, kv heads and row blocks.
void set_extents(KeyList& to, const BwdPlan& plan, int32_t batches, int32_t heads_k, int32_t row_blocks) {
  const KeyList& from = plan.kernel.keys;
  to.batch = from.batch > 1 ? batches : 1;
  to.heads = std::max(heads_k * plan.kernel.head_ratio / from.head_ratio, 1);
  to.head_ratio = from.head_ratio;
  to.capacity = chunk_capacity(plan);
  to.block_rows = plan.chunk_blocks * plan.list_rows;
  to.blocks = chunks_of(plan, row_blocks);
}
// Has chunks read the lists as they are.
void take_lists(KeyList& to, const KeyList& from) {
  to.heads = from.heads;
  to.idx = from.idx;
  to.count = from.count;
}
int64_t lists_of(const KeyList& keys) { return int64_t{keys.batch} * keys.heads * keys.blocks; }

// Whether rounds divide the row blocks.
bool shares_rows(const BwdPlan& plan, const BwdRound& round) { return round.row_blocks < plan.whole.row_blocks; }

// Whether rounds of row blocks go on from each other's sums (CarriedTerms). With a launch for each head of a group,
// all launches add to sums by key instead.
bool carries_terms(const BwdPlan& plan, const BwdRound& round) {
  return shares_rows(plan, round) && !plan.sequence.per_group;
}

// Rows of ChunkTerms for a kv head: for each chunk the capacity of its list, but no more than the keys up to the
// chunk's last row. Rounds of row blocks all have as many rows, as many as the last one needs, whose chunks may see
// all keys.
int64_t term_capacity(const BwdPlan& plan, const BwdRound& round) {
  const BwdParams& p = plan.kernel;
  const int64_t capacity = chunk_capacity(plan), rows = int64_t{plan.chunk_blocks} * plan.list_rows;
  const int64_t chunks = chunks_of(plan, round.row_blocks), most = std::min<int64_t>(capacity, p.seqlen_k);
  if (shares_rows(plan, round)) return chunks * most;
  int64_t terms = 0;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const int64_t keys = std::max<int64_t>((chunk + 1) * rows + p.seqlen_k - p.seqlen_q, 0);
    terms += std::min(most, keys);
  }
  return terms;
}
const int32_t* ends_of(const BwdPlan& plan, const KeyList& lists) {
  return has_shared_list(plan) ? nullptr : lists.end;
}

// How many items can run at a time.
int64_t places_of_items(const BwdPlan& plan, const Device& device) { return device.num_sms / plan.tile.cluster; }

}  // namespace

void choose_chunks(BwdPlan& plan, const Device& device) {
  const BwdParams& p = plan.kernel;
  const int32_t rows = plan.list_rows, row_blocks = plan.whole.row_blocks;
  const int64_t kept = std::max(p.keys.capacity - rows, rows);
  const int64_t steps = int64_t{has_lists_of_heads(plan) ? 1 : p.head_ratio} * (rows / plan.tile.block_m);
  const int64_t tiles = ceil_div(p.keys.capacity, plan.tile.block_n);
  const int64_t pairs = int64_t{p.batch} * p.nheads_k;
  const bool takes_turns = p.deterministic && !plan.keeps_terms;
  const bool is_long = takes_turns || (has_shared_list(plan) && !p.is_causal);
  const int64_t steps_wanted = is_long ? kStepsOfLongItem : kStepsOfItem;
  const int64_t places = places_of_items(plan, device);
  const int64_t most_rows = has_shared_list(plan) ? kMostRowsOfSharedList : int64_t{kMostChunkRows};
  int32_t blocks = 1;
  while (2 * blocks * rows <= most_rows && blocks < row_blocks && blocks * steps < steps_wanted &&
         blocks * rows < kChunkRowsOfKey * kept &&
         ceil_div(row_blocks, 2 * blocks) * tiles * pairs >= kItemsPerSm * places) {
    blocks *= 2;
  }
  plan.chunk_blocks = blocks;
}

namespace {
// Items of a round, if the list of each chunk fills as many tiles as that of a row block has room for.
int64_t items_with_chunks(const BwdPlan& plan, const BwdRound& round) {
  const int64_t tiles = ceil_div(plan.kernel.keys.capacity, plan.tile.block_n);
  return tiles * chunks_of(plan, round.row_blocks) * round.heads_k * round.batches;
}
}  // namespace

void shorten_chunks(BwdPlan& plan, const BwdRound& round, const Device& device) {
  const int64_t wanted = kItemsPerSm * places_of_items(plan, device);
  while (plan.chunk_blocks * plan.list_rows > kMostRowsOfFewItems && items_with_chunks(plan, round) < wanted) {
    plan.chunk_blocks /= 2;
  }
}

// The consumers write dk and dv as whole vectors, and no other launch may add to them. Not clusters, which number the
// rows of a chunk in 16 bits; and not with a bias, as that has not been timed.
bool may_have_whole_items(const BwdPlan& plan) {
  const BwdParams& p = plan.kernel;
  return plan.walk == KeyWalk::kMaskList && has_shared_list(plan) && !plan.sequence.per_group && !p.deterministic &&
         plan.tile.cluster == 1 && p.bias.kind == BiasKind::kNone && p.vec_dk && p.vec_dv &&
         int64_t{p.head_ratio} * p.seqlen_q <= kMostRowsOfWholeItem;
}

bool keeps_busy_with_whole_items(const BwdPlan& plan, const BwdRound& round, const Device& device) {
  const bool is_short = int64_t{plan.kernel.head_ratio} * plan.kernel.seqlen_q <= kMostRowsOfShortItem;
  const int64_t wanted = is_short ? kWholeItemsPerTenSms : kLongWholeItemsPerTenSms;
  return 10 * items_with_chunks(plan, round) >= wanted * device.num_sms;
}

// Not clusters, which write the rows of dk and dv in another way.
bool may_have_sole_chunk(const BwdPlan& plan) {
  const BwdParams& p = plan.kernel;
  return plan.walk == KeyWalk::kRowBlockLists && plan.chunk_blocks >= plan.whole.row_blocks &&
         plan.sequence.is_single() && plan.tile.cluster == 1 && plan.wants_dk && plan.wants_dv && p.vec_dk && p.vec_dv;
}
bool keeps_sole_chunk(const BwdPlan& plan, const BwdRound& round, const Device& device) {
  return plan.chunk_blocks * plan.list_rows <= kMostRowsOfFewItems ||
         items_with_chunks(plan, round) >= kItemsPerSm * places_of_items(plan, device);
}

bool has_many_whole_items(const BwdPlan& plan, const Device& device) {
  return plan.has_whole_items && items_with_chunks(plan, plan.round) >= kManyWholeItemsPerSm * device.num_sms;
}

bool keeps_busy_with_chunks(const BwdPlan& plan, const BwdRound& round, const Device& device) {
  return items_with_chunks(plan, round) >= kItemsPerSmWithTerms * places_of_items(plan, device);
}

int64_t steps_with_chunks(const BwdPlan& plan, const BwdRound& round, const Device& device) {
  const int64_t steps = int64_t{plan.kernel.head_ratio} * plan.chunk_blocks * (plan.list_rows / plan.tile.block_m);
  const BwdRound& all = plan.whole;
  const int64_t pairs = int64_t{ceil_div(all.batches, round.batches)} * ceil_div(all.heads_k, round.heads_k);
  int64_t sum = 0;
  for (int32_t begin = 0; begin < all.row_blocks; begin += round.row_blocks) {
    BwdRound own = round;
    own.row_blocks = std::min(round.row_blocks, all.row_blocks - begin);
    const int64_t waves = ceil_div(items_with_chunks(plan, own), places_of_items(plan, device));
    sum += waves * (steps + kStepsOfPrologue) + kStepsOfRound;
  }
  return pairs * sum;
}

bool fits_terms(const BwdPlan& plan, const BwdRound& round) {
  if (carries_terms(plan, round) && plan.kernel.keys.capacity > kMostCarriedTerms) return false;
  return term_capacity(plan, round) <= INT32_MAX;
}

ChunkTerms place_terms(const BwdPlan& plan, const BwdRound& round, Workspace& workspace) {
  ChunkTerms terms;
  if (!plan.keeps_terms) return terms;
  const BwdParams& p = plan.kernel;
  KeyList lists;
  set_extents(lists, plan, round.batches, round.heads_k, round.row_blocks);
  terms.capacity = static_cast<int32_t>(term_capacity(plan, round));
  const int64_t rows = int64_t{round.batches} * round.heads_k * terms.capacity;
  terms.first = workspace.take<int32_t>(int64_t{lists.batch} * lists.heads * p.seqlen_k);
  terms.dk = workspace.take<float>(rows * p.head_dim);
  terms.dv = workspace.take<float>(rows * p.head_dim);
  if (p.dbias_kind == DbiasKind::kKey) terms.dbias = workspace.take<float>(rows);
  return terms;
}

CarriedTerms place_carried_terms(const BwdPlan& plan, const BwdRound& round, Workspace& workspace) {
  CarriedTerms carried;
  if (!plan.keeps_terms || !carries_terms(plan, round)) return carried;
  const BwdParams& p = plan.kernel;
  KeyList lists;
  set_extents(lists, plan, round.batches, round.heads_k, round.row_blocks);
  const int64_t last_row = int64_t{(plan.whole.row_blocks - 1) / round.row_blocks * round.row_blocks} * plan.list_rows;
  carried.keys = static_cast<int32_t>(std::clamp<int64_t>(last_row + p.seqlen_k - p.seqlen_q, 0, p.seqlen_k));
  carried.places = workspace.take<uint32_t>(int64_t{lists.batch} * lists.heads * carried.keys);
  // All keys that are carried on are in the list of the first row block of the next round.
  carried.capacity = std::min(p.keys.capacity, p.seqlen_k);
  const int64_t elements = int64_t{round.batches} * round.heads_k * carried.capacity * p.head_dim;
  carried.from_dk = workspace.take<float>(elements);
  carried.from_dv = workspace.take<float>(elements);
  carried.to_dk = workspace.take<float>(elements);
  carried.to_dv = workspace.take<float>(elements);
  return carried;
}

CarriedTerms bwd_carried_terms(const BwdPlan& plan, const BwdParams& launch) {
  CarriedTerms carried = plan.carried;
  if (launch.row_block_begin / plan.round.row_blocks % 2 == 0) return carried;
  carried.from_dk = plan.carried.to_dk;
  carried.from_dv = plan.carried.to_dv;
  carried.to_dk = const_cast<float*>(plan.carried.from_dk);
  carried.to_dv = const_cast<float*>(plan.carried.from_dv);
  return carried;
}

KeyChunks place_chunks(const BwdPlan& plan, const BwdRound& round, Workspace& workspace) {
  KeyChunks chunks;
  if (plan.chunk_blocks == 0) return chunks;
  KeyList& keys = chunks.keys;
  set_extents(keys, plan, round.batches, round.heads_k, round.row_blocks);
  if (plan.has_whole_items) take_lists(keys, plan.kernel.keys);
  const int64_t lists = lists_of(keys);
  keys.end = ends_of(plan, plan.kernel.keys);
  if (!plan.has_whole_items) {
    keys.idx = workspace.take<int32_t>(lists * keys.capacity);
    keys.count = workspace.take<int32_t>(lists);
  }
  chunks.tile_rows = workspace.take<int32_t>(lists * (keys.capacity / kChunkTileKeys) * 2);
  return chunks;
}

namespace {
// Whether items are numbered by ListNumbers. Not in a fixed order, where items wait for each other's turns; not items
// with all rows, which use the lists as they are; and not clusters, which are started for all tiles that lists have
// room for.
bool has_list_numbers(const BwdPlan& plan) {
  return plan.chunk_blocks > 0 && !plan.kernel.deterministic && !plan.has_whole_items && plan.tile.cluster == 1;
}
}  // namespace

namespace {
// Moves to list `number`, the first one that a launch reads. The distances between lists stay the same.
void move_to_list(KeyChunks& chunks, int64_t number) {
  KeyList& keys = chunks.keys;
  const int64_t chunk = number * keys.blocks;
  keys.idx += chunk * keys.capacity;
  keys.count += chunk;
  chunks.tile_rows = static_cast<int32_t*>(chunks.tile_rows) + chunk * (keys.capacity / kChunkTileKeys) * 2;
}

ListSums list_sums(const BwdPlan& plan, const BwdParams& launch) {
  ListSums sums;
  sums.dq = plan.kernel.dq_accum;
  sums.dq_bytes = plan.dq_zero_bytes;
  sums.batch = launch.batch;
  sums.nheads_k = launch.nheads_k;
  sums.head_ratio = launch.head_ratio;
  sums.head_dim = launch.head_dim;
  if (launch.group_begin > 0 || launch.row_block_begin > 0) return sums;  // dk and dv go on from the round before
  sums.dk = launch.dk_accum;
  sums.dv = launch.dv_accum;
  return sums;
}
}  // namespace

int64_t work_counters_of(const BwdPlan& plan, const BwdRound& round) {
  if (!has_list_numbers(plan)) return 1;
  return static_cast<int64_t>(sizeof(ListNumbers) / sizeof(int32_t)) +
         ListNumbers::kWordsOfChunk * chunks_of(plan, round.row_blocks);
}

int64_t chunk_turns_of(const BwdPlan& plan, const BwdRound& round) {
  const int64_t turns = plan.chunk_blocks > 0 ? chunks_of(plan, round.row_blocks) : 1;
  return int64_t{round.batches} * round.heads_k * turns;
}

ChunkKeyListsParams bwd_chunk_params(const BwdPlan& plan, BwdParams& launch) {
  KeyList& keys = launch.chunks.keys;
  set_extents(keys, plan, launch.batch, launch.nheads_k, launch.row_blocks);
  keys.end = ends_of(plan, launch.keys);
  ChunkKeyListsParams p;
  if (plan.sequence.per_group) {
    move_to_list(launch.chunks, launch.group_begin / keys.head_ratio);
    p.head_step = std::max(launch.head_ratio / keys.head_ratio, 1);
  }
  p.is_whole = plan.has_whole_items;
  p.list_heads = keys.heads;
  if (p.is_whole) take_lists(keys, launch.keys);
  // The used rows of the launch's lists start at the same list as their counts.
  if (plan.used_rows != nullptr) p.used_rows = plan.used_rows + 2 * (launch.keys.count - plan.kernel.keys.count);
  p.from = launch.keys;
  p.to = launch.chunks;
  p.seqlen_q = launch.seqlen_q;
  p.seqlen_k = launch.seqlen_k;
  p.row_block_begin = launch.row_block_begin;
  p.row_blocks = launch.row_blocks;
  p.row_block_rows = plan.list_rows;
  p.is_shared = has_shared_list(plan);
  p.is_causal = launch.is_causal;
  p.first_term = launch.terms.first;
  if (clears_beside_lists(plan)) p.sums = list_sums(plan, launch);
  if (has_list_numbers(plan)) {
    p.numbers = reinterpret_cast<ListNumbers*>(launch.work_counter);
    p.blocks = static_cast<int32_t>(bwd_blocks(plan, launch));
    p.parts_of_list = launch.batch * launch.nheads_k / (keys.batch * keys.heads / p.head_step);
    // Items of a sole chunk write dk and dv of their keys, and so are not divided by heads.
    p.group_heads = plan.has_sole_chunk ? 1 : launch.group_end - launch.group_begin;
    p.steps_of_head = plan.chunk_blocks * (plan.list_rows / plan.tile.block_m);
    p.steps_of_prologue = static_cast<int32_t>(kStepsOfPrologue);
  }
  return p;
}

int64_t chunk_items(const BwdPlan& plan, const BwdParams& launch) {
  const int64_t tiles = chunk_capacity(plan) / kChunkTileKeys;
  const int64_t shares = has_list_numbers(plan) ? launch.group_end - launch.group_begin : 1;
  return tiles * chunks_of(plan, launch.row_blocks) * launch.nheads_k * launch.batch * shares;
}

}  // namespace dmattn
