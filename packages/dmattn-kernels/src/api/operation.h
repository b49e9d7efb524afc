// What every exported operation has in common: a call is validated and planned once, then launched.
//
//   dmattn_x_workspace_size   validate, look the device up, plan: the size of the workspace
//   dmattn_x                  the same plan, put into the caller's workspace, launched
//
// The second call gets the parameters of the first, so that each thread remembers the last parameters of each operation
// with the plan for them, and does not make it again for equal bytes. Nothing is shared between threads.
#pragma once

#include <cstddef>
#include <cstring>
#include <exception>
#include <type_traits>

#include "api/cuda_error.h"
#include "api/device.h"
#include "dmattn/dmattn.h"
#include "host/checks/validate.h"
#include "host/error.h"

namespace dmattn {

// Runs the body of an exported function: nothing it throws leaves the library.
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

// Specialised for each params struct: its name, the type of its plan, and how the plan is made.
//   static constexpr const char* kParams;
//   using Plan = ...;  with workspace_bytes, and place(Plan&, void* workspace)
//   static Plan plan(const Params&, const Device&);
template <class Params>
struct Operation;

// A call whose parameters are right, and what it will do.
template <class Params>
struct PlannedCall {
  Params params;  // as this library knows them
  typename Operation<Params>::Plan plan;
  bool is_set = false;
  bool has_pointers = false;  // the data pointers were right too

  bool matches(const Params* given, bool for_launch) const {
    return is_set && (has_pointers || !for_launch) && given != nullptr && given->struct_size == sizeof(Params) &&
           std::memcmp(given, &params, sizeof(Params)) == 0;
  }
};

// The calling thread's planned call for these parameters.
template <class Params>
PlannedCall<Params>& planned_call(const Params* given, bool for_launch) {
  using Op = Operation<Params>;
  static_assert(std::is_trivially_destructible_v<PlannedCall<Params>>, "threads may end in any order");
  static thread_local PlannedCall<Params> call;
  if (call.matches(given, for_launch)) return call;
  call.is_set = false;
  call.params = read_params(given, Op::kParams);
  PointerCheck pointers{/*required=*/for_launch};
  validate(call.params, pointers);
  call.plan = Op::plan(call.params, find_device(call.params.device));
  call.has_pointers = pointers.complete;
  call.is_set = true;
  return call;
}

template <class Params>
dmattn_status report_workspace_size(const Params* params, size_t* bytes) {
  return at_boundary([&] {
    if (params != nullptr && bytes == nullptr) {
      fail(DMATTN_ERROR_INVALID_VALUE, "bytes is null; wanted where to put the size");
    }
    *bytes = planned_call(params, /*for_launch=*/false).plan.workspace_bytes;
  });
}

// launch(call, stream) enqueues what the plan says.
template <class Params, class Launch>
dmattn_status run(const Params* params, void* workspace, size_t bytes, void* stream, Launch&& launch) {
  return at_boundary([&] {
    PlannedCall<Params>& call = planned_call(params, /*for_launch=*/true);
    validate_workspace(workspace, bytes, call.plan.workspace_bytes);
    place(call.plan, workspace);
    const DeviceGuard guard(call.params.device);
    launch(call, static_cast<cudaStream_t>(stream));
  });
}

}  // namespace dmattn
