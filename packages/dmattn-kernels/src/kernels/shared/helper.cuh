// What the helper kernels share: 16-byte chunks of 16-bit elements, rounding, block scans, one-dimensional launches.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "../../host/arithmetic.h"
#include "../params.h"
#include "chunk.cuh"
#include "early_start.cuh"

namespace dmattn {
namespace prep {

constexpr uint32_t kFullWarp = 0xffffffffu;

// The grid is one-dimensional: x may have 2^31 - 1 blocks, y and z only 65535. No blocks: nothing is launched. The
// kernel may start early and has to keep the rule of early_start.cuh.
template <class... Params, class... Args>
cudaError_t launch(void (*kernel)(Params...), int64_t blocks, int threads, size_t smem, cudaStream_t stream,
                   const Args&... args) {
  if (blocks <= 0) return cudaSuccess;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  return launch_early(kernel, static_cast<uint32_t>(blocks), threads, smem, stream, args...);
}

// --- 16-bit elements -----------------------------------------------------------------------------------------------

template <class Element>
struct Half2;
template <>
struct Half2<__half> {
  static __device__ __forceinline__ uint32_t pack(float lo, float hi) {
    const __half2 x = __floats2half2_rn(lo, hi);
    uint32_t r;
    memcpy(&r, &x, sizeof(r));
    return r;
  }
  static __device__ __forceinline__ float2 unpack(uint32_t x) {
    __half2 h;
    memcpy(&h, &x, sizeof(h));
    return __half22float2(h);
  }
};
template <>
struct Half2<__nv_bfloat16> {
  static __device__ __forceinline__ uint32_t pack(float lo, float hi) {
    const __nv_bfloat162 x = __floats2bfloat162_rn(lo, hi);
    uint32_t r;
    memcpy(&r, &x, sizeof(r));
    return r;
  }
  static __device__ __forceinline__ float2 unpack(uint32_t x) {
    __nv_bfloat162 h;
    memcpy(&h, &x, sizeof(h));
    return __bfloat1622float2(h);
  }
};

// Calls f(Element{}) for the 16-bit type that dtype names.
template <class F>
cudaError_t with_half_type(Dtype dtype, F&& f) {
  if (dtype == Dtype::kFloat16) return f(__half{});
  if (dtype == Dtype::kBFloat16) return f(__nv_bfloat16{});
  return cudaErrorInvalidValue;
}

template <class Element>
__device__ __forceinline__ void unpack_chunk(uint4 x, float (&v)[8]) {
  const uint32_t w[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = Half2<Element>::unpack(w[i]);
    v[2 * i] = pair.x;
    v[2 * i + 1] = pair.y;
  }
}
template <class Element>
__device__ __forceinline__ uint4 pack_chunk(const float (&v)[8]) {
  return make_uint4(Half2<Element>::pack(v[0], v[1]), Half2<Element>::pack(v[2], v[3]),
                    Half2<Element>::pack(v[4], v[5]), Half2<Element>::pack(v[6], v[7]));
}

// v += scale * (eight floats that start on 16 bytes).
__device__ __forceinline__ void accumulate8(float (&v)[8], const float* src, float scale) {
  const float4 lo = __ldg(reinterpret_cast<const float4*>(src));
  const float4 hi = __ldg(reinterpret_cast<const float4*>(src) + 1);
  const float x[8] = {lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = fmaf(scale, x[i], v[i]);
}

// Element offset of the row (b, row, h).
__host__ __device__ __forceinline__ int64_t row_offset(const Strides3& s, int b, int h, int64_t row) {
  return b * s.batch + h * s.head + row * s.row;
}

// --- reductions ----------------------------------------------------------------------------------------------------

// Over groups of kLanes neighbouring lanes; every lane gets the result.
template <int kLanes>
__device__ __forceinline__ float lanes_sum(float x) {
#pragma unroll
  for (int i = kLanes / 2; i > 0; i /= 2) x += __shfl_xor_sync(kFullWarp, x, i);
  return x;
}
template <int kLanes>
__device__ __forceinline__ float lanes_max(float x) {
#pragma unroll
  for (int i = kLanes / 2; i > 0; i /= 2) x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, i));
  return x;
}

// Inclusive sums over the lanes of a warp.
template <class Int>
__device__ __forceinline__ Int warp_inclusive_scan(Int x) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 1; i < 32; i *= 2) {
    const Int y = __shfl_up_sync(kFullWarp, x, i);
    if (lane >= i) x += y;
  }
  return x;
}

// Returns the sum of x over the threads before this one; `total` becomes the sum over all threads. Every thread of the
// block takes part; `warp_sums` may be reused after the caller's next barrier.
template <int kThreads>
__device__ __forceinline__ int block_exclusive_scan(int x, int (&warp_sums)[32], int& total) {
  static_assert(kThreads % 32 == 0 && kThreads <= 1024);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int inclusive = warp_inclusive_scan(x);
  if (lane == 31) warp_sums[warp] = inclusive;
  __syncthreads();
  // Every warp scans the warp sums for itself: one barrier less than having the first one do it.
  const int warp_inclusive = warp_inclusive_scan(lane < kThreads / 32 ? warp_sums[lane] : 0);
  total = __shfl_sync(kFullWarp, warp_inclusive, 31);
  const int before = __shfl_sync(kFullWarp, warp_inclusive, warp == 0 ? 0 : warp - 1);
  return inclusive - x + (warp == 0 ? 0 : before);
}

}  // namespace prep
}  // namespace dmattn
