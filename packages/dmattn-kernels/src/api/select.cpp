// Selection of keys by score.
#include "kernels/selection/select.h"

#include "api/operation.h"

namespace dmattn {
namespace {

void launch(const SelectionPlan& plan, cudaStream_t stream) {
  const char* what = "selecting keys";
  const prep::SelectPlan& steps = plan.steps;
  if (steps.rows == 0) return;
  if (steps.zero_bytes > 0) check_cuda(cudaMemsetAsync(steps.hist, 0, steps.zero_bytes, stream), what);
  if (steps.one_launch) {
    check_cuda(prep::select_in_one_launch(plan.params, steps, plan.lists, stream), what);
    return;
  }
  if (!steps.reads_scores) {
    check_cuda(prep::select_order(plan.params, steps, const_cast<int32_t*>(plan.lists.end), stream), what);
  }
  if (steps.chunks > 0) check_cuda(prep::select_by_grid(steps, plan.lists, stream), what);
  if (steps.single_list) {
    if (steps.chunks == 0) check_cuda(prep::select_single(steps, plan.lists, stream), what);
    return;
  }
  check_cuda(prep::select_sets(steps, stream), what);
  if (steps.segment_blocks > 0) {
    check_cuda(prep::select_segments(plan.params, steps, plan.lists, stream), what);
  } else {
    check_cuda(prep::select_blocks(steps, plan.lists, stream), what);
  }
}

}  // namespace
}  // namespace dmattn

extern "C" int64_t dmattn_select_capacity(int64_t window, int64_t seqlen_k, int32_t is_causal) {
  return dmattn::select_capacity(window, seqlen_k, is_causal != 0);
}

extern "C" dmattn_status dmattn_select_workspace_size(const dmattn_select_params* params, size_t* bytes) {
  return dmattn::report_workspace_size(params, bytes);
}

extern "C" dmattn_status dmattn_select_keys(const dmattn_select_params* params, void* workspace, size_t bytes,
                                            void* stream) {
  return dmattn::run(params, workspace, bytes, stream,
                     [](const auto& call, cudaStream_t s) { dmattn::launch(call.plan, s); });
}
