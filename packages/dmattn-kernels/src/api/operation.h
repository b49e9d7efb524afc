// What every exported operation has in common.
//
//   dmattn_x_workspace_size   checks the parameters, looks up the device and makes the plan, which has the size
//   dmattn_x                  uses the same plan (see host/planned_call.h), places it in the workspace, and launches
#pragma once

#include <cstddef>
#include <exception>

#include "api/cuda_error.h"
#include "api/device.h"
#include "dmattn/dmattn.h"
#include "host/error.h"
#include "host/planned_call.h"

namespace dmattn {

// Runs the body of an exported function. No exception leaves the library.
template <class Body>
dmattn_status at_boundary(Body&& body) noexcept {
  try {
    body();
    return DMATTN_OK;
  } catch (const Failure& failure) {
    return failure.status;
  } catch (const std::exception& error) {
    set_last_error(error.what());
    return DMATTN_ERROR_CUDA;
  }
}

template <class Params>
dmattn_status report_workspace_size(const Params* params, size_t* bytes) {
  return at_boundary([&] {
    if (params != nullptr && bytes == nullptr) {
      fail(DMATTN_ERROR_INVALID_VALUE, "bytes is null; wanted where to put the size");
    }
    *bytes = planned_call(params, /*for_launch=*/false, find_device).plan.workspace_bytes;
  });
}

// launch(call, stream) enqueues the kernels of the plan.
template <class Params, class Launch>
dmattn_status run(const Params* params, void* workspace, size_t bytes, void* stream, Launch&& launch) {
  return at_boundary([&] {
    PlannedCall<Params>& call = planned_call(params, /*for_launch=*/true, find_device);
    validate_workspace(workspace, bytes, call.plan.workspace_bytes);
    place(call.plan, workspace);
    const DeviceGuard guard(call.params.device);
    launch(call, static_cast<cudaStream_t>(stream));
  });
}

}  // namespace dmattn
