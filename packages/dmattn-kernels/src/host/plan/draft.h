// Drafts of a cache: attention of tokens that are not put in, and the commit that puts the first of them in.
#pragma once

#include "dmattn/dmattn.h"
#include "host/arch.h"
#include "kernels/helper_params.h"

namespace dmattn {

struct DraftPlan {
  bool is_empty = false;
  CacheDraftParams draft;  // of the launch before the attention
  Unit unit;               // of the attention
  KernelChoice choice;
  DecodeParams decode;
  size_t workspace_bytes = 0;
};
DraftPlan plan_cache_draft(const dmattn_cache_draft_params& p, const Device& device);
// Gives every array its place in a workspace that starts at `base`, or only counts the bytes where that is null.
void place(DraftPlan& plan, void* base);

struct CommitPlan {
  CacheDraftParams draft;
  size_t workspace_bytes = 0;
};
CommitPlan plan_cache_commit(const dmattn_cache_commit_params& p);
inline void place(CommitPlan&, void*) {}

}  // namespace dmattn
