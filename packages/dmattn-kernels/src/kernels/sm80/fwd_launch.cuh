// Chooses the forward kernel of a unit and enqueues it.
#pragma once

#include "fwd_kernel.cuh"
#include "launch.cuh"

namespace dmattn {

template <class Element, int kHeadDim, bool kGathered, Level kLevel, Family kFamily>
cudaError_t launch_fwd_kernel(const FwdParams& p, cudaStream_t stream) {
  constexpr bool kPlain = !is_general(kLevel) && !kGathered;
  constexpr Family kOther = other_family(kFamily);
  constexpr FwdTile tile = kPlain ? fwd_tile_plain(kFamily, kHeadDim) : fwd_tile(kFamily, kHeadDim);
  constexpr FwdTile other = kPlain ? fwd_tile_plain(kOther, kHeadDim) : fwd_tile(kOther, kHeadDim);
  constexpr bool kShared = tile.block_m == other.block_m && tile.block_n == other.block_n && tile.warps == other.warps;
  using T = FwdTraits<Element, kHeadDim, tile.block_m, tile.block_n, tile.warps, kGathered, kLevel>;
  const int64_t m_blocks = (p.seqlen_q + tile.block_m - 1) / tile.block_m;
  const int64_t blocks = m_blocks * p.num_splits * p.nheads * p.batch;
  static std::atomic<uint64_t> devices_ready{0};
  return launch(fwd_kernel<T, family_bits(kFamily, kShared)>, blocks, T::kThreads, T::smem_bytes(p),
                T::kBias + T::kBiasBytes, devices_ready, p, stream);
}

template <class Element, int kHeadDim, bool kGathered, Family kFamily>
cudaError_t launch_fwd_level(Level level, const FwdParams& p, cudaStream_t stream) {
  switch (level) {
    case Level::kPlain:
      return launch_fwd_kernel<Element, kHeadDim, kGathered, Level::kPlain, kFamily>(p, stream);
    case Level::kPacked:
      if constexpr (!kGathered) {
        return launch_fwd_kernel<Element, kHeadDim, kGathered, Level::kPacked, kFamily>(p, stream);
      }
      [[fallthrough]];  // gathered: general
    case Level::kGeneral:
      return launch_fwd_kernel<Element, kHeadDim, kGathered, Level::kGeneral, kFamily>(p, stream);
    default:
      return launch_fwd_kernel<Element, kHeadDim, kGathered, Level::kFull, kFamily>(p, stream);
  }
}

inline Level fwd_level(const FwdParams& p) {
  if (p.bias.kind == BiasKind::kDirect) return Level::kFull;
  // The plain path takes the maximum of the raw products, which needs a positive scale; the others scale first.
  const bool general = p.softcap > 0.f || p.bias.kind != BiasKind::kNone || p.mask.bits != nullptr ||
                       !(p.softmax_scale > 0.f) || !(p.vec_q && p.vec_k && p.vec_v && p.vec_out);
  return general ? Level::kGeneral : p.packing.is_active() ? Level::kPacked : Level::kPlain;
}

template <class Element, int kHeadDim, bool kGathered>
cudaError_t launch_fwd(Family family, const FwdParams& p, cudaStream_t stream) {
  return family == Family::kSm89
             ? launch_fwd_level<Element, kHeadDim, kGathered, Family::kSm89>(fwd_level(p), p, stream)
             : launch_fwd_level<Element, kHeadDim, kGathered, Family::kSm80>(fwd_level(p), p, stream);
}

}  // namespace dmattn
