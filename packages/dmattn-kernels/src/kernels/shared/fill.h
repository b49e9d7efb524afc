// Writing constants. Enqueues on `stream`, allocates nothing and returns the launch status. A memset between two
// kernels would keep the second from starting early (early_start.cuh).
#pragma once

#include <cuda_runtime_api.h>

#include "../params.h"

namespace dmattn {

// Zeros in a strided (batch, seqlen, heads, head_dim) tensor of 16-bit elements.
cudaError_t fill_zero(void* ptr, Strides3 stride, int batch, int seqlen, int nheads, int head_dim, cudaStream_t stream);

// Zeros in a stretch of memory.
cudaError_t clear_bytes(void* ptr, size_t bytes, cudaStream_t stream);

// Zero in one number, for the next kernel on the stream, which has to be one of this library.
cudaError_t clear_counter(int32_t* counter, cudaStream_t stream);

}  // namespace dmattn
