// Chooses the backward kernel of a unit and enqueues it.
#pragma once

#include "bwd_kernel.cuh"

namespace dmattn {

template <class Element, int kHeadDim, bool kGathered, bool kGeneral, Family kFamily>
cudaError_t launch_bwd_kernel(const BwdParams& p, cudaStream_t stream) {
  constexpr BwdTile tile = bwd_tile(kFamily, kHeadDim);
  using T = BwdTraits<Element, kHeadDim, kFamily, kGathered, kGeneral>;
  const int64_t tiles = static_cast<int64_t>((p.seqlen_k + tile.block_n - 1) / tile.block_n) * p.nheads_k * p.batch;
  const int64_t blocks = kGathered ? p.max_work_items : tiles * p.num_splits;
  static std::atomic<uint64_t> devices_ready{0};
  return launch(bwd_kernel<T, family_bits(kFamily, /*shared=*/false)>, blocks, T::kThreads, T::kSmemBytes,
                T::kSmemBytes, devices_ready, p, stream);
}

template <class Element, int kHeadDim, bool kGathered>
cudaError_t launch_bwd(Family family, const BwdParams& p, cudaStream_t stream) {
  const bool all_wanted = p.dq_accum != nullptr && (p.dk != nullptr || p.dk_accum != nullptr) &&
                          (p.dv != nullptr || p.dv_accum != nullptr);
  const bool general = p.softcap > 0.f || p.bias.kind != BiasKind::kNone || p.mask.bits != nullptr ||
                       p.dbias_kind != DbiasKind::kNone || p.dq_semaphore != nullptr || !all_wanted;
  if (family == Family::kSm89) {
    return general ? launch_bwd_kernel<Element, kHeadDim, kGathered, true, Family::kSm89>(p, stream)
                   : launch_bwd_kernel<Element, kHeadDim, kGathered, false, Family::kSm89>(p, stream);
  }
  return general ? launch_bwd_kernel<Element, kHeadDim, kGathered, true, Family::kSm80>(p, stream)
                 : launch_bwd_kernel<Element, kHeadDim, kGathered, false, Family::kSm80>(p, stream);
}

}  // namespace dmattn
