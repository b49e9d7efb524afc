// Moving whole keys. Architecture independent, no host synchronisation, nothing allocated, one launch each.
#pragma once

#include <cuda_runtime_api.h>

#include "../keys_params.h"

namespace dmattn {

// The keys of two stretches behind one another. Entries before them hold no key: zeros, and a score of -inf.
cudaError_t join_keys(const JoinKeysParams& p, cudaStream_t stream);

// Of keys in order of position those that a row keeps, the last `window` of them, as the last entries of the result.
// Entries before them hold no key: zeros, a score of -inf and position -1.
cudaError_t keep_keys(const KeepKeysParams& p, cudaStream_t stream);

}  // namespace dmattn
