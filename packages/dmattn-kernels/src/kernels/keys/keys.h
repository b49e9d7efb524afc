// Moving whole keys. Architecture independent, no host synchronisation, nothing allocated, one launch each.
#pragma once

#include <cuda_runtime_api.h>

#include "../keys_params.h"

namespace dmattn {

// Puts the keys of a stretch behind those of a state. Entries before both hold no key: zeros, and a score of -inf.
cudaError_t join_keys(const JoinKeysParams& p, cudaStream_t stream);

// Copies, of keys in order of position, the last `window` ones that a row keeps, to the last entries of the result.
// Entries before them hold no key: zeros, a score of -inf and position -1.
cudaError_t keep_keys(const KeepKeysParams& p, cudaStream_t stream);

}  // namespace dmattn
