// Element types and the few functions that the kernels approximate.
#pragma once

#include <cuda_runtime.h>
#include <cutlass/numeric_types.h>

#include <cstdint>

namespace dmattn {

constexpr float kLog2e = 1.4426950408889634f;

// Packs two 16-bit elements into a word, and unpacks them.
template <class Element>
struct ElementTraits;

template <>
struct ElementTraits<cutlass::half_t> {
  // Two fp32 values rounded to nearest and packed, the first in the low half.
  static __device__ __forceinline__ uint32_t pack(float lo, float hi) {
    uint32_t r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
  }
  static __device__ __forceinline__ float2 unpack(uint32_t x) {
    float2 r;
    asm("{.reg .f16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}" : "=f"(r.x), "=f"(r.y) : "r"(x));
    return r;
  }
};

template <>
struct ElementTraits<cutlass::bfloat16_t> {
  static __device__ __forceinline__ uint32_t pack(float lo, float hi) {
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
  }
  static __device__ __forceinline__ float2 unpack(uint32_t x) {
    return {__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)};
  }
};

__device__ __forceinline__ float exp2_approx(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

__device__ __forceinline__ float log2_approx(float x) {
  float r;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

__device__ __forceinline__ float tanh_fast(float x) {
  // 1 - 2 / (1 + e^2x) has an absolute error of about 1e-7; tanh.approx has 5e-4, too much for fp16. A large softcap
  // multiplies this error. So small x take the first two terms of the series, x - x^3 / 3, which keeps the relative
  // error below 4e-6 for all x.
  const float far = 1.f - __fdividef(2.f, 1.f + exp2_approx(2.f * kLog2e * x));
  const float near = __fmaf_rn(x * x * x, -1.f / 3.f, x);
  return fabsf(x) < 0.03f ? near : far;
}

}  // namespace dmattn
