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

// Into which launches a round of the backward is divided. Usually there is one. There is one for each batch
// (per_batch), kv head (per_head_k) or query head of a group (per_group)
//  - where query heads of a group have lists of their own or, on Hopper, biases of their own over lists (per_group):
//    a thread block then serves one head of the group,
//  - where a deterministic dbias is shared between heads or batches: a launch adds to each entry at most once, and
//    launches follow one another, unless thread blocks take turns at dbias (BwdPlan::orders_dbias), and
//  - where a deterministic dbias for each key comes from lists of row blocks (per_group): thread blocks take turns to
//    add to it when they end. Not on Hopper, where a thread block has the sums of all heads that share the bias.
struct BwdSequence {
  bool per_batch = false, per_head_k = false, per_group = false;
  bool is_single() const { return !per_batch && !per_head_k && !per_group; }
};

// What one round of launches covers: the whole call or, if its fp32 sums would be too large beside q, k and v, a
// share of it. Rounds follow one another and use the same workspace. A call is divided by batches, then by kv heads.
// If one kv head alone is too much, it is divided by its query heads or, over lists of row blocks (see
// has_row_block_lists()), by row blocks; each of these rounds then adds to dk and dv of the round before.
struct BwdRound {
  int32_t batch = 0, batches = 0;
  int32_t head_k = 0, heads_k = 0;
  int32_t group = 0, groups = 0;
  int32_t row_block = 0, row_blocks = 0;
  bool continues() const { return group > 0 || row_block > 0; }
};

// Gradients that were not asked for, but that the kernel computes all the same, as Hopper's kernels always compute
// all three. Such a dk or dv is written to the workspace; such a dq stays in its fp32 sums.
struct SpareGradients {
  bool dq = false, dk = false, dv = false;
};

struct BwdPlan {
  bool zeros = false;     // no query or no key: every gradient is 0
  bool launches = false;  // the attention kernel has something to do
  // The gradients that the kernel computes, including the spare ones.
  bool wants_dq = false, wants_dk = false, wants_dv = false;
  SpareGradients spares;
  bool has_lse_rest = false;
  KeyWalk walk = KeyWalk::kTiled;
  Unit unit;
  KernelChoice choice;  // its blocks are those of each launch: see bwd_blocks()
  // The number of persistent thread blocks, which stay on their SMs and take items, as counted by
  // `kernel.work_counter`. 0: the kernel is not persistent, and each item has a thread block of its own.
  int32_t resident_blocks = 0;
  BwdTile tile = {};
  MaskSource mask;
  BwdPreprocessParams preprocess;
  BwdParams kernel;
  ShortBwdParams short_kernel;  // few keys: in place of `kernel`, one launch and no rounds
  BwdSequence sequence;
  BwdRound whole, round;  // the whole call, and the most of it that a round covers

  // Rows of a row block, where each row block has a list of its own or, on Hopper, its part of a list that all rows
  // share. 0: the keys of a row do not depend on its row block.
  int32_t list_rows = 0;
  // Hopper: how many row blocks make a chunk, for which their lists are put together. 0: there are no chunks.
  int32_t chunk_blocks = 0;
  // Hopper, the list of a mask: an item is a tile of listed keys with all rows. dk and dv then need no sums.
  bool has_whole_items = false;
  // A single chunk has all rows, so that each key is in one of its tiles only. dk and dv then need no sums either.
  bool has_sole_chunk = false;
  int32_t* used_rows = nullptr;  // Hopper, the list of a mask: UsedRows::found
  // Hopper: a single tile has all keys of a head, so that the kernel writes dq itself, without fp32 sums.
  bool stores_dq = false;
  // Each chunk stores what it adds to dk, dv and dbias in rows of its own, which are summed at the end (ChunkTerms).
  bool keeps_terms = false;
  CarriedTerms carried;  // of the first round: see bwd_carried_terms()

