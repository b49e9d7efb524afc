// The launch of attention kernels, which need more shared memory than a kernel has by default.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

#include "../../shared/early_start.cuh"

namespace dmattn {

// Raises the kernel's shared-memory limit once per device (doing so at each launch would cost a microsecond), then
// launches. kEarly: the kernel may start early, and must keep the rule that early_start.cuh describes.
template <bool kEarly = false, class Params>
cudaError_t launch(void (*kernel)(Params), int64_t blocks, int threads, uint32_t smem_bytes, uint32_t smem_max,
                   std::atomic<uint64_t>& devices_ready, const Params& params, cudaStream_t stream) {
  if (blocks == 0) return cudaSuccess;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  int device = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  const uint64_t bit = uint64_t{1} << (device & 63);
  if (!(devices_ready.load(std::memory_order_acquire) & bit) || device > 63) {
    status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(smem_max));
    if (status != cudaSuccess) return status;
    devices_ready.fetch_or(bit, std::memory_order_release);
  }
  if constexpr (kEarly) return launch_early(kernel, static_cast<uint32_t>(blocks), threads, smem_bytes, stream, params);
  kernel<<<static_cast<unsigned>(blocks), threads, smem_bytes, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace dmattn
