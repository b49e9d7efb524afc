// Filling memory with zeros. Each function enqueues on `stream`, allocates nothing and returns the launch status.
#pragma once

#include <cuda_runtime_api.h>

#include "../params.h"

namespace dmattn {

// Zeros in a strided (batch, seqlen, heads, head_dim) tensor of 16-bit elements.
cudaError_t fill_zero(void* ptr, Strides3 stride, int batch, int seqlen, int nheads, int head_dim, cudaStream_t stream);

// Zeros in `bytes` bytes. By a kernel if address and size are multiples of 16: a memset between two kernels would keep
// the second one from starting early (early_start.cuh).
cudaError_t clear_bytes(void* ptr, size_t bytes, cudaStream_t stream);

// Zero in one number that the next kernel on the stream reads. That kernel has to be one of this library: it may start
// before this one has waited.
cudaError_t clear_counter(int32_t* counter, cudaStream_t stream);

}  // namespace dmattn
