// Which calls with softcap have kernels of their own on Hopper, and the tiles of the forward with softcap, a mask or
// a bias. Read by the host and by launches.
#pragma once

#include "params.h"
#include "tiles.h"

namespace dmattn {

// Whether there is softcap, and its product with log2(e), which kernels compute, does not overflow.
constexpr float kMostSoftcap = 1e38f;
constexpr bool has_finite_softcap(float softcap) { return softcap > 0.f && softcap <= kMostSoftcap; }

// Whether softcap is all that is asked of the scores. There may be a window of keys, or packed sequences.
inline bool has_plain_softcap(const FwdParams& p) {
  return has_finite_softcap(p.softcap) && p.bias.kind == BiasKind::kNone && !p.has_mask;
}

constexpr Sm90FwdTile sm90_softcap_fwd_tile(int head_dim_tile) {
  return sm90_fwd_tile(head_dim_tile, Sm90FwdShape::kShort);
}

// The tile of a call with softcap, a mask or a bias whose keys are split into `shares` parts.
inline Sm90FwdTile sm90_changed_fwd_tile(const FwdParams& p, int32_t shares) {
  const int dim_tile = head_dim_tile(p.head_dim);
  return has_plain_softcap(p) ? sm90_softcap_fwd_tile(dim_tile)
                              : sm90_general_fwd_tile(dim_tile, sm90_general_fwd_is_tall(p, shares));
}

}  // namespace dmattn
