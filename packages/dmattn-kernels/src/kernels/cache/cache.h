// Putting tokens into a cache of keys: one of the w best keys of each kv head (running top-w), or one that keeps all.
#pragma once

#include <cuda_runtime_api.h>

#include "../helper_params.h"

namespace dmattn {

// All tokens, one after the other. evict: the lowest entry (lowest score, among equals the earliest position) makes
// room when the token's score is not lower; a token whose score is NaN or -inf is never kept. Otherwise a token goes to
// the entry of its position, with a score of -inf for NaN, and is skipped (not counted in `seen` either) when there is
// none.
cudaError_t cache_append(const CacheAppendParams& p, cudaStream_t stream);

// After the decode kernel of token t: its results combined, the token put where decode.token.place says, `seen` raised.
cudaError_t cache_commit(const CacheAppendParams& p, int32_t t, const DecodeParams& decode, Dtype dtype,
                         cudaStream_t stream);

}  // namespace dmattn
