// Attention to listed keys in float32, one thread block a row: slow, and simple enough to be believed. It knows nothing
// of lists: it asks for every key which positions see it.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

namespace reference {

constexpr int kThreads = 128;

// Tensors are contiguous (batch, seqlen, heads, head_dim); `end` is (list batch, list heads, seqlen_k).
template <class Element>
struct Problem {
  const Element *q, *k, *v;
  const float* bias;   // as the kernel reads it, (batch, bias heads, seqlen_k); nullptr: none
  const int32_t* end;  // key j is seen at the positions r < end[j], if causal from j on
  int seqlen_q, seqlen_k, nheads, nheads_k, head_dim, list_batch, list_heads, bias_heads;
  float scale;
  bool is_causal;
};

template <class Reduce>
__device__ float reduce(float x, Reduce&& f) {
  __shared__ float all[kThreads];
  all[threadIdx.x] = x;
  __syncthreads();
  for (int n = kThreads / 2; n > 0; n /= 2) {
    if (threadIdx.x < n) all[threadIdx.x] = f(all[threadIdx.x], all[threadIdx.x + n]);
    __syncthreads();
  }
  const float result = all[0];
  __syncthreads();
  return result;
}

// Grid (rows, nheads, batch), seqlen_k floats of shared memory. out: [row of the list][head][batch][head_dim]; lse
// without the last.
template <class Element>
__global__ void forward(Problem<Element> p, const int* rows, float* out, float* lse) {
  extern __shared__ float weights[];
  const int i = rows[blockIdx.x], h = blockIdx.y, b = blockIdx.z;
  const int position = i + (p.is_causal ? p.seqlen_k - p.seqlen_q : 0);
  const Element* q = p.q + ((static_cast<int64_t>(b) * p.seqlen_q + i) * p.nheads + h) * p.head_dim;
  const int64_t step = static_cast<int64_t>(p.nheads_k) * p.head_dim;
  const int64_t first = static_cast<int64_t>(b) * p.seqlen_k * step + h / (p.nheads / p.nheads_k) * p.head_dim;
  const int32_t* end =
      p.end +
      (static_cast<int64_t>(p.list_batch > 1 ? b : 0) * p.list_heads + h / (p.nheads / p.list_heads)) * p.seqlen_k;
  const float* bias = nullptr;
  if (p.bias != nullptr) {
    bias = p.bias + (static_cast<int64_t>(b) * p.bias_heads + h / (p.nheads / p.bias_heads)) * p.seqlen_k;
  }
  float top = -INFINITY;
  for (int j = threadIdx.x; j < p.seqlen_k; j += kThreads) {
    weights[j] = -INFINITY;
    if (position >= end[j] || (p.is_causal && position < j)) continue;
    float sum = 0.f;
    for (int d = 0; d < p.head_dim; ++d) sum += float(q[d]) * float(p.k[first + j * step + d]);
    weights[j] = sum * p.scale + (bias != nullptr ? bias[j] : 0.f);
    top = fmaxf(top, weights[j]);
  }
  top = reduce(top, [](float x, float y) { return fmaxf(x, y); });
  const bool is_empty = top == -INFINITY;
  float sum = 0.f;
  for (int j = threadIdx.x; j < p.seqlen_k; j += kThreads) {
    sum += weights[j] = weights[j] == -INFINITY ? 0.f : expf(weights[j] - top);
  }
  sum = reduce(sum, [](float x, float y) { return x + y; });
  const int64_t at = (static_cast<int64_t>(blockIdx.x) * p.nheads + h) * gridDim.z + b;
  if (threadIdx.x == 0) lse[at] = is_empty ? -INFINITY : top + logf(sum);
  for (int d = threadIdx.x; d < p.head_dim; d += kThreads) {
    float x = 0.f;
    for (int j = 0; j < p.seqlen_k; ++j) {
      if (weights[j] != 0.f) x += weights[j] * float(p.v[first + j * step + d]);
    }
    out[at * p.head_dim + d] = is_empty ? 0.f : x / sum;
  }
}

}  // namespace reference
