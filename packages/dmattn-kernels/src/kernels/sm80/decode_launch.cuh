// Enqueues the decode kernel of a unit: one shape for both families.
#pragma once

#include "decode_kernel.cuh"

namespace dmattn {

template <class Element, int kHeadDim, bool kGathered>
cudaError_t launch_decode(Family, const DecodeParams& p, cudaStream_t stream) {
  using T = DecodeTraits<Element, kHeadDim, kGathered>;
  const int64_t row_blocks = (p.seqlen_q + T::kRows - 1) / T::kRows;
  static std::atomic<uint64_t> devices_ready{0};
  return launch(decode_kernel<T>, row_blocks * p.num_splits * p.nheads * p.batch, T::kThreads, T::kSmemBytes,
                T::kSmemBytes, devices_ready, p, stream);
}

}  // namespace dmattn
