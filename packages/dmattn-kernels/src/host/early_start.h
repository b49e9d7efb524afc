// Whether a kernel may be launched while the one before it on the stream still runs.
#pragma once

#include <cstdint>

namespace dmattn {

// compiled_for: the virtual architecture of the code that runs on the device, 10 * major + minor. Below 90 there is
// no instruction that waits for the previous kernel. driver: the CUDA version of the driver as the runtime reports
// it, 1000 * major + 10 * minor. Before 12.3 such launches cannot be captured in a graph. setting: the environment
// variable DMATTN_EARLY_START, where "0" turns early starts off; nullptr: not set.
bool may_start_early(int32_t compiled_for, int32_t driver, const char* setting);

}  // namespace dmattn
