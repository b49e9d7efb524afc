// Putting tokens into a cache of keys: one of the w best keys of each kv head (running top-w), or one that keeps all.
// Tokens whose queries attend are put in by the decode kernel (attention/sm80/decode_token.cuh).
#pragma once

#include <cuda_runtime_api.h>

#include "../helper_params.h"
#include "../tiles.h"

namespace dmattn {

// Puts all tokens in, one after the other. With p.evict, the lowest entry (lowest score, among equals the earliest
// position) makes room if the token's score is not lower; a token whose score is NaN or -inf is never kept. Without
// it, a token goes to the entry of its position, where a score of NaN becomes -inf; if there is no such entry, it is
// skipped, and not counted in `seen` either.
cudaError_t cache_append(const CacheAppendParams& p, cudaStream_t stream);

// A draft: up to kMaxDraft tokens that are not put in yet. Writes their keys and values to the rows behind the
// entries, and to p.draft what would become of each token with p.evict. The entries stay as they are.
cudaError_t cache_draft(const CacheDraftParams& p, cudaStream_t stream);
// Puts the first p.count tokens of each sequence in, as cache_append() would have done in the same state of the cache.
cudaError_t cache_commit(const CacheDraftParams& p, cudaStream_t stream);

}  // namespace dmattn
