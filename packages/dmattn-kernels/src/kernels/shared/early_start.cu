// Whether kernels start early on a device, and the kernel that clears a work counter.
#include <atomic>
#include <cstdlib>

#include "../../host/early_start.h"
#include "early_start.cuh"
#include "fill.h"

namespace dmattn {
namespace {

// Lets the next kernel start before its own wait: that kernel is one of this library, which waits before it reads the
// counter.
__global__ void clear_counter_kernel(int32_t* counter) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  *counter = 0;
}

bool find_out() {
  cudaFuncAttributes code{};
  int driver = 0;
  // This kernel's code stands for that of all kernels that start early: they are compiled for the same architectures
  // (cmake/cuda.cmake), or for one that has the instruction to wait.
  if (cudaFuncGetAttributes(&code, clear_counter_kernel) != cudaSuccess ||
      cudaDriverGetVersion(&driver) != cudaSuccess) {
    (void)cudaGetLastError();  // clears the error: the launch that follows reports what is wrong
    return false;
  }
  return may_start_early(code.ptxVersion, driver, std::getenv("DMATTN_EARLY_START"));
}

}  // namespace

bool starts_early() {
  static std::atomic<uint64_t> known{0}, early{0};  // a bit for each device
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device > 63) return false;
  const uint64_t bit = uint64_t{1} << device;
  if (!(known.load(std::memory_order_acquire) & bit)) {
    if (find_out()) early.fetch_or(bit, std::memory_order_relaxed);
    known.fetch_or(bit, std::memory_order_release);
  }
  return (early.load(std::memory_order_relaxed) & bit) != 0;
}

cudaError_t clear_counter(int32_t* counter, cudaStream_t stream) {
  return launch_early(clear_counter_kernel, 1, 1, 0, stream, counter);
}

}  // namespace dmattn
