#include "host/early_start.h"

#include <cstring>

namespace dmattn {

bool may_start_early(int32_t compiled_for, int32_t driver, const char* setting) {
  constexpr int32_t kHopper = 90, kCapturesInGraphs = 12030;
  if (setting != nullptr && std::strcmp(setting, "0") == 0) return false;
  return compiled_for >= kHopper && driver >= kCapturesInGraphs;
}

}  // namespace dmattn
