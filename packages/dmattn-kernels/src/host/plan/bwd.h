// What a backward call will do: every decision, and where everything lies in the workspace.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "dmattn/dmattn.h"
#include "host/arch.h"
#include "host/problem.h"
#include "host/workspace.h"
#include "kernels/carried_terms.h"
#include "kernels/helper_params.h"
#include "kernels/params.h"
#include "kernels/short_params.h"
#include "kernels/tiles.h"

namespace dmattn {

// The launches of one backward call. Usually one; one per batch, kv head or head of the group
//  - where query heads of a group have their own lists of keys, or on Hopper their own bias over lists (per_group): a
//    block then serves one head of the group,
//  - where a deterministic dbias is shared between heads or batches: a launch adds to each entry at most once, and
//    launches follow one another, unless blocks take turns at it (BwdPlan::orders_dbias), and
//  - where a deterministic key dbias comes from lists of row blocks (per_group): blocks add to it in turn, at their
//    end. Not on Hopper, where a block has the sums of all heads that share the bias.
struct BwdSequence {
  bool per_batch = false, per_head_k = false, per_group = false;
  bool is_single() const { return !per_batch && !per_head_k && !per_group; }
};

// What one round of launches covers: all of the call, or, where its fp32 sums would be large beside q, k and v, a share
// of it. Rounds then follow one another and use the same workspace. Shares are of batches, then of kv heads; where one
// kv head alone is too much, of its query heads (tiled or gathered by a mask) or of the row blocks (interval lists),
// and dk and dv then go on from the round before.
struct BwdRound {
  int32_t batch = 0, batches = 0;
  int32_t head_k = 0, heads_k = 0;
  int32_t group = 0, groups = 0;
  int32_t row_block = 0, row_blocks = 0;
  bool continues() const { return group > 0 || row_block > 0; }
};

// Gradients that nobody asked for, of kernels that always compute all three. dk and dv go to the workspace, dq stays
// in its sums.
struct SpareGradients {
  bool dq = false, dk = false, dv = false;
};

struct BwdPlan {
  bool zeros = false;     // no query or no key: every gradient is 0
  bool launches = false;  // the attention kernel has something to do
  bool wants_dq = false, wants_dk = false,
       wants_dv = false;  // of the kernel; of these nobody else wants the spare ones
  SpareGradients spares;
  bool has_lse_rest = false;
  KeyWalk walk = KeyWalk::kTiled;
  Unit unit;
  KernelChoice choice;  // blocks are those of each launch: see bwd_blocks()
  // Thread blocks that stay on their SMs and take the blocks of keys that `kernel.work_counter` counts; 0: each block
  // of keys has one of its own.
  int32_t resident_blocks = 0;
  BwdTile tile = {};
  MaskSource mask;
  BwdPreprocessParams preprocess;
  BwdParams kernel;
  ShortBwdParams short_kernel;  // of few keys, in place of `kernel`: one launch and no rounds
  BwdSequence sequence;
  BwdRound whole, round;  // all of it, and as much of that as a round covers

  // Rows of a row block that has a list, or, on Hopper, a share of one that all rows have. 0: row blocks have no part
  // in which keys there are.
  int32_t list_rows = 0;
  // The lists of row blocks on Hopper: how many of them are put together. 0: none are.
  int32_t chunk_blocks = 0;
  // The list of a mask on Hopper: each tile of it has all rows. Its dk and dv then need no sums.
  bool has_whole_items = false;
  // A single chunk has all rows, so that each key is in one of its tiles alone. Their dk and dv need no sums either.
  bool has_sole_chunk = false;
  int32_t* used_rows = nullptr;  // beside that list: UsedRows::found
  // A single tile has all keys of a head, so that its kernel on Hopper writes dq itself. There are no sums of it.
  bool stores_dq = false;
  // What these chunks add to dk, dv and dbias is kept apart and summed at the end (ChunkTerms).
  bool keeps_terms = false;
  CarriedTerms carried;  // of the first round: see bwd_carried_terms()

  // Splits of key tiles over blocks. Lists of keys, whose lengths the device knows: see bwd_schedule().
  int32_t max_work = 0, max_tiles = 0, max_splits = 1, even_blocks = 0;
  int32_t* schedule = nullptr;  // nullptr: lists of row blocks, which need none
  int64_t slots = 0;            // accumulators of split tiles
  size_t dq_slot_bytes = 0;    // of them, if they lie in the memory of dq, which is written when they have been rounded
  bool may_split = true;       // whether tiles may fall into parts, on Hopper
  bool has_dkv_accum = false;  // dk and dv are added up by key

