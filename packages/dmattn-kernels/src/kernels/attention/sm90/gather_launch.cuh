// Enqueues the Hopper forward kernel over lists: tensor maps, the work counter, the launch.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>

#include "../../shared/fill.h"
#include "../shared/launch.cuh"
#include "gather_kernel.cuh"
#include "tensor_map.h"

namespace dmattn::sm90 {

// Bytes of K and V of the heads that are in progress at a time. With the other data that passes through, they fit L2.
constexpr int64_t kGatherSectionBytes = 40 << 20;

template <class T>
cudaError_t fill_gather_arguments(GatherArguments& a, const FwdParams& p, int64_t section_bytes) {
  const TensorMapper mapper(tensor_map_dtype<typename T::Element>(), T::kPanelCols);
  const int32_t batch = p.batch, nheads = p.nheads, head_dim = p.head_dim;
  cudaError_t status = mapper.map(a.q, p.q, p.q_stride, {batch, p.seqlen_q, nheads, head_dim}, T::kQRows);
  if (status == cudaSuccess) status = mapper.map(a.out, p.out, p.out_stride, {batch, p.seqlen_q, nheads, head_dim}, 64);
  a.out_rows = {p.out, p.out_stride};
  a.k = gathered_tensor(p.k, p.k_stride);
  a.v = gathered_tensor(p.v, p.v_stride);
  a.keys = p.keys;
  a.bias = p.bias;
  a.lse = p.lse;
  a.lse_rest = p.lse_rest;
  a.lse_stride = p.lse_stride;
  a.seqlen_q = p.seqlen_q;
  a.seqlen_k = p.seqlen_k;
  a.nheads = nheads;
  a.head_ratio = p.head_ratio;
  a.head_dim = head_dim;
  a.m_blocks = (p.seqlen_q + T::kBlockM - 1) / T::kBlockM;
  a.all_heads = batch * nheads;
  a.items = a.m_blocks * a.all_heads;
  const int64_t kv_bytes = int64_t{2} * p.seqlen_k * head_dim * static_cast<int64_t>(sizeof(typename T::Element));
  const int64_t heads = std::max<int64_t>(1, section_bytes / kv_bytes) * p.head_ratio;
  a.section_heads = static_cast<int32_t>(std::min<int64_t>(heads, a.all_heads));
  a.softmax_scale = p.softmax_scale;
  a.bias_factor = 1.f / p.softmax_scale;
  a.most_bias = most_bias_in_product<typename T::Element>(p.softmax_scale);
  a.is_causal = p.is_causal;
  a.work_counter = p.work_counter;
  return status;
}

template <class T>
cudaError_t launch_gather_kernel(const KernelChoice& choice, const FwdParams& p, cudaStream_t stream,
                                 int64_t section_bytes = kGatherSectionBytes) {
  if (!is_planned<T>(choice)) return cudaErrorInvalidConfiguration;
  typename T::Arguments arguments;
  cudaError_t status = fill_gather_arguments<T>(arguments, p, section_bytes);
  if constexpr (T::kSplit) share_keys(arguments, p);
  if (status == cudaSuccess && p.work_counter != nullptr) {
    status = clear_counter(p.work_counter, stream);
  }
  if (status != cudaSuccess) return status;
  static std::atomic<uint64_t> devices_ready{0};
  return launch</*kEarly=*/true>(gather_kernel<T>, choice.blocks, T::kThreads, T::kSmemBytes, T::kSmemBytes,
                                 devices_ready, arguments, stream);
}

// A tile has two kernels, of which the second splits the keys of a list. Launches one of them, as launch_fwd_mode()
// does.
template <class Element, int kHeadDim, bool kBias, int kBlockN, int kStages, int kBlocksPerSm>
cudaError_t launch_gather_mode(const KernelChoice& choice, const FwdParams& p, cudaStream_t stream) {
  constexpr int kProducerRegisters = kBlocksPerSm == 2 ? 48 : 56;
  if constexpr (kBlocksPerSm == 1) {
    using Split =
        GatherTraits<Element, kHeadDim, kBias, kBlockN, kStages, kProducerRegisters, kBlocksPerSm, /*kSplit=*/true>;
    if (p.num_splits > 1) return launch_gather_kernel<Split>(choice, p, stream);
  } else if (p.num_splits > 1) {
    return cudaErrorNotSupported;
  }
  using Whole = GatherTraits<Element, kHeadDim, kBias, kBlockN, kStages, kProducerRegisters, kBlocksPerSm>;
  return launch_gather_kernel<Whole>(choice, p, stream);
}

}  // namespace dmattn::sm90
