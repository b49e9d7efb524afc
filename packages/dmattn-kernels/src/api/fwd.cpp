// Forward: validate, look the device up, plan, launch.
#include "api/error.h"
#include "api/operands.h"
#include "api/plan.h"
#include "api/units.h"
#include "api/validate.h"

namespace dmattn {
namespace {

void launch(const FwdPlan& plan, cudaStream_t stream) {
  if (plan.is_empty) return;
  if (plan.no_keys) {
    check_cuda(fill_empty_fwd(plan.kernel, plan.dtype, stream), "filling the results of no keys");
    return;
  }
  if (plan.gathered && !plan.selected) {
    check_cuda(compact_keys(plan.mask, plan.kernel.keys, stream), "listing the keys of the mask");
  } else if (has_mask(plan.mask)) {
    check_cuda(pack_mask(plan.mask, plan.kernel.mask, stream), "packing the mask");
  }
  if (plan.decode) {
    DecodeParams decode;
    static_cast<FwdParams&>(decode) = plan.kernel;
    const DecodeLauncher unit = decode_unit(plan.dtype, plan.dim_tile, plan.gathered);
    check_cuda(unit(plan.family, decode, stream), "launching the decode kernel");
  } else {
    const FwdLauncher unit = fwd_unit(plan.dtype, plan.dim_tile, plan.gathered);
    check_cuda(unit(plan.family, plan.kernel, stream), "launching the forward kernel");
  }
  if (plan.kernel.num_splits > 1) {
    check_cuda(combine_splits(plan.kernel, plan.dtype, stream), "combining the splits");
  }
}

}  // namespace
}  // namespace dmattn

extern "C" dmattn_status dmattn_fwd_workspace_size(const dmattn_fwd_params* params, size_t* bytes) {
  using namespace dmattn;
  return at_boundary([&] {
    const dmattn_fwd_params p = read_params(params, "dmattn_fwd_params");
    if (bytes == nullptr) fail(DMATTN_ERROR_INVALID_VALUE, "bytes is null; wanted where to put the size");
    validate(p, Pointers::kOptional);
    *bytes = plan_fwd(p, find_device(p.device), nullptr).workspace_bytes;
  });
}

extern "C" dmattn_status dmattn_fwd(const dmattn_fwd_params* params, void* workspace, size_t bytes, void* stream) {
  using namespace dmattn;
  return at_boundary([&] {
    const dmattn_fwd_params p = read_params(params, "dmattn_fwd_params");
    validate(p, Pointers::kRequired);
    const Device& device = find_device(p.device);
    const FwdPlan plan = plan_fwd(p, device, workspace);
    validate_workspace(workspace, bytes, plan.workspace_bytes);
    const DeviceGuard guard(p.device);
    launch(plan, static_cast<cudaStream_t>(stream));
  });
}
