// Errors of the CUDA runtime.
#pragma once

#include <cuda_runtime_api.h>

#include "host/error.h"

namespace dmattn {

// `what` was being done when the CUDA runtime returned `error`.
inline void check_cuda(cudaError_t error, const char* what) {
  if (error != cudaSuccess) fail(DMATTN_ERROR_CUDA, "%s: %s", what, cudaGetErrorString(error));
}

}  // namespace dmattn
