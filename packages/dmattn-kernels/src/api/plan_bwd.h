// Between the parts of the backward's planning.
#pragma once

#include "api/operands.h"
#include "api/plan.h"

namespace dmattn {

// Lays out the sums that the backward kernels keep in fp32, and decides into how many chunks the call falls for their
// sake, and into how many parts the rows of a key tile. In place last, because what they may take depends on all the
// rest.
void place_sums(BwdPlan& plan, const dmattn_bwd_params& p, const Device& device, Workspace& workspace);

// The (batch, head) pairs of arrays in the workspace.
inline int64_t rows_of(const BwdParams& p) { return static_cast<int64_t>(p.packing.slabs(p.batch)) * p.nheads; }
// Key tiles that a launch has to provide blocks for.
int64_t key_tiles_of(const BwdParams& p, int32_t block_n);

}  // namespace dmattn
