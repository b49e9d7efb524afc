// The forward.
#include "api/operation.h"
#include "host/launch_tag.h"
#include "kernels/forward/forward.h"
#include "kernels/masks/masks.h"
#include "kernels/units.h"

namespace dmattn {
namespace {

void launch(const FwdPlan& plan, cudaStream_t stream) {
  if (plan.is_empty) return;
  if (plan.no_keys) {
    check_cuda(fill_empty_fwd(plan.kernel, stream), "filling the results of no keys");
    return;
  }
  if (plan.is_short()) {
    check_cuda(find_short_fwd_unit(plan.unit)(plan.choice, plan.short_kernel, stream),
               "launching the forward kernel for few keys");
    return;
  }
  if (plan.walk == KeyWalk::kMaskList) {
    check_cuda(compact_keys(plan.mask, plan.kernel.keys, /*used_rows=*/nullptr, stream),
               "listing the keys of the mask");
  } else if (has_mask(plan.mask)) {
    check_cuda(pack_mask(plan.mask, plan.kernel.mask, stream), "packing the mask");
  }
  if (plan.is_decode()) {
    DecodeParams decode;
    static_cast<FwdParams&>(decode) = plan.kernel;
    decode.arrivals = plan.arrivals;
    decode.launch_tag = next_launch_tag();
    check_cuda(find_decode_unit(plan.unit)(plan.choice, decode, stream), "launching the decode kernel");
    return;  // the decode kernel combines its splits itself
  }
  check_cuda(find_fwd_unit(plan.unit)(plan.choice, plan.kernel, stream), "launching the forward kernel");
  if (plan.leaves_parts()) {
    check_cuda(combine_splits(plan.kernel, plan.unit.dtype, stream), "combining the splits");
  }
}

}  // namespace
}  // namespace dmattn

extern "C" dmattn_status dmattn_fwd_workspace_size(const dmattn_fwd_params* params, size_t* bytes) {
  return dmattn::report_workspace_size(params, bytes);
}

extern "C" dmattn_status dmattn_fwd(const dmattn_fwd_params* params, void* workspace, size_t bytes, void* stream) {
  return dmattn::run(params, workspace, bytes, stream,
                     [](const auto& call, cudaStream_t s) { dmattn::launch(call.plan, s); });
}
