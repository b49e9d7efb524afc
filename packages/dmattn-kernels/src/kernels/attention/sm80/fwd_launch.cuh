// Enqueues the forward kernel of a unit that the plan chose.
#pragma once

#include "fwd_kernel.cuh"
#include "launch.cuh"

namespace dmattn {

template <class Element, int kHeadDim, bool kGathered, Level kLevel, TileSet kTiles, bool kTokenRows = false>
cudaError_t launch_fwd_kernel(int64_t blocks, const FwdParams& p, cudaStream_t stream) {
  constexpr FwdTile tile = fwd_tile(kTiles, kHeadDim, kLevel, kGathered);
  constexpr bool kShared = tile == fwd_tile(other_tiles(kTiles), kHeadDim, kLevel, kGathered);
  using T = FwdTraits<Element, kHeadDim, tile.block_m, tile.block_n, tile.warps, kGathered, kLevel, kTokenRows>;
  static std::atomic<uint64_t> devices_ready{0};
  return launch(fwd_kernel<T, tile_set_bits(kTiles, kShared)>, blocks, T::kThreads, T::smem_bytes(p),
                T::kBias + T::kBiasBytes, devices_ready, p, stream);
}

template <class Element, int kHeadDim, bool kGathered>
cudaError_t launch_fwd(const KernelChoice& choice, const FwdParams& p, cudaStream_t stream) {
  return with_kernel<kGathered>(choice, [&](auto level, auto tiles) {
    if constexpr (!kGathered && level == Level::kPlain) {
      if (p.token_rows.count > 1) {
        return launch_fwd_kernel<Element, kHeadDim, kGathered, level, tiles, /*kTokenRows=*/true>(choice.blocks, p,
                                                                                                  stream);
      }
    }
    return launch_fwd_kernel<Element, kHeadDim, kGathered, level, tiles>(choice.blocks, p, stream);
  });
}

}  // namespace dmattn
