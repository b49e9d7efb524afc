// Errors of the C interface. Inside the library a failure is an exception; at the boundary it becomes a status and
// the calling thread's message.
#pragma once

#include <cuda_runtime_api.h>

#include <exception>

#include "dmattn/dmattn.h"

namespace dmattn {

struct Failure {
  dmattn_status status;
};

// Keeps the message for dmattn_last_error() and throws Failure.
[[noreturn]] void fail(dmattn_status status, const char* format, ...) __attribute__((format(printf, 2, 3)));

// Keeps the message only.
void set_last_error(const char* message);
const char* last_error();

// `what` was being done when the CUDA runtime returned `error`.
inline void check_cuda(cudaError_t error, const char* what) {
  if (error != cudaSuccess) fail(DMATTN_ERROR_CUDA, "%s: %s", what, cudaGetErrorString(error));
}

// Runs the body of an exported function: nothing it throws leaves the library.
template <class Body>
dmattn_status at_boundary(Body&& body) noexcept {
  try {
    body();
    return DMATTN_OK;
  } catch (const Failure& failure) {
    return failure.status;
  } catch (const std::exception& error) {
    set_last_error(error.what());
    return DMATTN_ERROR_CUDA;
  }
}

}  // namespace dmattn
