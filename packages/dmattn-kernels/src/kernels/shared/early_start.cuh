// Kernels that start early: on Hopper and later, a kernel may be launched while the one before it on the stream still
// runs, and then waits on the device ("programmatic dependent launch"). What a launch costs passes meanwhile.
//
// The rule that makes it safe: a kernel that is launched by launch_early() calls wait_for_previous_kernel() in every
// thread that reads or writes global memory, before the first such access, and in at least one thread of the grid
// whatever happens. The wait lasts until the kernel before has ended and all of its writes can be seen. That kernel has
// waited for the one before it in turn, so that all kernels before have ended. A kernel that waits has not yet touched
// memory: not its inputs, not its outputs, and not a workspace that an earlier kernel still uses and whose memory the
// caller has given away again.
// One kernel waits at its end instead, keep_keys_kernel() where it is asked to: it follows a kernel over lists that
// writes nothing it reads and reads nothing it writes, and that lets it start behind a wait of its own.
// let_next_kernel_start() comes after the wait, unless the next kernel is known to keep this rule: that of another
// library may rely on all kernels but the one before it having ended. Everything else on a stream (kernels launched
// plainly, copies, events) waits for the end as ever.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace dmattn {

// The two compile to nothing below compute capability 9.0. There launch_early() is a plain launch.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// The next kernel is set up once all thread blocks have called this or ended.
__device__ __forceinline__ void let_next_kernel_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Both, as short kernels have it.
__device__ __forceinline__ void follow_previous_kernel() {
  wait_for_previous_kernel();
  let_next_kernel_start();
}

// Whether launch_early() does on the current device. Looked up once for each; see host/early_start.h.
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
  if (status != cudaSuccess) (void)cudaGetLastError();  // reported here
  return status;
}

}  // namespace dmattn
