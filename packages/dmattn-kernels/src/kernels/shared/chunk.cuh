// Eight 16-bit elements at a time.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace dmattn {

// Eight 16-bit elements: one 16-byte access when vec, element accesses otherwise.
__device__ __forceinline__ uint4 load_chunk(const uint16_t* src, bool vec) {
  if (vec) return __ldg(reinterpret_cast<const uint4*>(src));
  uint32_t w[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) w[i] = __ldg(src + 2 * i) | static_cast<uint32_t>(__ldg(src + 2 * i + 1)) << 16;
  return make_uint4(w[0], w[1], w[2], w[3]);
}
__device__ __forceinline__ void store_chunk(uint16_t* dst, uint4 x, bool vec) {
  if (vec) {
    *reinterpret_cast<uint4*>(dst) = x;
    return;
  }
  const uint32_t w[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) dst[i] = static_cast<uint16_t>(w[i / 2] >> (16 * (i & 1)));
}

}  // namespace dmattn
