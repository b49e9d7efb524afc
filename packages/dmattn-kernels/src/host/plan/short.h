// Attention over few keys: which calls take the kernels for few keys, which need one launch and, except for a 16-bit
// dbias that is a sum, no workspace.
#pragma once

#include "dmattn/dmattn.h"
#include "host/arch.h"
#include "host/plan/bwd.h"
#include "host/plan/fwd.h"
#include "host/problem.h"

namespace dmattn {

// `plan` has its tensors, its mask and, in the backward, its gradients, at least one of which the kernel computes.
// Takes the kernel for few keys if it serves the call and this build has it. Otherwise returns false, and leaves the
// plan as it was.
bool choose_short_kernel(FwdPlan& plan, const dmattn_fwd_params& p, const Problem& x, const Device& device);
bool choose_short_kernel(BwdPlan& plan, const dmattn_bwd_params& p, const Problem& x, const Device& device);

}  // namespace dmattn
