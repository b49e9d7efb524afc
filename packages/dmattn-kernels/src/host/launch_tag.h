// A number for each launch that counts in memory which nobody has cleared.
#pragma once

#include <cstdint>

namespace dmattn {

// 64 bits that look random: what else may lie in the memory is not taken for a count that starts from them. No two
// launches of a process get the same. May be called by several threads at once.
uint64_t next_launch_tag();

}  // namespace dmattn
