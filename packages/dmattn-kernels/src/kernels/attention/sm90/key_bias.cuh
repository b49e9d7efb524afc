// A bias for each key that comes with the products of scores: where the softmax bounds a kernel of the Hopper forward,
// Q has three columns of ones more, and K the bias / softmax_scale in three 16-bit numbers whose sum it is. The softmax is
// then that of raw products. A large bias is added to the scores instead, and its operand is 0: it might overflow, and the
// scores, which are rounded once it has been added, would not be those of the backward. The dense forward does so with
// all numbers of a tile that has a large one.
#pragma once

#include <cutlass/numeric_types.h>

#include <cfloat>
#include <cute/tensor.hpp>
#include <type_traits>

#include "../shared/smem.cuh"
#include "../shared/softmax.cuh"

namespace dmattn::sm90 {

__device__ __forceinline__ void st_shared_v2(uint32_t addr, uint2 x) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(addr), "r"(x.x), "r"(x.y));
}

// The operands, in 16 columns more. Rows of 32 bytes, swizzled as the matrix instructions want them.
struct NoOperands {};
template <class Element, int kBlockN, int kStages>
struct KeyBiasOperands {
  static constexpr int kCols = 16, kRowBytes = kCols * sizeof(Element);

  alignas(1024) Element keys[kStages * kBlockN * kCols];
  alignas(1024) Element rows[64 * kCols];  // of all consumers alike
  int32_t is_large[kStages];               // not 0: the stage's operands lack something, which has to be added

  // Where the first eight columns of a row begin.
  static __device__ __forceinline__ uint32_t row_offset(int row) { return row * kRowBytes + (row / 4 % 2 << 4); }

  // The columns of Q, and those of K that no tile writes, by so many threads.
  __device__ __forceinline__ void write_constants(int thread, int threads) {
    const uint32_t of_keys = smem_u32(keys), of_rows = smem_u32(rows);
    const uint32_t two = ElementTraits<Element>::pack(1.f, 1.f), one = ElementTraits<Element>::pack(1.f, 0.f);
    for (int row = thread; row < kStages * kBlockN; row += threads) {
      st_shared(of_keys + row_offset(row), make_uint4(0, 0, 0, 0));
      st_shared(of_keys + (row_offset(row) ^ 16), make_uint4(0, 0, 0, 0));
    }
    for (int row = thread; row < 64; row += threads) {
      st_shared(of_rows + row_offset(row), make_uint4(two, one, 0, 0));
      st_shared(of_rows + (row_offset(row) ^ 16), make_uint4(0, 0, 0, 0));
    }
  }
};

// The largest bias that is not large. Maxima of the softmax are large beyond the first number; fp16 has room for the
// second in an operand. Of a scale that is not positive, or hardly, every bias is large, and in fp16 of a large one: its
// operands are multiples of 2^-24, so that an error of up to 2^-25 is multiplied by the scale.
template <class Element>
__host__ __device__ __forceinline__ float most_bias_in_product(float softmax_scale) {
  constexpr float kMostScale = std::is_same_v<Element, cutlass::half_t> ? 16.f : FLT_MAX;
  return softmax_scale > 1e-30f && softmax_scale <= kMostScale ? fminf(64.f, 32768.f * softmax_scale) : -1.f;
}

// Three 16-bit numbers whose sum x is: they have 24 bits together, or in fp16 more, but none below 2^-24.
template <class Element>
__device__ __forceinline__ uint2 split_in_three(float x) {
  if constexpr (std::is_same_v<Element, cutlass::bfloat16_t>) {
    // Upper halves of fp32 numbers. Of 24 bits eight are left once eight have been cut off twice.
    const uint32_t first = __float_as_uint(x);
    const float rest = x - __uint_as_float(first & 0xffff0000u);
    const uint32_t second = __float_as_uint(rest);
    const float last = rest - __uint_as_float(second & 0xffff0000u);
    return make_uint2(__byte_perm(first, second, 0x7632), __float_as_uint(last) >> 16);
  } else {
    using Pair = ElementTraits<Element>;
    const float first = Pair::unpack(Pair::pack(x, 0.f)).x, rest = x - first;
    const float second = Pair::unpack(Pair::pack(rest, 0.f)).x;
    return make_uint2(Pair::pack(first, second), Pair::pack(rest - second, 0.f));
  }
}

// c = q k^T, and in the same group of products what other columns add.
template <class Mma, class Q, class K, class OtherMma, class OtherQ, class OtherK, class C>
__device__ __forceinline__ void start_biased_scores(Mma& mma, const Q& q, const K& k, OtherMma& other_mma,
                                                    const OtherQ& other_q, const OtherK& other_k, C& c) {
  cute::warpgroup_fence_operand(c);
  cute::warpgroup_arrive();
  mma.accumulate_ = cute::GMMA::ScaleOut::Zero;
#pragma unroll
  for (int i = 0; i < cute::size<2>(q); ++i) {
    cute::gemm(mma, q(cute::_, cute::_, i), k(cute::_, cute::_, i), c);
    mma.accumulate_ = cute::GMMA::ScaleOut::One;
  }
  other_mma.accumulate_ = cute::GMMA::ScaleOut::One;
  cute::gemm(other_mma, other_q(cute::_, cute::_, 0), other_k(cute::_, cute::_, 0), c);
  cute::warpgroup_commit_batch();
  cute::warpgroup_fence_operand(c);
}

// As OnlineSoftmax::probabilities(), of raw products, with maxima in units of 1: other tiles have logits. These may be as
// low as finfo.min, which must not become -inf where all of this tile is hidden.
template <int kFragments>
__device__ __forceinline__ void take_probabilities_of_products(OnlineSoftmax<1>& softmax,
                                                               float (&products)[1][kFragments][4], float (&alpha)[2],
                                                               float scale, float scale_log2) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float most = fmaxf(products[0][0][2 * r], products[0][0][2 * r + 1]);
#pragma unroll
    for (int i = 1; i < kFragments; ++i) {
      most = fmaxf(most, fmaxf(products[0][i][2 * r], products[0][i][2 * r + 1]));
    }
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
    const float max = fmaxf(softmax.row_max[r], most * scale);
    const float used = max == -INFINITY ? 0.f : max;  // nothing kept yet: exp(-inf - 0) = 0, not NaN
    alpha[r] = exp2_approx((softmax.row_max[r] - used) * kLog2e);
    softmax.row_max[r] = max;
    const float sum = OnlineSoftmax<1>::exponentiate(r, products, scale_log2, fmaxf(used * kLog2e, -FLT_MAX));
    softmax.row_sum[r] = softmax.row_sum[r] * alpha[r] + sum;
  }
}

}  // namespace dmattn::sm90
