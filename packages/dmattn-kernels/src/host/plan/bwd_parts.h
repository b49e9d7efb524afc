// What the source files of the backward's plan share.
#pragma once

#include "host/plan/bwd.h"

namespace dmattn {

// Whether a mask or a window hides keys that causality and the lengths leave.
bool hides_keys(const BwdPlan& plan);
// Whether there is a bias for each key, and no mask, window or fixed order of sums. Hopper has a kernel for this that
// differs from the one without a bias in nothing but the bias.
bool has_key_bias_alone(const BwdPlan& plan);
// Whether thread blocks can take turns at a shared dbias: in Hopper's kernels up to head_dim 128, if all that share
// it have the same mask and so the same tiles.
bool may_order_dbias(const BwdPlan& plan);
// Whether Hopper's persistent kernels exist for this kind of problem; KernelSet::serves_bwd() decides the rest.
bool is_for_residents(const BwdPlan& plan);
// Whether a dense dbias that heads or batches share is added up in fp32 in memory of its own, and rounded or copied
// to dbias at the end. A 16-bit dbias always is. An fp32 dbias is on Hopper, if many scores share an entry and its
// rows do not start on 16 bytes: to such rows the kernels add one number at a time, to those of the sums by TMA.
bool adds_up_dbias_apart(const BwdPlan& plan);
// Whether persistent thread blocks have enough to do to be faster than the sm80 code. Always true over lists, for
// packed sequences, which no kernel splits, and in deterministic calls, which the sm80 code does not split further.
bool suits_residents(const BwdPlan& plan);

// The pairs of kv heads or batches that share a 16-bit bias and its gradient and are computed together. A pair takes
// as long as both would one after the other, but reads half as much of the bias and adds half as much to its
// gradient. Only at head_dim 64 are there registers for the dk and dv of two heads, and only where each tile of keys
// is one part.
BiasPairs find_pairs(const BwdPlan& plan, const BwdRound& round, int64_t parts);

// Persistent thread blocks have enough to do if no more than a tenth of their time is lost.
constexpr double kBusy = 0.9;
// Two ways to keep the items of a group at the same rows at the same time (see bwd_l2.cpp): items take turns at dq,
// or a thread block takes items in pairs, a tile of keys that many rows see and then one that few see.
bool suits_turns(const BwdPlan& plan, const BwdRound& round);
bool suits_mirrored_items(const BwdPlan& plan, const BwdRound& round, const Device& device);

// Decides into how many rounds the fp32 sums divide the call, and into how many parts a key tile is divided. Called
// last, as the memory left for the sums depends on `bytes_before`, the bytes of all else in the workspace.
void choose_sums(BwdPlan& plan, const Device& device, size_t bytes_before);
// Whether persistent thread blocks have so much to do with `tiles` tiles in a round, each in `parts` parts, that the
// sm80 code, which splits further, would take longer; or whether their items are so short that this does not matter.
bool keeps_residents_busy(const BwdPlan& plan, const BwdRound& round, int64_t tiles, int64_t parts);
// The number of parts of each tile with which persistent thread blocks have the most to do.
int64_t most_useful_parts(const BwdPlan& plan, int64_t tiles);
// Parts of each tile in a round of `groups` heads of each group, which may be fewer heads than in the `usual` round,
// in which each tile has `parts` parts.
int64_t parts_of_round(const BwdPlan& plan, const BwdRound& usual, int64_t parts, int32_t groups);
// Lays out the sums that the backward kernels keep in fp32.
void place_sums(BwdPlan& plan, Workspace& workspace);

// Whether query heads of a group have lists of their own or, on Hopper, biases of their own over lists: a launch then
// has one head of each group.
bool has_lists_of_heads(const BwdPlan& plan);
// On Hopper, without lists, whether query heads of a group have biases for each key of their own. An item reads such
// a bias once, so that it has a single head.
bool has_items_of_heads(const BwdPlan& plan);

// Chooses how many row blocks make a chunk. Depends on plan.keeps_terms.
void choose_chunks(BwdPlan& plan, const Device& device);
// Once rounds are chosen: chunks of more than 1024 rows become shorter where a round has few items for each SM.
void shorten_chunks(BwdPlan& plan, const BwdRound& round, const Device& device);
// Whether an item over a mask's list may have all rows (has_whole_items), and whether a round then has enough items
// for each SM.
bool may_have_whole_items(const BwdPlan& plan);
bool keeps_busy_with_whole_items(const BwdPlan& plan, const BwdRound& round, const Device& device);
// Whether one chunk has all row blocks, so that its tiles may write dk and dv (has_sole_chunk), and whether a round
// has enough items although its chunk is so long.
bool may_have_sole_chunk(const BwdPlan& plan);
bool keeps_sole_chunk(const BwdPlan& plan, const BwdRound& round, const Device& device);
// Whether there are so many items with all rows that little time is lost while the last of them run.
bool has_many_whole_items(const BwdPlan& plan, const Device& device);
// Whether a round that is made smaller for ChunkTerms still has enough items for each SM.
bool keeps_busy_with_chunks(const BwdPlan& plan, const BwdRound& round, const Device& device);
// The estimated time of all rounds of this size, in steps over a block of rows.
int64_t steps_with_chunks(const BwdPlan& plan, const BwdRound& round, const Device& device);
// ChunkTerms, in which each chunk of a round stores what it adds to dk, dv and dbias. fits_terms(): whether the rows
// of these arrays are few enough to be numbered. place_terms() lays them out if plan.keeps_terms.
bool fits_terms(const BwdPlan& plan, const BwdRound& round);
ChunkTerms place_terms(const BwdPlan& plan, const BwdRound& round, Workspace& workspace);
// Where rounds divide the row blocks: lays out the sums that each round hands to the next.
CarriedTerms place_carried_terms(const BwdPlan& plan, const BwdRound& round, Workspace& workspace);
// Lays out the lists of a round's chunks; does nothing where there are no chunks.
KeyChunks place_chunks(const BwdPlan& plan, const BwdRound& round, Workspace& workspace);
// Launches of a round. Each counts its items separately.
inline int32_t launches_of(const BwdSequence& sequence, const BwdRound& round) {
  return (sequence.per_batch ? round.batches : 1) * (sequence.per_head_k ? round.heads_k : 1) *
         (sequence.per_group ? round.groups : 1);
}
// How many 32-bit numbers a launch of the round has from BwdParams::work_counter on.
int64_t work_counters_of(const BwdPlan& plan, const BwdRound& round);
// How many it has from BwdParams::dkv_semaphore on, over lists of row blocks or of chunks.
int64_t chunk_turns_of(const BwdPlan& plan, const BwdRound& round);
// The most items that a launch may have: as many as if all lists of its chunks were full, and all tiles divided that
// may be.
int64_t chunk_items(const BwdPlan& plan, const BwdParams& launch);

// The number of (batch, query head) pairs that arrays in the workspace have.
inline int64_t rows_of(const BwdParams& p) { return int64_t{p.packing.slabs(p.batch)} * p.nheads; }
// Whether a workspace of `bytes` bytes, not counting plan.dense_bytes, keeps to the limit.
bool keeps_to_limit(const BwdPlan& plan, int64_t bytes);
// Key tiles of a launch with so many batches and kv heads; for packed sequences an upper bound.
int64_t key_tiles_of(const BwdParams& p, int32_t batches, int32_t heads_k, int32_t block_n);

}  // namespace dmattn
