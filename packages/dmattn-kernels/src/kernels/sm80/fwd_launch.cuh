// Chooses the forward kernel of a unit and enqueues it.
#pragma once

#include "fwd_kernel.cuh"
#include "launch.cuh"

namespace dmattn {

template <class Element, int kHeadDim, bool kGathered, bool kGeneral, Family kFamily>
cudaError_t launch_fwd_kernel(const FwdParams& p, cudaStream_t stream) {
  constexpr FwdTile tile = fwd_tile(kFamily, kHeadDim);
  constexpr FwdTile other = fwd_tile(other_family(kFamily), kHeadDim);
  constexpr bool kShared = tile.block_m == other.block_m && tile.block_n == other.block_n && tile.warps == other.warps;
  using T = FwdTraits<Element, kHeadDim, tile.block_m, tile.block_n, tile.warps, kGathered, kGeneral>;
  const int64_t m_blocks = (p.seqlen_q + tile.block_m - 1) / tile.block_m;
  const int64_t blocks = m_blocks * p.num_splits * p.nheads * p.batch;
  static std::atomic<uint64_t> devices_ready{0};
  return launch(fwd_kernel<T, family_bits(kFamily, kShared)>, blocks, T::kThreads, T::smem_bytes(p),
                T::kBias + T::kBiasBytes, devices_ready, p, stream);
}

template <class Element, int kHeadDim, bool kGathered>
cudaError_t launch_fwd(Family family, const FwdParams& p, cudaStream_t stream) {
  // The plain path takes the maximum of the raw products, which needs a positive scale; the general one scales first.
  const bool general =
      p.softcap > 0.f || p.bias.kind != BiasKind::kNone || p.mask.bits != nullptr || !(p.softmax_scale > 0.f);
  if (family == Family::kSm89) {
    return general ? launch_fwd_kernel<Element, kHeadDim, kGathered, true, Family::kSm89>(p, stream)
                   : launch_fwd_kernel<Element, kHeadDim, kGathered, false, Family::kSm89>(p, stream);
  }
  return general ? launch_fwd_kernel<Element, kHeadDim, kGathered, true, Family::kSm80>(p, stream)
                 : launch_fwd_kernel<Element, kHeadDim, kGathered, false, Family::kSm80>(p, stream);
}

}  // namespace dmattn
