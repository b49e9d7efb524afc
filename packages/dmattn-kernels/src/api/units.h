// Kernel units with words for those that a build leaves out.
#pragma once

#include "api/error.h"
#include "kernels/units.h"

namespace dmattn {

template <class Launcher>
Launcher require_unit(Launcher unit, Dtype dtype, int32_t dim_tile, bool gathered, const char* direction) {
  if (unit == nullptr) {
    fail(DMATTN_ERROR_UNSUPPORTED, "this build of the library has no %s kernel for %s, head_dim up to %d, %s keys",
         direction, dtype == Dtype::kFloat16 ? "float16" : "bfloat16", dim_tile, gathered ? "gathered" : "dense");
  }
  return unit;
}

inline FwdLauncher fwd_unit(Dtype dtype, int32_t dim_tile, bool gathered) {
  return require_unit(find_fwd_unit(dtype, dim_tile, gathered), dtype, dim_tile, gathered, "forward");
}
inline BwdLauncher bwd_unit(Dtype dtype, int32_t dim_tile, bool gathered) {
  return require_unit(find_bwd_unit(dtype, dim_tile, gathered), dtype, dim_tile, gathered, "backward");
}
inline DecodeLauncher decode_unit(Dtype dtype, int32_t dim_tile, bool gathered) {
  return require_unit(find_decode_unit(dtype, dim_tile, gathered), dtype, dim_tile, gathered, "decode");
}

}  // namespace dmattn
