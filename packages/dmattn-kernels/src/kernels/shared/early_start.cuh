// Kernels that start early: on Hopper and later, a kernel may be launched while the previous one of the stream still
// runs, and then waits for that one on the device ("programmatic dependent launch"). The launch itself then overlaps
// with the previous kernel.
//
// The rule that makes this safe: in a kernel that is launched by launch_early(), every thread that reads or writes
// global memory calls wait_for_previous_kernel() before its first such access, and at least one thread of the grid
// calls it in any case. The wait lasts until the previous kernel has ended and all of its writes are visible. As that
// kernel has waited in turn, all kernels before it have ended too. A kernel that has not waited yet has touched no
// memory: neither its inputs nor its outputs, nor a workspace that an earlier kernel still uses and that the caller
// has already given back.
// Two kernels do otherwise (docs/kernels.md, "Kernels that start early"). keep_keys_kernel() waits at its end if
// KeepKeysParams::starts_early is set: neither it nor the kernel before it writes anything that the other reads or
// writes. The decode kernel of a draft reads, before it waits, what the kernel of cache_draft() does not write. In
// both cases the kernel before lets the next one start only after a wait of its own.
// let_next_kernel_start() comes after the wait, unless the next kernel is known to keep this rule. A kernel of another
// library may rely on the end of all kernels but the one directly before it. Everything else on a stream (kernels
// launched without this attribute, copies, events) waits for the end of the previous kernel as usual.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace dmattn {

// Below compute capability 9.0 these two functions are empty, and launch_early() is an ordinary launch.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// The next kernel is started once all thread blocks of this one have called this or ended.
__device__ __forceinline__ void let_next_kernel_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// The two in this order, for short kernels.
__device__ __forceinline__ void follow_previous_kernel() {
  wait_for_previous_kernel();
  let_next_kernel_start();
}

// Whether launch_early() starts kernels early on the current device. Found out once for each device: see
// host/early_start.h.
bool starts_early();

// Launches a kernel that keeps the rule above.
template <class... Params, class... Args>
cudaError_t launch_early(void (*kernel)(Params...), uint32_t blocks, int threads, size_t smem, cudaStream_t stream,
                         const Args&... args) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(static_cast<uint32_t>(threads));
  config.dynamicSmemBytes = smem;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = starts_early() ? 1 : 0;
  const cudaError_t status = cudaLaunchKernelEx(&config, kernel, args...);
  if (status != cudaSuccess) (void)cudaGetLastError();  // clears the error, which is returned
  return status;
}

}  // namespace dmattn
