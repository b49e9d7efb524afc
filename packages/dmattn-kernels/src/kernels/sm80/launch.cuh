// Launch plumbing shared by the forward and the backward units.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

#include "../tiles.h"

namespace dmattn {

constexpr Family other_family(Family f) { return f == Family::kSm80 ? Family::kSm89 : Family::kSm80; }

// Families whose tile table gives a kernel its shape, as a bit set: kSm80 = 1, kSm89 = 2.
constexpr int family_bits(Family f, bool shared) { return shared ? 3 : f == Family::kSm80 ? 1 : 2; }

// Whether the code for this compilation pass holds the kernel's body. The unit is compiled for sm_80, sm_89 and as PTX
// for newer chips; a shape that only one family uses would be dead weight in the other's binary. Test builds
// (DMATTN_ALL_TILES) run both families' shapes on one chip.
template <int kFamilyBits>
constexpr bool is_compiled_here() {
#if defined(__CUDA_ARCH__) && !defined(DMATTN_ALL_TILES)
  return (kFamilyBits & (__CUDA_ARCH__ == 890 ? 2 : 1)) != 0;
#else
  return true;
#endif
}

// Raises the kernel's shared-memory limit once per device (a call per launch would cost a microsecond), then launches.
template <class Params>
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
  kernel<<<static_cast<unsigned>(blocks), threads, smem_bytes, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace dmattn
