// The kernels of a unit, as the launchers of the forward and the backward choose among them.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "../../tiles.h"
#include "../shared/launch.cuh"

namespace dmattn {

constexpr TileSet other_tiles(TileSet tiles) { return tiles == TileSet::kWide ? TileSet::kNarrow : TileSet::kWide; }

// The tile sets that have a kernel's shape, as bits: kWide = 1, kNarrow = 2.
constexpr int tile_set_bits(TileSet tiles, bool shared) { return shared ? 3 : tiles == TileSet::kWide ? 1 : 2; }

// Whether this compilation pass compiles the kernel's body. A unit is compiled from compute_80, for GPUs that need
// the narrow tiles from compute_86, and from compute_89 to PTX that may run on either (see cmake/cuda.cmake). A shape
// that only the other tile set has would be code that is never run. Test builds (DMATTN_ALL_TILES) run all shapes on
// one GPU.
template <int kTileSetBits>
constexpr bool is_compiled_here() {
#if defined(__CUDA_ARCH__) && !defined(DMATTN_ALL_TILES)
  return (kTileSetBits & (__CUDA_ARCH__ == 890 ? 3 : __CUDA_ARCH__ == 860 ? 2 : 1)) != 0;
#else
  return true;
#endif
}

template <Level kLevel>
using LevelConstant = std::integral_constant<Level, kLevel>;
template <TileSet kTiles>
using TileSetConstant = std::integral_constant<TileSet, kTiles>;

// Calls f(level, tiles) with the choice as compile-time constants. There are no kernels of level kPacked over lists.
template <bool kGathered, class F>
cudaError_t with_kernel(const KernelChoice& choice, F&& f) {
  const auto with_tiles = [&](auto level) {
    return choice.tiles == TileSet::kNarrow ? f(level, TileSetConstant<TileSet::kNarrow>{})
                                            : f(level, TileSetConstant<TileSet::kWide>{});
  };
  switch (choice.level) {
    case Level::kPlain:
      return with_tiles(LevelConstant<Level::kPlain>{});
    case Level::kPacked:
      if constexpr (!kGathered) return with_tiles(LevelConstant<Level::kPacked>{});
      return cudaErrorInvalidValue;
    case Level::kGeneral:
      return with_tiles(LevelConstant<Level::kGeneral>{});
    case Level::kFull:
      return with_tiles(LevelConstant<Level::kFull>{});
    case Level::kCut:  // decoding only, which decode_launch.cuh launches
      break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace dmattn
