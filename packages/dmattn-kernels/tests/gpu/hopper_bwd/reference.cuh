// Attention and its gradients in float32, one thread block a row or a key: slow, and simple enough to be believed.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

namespace reference {

constexpr int kThreads = 128;

// Tensors are contiguous (batch, seqlen, heads, head_dim); lse, delta and dlse are (batch, heads, seqlen).
template <class Element>
struct Problem {
  const Element *q, *k, *v, *dout;
  const Element* out;  // as the forward rounded it
  const float* lse;
  const float* dlse;  // nullptr: none
  int seqlen_q, seqlen_k, nheads, nheads_k, head_dim;
  float scale, softcap;
  bool is_causal;

  __device__ const Element* row(const Element* x, int b, int i, int h) const {
    return x + ((static_cast<int64_t>(b) * seqlen_q + i) * nheads + h) * head_dim;
  }
  __device__ const Element* key(const Element* x, int b, int j, int h) const {
    return x + ((static_cast<int64_t>(b) * seqlen_k + j) * nheads_k + h / (nheads / nheads_k)) * head_dim;
  }
  __device__ int64_t stat(int b, int h, int i) const { return (static_cast<int64_t>(b) * nheads + h) * seqlen_q + i; }
  __device__ int keys_seen(int i) const {
    return is_causal ? min(seqlen_k, max(0, i + 1 + seqlen_k - seqlen_q)) : seqlen_k;
  }
  __device__ float dot(const Element* x, const Element* y) const {
    float sum = 0.f;
    for (int d = 0; d < head_dim; ++d) sum += float(x[d]) * float(y[d]);
    return sum;
  }
  // The logit, and its derivative by the scaled product.
  __device__ float logit(int b, int h, int i, int j, float& derivative) const {
    const float x = dot(row(q, b, i, h), key(k, b, j, h)) * scale;
    derivative = 1.f;
    if (softcap <= 0.f) return x;
    const float t = tanhf(x / softcap);
    derivative = 1.f - t * t;
    return softcap * t;
  }
  __device__ float delta(int b, int h, int i) const {
    return dot(row(out, b, i, h), row(dout, b, i, h)) - (dlse != nullptr ? dlse[stat(b, h, i)] : 0.f);
  }
  // p_ij, and ds_ij by the unscaled product without the scale.
  __device__ float probability(int b, int h, int i, int j, float row_delta, float& ds) const {
    float derivative;
    const float x = logit(b, h, i, j, derivative);
    const float p = expf(x - lse[stat(b, h, i)]);
    ds = p * (dot(row(dout, b, i, h), key(v, b, j, h)) - row_delta) * derivative;
    return p;
  }
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

// Grid (seqlen_q, nheads, batch), seqlen_k floats of shared memory.
template <class Element>
__global__ void forward(Problem<Element> p, Element* out, float* lse) {
  extern __shared__ float weights[];
  const int i = blockIdx.x, h = blockIdx.y, b = blockIdx.z, keys = p.keys_seen(i);
  float top = -INFINITY, unused;
  for (int j = threadIdx.x; j < keys; j += kThreads) {
    weights[j] = p.logit(b, h, i, j, unused);
    top = fmaxf(top, weights[j]);
  }
  top = reduce(top, [](float x, float y) { return fmaxf(x, y); });
  float sum = 0.f;
  for (int j = threadIdx.x; j < keys; j += kThreads) sum += weights[j] = expf(weights[j] - top);
  sum = reduce(sum, [](float x, float y) { return x + y; });
  if (threadIdx.x == 0) lse[p.stat(b, h, i)] = keys > 0 ? top + logf(sum) : -INFINITY;
  for (int d = threadIdx.x; d < p.head_dim; d += kThreads) {
    float x = 0.f;
    for (int j = 0; j < keys; ++j) x += weights[j] * float(p.key(p.v, b, j, h)[d]);
    out[((static_cast<int64_t>(b) * p.seqlen_q + i) * p.nheads + h) * p.head_dim + d] =
        Element(keys > 0 ? x / sum : 0.f);
  }
}

// Grid (rows, nheads, batch), seqlen_k floats of shared memory; result [row of the list][head][batch][head_dim].
template <class Element>
__global__ void dq(Problem<Element> p, const int* rows, float* result) {
  extern __shared__ float weights[];
  const int i = rows[blockIdx.x], h = blockIdx.y, b = blockIdx.z, keys = p.keys_seen(i);
  const float delta = p.delta(b, h, i);
  for (int j = threadIdx.x; j < keys; j += kThreads) p.probability(b, h, i, j, delta, weights[j]);
  __syncthreads();
  float* const to = result + ((static_cast<int64_t>(blockIdx.x) * p.nheads + h) * gridDim.z + b) * p.head_dim;
  for (int d = threadIdx.x; d < p.head_dim; d += kThreads) {
    float x = 0.f;
    for (int j = 0; j < keys; ++j) x += weights[j] * float(p.key(p.k, b, j, h)[d]);
    to[d] = x * p.scale;
  }
}

// Grid (keys, nheads_k, batch); results [key of the list][kv head][batch][head_dim].
template <class Element>
__global__ void dkv(Problem<Element> p, const int* keys, float* dk, float* dv) {
  __shared__ float ps[kThreads], dss[kThreads];
  const int j = keys[blockIdx.x], hk = blockIdx.y, b = blockIdx.z, group = p.nheads / p.nheads_k;
  float sum_k[2] = {}, sum_v[2] = {};
  for (int h = hk * group; h < (hk + 1) * group; ++h) {
    for (int i0 = 0; i0 < p.seqlen_q; i0 += kThreads) {
      const int i = i0 + threadIdx.x;
      float weight = 0.f, ds = 0.f;
      if (i < p.seqlen_q && j < p.keys_seen(i)) weight = p.probability(b, h, i, j, p.delta(b, h, i), ds);
      ps[threadIdx.x] = weight;
      dss[threadIdx.x] = ds;
      __syncthreads();
      for (int n = 0; n < 2; ++n) {
        const int d = threadIdx.x + n * kThreads;
        if (d >= p.head_dim) continue;
        for (int r = 0; r < kThreads && i0 + r < p.seqlen_q; ++r) {
          sum_k[n] += dss[r] * float(p.row(p.q, b, i0 + r, h)[d]);
          sum_v[n] += ps[r] * float(p.row(p.dout, b, i0 + r, h)[d]);
        }
      }
      __syncthreads();
    }
  }
  const int64_t to = ((static_cast<int64_t>(blockIdx.x) * p.nheads_k + hk) * gridDim.z + b) * p.head_dim;
  for (int n = 0; n < 2; ++n) {
    const int d = threadIdx.x + n * kThreads;
    if (d >= p.head_dim) continue;
    dk[to + d] = sum_k[n] * p.scale;
    dv[to + d] = sum_v[n];
  }
}

}  // namespace reference
