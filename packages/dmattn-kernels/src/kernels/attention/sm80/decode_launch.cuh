// Enqueues the decode kernel of a unit: one shape for all chips.
#pragma once

#include "decode_kernel.cuh"

namespace dmattn {

template <class Element, int kHeadDim, bool kGathered>
cudaError_t launch_decode(const KernelChoice& choice, const DecodeParams& p, cudaStream_t stream) {
  using T = DecodeTraits<Element, kHeadDim, kGathered>;
  static std::atomic<uint64_t> devices_ready{0};
  return launch(decode_kernel<T>, choice.blocks, T::kThreads, T::kSmemBytes, T::kSmemBytes, devices_ready, p, stream);
}

}  // namespace dmattn
