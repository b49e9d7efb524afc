// Boolean masks made ready for attention. Each function enqueues on `stream`, allocates nothing and returns the launch
// status.
#pragma once

#include <cuda_runtime_api.h>

#include "../helper_params.h"

namespace dmattn {

// Reads the mask once and fills every array of `bits`.
cudaError_t pack_mask(const MaskSource& mask, const MaskBits& bits, cudaStream_t stream);

// Row 0 of the mask is read. Ascending order, deterministic. used_rows: UsedRows::found, of which each list clears its
// own; nullptr: there is none.
cudaError_t compact_keys(const MaskSource& mask, const KeyList& keys, int32_t* used_rows, cudaStream_t stream);

}  // namespace dmattn
