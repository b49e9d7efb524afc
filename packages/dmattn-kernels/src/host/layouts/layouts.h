// Where the arrays that represent a mask lie in the workspace.
#pragma once

#include "host/workspace.h"
#include "kernels/params.h"

namespace dmattn {

// The packed form of a dense mask. head_ratio is left for the caller to set.
MaskBits layout_mask_bits(const MaskSource& mask, Workspace& workspace);
// The list of keys that a key-only mask keeps. head_ratio is left for the caller to set.
KeyList layout_key_list(const MaskSource& mask, Workspace& workspace);

}  // namespace dmattn
