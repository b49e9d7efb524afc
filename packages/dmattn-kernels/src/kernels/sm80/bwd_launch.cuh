// Chooses the backward kernel of a unit and enqueues it.
#pragma once

#include "bwd_kernel.cuh"

namespace dmattn {

template <class Element, int kHeadDim, bool kGathered, Level kLevel, Family kFamily>
cudaError_t launch_bwd_kernel(const BwdParams& p, cudaStream_t stream) {
  constexpr BwdTile tile = bwd_tile(kFamily, kHeadDim);
  using T = BwdTraits<Element, kHeadDim, kFamily, kGathered, kLevel>;
  const int64_t tiles = static_cast<int64_t>((p.seqlen_k + tile.block_n - 1) / tile.block_n) * p.nheads_k * p.batch;
  const int64_t interval_tiles =
      static_cast<int64_t>((p.keys.capacity + tile.block_n - 1) / tile.block_n) * p.row_blocks * p.nheads_k * p.batch;
  const int64_t blocks = !kGathered ? tiles * p.num_splits : p.keys.block_rows > 0 ? interval_tiles : p.max_work_items;
  static std::atomic<uint64_t> devices_ready{0};
  return launch(bwd_kernel<T, family_bits(kFamily, /*shared=*/false)>, blocks, T::kThreads, T::kSmemBytes,
                T::kSmemBytes, devices_ready, p, stream);
}

template <class Element, int kHeadDim, bool kGathered, Family kFamily>
cudaError_t launch_bwd_level(Level level, const BwdParams& p, cudaStream_t stream) {
  switch (level) {
    case Level::kPlain:
      return launch_bwd_kernel<Element, kHeadDim, kGathered, Level::kPlain, kFamily>(p, stream);
    case Level::kPacked:
      if constexpr (!kGathered) {
        return launch_bwd_kernel<Element, kHeadDim, kGathered, Level::kPacked, kFamily>(p, stream);
      }
      [[fallthrough]];  // gathered: general
    case Level::kGeneral:
      return launch_bwd_kernel<Element, kHeadDim, kGathered, Level::kGeneral, kFamily>(p, stream);
    default:
      return launch_bwd_kernel<Element, kHeadDim, kGathered, Level::kFull, kFamily>(p, stream);
  }
}

inline Level bwd_level(const BwdParams& p, bool gathered) {
  const bool dbias_registers = p.dbias_kind == DbiasKind::kAccum ||
                               (p.dbias_kind == DbiasKind::kTile && (gathered || p.bias.dtype == Dtype::kFloat32));
  if (p.bias.kind == BiasKind::kDirect || p.softcap > 0.f || dbias_registers) return Level::kFull;
  const bool all_wanted =
      p.dq_accum != nullptr && (p.dk != nullptr || p.dk_accum != nullptr) && (p.dv != nullptr || p.dv_accum != nullptr);
  const bool all_aligned = p.vec_q && p.vec_k && p.vec_v && p.vec_dout;
  // The plain kernel scales cut scores of -inf: by a scale that is not positive they would not stay -inf.
  const bool general = !(p.softmax_scale > 0.f) || p.bias.kind != BiasKind::kNone || p.mask.bits != nullptr ||
                       p.deterministic || p.dbias_kind != DbiasKind::kNone || !all_wanted || !all_aligned;
  return general ? Level::kGeneral : p.packing.is_active() ? Level::kPacked : Level::kPlain;
}

template <class Element, int kHeadDim, bool kGathered>
cudaError_t launch_bwd(Family family, const BwdParams& p, cudaStream_t stream) {
  const Level level = bwd_level(p, kGathered);
  return family == Family::kSm89 ? launch_bwd_level<Element, kHeadDim, kGathered, Family::kSm89>(level, p, stream)
                                 : launch_bwd_level<Element, kHeadDim, kGathered, Family::kSm80>(level, p, stream);
}

}  // namespace dmattn
