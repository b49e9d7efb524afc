// What a call will do: every decision, and where everything lies in the workspace. Pure functions of the parameters
// and the device's properties; nothing here touches a GPU.
#pragma once

#include <cstddef>
#include <cstdint>

#include "api/device.h"
#include "api/workspace.h"
#include "dmattn/dmattn.h"
#include "kernels/params.h"
#include "kernels/prep/cache.h"
#include "kernels/prep/prep.h"
#include "kernels/tiles.h"

namespace dmattn {

struct FwdPlan {
  Dtype dtype = Dtype::kNone;
  Family family = Family::kSm80;
  int32_t dim_tile = 0;
  bool is_empty = false;  // there is no output at all
  bool no_keys = false;   // out = 0, lse = -inf
  bool gathered = false;  // by kernel.keys; otherwise the mask, if any, becomes kernel.mask
  bool selected = false;  // kernel.keys comes from the caller
  bool decode = false;    // one query row a head: the decode kernel's work
  MaskSource mask;        // see has_mask()
  FwdParams kernel;
  size_t workspace_bytes = 0;
};

FwdPlan plan_fwd(const dmattn_fwd_params& given, const Device& device, void* workspace);

// A split with fewer key tiles than this costs more to set up and to combine than it gains.
constexpr int32_t kMinTilesPerSplit = 4;
// Parts into which the keys of a row block are split, so that `blocks` blocks of work fill `resident` places evenly.
int32_t choose_num_splits(int64_t blocks, int64_t resident, int32_t key_tiles, int32_t min_tiles = kMinTilesPerSplit);

// Splits of the decode kernel over so many keys. wanted = 0: as many as the device has places for.
int32_t choose_decode_splits(const FwdParams& p, int32_t keys, int32_t dim_tile, int32_t wanted, const Device& device);
// One query row a head and several heads a kv head: the group's heads become the rows of one block, which reads K and V
// once for all of them. The one row is aligned to the last key, so causality has nothing to cut.
void pack_group_as_rows(FwdParams& p);
// Room for the partial results of p.num_splits parts.
void place_partials(FwdParams& p, Workspace& workspace);

// Appending to a cache, and the attention of the tokens' queries.
struct CachePlan {
  Dtype dtype = Dtype::kNone;
  Family family = Family::kSm80;
  int32_t dim_tile = 0;
  bool attends = false;
  CacheAppendParams append;            // of all tokens
  DecodeParams decode;                 // of the first token; see token_params()
  int64_t q_token = 0, out_token = 0;  // elements between the queries and outputs of two tokens
  size_t workspace_bytes = 0;
};
CachePlan plan_cache_append(const dmattn_cache_append_params& p, const Device& device, void* workspace);
// What the launches for token t read.
DecodeParams token_params(const CachePlan& plan, int32_t t);

// The launches of one backward call. Usually one; one per batch, kv head or head of the group
//  - where each query head has its own list of keys (per_group): a block then serves one list,
//  - where a deterministic dbias is shared between heads or batches: a launch adds to each entry at most once, and
//    launches follow one another, and
//  - where a deterministic key dbias comes from lists of row blocks (per_group): blocks add to it in turn, at their
//  end.
struct BwdSequence {
  bool per_batch = false, per_head_k = false, per_group = false;
  bool is_single() const { return !per_batch && !per_head_k && !per_group; }
};

// What one round of launches covers: all of the call, or, where its fp32 sums would be large beside q, k and v, a share
// of it. Rounds then follow one another and use the same workspace. Shares are of batches, then of kv heads; where one
// kv head alone is too much, of its query heads (tiled or gathered by a mask) or of the row blocks (interval lists),
// and dk and dv then go on from the round before.
struct BwdChunk {
  int32_t batch = 0, batches = 0;
  int32_t head_k = 0, heads_k = 0;
  int32_t group = 0, groups = 0;
  int32_t row_block = 0, row_blocks = 0;
  bool continues() const { return group > 0 || row_block > 0; }
};

struct BwdPlan {
  Dtype dtype = Dtype::kNone;
  Family family = Family::kSm80;
  int32_t dim_tile = 0;
  BwdTile tile = {};
  bool zeros = false;     // no query or no key: every gradient is 0
  bool launches = false;  // the attention kernel has something to do
  bool gathered = false;
  bool selected = false;   // kernel.keys comes from the caller
  bool intervals = false;  // ... with a list per block of rows
  MaskSource mask;
  BwdPreprocessParams preprocess;
  BwdParams kernel;
  BwdSequence sequence;
  // Gathered: see bwd_schedule().
  int32_t max_work = 0, max_tiles = 0, max_splits = 1;
  int32_t* schedule = nullptr;  // nullptr: lists of row blocks, which need none
  BwdChunk whole, chunk;        // all of it, and as much of that as a round covers
  // Parts of the workspace that have to start as zeros, one behind the other: once, for each chunk, and for each chunk
  // that does not continue dk and dv.
  void* scratch_zeros = nullptr;
  size_t once_zero_bytes = 0, chunk_zero_bytes = 0, dkv_zero_bytes = 0;
  ConvertDqParams convert_dq;
  // dbias: `reduce` from column sums or dlse; or `dbias_elements` from the accumulator; or direct.
  bool dbias_cols = false, dbias_rows = false;
  ReduceDbiasParams reduce_dbias;
  float* dbias_accum = nullptr;
  int64_t dbias_elements = 0;   // of dbias itself
  size_t dbias_zero_bytes = 0;  // of dbias itself, zeroed before the launch
  size_t workspace_bytes = 0;
  size_t dense_bytes = 0;  // of these, what grows with seqlen_q x seqlen_k because the mask or the bias does
};

BwdPlan plan_bwd(const dmattn_bwd_params& given, const Device& device, void* workspace);

// Calls f(chunk) for every round, in order.
template <class F>
void for_each_chunk(const BwdPlan& plan, F&& f) {
  const BwdChunk &all = plan.whole, &most = plan.chunk;
  const auto extent = [](int32_t begin, int32_t most_of, int32_t end) {
    return most_of < end - begin ? most_of : end - begin;
  };
  for (int32_t b = 0; b < all.batches; b += most.batches)
    for (int32_t hk = 0; hk < all.heads_k; hk += most.heads_k)
      for (int32_t g = 0; g < all.groups; g += most.groups)
        for (int32_t r = 0; r < all.row_blocks; r += most.row_blocks) {
          BwdChunk c;
          c.batch = b;
          c.batches = extent(b, most.batches, all.batches);
          c.head_k = hk;
          c.heads_k = extent(hk, most.heads_k, all.heads_k);
          c.group = g;
          c.groups = extent(g, most.groups, all.groups);
          c.row_block = r;
          c.row_blocks = extent(r, most.row_blocks, all.row_blocks);
          f(c);
        }
}
// Whether dk and dv of the chunk's keys are complete after it.
bool completes_dkv(const BwdPlan& plan, const BwdChunk& chunk);

// The kernel parameters of a chunk; its launches have those of bwd_launch_params().
BwdParams bwd_chunk_params(const BwdPlan& plan, const BwdChunk& chunk);
ConvertDqParams bwd_chunk_dq(const BwdPlan& plan, const BwdChunk& chunk);
// Of the launch for the chunk's batch b, kv head hk and head g of its group, as far as the sequence tells these apart
// (0 where it does not).
BwdParams bwd_launch_params(const BwdPlan& plan, const BwdParams& chunk, int32_t b, int32_t hk, int32_t g);
// The lists of that launch with entry (b, hk) for every kv head, for bwd_schedule().
KeyList bwd_schedule_lists(const BwdParams& launch);

}  // namespace dmattn
