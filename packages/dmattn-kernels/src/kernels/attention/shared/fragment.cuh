// A warp's accumulators: float acc[MT][NT][4] over MT x NT fragments of 16 rows and 8 columns, as mma.sync leaves
// them. A wgmma leaves its 64 rows in the same form, 16 of them in each of four warps.
#pragma once

#include <cuda_runtime.h>

namespace dmattn {

// Where a thread's accumulators lie in a kBlockM x kBlockN tile: element e of fragment (mt, nt) is at
// row(mt, e), col(nt, e).
struct FragmentMap {
  int row0, col0;  // first row and column of this lane
  __device__ __forceinline__ FragmentMap(int warp_row0, int warp_col0, int lane)
      : row0(warp_row0 + lane / 4), col0(warp_col0 + 2 * (lane & 3)) {}
  __device__ __forceinline__ int row(int mt, int e) const { return row0 + 16 * mt + 8 * (e >> 1); }
  __device__ __forceinline__ int col(int nt, int e) const { return col0 + 8 * nt + (e & 1); }
};

template <int MT, int NT>
__device__ __forceinline__ void clear(float (&acc)[MT][NT][4]) {
#pragma unroll
  for (int mt = 0; mt < MT; ++mt)
#pragma unroll
    for (int nt = 0; nt < NT; ++nt)
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[mt][nt][e] = 0.f;
}

}  // namespace dmattn
