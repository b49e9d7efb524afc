// tanh for softcap on Hopper.
//
// An SM computes 16 powers or reciprocals a clock, but 128 sums or products. tanh_fast() takes a power and a
// reciprocal, and the softmax takes another power: these three take longer than all other instructions of a score. A
// quotient of polynomials takes no power, but seven more instructions. So some of the scores use the quotient and the
// others tanh_fast(); measurements decided how many (kCapQuotients). Counts, errors and times are in
// docs/kernels/forward-mask-bias.md.
#pragma once

#include "../shared/element.cuh"

namespace dmattn::sm90 {

// x, limited to -limit to limit; NaN stays NaN.
__device__ __forceinline__ float clamp_number(float x, float limit) {
  float r;
  asm("{.reg .f32 t; max.NaN.f32 t, %1, %2; min.NaN.f32 %0, t, %3;}" : "=f"(r) : "f"(x), "f"(-limit), "f"(limit));
  return r;
}
__device__ __forceinline__ float reciprocal_approx(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

// x p(x^2) / q(x^2), where p and q are of degree 4 and have the smallest possible largest error up to x = 9, from
// where on tanh rounds to 1. A step of Newton's method removes the error of the reciprocal. The error that is left is
// at most 3e-7 relative to tanh: from x = 0.03 on it is smaller than that of tanh_fast(), both absolute and relative.
__device__ __forceinline__ float tanh_by_quotient(float x) {
  x = clamp_number(x, 9.f);
  const float u = x * x;
  float p = __fmaf_rn(0.0171164349f, u, 26.5776157f);
  p = __fmaf_rn(p, u, 4526.46924f);
  p = __fmaf_rn(p, u, 173618.156f);
  p = __fmaf_rn(p, u, 1298254.62f);
  float q = __fadd_rn(u, 424.708801f);
  q = __fmaf_rn(q, u, 33549.4648f);
  q = __fmaf_rn(q, u, 606369.25f);
  q = __fmaf_rn(q, u, 1298254.75f);
  const float numerator = x * p, reciprocal = reciprocal_approx(q);
  const float quotient = numerator * reciprocal;
  return __fmaf_rn(__fmaf_rn(-q, quotient, numerator), reciprocal, quotient);
}

// The tanh of a score: kQuotients of every four neighbouring scores use the quotient. index: of the score.
template <int kQuotients>
__device__ __forceinline__ float tanh_of_score(float x, int index) {
  static_assert(0 <= kQuotients && kQuotients <= 4);
  return index % 4 < kQuotients ? tanh_by_quotient(x) : tanh_fast(x);
}

// Replaces each product by the tanh of scale * product.
template <int kQuotients, int kFragments>
__device__ __forceinline__ void cap_scores(float (&scores)[1][kFragments][4], float scale) {
#pragma unroll
  for (int i = 0; i < kFragments; ++i)
#pragma unroll
    for (int e = 0; e < 4; ++e) scores[0][i][e] = tanh_of_score<kQuotients>(scores[0][i][e] * scale, e);
}

}  // namespace dmattn::sm90
