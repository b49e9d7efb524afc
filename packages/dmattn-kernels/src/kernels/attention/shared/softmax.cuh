// Online softmax over the rows that a thread holds (two per 16-row fragment).
#pragma once

#include "element.cuh"

namespace dmattn {

// What is subtracted from the scores of a row need not be their maximum: any number near it will do, since sums are
// divided by sums in the end. With kLazy it is left as it is while a new maximum exceeds it little (see set_limit()),
// so that the results of earlier tiles have to be rescaled in few tiles only.
template <int MT, bool kLazy = false>
struct OnlineSoftmax {
  float row_max[2 * MT];                 // running maximum, or what is subtracted instead, in the units of the scores
  float row_sum[2 * MT];                 // this thread's part of the running sum; finish() adds those of the quad
  float limit[kLazy ? 2 * MT : 1] = {};  // row_max is left as it is while the maximum is not above this

  __device__ __forceinline__ OnlineSoftmax() {
#pragma unroll
    for (int r = 0; r < 2 * MT; ++r) {
      row_max[r] = -INFINITY;
      row_sum[r] = 0.f;
      if constexpr (kLazy) limit[r] = -INFINITY;
    }
  }

  // The new row_max of a row. `found`: the larger of row_max and the maximum of the tile.
  __device__ __forceinline__ float settle(int r, float found) const {
    if constexpr (kLazy) return found > limit[r] ? found : row_max[r];
    return found;
  }
  // Adds the sum of a tile to that of the tiles before, which are rescaled by alpha. unit: by how much a score grows
  // when its probability doubles.
  __device__ __forceinline__ void add_sum(int r, float alpha, float sum, float unit) {
    row_sum[r] = row_sum[r] * alpha + sum;
    if constexpr (kLazy) set_limit(r, unit);
  }
  // A probability is rounded to 16 bits, but that of the maximum, which is 1, is exact. This matters where one key has
  // much of the weight. So row_max is left alone only if the key with the new maximum has at most a quarter of the
  // weight of the keys before it. Its probability is at most 2^8, too: a quarter of the sum could exceed the range of
  // fp16.
  __device__ __forceinline__ void set_limit(int r, float unit) {
    float sum = row_sum[r];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    limit[r] = row_max[r] + fminf(log2_approx(0.25f * sum), 8.f) * unit;
  }

