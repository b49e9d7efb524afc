// Scores and positions of keys, and the words that rows of keys are copied by.
#pragma once

#include "../keys_params.h"
#include "../shared/helper.cuh"

namespace dmattn {
namespace prep {

// Calls f(Word{}) for the type of words of `bytes` bytes.
template <class F>
cudaError_t with_word_type(int bytes, F&& f) {
  if (bytes == 16) return f(uint4{});
  if (bytes == 8) return f(uint2{});
  if (bytes == 4) return f(uint32_t{});
  return f(uint16_t{});
}

// n / by.value, for n below 2^31.
__device__ __forceinline__ uint32_t quotient(uint32_t n, const Divisor& by) {
  return by.value == 1 ? n : __umulhi(n, by.multiplier) >> by.shift;
}

__device__ __forceinline__ int64_t number_offset(const KeyNumbers& n, int b, int h, int key) {
  return b * n.batch_stride + quotient(h, n.head_ratio) * n.head_stride + key * n.key_stride;
}

// The bits of a score in the dtype of the result: unchanged, or those of the equal float.
__device__ __forceinline__ uint32_t score_bits(const KeyNumbers& n, int64_t offset, Dtype to) {
  if (n.dtype == Dtype::kFloat32) return static_cast<const uint32_t*>(n.data)[offset];
  const uint16_t bits = static_cast<const uint16_t*>(n.data)[offset];
  if (to == n.dtype) return bits;
  if (n.dtype == Dtype::kBFloat16) return static_cast<uint32_t>(bits) << 16;
  return __float_as_uint(__half2float(__ushort_as_half(bits)));
}
__device__ __forceinline__ uint32_t lowest_score_bits(Dtype dtype) {  // -inf
  return dtype == Dtype::kFloat32 ? 0xff800000u : dtype == Dtype::kBFloat16 ? 0xff80u : 0xfc00u;
}
__device__ __forceinline__ void store_score(const KeyNumbersOut& scores, int b, int h, int key, uint32_t bits) {
  const int64_t offset = b * scores.batch_stride + h * scores.head_stride + key * scores.key_stride;
  if (scores.dtype == Dtype::kFloat32) {
    static_cast<uint32_t*>(scores.data)[offset] = bits;
  } else {
    static_cast<uint16_t*>(scores.data)[offset] = static_cast<uint16_t>(bits);
  }
}

// Copies words 0, ..., count - 1 from source(i), which is nullptr for zeros, to target(i). By all threads of a block,
// each of which has kAhead loads in flight before it stores their results.
template <class Word, int kThreads, class Source, class Target>
__device__ __forceinline__ void copy_words(uint32_t count, Source&& source, Target&& target) {
  constexpr int kAhead = 4;
#pragma unroll 1
  for (uint32_t begin = threadIdx.x; begin < count; begin += kAhead * kThreads) {
    Word found[kAhead];
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      found[n] = Word{};
      const uint32_t i = begin + n * kThreads;
      const Word* from = i < count ? source(i) : nullptr;
      if (from != nullptr) found[n] = __ldg(from);
    }
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      const uint32_t i = begin + n * kThreads;
      if (i < count) *target(i) = found[n];
    }
  }
}

// Offset, in words, of the first word of the row (b, key, h).
__device__ __forceinline__ int64_t word_offset(const WordRows& rows, int b, int h, int key) {
  return row_offset(rows.stride, b, static_cast<int>(quotient(h, rows.head_ratio)), key);
}

}  // namespace prep
}  // namespace dmattn