  // How the tiles of lists are split between thread blocks: see bwd_schedule(), which decides it on the device, as
  // only the device knows the lengths of the lists.
  int32_t max_work = 0, max_tiles = 0, max_splits = 1, even_blocks = 0;
  int32_t* schedule = nullptr;  // nullptr: no lists, or those of row blocks
  int64_t slots = 0;            // accumulators of dk and dv of split tiles
  // Bytes of the slots if they lie in the memory of dq, which is written after they have been rounded.
  size_t dq_slot_bytes = 0;
  bool may_split = true;       // Hopper: whether tiles may be divided into parts
  bool has_dkv_accum = false;  // dk and dv are added up by key

  // The parts of the workspace that start as zeros, one behind the other from scratch_zeros on. Zeroed once for the
  // call: once_zero_bytes; for each round: the counters, and then the sums of dq; for each round that does not go on
  // with dk and dv of the round before: dkv_zero_bytes.
  void* scratch_zeros = nullptr;
  size_t once_zero_bytes = 0, counter_zero_bytes = 0, dq_zero_bytes = 0, dkv_zero_bytes = 0;
  ConvertDqParams convert_dq;
  // dbias is written by `reduce_dbias`, from column sums (dbias_cols) or from dlse (dbias_rows), or rounded or copied
  // from dbias_accum, or written by the kernel itself.
  bool dbias_cols = false, dbias_rows = false;
  ReduceDbiasParams reduce_dbias;
  void* dbias = nullptr;
  Dtype dbias_dtype = Dtype::kNone;
  float* dbias_accum = nullptr;
  bool orders_dbias = false;    // kAccum, deterministic: thread blocks of one launch take turns at dbias
  bool has_dbias_sums = false;  // kAccum: sums lie apart from dbias, with the strides of `kernel`
  int64_t dbias_elements = 0;   // of dbias itself
  int64_t dbias_keys = 0;       // elements of a row
  int64_t dbias_pitch = 0;      // elements from one row to the next
  size_t dbias_zero_bytes = 0;  // of dbias itself, zeroed before the launch
  size_t workspace_bytes = 0;
  size_t dense_bytes = 0;  // of these, the arrays that grow with seqlen_q x seqlen_k, as a dense mask or bias does

  // Bytes of dbias itself from its first entry to its last, including the gaps between its rows.
  size_t dbias_bytes() const {
    if (dbias_elements == 0) return 0;
    const int64_t last_row = (dbias_elements / dbias_keys - 1) * dbias_pitch;
    return static_cast<size_t>((last_row + dbias_keys) * element_bytes(dbias_dtype));
  }
  // Neither gradients nor a dbias: nothing happens at all.
  bool is_empty() const { return !zeros && !launches && !dbias_rows; }
  bool is_short() const { return unit.direction == Direction::kShortBackward; }
};

// Whether row blocks have lists of their own or parts of a shared list: see BwdPlan::list_rows.
inline bool has_row_block_lists(const BwdPlan& plan) { return plan.list_rows > 0; }
// Whether the sums of a round are cleared by the launch that makes the lists of its chunks: see ListSums.
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
// The parameters of the launch for the round's batch b, kv head hk and query head g of a group. b and hk are 0 where
// plan.sequence has no launches of their own for these; g is then not read.
BwdParams bwd_launch_params(const BwdPlan& plan, const BwdParams& round, int32_t b, int32_t hk, int32_t g);
// Thread blocks of that launch.
int64_t bwd_blocks(const BwdPlan& plan, const BwdParams& launch);
// Parameters of chunk_key_lists(), which puts the lists of the launch's row blocks together. Also sets launch.chunks
// to the lists that it writes.
ChunkKeyListsParams bwd_chunk_params(const BwdPlan& plan, BwdParams& launch);
// The sums that the launch's round takes over from the round before, and those that it leaves to the next.
CarriedTerms bwd_carried_terms(const BwdPlan& plan, const BwdParams& launch);
// The lists of that launch, from that of its first query head on, so that bwd_schedule() finds the list of a kv head.
KeyList bwd_schedule_lists(const BwdParams& launch);

// The level of the kernel that serves `plan`.
Level bwd_level(const BwdPlan& plan);

}  // namespace dmattn
