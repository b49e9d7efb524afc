// Boolean masks made ready for attention. Each function enqueues on `stream`, allocates nothing and returns the launch
// status.
#pragma once

#include <cuda_runtime_api.h>

#include "../helper_params.h"

namespace dmattn {

// Reads the mask once and fills every array of `bits`.
cudaError_t pack_mask(const MaskSource& mask, const MaskBits& bits, cudaStream_t stream);

// Row 0 of the mask is read. Ascending order, deterministic.
cudaError_t compact_keys(const MaskSource& mask, const KeyList& keys, cudaStream_t stream);

}  // namespace dmattn
