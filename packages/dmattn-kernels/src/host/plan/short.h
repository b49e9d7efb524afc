// Attention over few keys: which calls have a kernel of their own, which takes one launch and no workspace.
#pragma once

#include "dmattn/dmattn.h"
#include "host/arch.h"
#include "host/plan/bwd.h"
#include "host/plan/fwd.h"
#include "host/problem.h"

namespace dmattn {

// For a plan that has its tensors, its mask and, in the backward, its gradients, of which the kernel has some to
// compute: takes that kernel if it can, and this build has it. false: it has left the plan alone.
bool choose_short_kernel(FwdPlan& plan, const dmattn_fwd_params& p, const Problem& x, const Device& device);
bool choose_short_kernel(BwdPlan& plan, const dmattn_bwd_params& p, const Problem& x, const Device& device);

}  // namespace dmattn
