// Appending to a cache of keys, with or without attention to it; drafts of tokens for such a cache.
#include "kernels/cache/cache.h"

#include "api/operation.h"
#include "host/launch_tag.h"
#include "kernels/units.h"

namespace dmattn {
namespace {

void launch(const CachePlan& plan, cudaStream_t stream) {
  if (!plan.attends) {
    check_cuda(cache_append(plan.append, stream), "appending to the cache of keys");
    return;
  }
  const DecodeLauncher unit = find_decode_unit(plan.unit);
  for (int32_t t = 0; t < plan.append.tokens; ++t) {
    DecodeParams decode = token_params(plan, t);
    decode.launch_tag = next_launch_tag();
    check_cuda(unit(plan.choice, decode, stream), "launching the decode kernel");
  }
}

void launch(const DraftPlan& plan, cudaStream_t stream) {
  if (plan.is_empty) return;
  check_cuda(cache_draft(plan.draft, stream), "drafting tokens of the cache of keys");
  DecodeParams decode = plan.decode;
  decode.launch_tag = next_launch_tag();
  check_cuda(find_decode_unit(plan.unit)(plan.choice, decode, stream), "launching the decode kernel");
}

}  // namespace
}  // namespace dmattn

extern "C" dmattn_status dmattn_cache_append_workspace_size(const dmattn_cache_append_params* params, size_t* bytes) {
  return dmattn::report_workspace_size(params, bytes);
}

extern "C" dmattn_status dmattn_cache_append(const dmattn_cache_append_params* params, void* workspace, size_t bytes,
                                             void* stream) {
  return dmattn::run(params, workspace, bytes, stream,
                     [](const auto& call, cudaStream_t s) { dmattn::launch(call.plan, s); });
}

extern "C" dmattn_status dmattn_cache_draft_workspace_size(const dmattn_cache_draft_params* params, size_t* bytes) {
  return dmattn::report_workspace_size(params, bytes);
}

extern "C" dmattn_status dmattn_cache_draft(const dmattn_cache_draft_params* params, void* workspace, size_t bytes,
                                            void* stream) {
  return dmattn::run(params, workspace, bytes, stream,
                     [](const auto& call, cudaStream_t s) { dmattn::launch(call.plan, s); });
}

extern "C" dmattn_status dmattn_cache_commit_workspace_size(const dmattn_cache_commit_params* params, size_t* bytes) {
  return dmattn::report_workspace_size(params, bytes);
}

extern "C" dmattn_status dmattn_cache_commit(const dmattn_cache_commit_params* params, void* workspace, size_t bytes,
                                             void* stream) {
  return dmattn::run(params, workspace, bytes, stream, [](const auto& call, cudaStream_t s) {
    dmattn::check_cuda(dmattn::cache_commit(call.plan.draft, s), "putting the draft into the cache of keys");
  });
}
