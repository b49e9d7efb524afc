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
    const auto with_shape = [&](auto keys, auto is_single) {
      return launch_short_bwd_kernel<Element, head_dim, keys, level, is_single>(choice.blocks, p, stream);
    };
    if (short_bwd_is_single(p)) return with_shape(std::integral_constant<int, 64>{}, std::true_type{});
    if constexpr (level != Level::kFull) {
      if (short_bwd_keys(p.seqlen_k) == 64) return with_shape(std::integral_constant<int, 64>{}, std::false_type{});
      return with_shape(std::integral_constant<int, kMostShortBwdKeys>{}, std::false_type{});
    }
    return cudaErrorInvalidValue;
  });
}

}  // namespace dmattn
