// A call is validated and planned once, though it is made of two: the question for the size of its workspace, and the
// launch. Each thread remembers the last parameters of each operation that were right, with the plan for them, and does
// not check or plan again for equal bytes. A plan knows what lies in the workspace, not where: place() gives it the
// workspace of each launch. Nothing is shared between threads.
#pragma once

#include <cstring>
#include <type_traits>

#include "host/arch.h"
#include "host/checks/validate.h"
#include "host/operations.h"

namespace dmattn {

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

// The calling thread's planned call for these parameters; good until the thread's next call of the operation.
// find_device(number) gives the Device; it may fail, as the checks may: then nothing is remembered.
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