  // Parts of the workspace that have to start as zeros, one behind the other: once; for each round, counters and then
  // the sums of dq; and for each round that does not continue dk and dv.
  void* scratch_zeros = nullptr;
  size_t once_zero_bytes = 0, counter_zero_bytes = 0, dq_zero_bytes = 0, dkv_zero_bytes = 0;
  ConvertDqParams convert_dq;
  // dbias: `reduce_dbias` from column sums or dlse; or rounded from the accumulator; or direct.
  bool dbias_cols = false, dbias_rows = false;
  ReduceDbiasParams reduce_dbias;
  void* dbias = nullptr;
  Dtype dbias_dtype = Dtype::kNone;
  float* dbias_accum = nullptr;
  bool orders_dbias = false;    // kAccum, deterministic: blocks of one launch take turns at it
  bool has_dbias_sums = false;  // kAccum: sums are apart from dbias, with the strides of the kernel's parameters
  int64_t dbias_elements = 0;   // of dbias itself
  int64_t dbias_keys = 0;       // of these, in a row
  int64_t dbias_pitch = 0;      // from one row to the next
  size_t dbias_zero_bytes = 0;  // of dbias itself, zeroed before the launch
  size_t workspace_bytes = 0;
  size_t dense_bytes = 0;  // of these, what grows with seqlen_q x seqlen_k because the mask or the bias does

  // Of dbias itself, from its first entry to its last.
  size_t dbias_bytes() const {
    if (dbias_elements == 0) return 0;
    const int64_t last_row = (dbias_elements / dbias_keys - 1) * dbias_pitch;
    return static_cast<size_t>((last_row + dbias_keys) * element_bytes(dbias_dtype));
  }
  // Neither gradients nor a dbias: nothing happens at all.
  bool is_empty() const { return !zeros && !launches && !dbias_rows; }
  bool is_short() const { return unit.direction == Direction::kShortBackward; }
};

// Row blocks that have lists of their own, or shares of one.
inline bool has_row_block_lists(const BwdPlan& plan) { return plan.list_rows > 0; }
// Whether the sums of a round are cleared beside its chunks' lists: see ListSums.
inline bool clears_beside_lists(const BwdPlan& plan) {
  return plan.chunk_blocks > 0 && !plan.has_whole_items && plan.sequence.is_single();
}
inline bool has_shared_list(const BwdPlan& plan) { return plan.list_rows > 0 && plan.walk != KeyWalk::kRowBlockLists; }

// `p` has been validated. The arrays in the workspace have no place yet: see place().
BwdPlan plan_bwd(const dmattn_bwd_params& p, const Device& device);
// Gives every array its place in a workspace that starts at `base`, or only counts the bytes where that is null.
void place(BwdPlan& plan, void* base);

// Calls f(round) for every round, in order.
template <class F>
void for_each_round(const BwdPlan& plan, F&& f) {
  const BwdRound &all = plan.whole, &most = plan.round;
  BwdRound r;
  for (r.batch = 0; r.batch < all.batches; r.batch += most.batches) {
    r.batches = std::min(most.batches, all.batches - r.batch);
    for (r.head_k = 0; r.head_k < all.heads_k; r.head_k += most.heads_k) {
      r.heads_k = std::min(most.heads_k, all.heads_k - r.head_k);
      for (r.group = 0; r.group < all.groups; r.group += most.groups) {
        r.groups = std::min(most.groups, all.groups - r.group);
        for (r.row_block = 0; r.row_block < all.row_blocks; r.row_block += most.row_blocks) {
          r.row_blocks = std::min(most.row_blocks, all.row_blocks - r.row_block);
          f(r);
        }
      }
    }
  }
}
inline bool covers_all(const BwdPlan& plan, const BwdRound& r) {
  const BwdRound& all = plan.whole;
  return r.batches == all.batches && r.heads_k == all.heads_k && r.groups == all.groups &&
         r.row_blocks == all.row_blocks;
}
inline bool is_last_round(const BwdPlan& plan, const BwdRound& r) {
  const BwdRound& all = plan.whole;
  return r.batch + r.batches == all.batches && r.head_k + r.heads_k == all.heads_k &&
         r.group + r.groups == all.groups && r.row_block + r.row_blocks == all.row_blocks;
}
// Whether dk and dv of the round's keys are complete after it.
bool completes_dkv(const BwdPlan& plan, const BwdRound& round);

// The kernel parameters of a round; its launches have those of bwd_launch_params().
BwdParams bwd_round_params(const BwdPlan& plan, const BwdRound& round);
ConvertDqParams bwd_round_dq(const BwdPlan& plan, const BwdRound& round);
// Of the launch for the round's batch b, kv head hk and head g of its group, as far as the sequence tells these apart
// (0 where it does not).
BwdParams bwd_launch_params(const BwdPlan& plan, const BwdParams& round, int32_t b, int32_t hk, int32_t g);
// Thread blocks of that launch.
int64_t bwd_blocks(const BwdPlan& plan, const BwdParams& launch);
// Puts the row blocks of that launch together: its chunks become those that chunk_key_lists() then writes.
ChunkKeyListsParams bwd_chunk_params(const BwdPlan& plan, BwdParams& launch);
// What that launch's round goes on from, and leaves to the next.
CarriedTerms bwd_carried_terms(const BwdPlan& plan, const BwdParams& launch);
// The lists of that launch with entry (b, hk) for every kv head, for bwd_schedule().
KeyList bwd_schedule_lists(const BwdParams& launch);

// Of kernels that are given these parameters.
Level bwd_level(const BwdPlan& plan);

}  // namespace dmattn
