// Decoding: few query rows a head, over all keys, a list of them, or the entries of a cache.
#pragma once

#include "dmattn/dmattn.h"
#include "host/arch.h"
#include "host/workspace.h"
#include "kernels/helper_params.h"
#include "kernels/params.h"
#include "kernels/tiles.h"

namespace dmattn {

// The number of splits of the decode kernel over `keys` keys. wanted == 0: as many as the device has room for at a
// time.
int32_t choose_decode_splits(const FwdParams& p, int32_t keys, int32_t dim_tile, int32_t wanted, const Device& device,
                             int32_t block_rows = kDecodeRows);
// The level of the decode kernel that serves `p`, in which num_splits is already set: see kernels/decode_level.h.
Level decode_level(const FwdParams& p, int32_t dim_tile, bool from_cache);
// Thread blocks of the decode kernel.
int64_t decode_blocks(const FwdParams& p, int32_t block_rows = kDecodeRows);
// One query row a head and several heads a kv head: the group's heads become the rows of one block, which reads K and V
// once for all of them. The one row is aligned to the last key, so causality has nothing to cut.
void pack_group_as_rows(FwdParams& p);
// The same for several tokens: a token has a row for each head of the group, and these are followed by the rows of
// the next token. Returns how to find the rows of a token.
TokenRows pack_tokens_as_rows(FwdParams& p, int32_t tokens);
// Room for the partial results of p.num_splits parts.
void place_partials(FwdParams& p, Workspace& workspace);

// Appending to a cache, and the attention of the tokens' queries.
struct CachePlan {
  bool attends = false;
  Unit unit;  // of the attention
  KernelChoice choice;
  CacheAppendParams append;            // of all tokens
  DecodeParams decode;                 // of the first token; see token_params()
  int64_t q_token = 0, out_token = 0;  // elements between the queries and outputs of two tokens
  size_t workspace_bytes = 0;
};
CachePlan plan_cache_append(const dmattn_cache_append_params& p, const Device& device);
// Gives every array its place in a workspace that starts at `base`, or only counts the bytes where that is null.
void place(CachePlan& plan, void* base);
// What the launches for token t read.
DecodeParams token_params(const CachePlan& plan, int32_t t);

}  // namespace dmattn
