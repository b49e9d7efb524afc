// Enqueues the Hopper backward kernel (tensor maps, the work counter, the launch), and the conversion of dq after it.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>

#include "../shared/launch.cuh"
#include "bwd_convert_dq.cuh"
#include "bwd_kernel.cuh"
#include "tensor_map.h"

namespace dmattn::sm90 {

// Q, dO and the fp32 dq of the heads in progress stay in L2: of the 50 MB of an H100 or H200, what leaves room for what
// passes through.
constexpr int64_t kBwdSectionBytes = 40 << 20;

// Rows of lse and delta of a head, as the kernel reads them: whole blocks, each of which starts on 16 bytes.
template <class T>
constexpr int32_t bwd_seqlen_q_rounded(int32_t seqlen_q) {
  return (seqlen_q + T::kBlockM - 1) / T::kBlockM * T::kBlockM;
}

template <class T>
cudaError_t fill_arguments(BwdArguments& a, const BwdParams& p, int64_t section_bytes = kBwdSectionBytes) {
  const TensorMapper mapper(tensor_map_dtype<typename T::Element>(), T::kPanelCols);
  const TensorExtents rows = {p.batch, p.seqlen_q, p.nheads, p.head_dim};
  const TensorExtents keys = {p.batch, p.seqlen_k, p.nheads_k, p.head_dim};
  cudaError_t status = mapper.map(a.q, p.q, p.q_stride, rows, T::kBlockM);
  if (status == cudaSuccess) status = mapper.map(a.dout, p.dout, p.dout_stride, rows, T::kBlockM);
  if (status == cudaSuccess) status = mapper.map(a.k, p.k, p.k_stride, keys, T::kBlockN);
  if (status == cudaSuccess) status = mapper.map(a.v, p.v, p.v_stride, keys, T::kBlockN);
  if (p.num_splits == 1) {
    if (status == cudaSuccess) status = mapper.map(a.dk, p.dk, p.dk_stride, keys, 64);
    if (status == cudaSuccess) status = mapper.map(a.dv, p.dv, p.dv_stride, keys, 64);
  }
  a.lse = p.lse;
  a.delta = p.delta;
  a.dq_accum = p.dq_accum;
  a.dq_semaphore = p.dq_semaphore;
  a.dk_slots = p.dk_slots;
  a.dv_slots = p.dv_slots;
  a.seqlen_q = p.seqlen_q;
  a.seqlen_k = p.seqlen_k;
  a.seqlen_q_rounded = p.seqlen_q_rounded;
  a.nheads = p.nheads;
  a.nheads_k = p.nheads_k;
  a.head_ratio = p.head_ratio;
  a.m_blocks = (p.seqlen_q + T::kBlockM - 1) / T::kBlockM;
  a.n_blocks = (p.seqlen_k + T::kBlockN - 1) / T::kBlockN;
  a.num_splits = p.num_splits;
  a.all_parts = p.batch * p.nheads_k * p.num_splits;
  a.items = a.n_blocks * a.all_parts;
  const int64_t head_bytes = int64_t{p.seqlen_q} * T::kHeadDim * (2 * sizeof(typename T::Element) + sizeof(float));
  const int64_t part_bytes = head_bytes * std::max(1, p.head_ratio / p.num_splits);
  a.section_parts =
      static_cast<int32_t>(std::clamp<int64_t>(section_bytes / std::max<int64_t>(part_bytes, 1), 1, a.all_parts));
  a.softmax_scale = p.softmax_scale;
  a.softcap = p.softcap;
  a.is_causal = p.is_causal;
  a.work_counter = p.work_counter;
  a.zero = 0;
  return status;
}

template <class T>
cudaError_t launch_bwd_kernel(int64_t blocks, const BwdParams& p, cudaStream_t stream,
                              int64_t section_bytes = kBwdSectionBytes) {
  BwdArguments arguments;
  cudaError_t status = fill_arguments<T>(arguments, p, section_bytes);
  if (status == cudaSuccess && p.work_counter != nullptr) {
    status = cudaMemsetAsync(p.work_counter, 0, sizeof(int32_t), stream);
  }
  if (status != cudaSuccess) return status;
  static std::atomic<uint64_t> devices_ready{0};
  return launch(bwd_kernel<T>, blocks, T::kThreads, T::kSmemBytes, T::kSmemBytes, devices_ready, arguments, stream);
}

template <class T>
cudaError_t launch_convert_dq(const BwdParams& p, void* dq, const Strides3& dq_stride, bool vec_dq,
                              cudaStream_t stream) {
  DqArguments a;
  a.dq_accum = p.dq_accum;
  a.dq = dq;
  a.dq_stride = dq_stride;
  a.seqlen_q = p.seqlen_q;
  a.nheads = p.nheads;
  a.head_dim = p.head_dim;
  a.m_blocks = (p.seqlen_q + T::kBlockM - 1) / T::kBlockM;
  a.softmax_scale = p.softmax_scale;
  a.vec_dq = vec_dq;
  const int64_t blocks = int64_t{a.m_blocks} * p.nheads * p.batch;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  convert_dq_kernel<T><<<static_cast<unsigned>(blocks), 128 * T::kConsumers, 0, stream>>>(a);
  return cudaGetLastError();
}

}  // namespace dmattn::sm90
