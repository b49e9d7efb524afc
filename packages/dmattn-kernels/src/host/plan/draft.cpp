#include "host/plan/draft.h"

#include "host/plan/cache_params.h"
#include "host/plan/decode.h"
#include "host/workspace.h"

namespace dmattn {
namespace {

void set_draft(CacheDraftParams& to, const dmattn_tensor& draft, Dtype dtype) {
  to.draft = static_cast<DraftToken*>(draft.data);
  to.tokens = static_cast<int32_t>(draft.shape[2]);
  to.vec_cache = is_vec16(to.k_cache, to.k_stride, dtype) && is_vec16(to.v_cache, to.v_stride, dtype);
}

// Sets the rows, which are the queries of the tokens, and appends the tokens to the keys.
void set_draft_rows(DecodeParams& d, const CacheDraftParams& draft) {
  d.draft.tokens = draft.draft;
  d.draft.entries = draft.capacity;
  d.draft.count = draft.tokens;
  d.token_rows = pack_tokens_as_rows(d, draft.tokens);
  d.seqlen_k += draft.tokens;
}

}  // namespace

DraftPlan plan_cache_draft(const dmattn_cache_draft_params& p, const Device& device) {
  DraftPlan plan;
  const auto dtype = static_cast<Dtype>(p.q.dtype);
  CacheDraftParams& draft = plan.draft;
  read_cache(draft, p);
  read_tokens(draft, p);
  set_draft(draft, p.draft, dtype);
  draft.vec_new = is_vec16(draft.k_new, draft.k_new_stride, dtype) && is_vec16(draft.v_new, draft.v_new_stride, dtype);
  plan.is_empty = draft.batch == 0 || draft.tokens == 0;
  if (plan.is_empty) return plan;
  plan.unit.direction = Direction::kDecode;
  plan.unit.dtype = dtype;
  plan.unit.head_dim_tile = head_dim_tile(draft.head_dim);
  plan.choice.tiles = resolve_unit(*device.kernels, plan.unit).tiles;
  DecodeParams& d = plan.decode;
  set_entries(d, draft, dtype, static_cast<int32_t>(p.q.shape[2]));
  set_queries(d, p);
  set_draft_rows(d, draft);
  const int32_t block_rows = token_rows(plan.unit.head_dim_tile);
  d.num_splits = choose_decode_splits(d, d.seqlen_k, plan.unit.head_dim_tile, 0, device, block_rows);
  plan.choice.blocks = decode_blocks(d, block_rows);
  plan.choice.level = decode_level(d, plan.unit.head_dim_tile, /*from_cache=*/true);
  place(plan, nullptr);
  return plan;
}

void place(DraftPlan& plan, void* base) {
  DecodeParams& d = plan.decode;
  if (plan.is_empty || d.num_splits == 1) return;
  Workspace workspace(base);
  d.arrivals = workspace.take<uint64_t>(plan.choice.blocks / d.num_splits);
  place_partials(d, workspace);
  plan.workspace_bytes = workspace.bytes();
}

CommitPlan plan_cache_commit(const dmattn_cache_commit_params& p) {
  CommitPlan plan;
  read_cache(plan.draft, p);
  set_draft(plan.draft, p.draft, static_cast<Dtype>(p.k_cache.dtype));
  plan.draft.count = p.count.data;
  plan.draft.count_stride = p.count.stride[0];
  plan.draft.count_is_wide = p.count.dtype == DMATTN_INT64;
  return plan;
}

}  // namespace dmattn
