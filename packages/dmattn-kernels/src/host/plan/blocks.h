// How many thread blocks a call may have.
#pragma once

#include <cstdint>

namespace dmattn {

// The thread blocks of a launch and the items of a persistent kernel are counted in 32 bits. The margin is for the
// numbers that persistent thread blocks draw beyond the last item.
constexpr int64_t kMostBlocks = INT32_MAX - 8192;

}  // namespace dmattn
