// Appending to a cache of keys, and attending to it: validate, look the device up, plan, launch.
#include "kernels/prep/cache.h"

#include "api/error.h"
#include "api/plan.h"
#include "api/units.h"
#include "api/validate.h"

namespace dmattn {
namespace {

void launch(const CachePlan& plan, cudaStream_t stream) {
  if (!plan.attends) {
    check_cuda(cache_append(plan.append, stream), "appending to the cache of keys");
    return;
  }
  const DecodeLauncher unit = decode_unit(plan.dtype, plan.dim_tile, /*gathered=*/false);
  for (int32_t t = 0; t < plan.append.tokens; ++t) {
    const DecodeParams decode = token_params(plan, t);
    check_cuda(unit(plan.family, decode, stream), "launching the decode kernel");
    check_cuda(cache_commit(plan.append, t, decode, plan.dtype, stream), "putting a token into the cache of keys");
  }
}

}  // namespace
}  // namespace dmattn

extern "C" dmattn_status dmattn_cache_append_workspace_size(const dmattn_cache_append_params* params, size_t* bytes) {
  using namespace dmattn;
  return at_boundary([&] {
    const dmattn_cache_append_params p = read_params(params, "dmattn_cache_append_params");
    if (bytes == nullptr) fail(DMATTN_ERROR_INVALID_VALUE, "bytes is null; wanted where to put the size");
    validate(p, Pointers::kOptional);
    *bytes = plan_cache_append(p, find_device(p.device), nullptr).workspace_bytes;
  });
}

extern "C" dmattn_status dmattn_cache_append(const dmattn_cache_append_params* params, void* workspace, size_t bytes,
                                             void* stream) {
  using namespace dmattn;
  return at_boundary([&] {
    const dmattn_cache_append_params p = read_params(params, "dmattn_cache_append_params");
    validate(p, Pointers::kRequired);
    const CachePlan plan = plan_cache_append(p, find_device(p.device), workspace);
    validate_workspace(workspace, bytes, plan.workspace_bytes);
    const DeviceGuard guard(p.device);
    launch(plan, static_cast<cudaStream_t>(stream));
  });
}
