// Errors of the C interface. Inside the library a failure is an exception; at the boundary it becomes a status and
// the calling thread's message (see api/operation.h).
#pragma once

#include "dmattn/dmattn.h"

namespace dmattn {

struct Failure {
  dmattn_status status;
};

// Stores the message for dmattn_last_error() and throws Failure.
[[noreturn]] void fail(dmattn_status status, const char* format, ...) __attribute__((format(printf, 2, 3)));

// Stores the message only.
void set_last_error(const char* message);
const char* last_error();

}  // namespace dmattn
