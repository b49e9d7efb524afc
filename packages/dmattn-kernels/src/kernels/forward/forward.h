// What follows the forward kernel. Each function enqueues on `stream`, allocates nothing and returns the launch status.
#pragma once

#include <cuda_runtime_api.h>

#include "../helper_params.h"

namespace dmattn {

// out and lse from the partial results of num_splits splits (p.out_accum, p.lse_accum).
cudaError_t combine_splits(const FwdParams& p, Dtype dtype, cudaStream_t stream);
// seqlen_k == 0: out = 0, lse = -inf.
cudaError_t fill_empty_fwd(const FwdParams& p, cudaStream_t stream);

}  // namespace dmattn
