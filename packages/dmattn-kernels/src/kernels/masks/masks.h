// Boolean masks made ready for attention. Each function enqueues on `stream`, allocates nothing and returns the launch
// status.
#pragma once

#include <cuda_runtime_api.h>

#include "../helper_params.h"

namespace dmattn {

// Fills every array of `bits`. Of a mask that is the same for all rows (bits.is_key_only) only one row is read, unless
// sequences are packed.
cudaError_t pack_mask(const MaskSource& mask, const MaskBits& bits, cudaStream_t stream);

// Lists the keys that row 0 of the mask keeps, in ascending order. used_rows: UsedRows::found, of which each list
// clears its own two numbers; nullptr: there is none.
cudaError_t compact_keys(const MaskSource& mask, const KeyList& keys, int32_t* used_rows, cudaStream_t stream);

}  // namespace dmattn
