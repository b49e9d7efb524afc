// How many thread blocks a call may have.
#pragma once

#include <cstdint>

namespace dmattn {

// Thread blocks of a launch, and items that those that stay on their SM take, are counted in 32 bits.
constexpr int64_t kMostBlocks = INT32_MAX - 8192;

}  // namespace dmattn
