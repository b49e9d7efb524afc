// What a selection of keys will do, by score or by given intervals: the host's decisions and the workspace.
#pragma once

#include "dmattn/dmattn.h"
#include "host/workspace.h"
#include "kernels/selection_params.h"

namespace dmattn {

struct SelectionPlan {
  SelectParams params;
  KeyList lists;
  prep::SelectPlan steps;
  size_t workspace_bytes = 0;
};
SelectionPlan plan_select(const dmattn_select_params& p, int32_t num_sms);
// Gives every array its place in a workspace that starts at `base`, or only counts the bytes where that is null.
void place(SelectionPlan& plan, void* base);

// The capacity that each list of a selection needs; 0 if there can be no such selection.
int64_t select_capacity(int64_t window, int64_t seqlen_k, bool is_causal);

struct KeyListsPlan {
  IntervalParams params;
  KeyList lists;
  size_t workspace_bytes = 0;
};
KeyListsPlan plan_build_key_lists(const dmattn_build_key_lists_params& p);
void place(KeyListsPlan& plan, void* base);

}  // namespace dmattn
