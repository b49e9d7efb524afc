// The operations of the library: the names of their parameter structs, and how their plans are made. Every plan has
// workspace_bytes and a function place(plan, base).
#pragma once

#include "dmattn/dmattn.h"
#include "host/plan/bwd.h"
#include "host/plan/decode.h"
#include "host/plan/draft.h"
#include "host/plan/fwd.h"
#include "host/plan/keys.h"
#include "host/plan/select.h"

namespace dmattn {

template <class Params>
struct Operation;

template <>
struct Operation<dmattn_fwd_params> {
  static constexpr const char* kParams = "dmattn_fwd_params";
  using Plan = FwdPlan;
  static Plan plan(const dmattn_fwd_params& p, const Device& device) { return plan_fwd(p, device); }
};
template <>
struct Operation<dmattn_bwd_params> {
  static constexpr const char* kParams = "dmattn_bwd_params";
  using Plan = BwdPlan;
  static Plan plan(const dmattn_bwd_params& p, const Device& device) { return plan_bwd(p, device); }
};
template <>
struct Operation<dmattn_select_params> {
  static constexpr const char* kParams = "dmattn_select_params";
  using Plan = SelectionPlan;
  static Plan plan(const dmattn_select_params& p, const Device& device) { return plan_select(p, device.num_sms); }
};
template <>
struct Operation<dmattn_build_key_lists_params> {
  static constexpr const char* kParams = "dmattn_build_key_lists_params";
  using Plan = KeyListsPlan;
  static Plan plan(const dmattn_build_key_lists_params& p, const Device&) { return plan_build_key_lists(p); }
};
template <>
struct Operation<dmattn_cache_append_params> {
  static constexpr const char* kParams = "dmattn_cache_append_params";
  using Plan = CachePlan;
  static Plan plan(const dmattn_cache_append_params& p, const Device& device) { return plan_cache_append(p, device); }
};
template <>
struct Operation<dmattn_cache_draft_params> {
  static constexpr const char* kParams = "dmattn_cache_draft_params";
  using Plan = DraftPlan;
  static Plan plan(const dmattn_cache_draft_params& p, const Device& device) { return plan_cache_draft(p, device); }
};
template <>
struct Operation<dmattn_cache_commit_params> {
  static constexpr const char* kParams = "dmattn_cache_commit_params";
  using Plan = CommitPlan;
  static Plan plan(const dmattn_cache_commit_params& p, const Device&) { return plan_cache_commit(p); }
};
template <>
struct Operation<dmattn_join_keys_params> {
  static constexpr const char* kParams = "dmattn_join_keys_params";
  using Plan = JoinKeysPlan;
  static Plan plan(const dmattn_join_keys_params& p, const Device&) { return plan_join_keys(p); }
};
template <>
struct Operation<dmattn_keep_keys_params> {
  static constexpr const char* kParams = "dmattn_keep_keys_params";
  using Plan = KeepKeysPlan;
  static Plan plan(const dmattn_keep_keys_params& p, const Device& device) { return plan_keep_keys(p, device.num_sms); }
};

}  // namespace dmattn
