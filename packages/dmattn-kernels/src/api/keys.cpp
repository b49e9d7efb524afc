// Joining the keys of two stretches, and extracting the keys that the rows behind a stretch still see.
#include "kernels/keys/keys.h"

#include "api/operation.h"

namespace dmattn {
namespace {

void launch(const JoinKeysPlan& plan, cudaStream_t stream) {
  check_cuda(join_keys(plan.params, stream), "joining keys");
}
void launch(const KeepKeysPlan& plan, cudaStream_t stream) {
  check_cuda(keep_keys(plan.params, stream), "keeping keys");
}

}  // namespace
}  // namespace dmattn

extern "C" dmattn_status dmattn_join_keys_workspace_size(const dmattn_join_keys_params* params, size_t* bytes) {
  return dmattn::report_workspace_size(params, bytes);
}

extern "C" dmattn_status dmattn_join_keys(const dmattn_join_keys_params* params, void* workspace, size_t bytes,
                                          void* stream) {
  return dmattn::run(params, workspace, bytes, stream,
                     [](const auto& call, cudaStream_t s) { dmattn::launch(call.plan, s); });
}

extern "C" dmattn_status dmattn_keep_keys_workspace_size(const dmattn_keep_keys_params* params, size_t* bytes) {
  return dmattn::report_workspace_size(params, bytes);
}

extern "C" dmattn_status dmattn_keep_keys(const dmattn_keep_keys_params* params, void* workspace, size_t bytes,
                                          void* stream) {
  return dmattn::run(params, workspace, bytes, stream,
                     [](const auto& call, cudaStream_t s) { dmattn::launch(call.plan, s); });
}
