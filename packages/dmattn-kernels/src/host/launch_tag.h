// A number for each launch whose thread blocks count in memory that nobody has cleared.
#pragma once

#include <cstdint>

namespace dmattn {

// 64 bits that look random, so that old contents of the memory are not mistaken for a count that starts from them. No
// two launches of a process get the same number. May be called by several threads at once.
uint64_t next_launch_tag();

}  // namespace dmattn
