// Whether a kernel may be launched while the one before it on the stream still runs.
#pragma once

#include <cstdint>

namespace dmattn {

// compiled_for: the virtual architecture of the code that the device runs, 10 * major + minor. Below 90 there is no
// instruction to wait with. `driver`: its CUDA version as the runtime has it, 1000 * major + 10 * minor; before 12.3
// such launches cannot be captured in a graph. `setting`: of DMATTN_EARLY_START in the environment, where "0" says no;
// nullptr: not set.
bool may_start_early(int32_t compiled_for, int32_t driver, const char* setting);

}  // namespace dmattn
