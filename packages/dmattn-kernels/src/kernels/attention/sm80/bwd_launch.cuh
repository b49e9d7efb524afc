// Enqueues the backward kernel of a unit that the plan chose.
#pragma once

#include "bwd_kernel.cuh"
#include "launch.cuh"

namespace dmattn {

template <class Element, int kHeadDim, bool kGathered, Level kLevel, TileSet kTiles>
cudaError_t launch_bwd_kernel(int64_t blocks, const BwdParams& p, cudaStream_t stream) {
  using T = BwdTraits<Element, kHeadDim, kTiles, kGathered, kLevel>;
  static std::atomic<uint64_t> devices_ready{0};
  return launch(bwd_kernel<T, tile_set_bits(kTiles, /*shared=*/false)>, blocks, T::kThreads, T::kSmemBytes,
                T::kSmemBytes, devices_ready, p, stream);
}

template <class Element, int kHeadDim, bool kGathered>
cudaError_t launch_bwd(const KernelChoice& choice, const BwdParams& p, cudaStream_t stream) {
  return with_kernel<kGathered>(choice, [&](auto level, auto tiles) {
    return launch_bwd_kernel<Element, kHeadDim, kGathered, level, tiles>(choice.blocks, p, stream);
  });
}

}  // namespace dmattn
