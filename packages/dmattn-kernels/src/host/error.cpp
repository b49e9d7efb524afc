#include "host/error.h"

#include <cstdarg>
#include <cstdio>

namespace dmattn {
namespace {

constexpr size_t kMessageBytes = 512;
// An array, not a string: it has no destructor, so that threads may end in any order.
thread_local char message[kMessageBytes] = "";

}  // namespace

void fail(dmattn_status status, const char* format, ...) {
  va_list args;
  va_start(args, format);
  std::vsnprintf(message, kMessageBytes, format, args);
  va_end(args);
  throw Failure{status};
}

void set_last_error(const char* text) { std::snprintf(message, kMessageBytes, "%s", text); }

const char* last_error() { return message; }

}  // namespace dmattn
