// dbias of biases that are constant along queries or keys: fp32 sums over what the bias was broadcast over, in an
// order that depends on shapes only.
#include "../shared/helper.cuh"
#include "backward.h"

namespace dmattn {
namespace {

using namespace prep;

constexpr int kThreads = 256;

// A sum that carries its rounding errors along (Kahan), since a bias may be shared by millions of rows. The kernels
// wait for memory, not for the three extra additions.
struct CompensatedSum {
  float sum = 0.f, error = 0.f;
  __device__ __forceinline__ void add(float x) {
    const float y = __fsub_rn(x, error);
    const float t = __fadd_rn(sum, y);
    // After an infinity or NaN the error term would be NaN; the sum itself is right.
    error = isfinite(t) ? __fsub_rn(__fsub_rn(t, sum), y) : 0.f;
    sum = t;
  }
};

// The values to be summed, addressed by (b, h, position). Positions are keys or rows.
struct ColumnSource {
  __device__ __forceinline__ static float load(const ReduceDbiasParams& p, int b, int h, int pos) {
    return __ldg(p.src + (static_cast<int64_t>(b) * p.nheads + h) * p.seqlen_k + pos);
  }
};
struct RowSource {
  __device__ __forceinline__ static float load(const ReduceDbiasParams& p, int b, int h, int pos) {
    const float lse = __ldg(p.lse_rounded + (static_cast<int64_t>(b) * p.nheads + h) * p.seqlen_q_rounded + pos);
    const float dlse = __ldg(p.dlse + row_offset(p.dlse_stride, b, h, pos));
    return lse == INFINITY ? 0.f : dlse;
  }
};

// The (batch, head) pairs that one (out_batch, out_head) sums over.
struct Terms {
  int b0, h0, heads, count;
  __device__ __forceinline__ Terms(const ReduceDbiasParams& p, int out) {
    heads = p.nheads / p.out_heads;
    h0 = out % p.out_heads * heads;
    b0 = out / p.out_heads;
    count = heads * (p.batch / p.out_batch);
  }
  __device__ __forceinline__ int b(int term) const { return b0 + term / heads; }
  __device__ __forceinline__ int h(int term) const { return h0 + term % heads; }
};

__device__ __forceinline__ void store_as(void* dst, Dtype dtype, int64_t i, float x) {
  if (dtype == Dtype::kFloat16) {
    static_cast<__half*>(dst)[i] = __float2half_rn(x);
  } else if (dtype == Dtype::kBFloat16) {
    static_cast<__nv_bfloat16*>(dst)[i] = __float2bfloat16_rn(x);
  } else {
    static_cast<float*>(dst)[i] = x;
  }
}

// One entry of dbias for each position. A block has 32 positions, and a warp reads 128 consecutive bytes of a term.
template <class Source>
__global__ void __launch_bounds__(kThreads) sum_terms_kernel(const ReduceDbiasParams p, int positions, bool zero) {
  follow_previous_kernel();
  constexpr int kWarps = kThreads / 32;
  __shared__ float partial[kWarps][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int tiles = ceil_div(positions, 32);
  const int pos = blockIdx.x % tiles * 32 + lane;
  const int out = blockIdx.x / tiles;
  const Terms terms(p, out);
  CompensatedSum acc;
  if (!zero && pos < positions) {
#pragma unroll 4
    for (int t = warp; t < terms.count; t += kWarps) acc.add(Source::load(p, terms.b(t), terms.h(t), pos));
  }
  partial[warp][lane] = acc.sum;
  __syncthreads();
  if (warp != 0 || pos >= positions) return;
  float sum = 0.f;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) sum += partial[w][lane];
  store_as(p.dbias, p.dtype, static_cast<int64_t>(out) * positions + pos, sum);
}

// One entry of dbias for all positions together, each by one block.
constexpr int kSumAllThreads = 1024;

template <class Source>
__global__ void __launch_bounds__(kSumAllThreads) sum_all_kernel(const ReduceDbiasParams p, int positions, bool zero) {
  __shared__ float partial[32];
  follow_previous_kernel();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int out = blockIdx.x;
  const Terms terms(p, out);
  CompensatedSum acc;
  if (!zero) {
    for (int t = 0; t < terms.count; ++t) {
      const int b = terms.b(t), h = terms.h(t);
#pragma unroll 4
      for (int pos = threadIdx.x; pos < positions; pos += kSumAllThreads) acc.add(Source::load(p, b, h, pos));
    }
  }
  float sum = lanes_sum<32>(acc.sum);
  if (lane == 0) partial[warp] = sum;
  __syncthreads();
  if (warp != 0) return;
  sum = lanes_sum<32>(partial[lane]);
  if (lane == 0) store_as(p.dbias, p.dtype, out, sum);
}

template <class Source>
cudaError_t reduce(const ReduceDbiasParams& p, int positions, bool per_position, bool zero, cudaStream_t stream) {
  const int64_t outs = static_cast<int64_t>(p.out_batch) * p.out_heads;
  if (per_position) {
    return launch(sum_terms_kernel<Source>, outs * ceil_div(positions, 32), kThreads, 0, stream, p, positions, zero);
  }
  return launch(sum_all_kernel<Source>, outs, kSumAllThreads, 0, stream, p, positions, zero);
}

// Eight elements for each thread, of arrays that start on 16 bytes; `n` counts groups of eight.
template <class Element>
__global__ void __launch_bounds__(kThreads) convert_chunks_kernel(const float* src, uint16_t* dst, int64_t n) {
  follow_previous_kernel();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= n) return;
  float x[8] = {};
  accumulate8(x, src + i * 8, 1.f);
  store_chunk(dst + i * 8, pack_chunk<Element>(x), true);
}
__global__ void __launch_bounds__(kThreads)
    convert_elements_kernel(const float* src, void* dst, Dtype dtype, int64_t n) {
  follow_previous_kernel();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < n) store_as(dst, dtype, i, __ldg(src + i));
}

