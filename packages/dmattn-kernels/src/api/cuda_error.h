// Errors of the CUDA runtime.
#pragma once

#include <cuda_runtime_api.h>

#include "host/error.h"

namespace dmattn {

// `what` was being done when the CUDA runtime returned `error`. The runtime's record of the error is cleared:
// otherwise code that asks for the last error after a later launch would get this one.
inline void check_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  (void)cudaGetLastError();
  fail(DMATTN_ERROR_CUDA, "%s: %s", what, cudaGetErrorString(error));
}

}  // namespace dmattn
