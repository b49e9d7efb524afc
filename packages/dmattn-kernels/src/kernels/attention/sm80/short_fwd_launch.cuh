// Enqueues the forward over few keys that the plan chose.
#pragma once

#include "short_fwd_kernel.cuh"

namespace dmattn {

template <class Element, int kHeadDim, Level kLevel>
cudaError_t launch_short_fwd_kernel(int64_t blocks, const ShortFwdParams& p, cudaStream_t stream) {
  using T = ShortFwdTraits<Element, kHeadDim, kLevel>;
  static std::atomic<uint64_t> devices_ready{0};
  return launch(short_fwd_kernel<T>, blocks, T::kThreads, T::kSmemBytes, T::kSmemBytes, devices_ready, p, stream);
}

template <class Element, int kHeadDim, bool kGathered>
cudaError_t launch_short_fwd(const KernelChoice& choice, const ShortFwdParams& p, cudaStream_t stream) {
  static_assert(!kGathered && kHeadDim == kMostShortHeadDim);
  return with_short_shape(p, choice.level, [&](auto head_dim, auto level) {
    return launch_short_fwd_kernel<Element, head_dim, level>(choice.blocks, p, stream);
  });
}

}  // namespace dmattn
