// Between the parts of the backward's planning.
#pragma once

#include "host/plan/bwd.h"

namespace dmattn {

// Whether rows do not see all keys that causality and the lengths leave.
bool hides_keys(const BwdPlan& plan);
// Hopper's kernels up to head_dim 128 take turns at a dbias that is shared, of which all have the same tiles.
bool may_order_dbias(const BwdPlan& plan);
// Whether this is a problem of the kind that KernelSet::serves_bwd() is asked about.
bool is_for_residents(const BwdPlan& plan);
// Whether a dense dbias is added up in fp32 apart from it, and rounded, or copied, at the end: in 16 bits; and in fp32
// on Hopper where many scores share an entry and rows do not start on 16 bytes, as such rows are added to one number at
// a time, and those of sums by TMA.
bool adds_up_dbias_apart(const BwdPlan& plan);
// Whether thread blocks that stay have enough to do. No kernel splits packed sequences; where sums are deterministic
// others do not split further.
bool suits_residents(const BwdPlan& plan);

// Pairs of what shares a 16-bit bias and its gradient take as long as one after the other, and read and add half as
// much of them. Only at head_dim 64 are there registers for the dk and dv of two heads, and only where each tile of
// keys is one part.
BiasPairs find_pairs(const BwdPlan& plan, const BwdRound& round, int64_t parts);

// Thread blocks that stay have enough to do if no more than a tenth of their time is lost.
constexpr double kBusy = 0.9;
// Whether items take turns at dq so that those of a group are at the same rows; and whether items have two tiles of
// keys each, one of few rows and one of many.
bool suits_turns(const BwdPlan& plan, const BwdRound& round);
bool suits_mirrored_items(const BwdPlan& plan, const BwdRound& round, const Device& device);

// Decides into how many rounds the call falls for the sake of the fp32 sums, and into how many parts the rows of a key
// tile. Comes last, because what the sums may take depends on all the rest: `bytes_before` of the workspace.
void choose_sums(BwdPlan& plan, const Device& device, size_t bytes_before);
// Whether thread blocks that stay have enough to do with the tiles of a round, of which each falls into so many parts:
// others, which split further, would take longer. Or whether they are soon done.
bool keeps_residents_busy(const BwdPlan& plan, const BwdRound& round, int64_t tiles, int64_t parts);
// The parts with which they would have the most to do.
int64_t most_useful_parts(const BwdPlan& plan, int64_t tiles);
// Of each tile in a round of so many heads of a group, which may be fewer than those of the `usual` one, in which there
// are so many parts.
int64_t parts_of_round(const BwdPlan& plan, const BwdRound& usual, int64_t parts, int32_t groups);
// Lays out the sums that the backward kernels keep in fp32.
void place_sums(BwdPlan& plan, Workspace& workspace);

// Whether heads of a group have lists of their own, or on Hopper a bias over lists: a launch has one of each group then.
bool has_lists_of_heads(const BwdPlan& plan);
// On Hopper, whether heads of a group have biases of their own for each key, over consecutive keys. Items read such a
// bias once, so that each has one head.
bool has_items_of_heads(const BwdPlan& plan);

// How many row blocks of the lists make a chunk. Depends on plan.keeps_terms.
void choose_chunks(BwdPlan& plan, const Device& device);
// Once rounds are chosen: chunks of more than 1024 rows become shorter where a round has few items for each SM.
void shorten_chunks(BwdPlan& plan, const BwdRound& round, const Device& device);
// Whether each tile of the list may have all rows, and whether a round then has items enough for each SM.
bool may_have_whole_items(const BwdPlan& plan);
bool keeps_busy_with_whole_items(const BwdPlan& plan, const BwdRound& round, const Device& device);
// Whether one chunk has all row blocks, so that its tiles may write dk and dv; and whether a round has so many items that
// the chunk stays as long as that.
bool may_have_sole_chunk(const BwdPlan& plan);
bool keeps_sole_chunk(const BwdPlan& plan, const BwdRound& round, const Device& device);
// Whether there are so many whole items that SMs hardly wait for the last of them.
bool has_many_whole_items(const BwdPlan& plan, const Device& device);
// Whether a round has items enough for each SM.
bool keeps_busy_with_chunks(const BwdPlan& plan, const BwdRound& round, const Device& device);
// What all rounds like this one take, in steps over a block of rows.
int64_t steps_with_chunks(const BwdPlan& plan, const BwdRound& round, const Device& device);
// What the chunks of a round add to dk, dv and dbias, if it is kept apart. false in fits_terms(): there are too many
// rows to be numbered.
bool fits_terms(const BwdPlan& plan, const BwdRound& round);
ChunkTerms place_terms(const BwdPlan& plan, const BwdRound& round, Workspace& workspace);
// Where rounds are of row blocks, what such sums take with them from one to the next.
CarriedTerms place_carried_terms(const BwdPlan& plan, const BwdRound& round, Workspace& workspace);
// Lays out the lists of a round's chunks; without any, does nothing.
KeyChunks place_chunks(const BwdPlan& plan, const BwdRound& round, Workspace& workspace);
// Launches of a round, each of which counts its items by itself.
inline int32_t launches_of(const BwdSequence& sequence, const BwdRound& round) {
  return (sequence.per_batch ? round.batches : 1) * (sequence.per_head_k ? round.heads_k : 1) *
         (sequence.per_group ? round.groups : 1);
}
// How many numbers of 32 bits a launch of the round has from BwdParams::work_counter on.
int64_t work_counters_of(const BwdPlan& plan, const BwdRound& round);
// Likewise of BwdParams::dkv_semaphore, where chunks of lists take turns.
int64_t chunk_turns_of(const BwdPlan& plan, const BwdRound& round);
// Items of a launch, if its chunks' lists were full, and each tile several items where it may be.
int64_t chunk_items(const BwdPlan& plan, const BwdParams& launch);

// The (batch, head) pairs of arrays in the workspace.
inline int64_t rows_of(const BwdParams& p) { return int64_t{p.packing.slabs(p.batch)} * p.nheads; }
// Whether a workspace of so many bytes, without those that are as large as a dense bias or mask, is no larger than it
// should be.
bool keeps_to_limit(const BwdPlan& plan, int64_t bytes);
// Key tiles that a launch has to provide blocks for.
int64_t key_tiles_of(const BwdParams& p, int32_t batches, int32_t heads_k, int32_t block_n);

}  // namespace dmattn
