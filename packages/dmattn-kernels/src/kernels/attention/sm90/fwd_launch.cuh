// Enqueues the Hopper forward kernel: tensor maps, the work counter, the launch.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>

#include "../shared/launch.cuh"
#include "fwd_kernel.cuh"
#include "gather_launch.cuh"
#include "tensor_map.h"

namespace dmattn {
namespace sm90 {

// K and V of the heads in progress, with what else passes through, stay in half of the L2 of an H100 or H200.
constexpr int64_t kSectionBytes = 32 << 20;

// What only the general kernel is given.
template <class T>
cudaError_t fill_general_arguments(GeneralFwdArguments& a, const FwdParams& p) {
  a.bias = p.bias;
  a.mask = p.mask;
  a.softcap = p.softcap;
  if (p.bias.kind != BiasKind::kTile && p.bias.kind != BiasKind::kDirect) return cudaSuccess;
  const bool is_wide = p.bias.kind == BiasKind::kDirect;
  const TensorMapper mapper(is_wide ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : tensor_map_dtype<typename T::Element>(),
                            is_wide ? 32 : 64);
  Strides3 stride;
  stride.batch = p.bias.batch_stride;
  stride.head = p.bias.head_stride;
  stride.row = p.bias.row_stride;
  const TensorExtents extents = {stride.batch == 0 ? 1 : p.batch, p.seqlen_q,
                                 stride.head == 0 ? 1 : p.nheads / p.bias.head_ratio, p.seqlen_k};
  return mapper.map(a.bias_tiles, p.bias.ptr, stride, extents, T::kBlockM);
}

template <class T>
cudaError_t fill_arguments(FwdArguments& a, const FwdParams& p) {
  const TensorMapper mapper(tensor_map_dtype<typename T::Element>(), T::kPanelCols);
  const int32_t batch = p.batch, nheads = p.nheads, nheads_k = p.nheads_k, head_dim = p.head_dim;
  cudaError_t status = mapper.map(a.q, p.q, p.q_stride, {batch, p.seqlen_q, nheads, head_dim}, T::kBlockM);
  if (status == cudaSuccess) {
    status = mapper.map(a.k, p.k, p.k_stride, {batch, p.seqlen_k, nheads_k, head_dim}, T::kBlockN);
  }
  if (status == cudaSuccess) {
    status = mapper.map(a.v, p.v, p.v_stride, {batch, p.seqlen_k, nheads_k, head_dim}, T::kBlockN);
  }
  if (status == cudaSuccess) status = mapper.map(a.out, p.out, p.out_stride, {batch, p.seqlen_q, nheads, head_dim}, 64);
  a.lse = p.lse;
  a.lse_rest = p.lse_rest;
  a.lse_stride = p.lse_stride;
  a.seqlen_q = p.seqlen_q;
  a.seqlen_k = p.seqlen_k;
  a.nheads = nheads;
  a.head_ratio = p.head_ratio;
  a.m_blocks = (p.seqlen_q + T::kBlockM - 1) / T::kBlockM;
  a.all_heads = batch * nheads;
  a.items = a.m_blocks * a.all_heads;
  const int64_t kv_bytes = int64_t{2} * p.seqlen_k * head_dim * static_cast<int64_t>(sizeof(typename T::Element));
  const int64_t heads = std::max<int64_t>(1, kSectionBytes / kv_bytes) * p.head_ratio;
  a.section_heads = static_cast<int32_t>(std::min<int64_t>(heads, a.all_heads));
  a.softmax_scale = p.softmax_scale;
  a.is_causal = p.is_causal;
  a.work_counter = p.work_counter;
  return status;
}

template <class T>
cudaError_t launch_fwd_kernel(int64_t blocks, const FwdParams& p, cudaStream_t stream) {
  typename T::Arguments arguments;
  cudaError_t status = fill_arguments<T>(arguments, p);
  if constexpr (T::kGeneral) {
    if (status == cudaSuccess) status = fill_general_arguments<T>(arguments, p);
  }
  if (status == cudaSuccess && p.work_counter != nullptr) {
    status = cudaMemsetAsync(p.work_counter, 0, sizeof(int32_t), stream);
  }
  if (status != cudaSuccess) return status;
  static std::atomic<uint64_t> devices_ready{0};
  return launch(fwd_kernel<T>, blocks, T::kThreads, T::kSmemBytes, T::kSmemBytes, devices_ready, arguments, stream);
}

}  // namespace sm90

// The unit of a head-dim tile has a plain kernel for each of Hopper's head dimensions in it, and general ones for all of
// them (the widest has a single one); over lists, one with and one without a bias for each key.
template <class Element, int kHeadDimTile, bool kGathered>
cudaError_t launch_fwd(const KernelChoice& choice, const FwdParams& p, cudaStream_t stream) {
  if constexpr (kGathered) {
    const auto go = [&](auto has_bias) {
      constexpr Sm90ListTile kTile = sm90_list_tile(kHeadDimTile);
      using T = sm90::GatherTraits<Element, kHeadDimTile, has_bias, kTile.block_n, kTile.stages,
                                   sm90::ProxyFence::kConsumer, /*kShortTail=*/true, /*kProducerRegisters=*/56>;
      return sm90::launch_gather_kernel<T>(choice.blocks, p, stream);
    };
    return p.bias.kind == BiasKind::kNone ? go(cute::false_type{}) : go(cute::true_type{});
  } else {
    const auto go = [&](auto head_dim, auto is_short) {
      constexpr Sm90FwdTile kTile = sm90_fwd_tile(head_dim, is_short);
      using T = sm90::FwdTraits<Element, head_dim, kTile.consumers, kTile.block_n>;
      return sm90::launch_fwd_kernel<T>(choice.blocks, p, stream);
    };
    const auto go_general = [&](auto mode, auto is_tall) {
      constexpr Sm90FwdTile kTile = sm90_general_fwd_tile(kHeadDimTile, is_tall);
      using T =
          sm90::FwdTraits<Element, kHeadDimTile, kTile.consumers, kTile.block_n, /*kStages=*/2, decltype(mode)::value>;
      return sm90::launch_fwd_kernel<T>(choice.blocks, p, stream);
    };
    if (choice.level != Level::kPlain) {
      if constexpr (kHeadDimTile <= 128) {
        const bool is_simple = p.softcap == 0.f && p.softmax_scale > 0.f;
        const auto go_biased = [&](auto mode) {
          if constexpr (kHeadDimTile == 64) {
            if (sm90_general_fwd_is_tall(p)) return go_general(mode, cute::true_type{});
          }
          return go_general(mode, cute::false_type{});
        };
        if (is_simple && p.bias.kind == BiasKind::kNone) {
          return go_general(cute::C<sm90::ScoreMode::kMask>{}, cute::false_type{});
        }
        if (is_simple && p.bias.kind == BiasKind::kKey) return go_biased(cute::C<sm90::ScoreMode::kKeyBias>{});
        if (is_simple) return go_biased(cute::C<sm90::ScoreMode::kTileBias>{});
      }
      return go_general(cute::C<sm90::ScoreMode::kAny>{}, cute::false_type{});
    }
    constexpr int kSmaller = kHeadDimTile == 128 ? 96 : kHeadDimTile == 256 ? 192 : kHeadDimTile;
    if constexpr (kHeadDimTile == 64) {
      if (sm90_fwd_is_short(p.seqlen_q)) return go(cute::Int<64>{}, cute::true_type{});
    }
    if (sm90_fwd_head_dim(p.head_dim) == kSmaller) return go(cute::Int<kSmaller>{}, cute::false_type{});
    return go(cute::Int<kHeadDimTile>{}, cute::false_type{});
  }
}

}  // namespace dmattn