// Rounds rows of sums whose results may start at any element, and so one number at a time. Blocks are numbered along
// the rows; a thread has kRowNumbers numbers of a row, kThreads apart.
constexpr int64_t kRowNumbers = 4, kRowBlockKeys = kThreads * kRowNumbers;

__global__ void __launch_bounds__(kThreads)
    convert_rows_kernel(const DbiasSumRows sums, void* dst, Dtype dtype, int64_t blocks_of_row) {
  follow_previous_kernel();
  const int64_t row = blockIdx.x / blocks_of_row;
  const int64_t first = (blockIdx.x - row * blocks_of_row) * kRowBlockKeys + threadIdx.x;
  float numbers[kRowNumbers];
#pragma unroll
  for (int i = 0; i < kRowNumbers; ++i) {
    const int64_t key = first + i * kThreads;
    numbers[i] = key < sums.keys ? __ldg(sums.data + row * sums.pitch + key) : 0.f;
  }
#pragma unroll
  for (int i = 0; i < kRowNumbers; ++i) {
    const int64_t key = first + i * kThreads;
    if (key < sums.keys) store_as(dst, dtype, row * sums.dbias_pitch + key, numbers[i]);
  }
}

}  // namespace

cudaError_t reduce_dbias_cols(const ReduceDbiasParams& p, cudaStream_t stream) {
  const int64_t outs = static_cast<int64_t>(p.out_batch) * p.out_heads;
  return launch(sum_terms_kernel<ColumnSource>, outs * ceil_div(p.seqlen_k, 32), kThreads, 0, stream, p, p.seqlen_k,
                p.src == nullptr);
}

cudaError_t reduce_dbias_rows(const ReduceDbiasParams& p, cudaStream_t stream) {
  return reduce<RowSource>(p, p.seqlen_q, p.out_rows == p.seqlen_q, p.dlse == nullptr, stream);
}

cudaError_t round_dbias(const DbiasSumRows& sums, void* dbias, Dtype dtype, cudaStream_t stream) {
  if (sums.pitch != sums.keys || sums.dbias_pitch != sums.keys) {
    const int64_t blocks_of_row = ceil_div(sums.keys, kRowBlockKeys);
    return launch(convert_rows_kernel, sums.rows * blocks_of_row, kThreads, 0, stream, sums, dbias, dtype,
                  blocks_of_row);
  }
  const int64_t n = sums.rows * sums.keys;
  const bool vec = (reinterpret_cast<uintptr_t>(sums.data) | reinterpret_cast<uintptr_t>(dbias)) % 16 == 0;
  const int64_t chunks = vec ? n / 8 : 0;
  const cudaError_t status = with_half_type(dtype, [&](auto element) {
    return launch(convert_chunks_kernel<decltype(element)>, ceil_div<int64_t>(chunks, kThreads), kThreads, 0, stream,
                  sums.data, static_cast<uint16_t*>(dbias), chunks);
  });
  const int64_t rest = n - chunks * 8;
  if (status != cudaSuccess || rest == 0) return status;
  return launch(convert_elements_kernel, ceil_div<int64_t>(rest, kThreads), kThreads, 0, stream, sums.data + chunks * 8,
                static_cast<void*>(static_cast<uint16_t*>(dbias) + chunks * 8), dtype, rest);
}

}  // namespace dmattn