  // One row of acc_s becomes exp(scale * (acc_s - max)), where max is the new row_max, and the running sum is
  // updated. Returns the factor by which results of earlier tiles have to be multiplied, since the maximum has
  // changed. kScaled: acc_s holds raw products; exp2(acc * scale_log2 - max * scale_log2) is one FFMA and one MUFU.
  // Otherwise acc_s holds logits, and the maximum is subtracted first, so that huge finite logits cannot overflow.
  template <bool kScaled, int NT>
  __device__ __forceinline__ float step_row(int r, float (&acc_s)[MT][NT][4], float scale_log2) {
    return step_row<kScaled>(r, acc_s, scale_log2, find_max(r, acc_s));
  }
  // The new row_max of a row, including acc_s.
  template <int NT>
  __device__ __forceinline__ float find_max(int r, const float (&acc_s)[MT][NT][4]) const {
    const int mt = r / 2, e0 = 2 * (r & 1);
    float m = row_max[r];
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) m = fmaxf(m, fmaxf(acc_s[mt][nt][e0], acc_s[mt][nt][e0 + 1]));
    m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
    return settle(r, fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2)));
  }
  template <bool kScaled, int NT>
  __device__ __forceinline__ float step_row(int r, float (&acc_s)[MT][NT][4], float scale_log2, float m) {
    const int mt = r / 2, e0 = 2 * (r & 1);
    const float m_used = m == -INFINITY ? 0.f : m;  // nothing kept yet: exp(-inf - 0) = 0, not NaN
    const float alpha =
        kScaled ? exp2_approx((row_max[r] - m_used) * scale_log2) : exp2_approx((row_max[r] - m_used) * kLog2e);
    row_max[r] = m;
    float sum = 0.f;
    if constexpr (kScaled) {
      sum = exponentiate(r, acc_s, scale_log2, m_used * scale_log2);
    } else {
#pragma unroll
      for (int nt = 0; nt < NT; ++nt)
#pragma unroll
        for (int e = e0; e < e0 + 2; ++e) {
          acc_s[mt][nt][e] = exp2_approx((acc_s[mt][nt][e] - m_used) * kLog2e);
          sum += acc_s[mt][nt][e];
        }
    }
    add_sum(r, alpha, sum, kScaled && kLazy ? __fdividef(1.f, scale_log2) : 1.f / kLog2e);
    return alpha;
  }

  // A row of acc_s becomes exp2(scale_log2 * acc_s - shift). Returns this thread's part of its sum.
  template <int NT>
  static __device__ __forceinline__ float exponentiate(int r, float (&acc_s)[MT][NT][4], float scale_log2,
                                                       float shift) {
    const int mt = r / 2, e0 = 2 * (r & 1);
    float sum = 0.f;
#pragma unroll
    for (int nt = 0; nt < NT; ++nt)
#pragma unroll
      for (int e = e0; e < e0 + 2; ++e) {
        acc_s[mt][nt][e] = exp2_approx(__fmaf_rn(acc_s[mt][nt][e], scale_log2, -shift));
        sum += acc_s[mt][nt][e];
      }
    return sum;
  }

  // step_row() for all rows, which also rescales acc_o to the new maxima.
  template <bool kScaled, int NT, int OT>
  __device__ __forceinline__ void step(float (&acc_s)[MT][NT][4], float (&acc_o)[MT][OT][4], float scale_log2) {
#pragma unroll
    for (int r = 0; r < 2 * MT; ++r) {
      const int mt = r / 2, e0 = 2 * (r & 1);
      const float alpha = step_row<kScaled>(r, acc_s, scale_log2);
      // The maximum of most rows settles within a few tiles: skip the rescaling when no row of the warp moved.
      if (__any_sync(0xffffffffu, alpha != 1.f)) {
#pragma unroll
        for (int ot = 0; ot < OT; ++ot) {
          acc_o[mt][ot][e0] *= alpha;
          acc_o[mt][ot][e0 + 1] *= alpha;
        }
      }
    }
  }

  // The same in two parts (see rescale()), for kernels in which a product is still adding to acc_o.
  template <bool kScaled, int NT>
  __device__ __forceinline__ void probabilities(float (&acc_s)[MT][NT][4], float (&alpha)[2 * MT], float scale_log2) {
#pragma unroll
    for (int r = 0; r < 2 * MT; ++r) alpha[r] = step_row<kScaled>(r, acc_s, scale_log2);
  }
  // As probabilities<true>(), but for logits. If a maximum of the warp's rows is large, the maxima are subtracted
  // beforehand: max * log2(e) is rounded, by at most 2^-18 for maxima up to 64, and for larger ones the error would
  // show in the log-sum-exp. Both cases share one copy of the exponentials, so that the compiler can interleave them
  // with the packing and rescaling that follow, which use other units of the SM.
  template <int NT>
  __device__ __forceinline__ void probabilities_of_logits(float (&acc_s)[MT][NT][4], float (&alpha)[2 * MT]) {
    float left[2 * MT];  // what is still to be subtracted for the maximum
    bool is_large = false;
#pragma unroll
    for (int r = 0; r < 2 * MT; ++r) {
      const float m = find_max(r, acc_s);
      left[r] = m == -INFINITY ? 0.f : m;  // nothing kept yet: exp(-inf - 0) = 0, not NaN
      is_large |= fabsf(left[r]) > 64.f;
      alpha[r] = exp2_approx((row_max[r] - left[r]) * kLog2e);
      row_max[r] = m;
    }
    if (__any_sync(0xffffffffu, is_large)) {
#pragma unroll
      for (int r = 0; r < 2 * MT; ++r) {
#pragma unroll
        for (int nt = 0; nt < NT; ++nt)
#pragma unroll
          for (int e = 0; e < 2; ++e) acc_s[r / 2][nt][2 * (r & 1) + e] -= left[r];
        left[r] = 0.f;
      }
    }
#pragma unroll
    for (int r = 0; r < 2 * MT; ++r) {
      const float sum = exponentiate(r, acc_s, kLog2e, left[r] * kLog2e);
      add_sum(r, alpha[r], sum, 1.f / kLog2e);
    }
  }
  template <int OT>
  static __device__ __forceinline__ void rescale(float (&acc_o)[MT][OT][4], const float (&alpha)[2 * MT]) {
    if constexpr (kLazy) {
      bool any = false;
#pragma unroll
      for (int r = 0; r < 2 * MT; ++r) any |= alpha[r] != 1.f;
      if (!__any_sync(0xffffffffu, any)) return;
    }
#pragma unroll
    for (int r = 0; r < 2 * MT; ++r)
#pragma unroll
      for (int ot = 0; ot < OT; ++ot) {
        acc_o[r / 2][ot][2 * (r & 1)] *= alpha[r];
        acc_o[r / 2][ot][2 * (r & 1) + 1] *= alpha[r];
      }
  }

  // Adds up the sum over the quad. Returns 1 / sum (0 for a row that keeps nothing), and the log-sum-exp in natural
  // units in `lse`. `rest` is what rounding to fp32 dropped from lse: hardly anything for usual logits, but all of
  // log(sum) in a row whose every bias is finfo.min.
  __device__ __forceinline__ float finish(int r, float scale, float& lse, float& rest) {
    float sum = row_sum[r];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    const bool empty = !(sum > 0.f);
    const float max = row_max[r] * scale, log_sum = logf(sum);
    lse = empty ? -INFINITY : max + log_sum;
    rest = empty ? 0.f : (max - lse) + log_sum;
    return empty ? 0.f : 1.f / sum;
  }
};

}  // namespace dmattn
