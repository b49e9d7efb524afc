// A bias for each key that the products of scores add, in kernels of the Hopper forward. Q has three more columns,
// which are ones, and K has in these columns three 16-bit numbers whose sum is bias / softmax_scale. The softmax is
// then that of raw products. A large bias is added to the scores instead, and its columns of K are 0: in the product it
// might overflow, and the logits would not be rounded as in the backward. Over lists this is decided for each key, in
// the dense forward for each tile. There a tile of large numbers near each other, as of a bias that grows with the
// position (ALiBi), has their differences from a number in their middle in the product, and the softmax adds that
// number.
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

// The operands of that product, with 16 columns. Rows have 32 bytes, swizzled as the matrix instructions require.
struct NoOperands {};
template <class Element, int kBlockN, int kStages>
struct KeyBiasOperands {
  static constexpr int kCols = 16, kRowBytes = kCols * sizeof(Element);

  alignas(1024) Element keys[kStages * kBlockN * kCols];
  alignas(1024) Element rows[64 * kCols];  // the same for all consumers

  // The offset in bytes of the first eight columns of a row.
  static __device__ __forceinline__ uint32_t row_offset(int row) { return row * kRowBytes + (row / 4 % 2 << 4); }

  // Writes the columns of Q, and zeros to K, where the tiles write only the first four columns. `threads` threads
  // share the work.
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

// The largest bias, without its sign, that is not large. There are two limits: 64, beyond which the softmax treats a
// maximum as large, and 32768 * scale, so that bias / scale fits fp16. Every bias is large if the scale is not
// positive or too close to 0, and in fp16 if the scale is above 16: fp16 operands are multiples of 2^-24, and the
// scale multiplies their error of up to 2^-25.
template <class Element>
__host__ __device__ __forceinline__ float most_bias_in_product(float softmax_scale) {
  constexpr float kMostScale = std::is_same_v<Element, cutlass::half_t> ? 16.f : FLT_MAX;
  return softmax_scale > 1e-30f && softmax_scale <= kMostScale ? fminf(64.f, 32768.f * softmax_scale) : -1.f;
}

// The largest middle of a tile's bias (see KeyBiasShared), without its sign. The backward adds a bias to the scores in
// fp32: logits near this number are rounded by up to 2^-12, in fp16 2^-15, so that probabilities change by at most an
// eighth of what they do when they are rounded to 16 bits.
template <class Element>
__host__ __device__ constexpr float most_middle_of_bias() {
  return std::is_same_v<Element, cutlass::half_t> ? 512.f : 4096.f;
}

// Splits x into three 16-bit numbers whose sum is x. They have 24 bits together; in fp16 they have more, but none
// below 2^-24.
template <class Element>
__device__ __forceinline__ uint2 split_in_three(float x) {
  if constexpr (std::is_same_v<Element, cutlass::bfloat16_t>) {
    // Upper halves of fp32 words. Each of the first two takes eight of the 24 significant bits, so that eight are
    // left for the last one.
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

// Starts c = q k^T and, in the same group of products, adds the product of the other columns.
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

// As OnlineSoftmax::probabilities(), for raw products, but row_max is in natural units, since it is also compared
// with logits of other tiles. It may be as low as finfo.min, and must not become -inf when multiplied by log2(e): a
// row for which this tile is hidden would get NaN. middle: what has to be added to all logits of the tile.
template <int kFragments>
__device__ __forceinline__ void take_probabilities_of_products(OnlineSoftmax<1>& softmax,
                                                               float (&products)[1][kFragments][4], float (&alpha)[2],
                                                               float scale, float scale_log2, float middle = 0.f) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float most = fmaxf(products[0][0][2 * r], products[0][0][2 * r + 1]);
#pragma unroll
    for (int i = 1; i < kFragments; ++i) {
      most = fmaxf(most, fmaxf(products[0][i][2 * r], products[0][i][2 * r + 1]));
    }
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
    most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
    const float max = fmaxf(softmax.row_max[r], __fmaf_rn(most, scale, middle));
    const float used = max == -INFINITY ? 0.f : max;  // nothing kept yet: exp(-inf - 0) = 0, not NaN
    alpha[r] = exp2_approx((softmax.row_max[r] - used) * kLog2e);
    softmax.row_max[r] = max;
    const float sum =
        OnlineSoftmax<1>::exponentiate(r, products, scale_log2, fmaxf((used - middle) * kLog2e, -FLT_MAX));
    softmax.add_sum(r, alpha[r], sum, 1.f / kLog2e);
  }
}

}  // namespace dmattn::sm90
