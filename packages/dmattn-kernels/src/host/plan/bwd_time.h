// Estimated times of the backward on Hopper, by which rounds and the parts of key tiles are chosen.
#pragma once

#include "host/plan/bwd.h"

namespace dmattn {

// Estimated microseconds on an H200 of all rounds of this size, if each key tile is divided into `parts` parts. Only
// for comparing choices: what is the same for all of them is left out. `is_even`: all thread blocks have the same
// amount of work (BwdParams::mirrors_items).
double time_of_rounds(const BwdPlan& plan, const BwdRound& round, int64_t parts, bool is_even = false);

}  // namespace dmattn
