// Enqueues the backward over few keys that the plan chose.
#pragma once

#include "short_bwd_kernel.cuh"

namespace dmattn {

template <class Element, int kHeadDim, int kBlockN, Level kLevel, bool kSingle>
cudaError_t launch_short_bwd_kernel(int64_t blocks, const ShortBwdParams& p, cudaStream_t stream) {
  using T = ShortBwdTraits<Element, kHeadDim, kBlockN, kLevel, kSingle>;
  static std::atomic<uint64_t> devices_ready{0};
  return launch(short_bwd_kernel<T>, blocks, T::kThreads, T::kSmemBytes, T::kSmemBytes, devices_ready, p, stream);
}

template <class Element, int kHeadDim, bool kGathered>
cudaError_t launch_short_bwd(const KernelChoice& choice, const ShortBwdParams& p, cudaStream_t stream) {
  static_assert(!kGathered && kHeadDim == kMostShortHeadDim);
  return with_short_shape(p, choice.level, [&](auto head_dim, auto level) {
    if (short_bwd_keys(p.seqlen_k) == kMostShortBwdKeys) {
      return launch_short_bwd_kernel<Element, head_dim, kMostShortBwdKeys, level, false>(choice.blocks, p, stream);
    }
    if (p.head_ratio > 1 || p.seqlen_q > kShortRows) {
      return launch_short_bwd_kernel<Element, head_dim, 64, level, false>(choice.blocks, p, stream);
    }
    return launch_short_bwd_kernel<Element, head_dim, 64, level, true>(choice.blocks, p, stream);
  });
}

}  // namespace dmattn
