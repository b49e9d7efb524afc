// Which calls with softcap, or with a bias for each key and nothing else, have kernels of their own on Hopper, and the
// tiles of the forward with softcap, a mask or a bias. Read by the host and by launches.
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

// Whether a call has the kernel for a bias for each key and nothing else. With few rows the kernel for such a bias
// beside a mask is one or two microseconds faster, as it does not wait for the bias before its first product. At
// head_dim 96 it has tiles of 128 columns, and is faster only up to 384 rows.
inline bool sm90_has_key_bias_alone(const FwdParams& p, int32_t shares) {
  if (p.bias.kind != BiasKind::kKey) return false;
  const bool has_few_rows = sm90_fwd_head_dim(p.head_dim) == 96 ? p.seqlen_q <= 384 : sm90_has_few_rows(p.seqlen_q);
  return shares <= 1 && !has_few_rows && !p.has_mask && p.window == 0 && p.softcap == 0.f && p.softmax_scale > 0.f;
}
// Its tiles. Above head_dim 128 they have fewer keys than without a bias, since the operands of the bias take 32 bytes
// of shared memory for each key.
constexpr Sm90FwdTile sm90_key_bias_fwd_tile(int head_dim) {
  return head_dim <= 64    ? Sm90FwdTile{3, 128}  // 122 KB
         : head_dim <= 96  ? Sm90FwdTile{2, 128}  // 154 KB
         : head_dim <= 128 ? Sm90FwdTile{2, 128}  // 202 KB
         : head_dim <= 192 ? Sm90FwdTile{2, 96}   // 200 KB
                           : Sm90FwdTile{2, 64};  // 198 KB
}

// The tile of a call with softcap, a mask or a bias whose keys are split into `shares` parts.
inline Sm90FwdTile sm90_changed_fwd_tile(const FwdParams& p, int32_t shares) {
  if (sm90_has_key_bias_alone(p, shares)) return sm90_key_bias_fwd_tile(sm90_fwd_head_dim(p.head_dim));
  const int dim_tile = head_dim_tile(p.head_dim);
  return has_plain_softcap(p) ? sm90_softcap_fwd_tile(dim_tile)
                              : sm90_general_fwd_tile(dim_tile, sm90_general_fwd_is_tall(p, shares));
}

}  // namespace dmattn
