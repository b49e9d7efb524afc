// After the Hopper backward kernel: dq from its fp32 sums.
#pragma once

#include "../../params.h"
#include "../shared/element.cuh"
#include "bwd_traits.cuh"

namespace dmattn::sm90 {

struct DqArguments {
  const float* dq_accum;
  void* dq;
  Strides3 dq_stride;
  int32_t seqlen_q, nheads, head_dim, m_blocks;
  float softmax_scale;
  bool vec_dq;  // rows start on 16 bytes
};

// A thread block per tile of dq_accum; its threads read what those of the backward kernel's consumers wrote.
template <class T>
__global__ void __launch_bounds__(128 * T::kConsumers) convert_dq_kernel(const DqArguments p) {
  using Dq = typename T::Dq;
  using Traits = ElementTraits<typename T::Element>;
  constexpr int kPitch = T::kHeadDim + 8;  // the rows of a fragment fall on different banks
  __shared__ __align__(16) uint16_t tile[T::kBlockM * kPitch];
  const int m_block = blockIdx.x % p.m_blocks;
  const int head = blockIdx.x / p.m_blocks % p.nheads, batch = blockIdx.x / p.m_blocks / p.nheads;
  const int consumer = threadIdx.x / 128, thread = threadIdx.x % 128;
  const float* from =
      p.dq_accum + static_cast<int64_t>(blockIdx.x) * (T::kBlockM * T::kHeadDim) + consumer * Dq::kPart + thread * 4;
#pragma unroll
  for (int i = 0; i < Dq::kFragments; ++i) {
    const float4 x = __ldg(reinterpret_cast<const float4*>(from + i * 512));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t pair =
          Traits::pack((half == 0 ? x.x : x.z) * p.softmax_scale, (half == 0 ? x.y : x.w) * p.softmax_scale);
      const typename Dq::Place place = Dq::place(consumer, i, thread, 2 * half);
      uint16_t* const to = tile + place.row * kPitch + place.col;
      if constexpr (Dq::kTransposed) {
        to[0] = static_cast<uint16_t>(pair);
        to[kPitch] = static_cast<uint16_t>(pair >> 16);
      } else {
        *reinterpret_cast<uint32_t*>(to) = pair;
      }
    }
  }
  __syncthreads();

  const int m0 = m_block * T::kBlockM, rows = min(T::kBlockM, p.seqlen_q - m0);
  uint16_t* const dq =
      static_cast<uint16_t*>(p.dq) + batch * p.dq_stride.batch + head * p.dq_stride.head + m0 * p.dq_stride.row;
  if (p.vec_dq) {
    const int chunks = p.head_dim / 8;
    for (int i = threadIdx.x; i < rows * chunks; i += blockDim.x) {
      const int row = i / chunks, col = i % chunks * 8;
      *reinterpret_cast<uint4*>(dq + row * p.dq_stride.row + col) =
          *reinterpret_cast<const uint4*>(tile + row * kPitch + col);
    }
  } else {
    for (int i = threadIdx.x; i < rows * p.head_dim; i += blockDim.x) {
      const int row = i / p.head_dim, col = i % p.head_dim;
      dq[row * p.dq_stride.row + col] = tile[row * kPitch + col];
    }
  }
}

}  // namespace dmattn::sm90
