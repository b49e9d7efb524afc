// Lists of keys from given intervals.
#include "api/operation.h"
#include "kernels/selection/intervals.h"

namespace dmattn {
namespace {

void launch(const KeyListsPlan& plan, cudaStream_t stream) {
  check_cuda(build_interval_lists(plan.params, plan.lists, stream), "building key lists");
}

}  // namespace
}  // namespace dmattn

extern "C" dmattn_status dmattn_build_key_lists_workspace_size(const dmattn_build_key_lists_params* params,
                                                               size_t* bytes) {
  return dmattn::report_workspace_size(params, bytes);
}

extern "C" dmattn_status dmattn_build_key_lists(const dmattn_build_key_lists_params* params, void* workspace,
                                                size_t bytes, void* stream) {
  return dmattn::run(params, workspace, bytes, stream,
                     [](const auto& call, cudaStream_t s) { dmattn::launch(call.plan, s); });
}
