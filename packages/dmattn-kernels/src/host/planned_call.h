// A call consists of two function calls, the one for the size of the workspace and the launch, but is validated and
// planned only once. Each thread remembers, for each operation, the last parameters that were valid and the plan for
// them, and neither checks nor plans again for equal bytes. A plan knows the layout of the workspace, but not its
// address: place() gives it that for each launch. Threads share nothing.
#pragma once

#include <cstring>
#include <type_traits>

#include "host/arch.h"
#include "host/checks/validate.h"
#include "host/operations.h"

namespace dmattn {

// Valid parameters and the plan for them.
template <class Params>
struct PlannedCall {
  Params params;  // in the form that this version of the library knows
  typename Operation<Params>::Plan plan;
  bool is_set = false;
  bool has_pointers = false;  // the data pointers have been checked, too

  bool matches(const Params* given, bool for_launch) const {
    return is_set && (has_pointers || !for_launch) && given != nullptr && given->struct_size == sizeof(Params) &&
           std::memcmp(given, &params, sizeof(Params)) == 0;
  }
};

// The calling thread's planned call for these parameters, valid until the thread's next call of the operation.
// find_device(number) returns the Device. If it or a check fails, nothing is remembered.
template <class Params, class FindDevice>
PlannedCall<Params>& planned_call(const Params* given, bool for_launch, FindDevice&& find_device) {
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

}  // namespace dmattn
