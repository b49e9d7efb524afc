// How long the backward of Hopper's thread blocks that stay takes: rounds, and parts of tiles, are chosen by it.
#pragma once

#include "host/plan/bwd.h"

namespace dmattn {

// Microseconds that all rounds like this one take on an H200, if each tile of keys falls into so many parts. Only to be
// compared with each other: what is the same for all choices is left out. `is_even`: all blocks have as much to do
// (BwdParams::mirrors_items).
double time_of_rounds(const BwdPlan& plan, const BwdRound& round, int64_t parts, bool is_even = false);

}  // namespace dmattn
