// Enqueues the Hopper forward kernel: tensor maps, the work counter, the launch.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>

#include "../../shared/fill.h"
#include "../../sm90_changed_scores.h"
#include "../../sm90_fwd_times.h"
#include "../shared/launch.cuh"
#include "fwd_kernel.cuh"
#include "gather_launch.cuh"
#include "tensor_map.h"

namespace dmattn {
namespace sm90 {

// The most bytes of K and V of the heads in progress. They stay in the L2 cache of an H100 or H200, which also has
// room for all else that passes through it.
constexpr int64_t kSectionBytes = 32 << 20;

inline NumberedRows numbered_bias_rows(const FwdParams& p) {
  return number_rows(p.bias, p.batch, p.nheads / p.bias.head_ratio, p.seqlen_q, p.seqlen_k);
}
// Whether ScoreMode::kUnalignedBias serves the bias.
inline bool has_unaligned_bias(const FwdParams& p) {
  const Strides3 stride = {p.bias.batch_stride, p.bias.head_stride, p.bias.row_stride};
  return p.bias.kind == BiasKind::kTile && !has_tma_rows(p.bias.ptr, stride, 2) && numbered_bias_rows(p).exist();
}

template <class T>
cudaError_t fill_bias_classes(BiasClasses& a, const FwdParams& p) {
  using Boxes = typename decltype(T::Shared::general)::Boxes;
  const NumberedRows rows = numbered_bias_rows(p);
  const TensorMapper mapper(tensor_map_dtype<typename T::Element>(), 64);
  const uintptr_t first = reinterpret_cast<uintptr_t>(p.bias.ptr);
  a.head_rows = static_cast<uint32_t>(rows.head_rows);
  a.batch_rows = static_cast<uint32_t>(rows.batch_rows);
  a.first_shift = first % 16 / 2;
  a.next_shift = p.bias.row_stride % 8;
  for (uint32_t i = 0; i < kRowClasses; ++i) {
    const uintptr_t begin = first + i * p.bias.row_stride * 2;
    const int64_t count = (rows.count - i + kRowClasses - 1) / kRowClasses;
    const int64_t columns = p.seqlen_k + begin % 16 / 2;
    const cudaError_t status =
        mapper.map(a.maps[i], reinterpret_cast<const void*>(begin / 16 * 16), {0, 0, p.bias.row_stride * kRowClasses},
                   {1, static_cast<int32_t>(count), 1, static_cast<int32_t>(columns)}, Boxes::kBoxRows);
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

// Fills in the arguments that only the general kernels have.
template <class T>
cudaError_t fill_general_arguments(typename T::Arguments& a, const FwdParams& p) {
  a.bias = p.bias;
  a.mask = p.mask;
  a.softcap = p.softcap;
  a.bias_rows = {};
  if (p.bias.kind != BiasKind::kTile && p.bias.kind != BiasKind::kDirect) return cudaSuccess;
  if constexpr (T::kHasBoxedBias) return fill_bias_classes<T>(a.bias_classes, p);
  const bool is_wide = p.bias.kind == BiasKind::kDirect;
  const TensorMapper mapper(is_wide ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : tensor_map_dtype<typename T::Element>(),
                            is_wide ? 32 : 64);
  const Strides3 stride = {p.bias.batch_stride, p.bias.head_stride, p.bias.row_stride};
  if (!has_tma_rows(p.bias.ptr, stride, is_wide ? 4 : 2)) {
    a.bias_rows = bias_rows_of(p.bias, p.seqlen_q, p.seqlen_k);
    return cudaSuccess;
  }
  const TensorExtents extents = {stride.batch == 0 ? 1 : p.batch, p.seqlen_q,
                                 stride.head == 0 ? 1 : p.nheads / p.bias.head_ratio, p.seqlen_k};
  return mapper.map(a.bias_tiles, p.bias.ptr, stride, extents, T::kBlockM);
}

template <class T>
cudaError_t fill_arguments(FwdArguments& a, const FwdParams& p) {
  const TensorMapper mapper(tensor_map_dtype<typename T::Element>(), T::kPanelCols);
  const int32_t batch = p.packing.slabs(p.batch), nheads = p.nheads, head_dim = p.head_dim;
  const auto map = [&](CUtensorMap& to, const void* tensor, const Strides3& stride, int32_t seqlen, int32_t heads,
                       int rows) {
    if constexpr (T::kPacked) {
      return mapper.map_packed(to, tensor, stride, heads, head_dim, rows);
    } else {
      return mapper.map(to, tensor, stride, {batch, seqlen, heads, head_dim}, rows);
    }
  };
  cudaError_t status = map(a.q, p.q, p.q_stride, p.seqlen_q, nheads, T::kBlockM);
  if (status == cudaSuccess) status = map(a.k, p.k, p.k_stride, p.seqlen_k, p.nheads_k, T::kBlockN);
  if (status == cudaSuccess) status = map(a.v, p.v, p.v_stride, p.seqlen_k, p.nheads_k, T::kBlockN);
  if (status == cudaSuccess) status = map(a.out, p.out, p.out_stride, p.seqlen_q, nheads, 64);
  a.lse = p.lse;
  a.lse_rest = p.lse_rest;
  a.lse_stride = p.lse_stride;
  a.seqlen_q = p.seqlen_q;
  a.seqlen_k = p.seqlen_k;
  a.nheads = nheads;
  a.head_ratio = p.head_ratio;
  a.m_blocks = T::kPacked ? packed_blocks(p.packing.total_q, p.packing.sequences, T::kBlockM)
                          : (p.seqlen_q + T::kBlockM - 1) / T::kBlockM;
  a.all_heads = batch * nheads;
  a.items = a.m_blocks * a.all_heads;
  const int64_t kv_bytes =
      int64_t{2} * std::max(p.seqlen_k, 1) * head_dim * static_cast<int64_t>(sizeof(typename T::Element));
  const int64_t heads = std::max<int64_t>(1, kSectionBytes / kv_bytes) * p.head_ratio;
  a.section_heads = static_cast<int32_t>(std::min<int64_t>(heads, a.all_heads));
  a.softmax_scale = p.softmax_scale;
  a.is_causal = p.is_causal;
  a.work_counter = p.work_counter;
  a.window = p.window;
  return status;
}

template <class T>
cudaError_t launch_fwd_kernel(const KernelChoice& choice, const FwdParams& p, cudaStream_t stream) {
  if (!is_planned<T>(choice)) return cudaErrorInvalidConfiguration;
  static_assert(T::kSmemBytes <= T::kSmemLimit);
  typename T::Arguments arguments;
  cudaError_t status = fill_arguments<T>(arguments, p);
  if constexpr (T::kGeneral) {
    if (status == cudaSuccess) status = fill_general_arguments<T>(arguments, p);
  }
  if constexpr (T::kBiasInProduct) arguments.bias = p.bias;
  if constexpr (T::kPacked) arguments.packing = p.packing;
  if constexpr (T::kSplit) share_keys(arguments, p);
  if constexpr (T::kSoftcap) {
    arguments.scale_in_cap = p.softmax_scale / p.softcap;
    arguments.softmax_scale = p.softcap;
  }
  if (status == cudaSuccess && p.work_counter != nullptr) {
    status = clear_counter(p.work_counter, stream);
  }
  if (status != cudaSuccess) return status;
  static std::atomic<uint64_t> devices_ready{0};
  return launch</*kEarly=*/true>(fwd_kernel<T>, choice.blocks, T::kThreads, T::kSmemBytes, T::kSmemBytes, devices_ready,
                                 arguments, stream);
}

// Launches one of the two kernels of a mode and a tile, of which the second one splits the keys. Where there is no
// second one, a call with shares is refused: the partial results would not be written.
template <class Element, int kHeadDim, ScoreMode kMode, int kConsumers, int kBlockN, int kStages, int kBlocksPerSm,
          bool kMaySplit>
cudaError_t launch_fwd_mode(const KernelChoice& choice, const FwdParams& p, cudaStream_t stream) {
  if constexpr (kMaySplit && may_split_keys(kMode)) {
    using Split = FwdTraits<Element, kHeadDim, kConsumers, kBlockN, kStages, kMode, kBlocksPerSm, /*kSplit=*/true>;
    if (p.num_splits > 1) return launch_fwd_kernel<Split>(choice, p, stream);
  } else if (p.num_splits > 1) {
    return cudaErrorNotSupported;
  }
  using Whole = FwdTraits<Element, kHeadDim, kConsumers, kBlockN, kStages, kMode, kBlocksPerSm>;
  return launch_fwd_kernel<Whole>(choice, p, stream);
}

}  // namespace sm90

// Chooses among the kernels of a unit. For tiles of consecutive keys, a unit has plain kernels, kernels for packed
// sequences, and kernels for a bias for each key alone for each of Hopper's head dimensions in its head-dim tile. For
// the head-dim tile as a whole it has one kernel for windows, two for softcap, and general ones; in the tile of 256,
// the general ones except for kAny are separate for 192 and 256. Most have a variant that splits the keys. For lists, a
// unit has kernels with and without a bias for each key, again separate for 192 and 256.
template <class Element, int kHeadDimTile, bool kGathered>
cudaError_t launch_fwd(const KernelChoice& choice, const FwdParams& p, cudaStream_t stream) {
  if constexpr (kGathered) {
    const auto go_in = [&](auto has_bias, auto head_dim, auto is_short) {
      constexpr Sm90ListTile kTile = sm90_list_tile(head_dim, is_short);
      return sm90::launch_gather_mode<Element, head_dim, has_bias, kTile.block_n, kTile.stages, kTile.blocks_per_sm>(
          choice, p, stream);
    };
    const auto go = [&](auto head_dim, auto is_short) {
      return p.bias.kind == BiasKind::kNone ? go_in(cute::false_type{}, head_dim, is_short)
                                            : go_in(cute::true_type{}, head_dim, is_short);
    };
    if constexpr (kHeadDimTile == 64) {
      if (sm90_lists_are_short(p)) return go(cute::Int<64>{}, cute::true_type{});
    }
    if constexpr (kHeadDimTile == 256) {
      if (sm90_list_head_dim(p.head_dim) == 192) return go(cute::Int<192>{}, cute::false_type{});
    }
    return go(cute::Int<kHeadDimTile>{}, cute::false_type{});
  } else {
    const auto go_in = [&](auto mode, auto head_dim, auto shape) {
      constexpr Sm90FwdTile kTile = sm90_fwd_tile(head_dim, decltype(shape)::value);
      constexpr bool kMaySplit = decltype(shape)::value == Sm90FwdShape::kShort;
      return sm90::launch_fwd_mode<Element, head_dim, decltype(mode)::value, kTile.consumers, kTile.block_n,
                                   kTile.stages, kTile.blocks_per_sm, kMaySplit>(choice, p, stream);
    };
    const auto go = [&](auto head_dim, auto shape) {
      constexpr Sm90FwdShape kShape = decltype(shape)::value;
      constexpr bool kIsShort = head_dim <= 64 && kShape == Sm90FwdShape::kShort;
      if constexpr (!kIsShort && kShape != Sm90FwdShape::kFewKeys) {
        if (choice.level == Level::kPacked) return go_in(cute::C<sm90::ScoreMode::kPacked>{}, head_dim, shape);
      }
      return go_in(cute::C<sm90::ScoreMode::kPlain>{}, head_dim, shape);
    };
    const auto go_general_in = [&](auto mode, auto head_dim, auto is_tall) {
      constexpr sm90::ScoreMode kMode = decltype(mode)::value;
      constexpr bool kSoftcap = kMode == sm90::ScoreMode::kSoftcap || kMode == sm90::ScoreMode::kPackedSoftcap;
      constexpr Sm90FwdTile kTile = kMode == sm90::ScoreMode::kWindow ? sm90_window_fwd_tile(kHeadDimTile)
                                    : kSoftcap                        ? sm90_softcap_fwd_tile(kHeadDimTile)
                                                                      : sm90_general_fwd_tile(kHeadDimTile, is_tall);
      return sm90::launch_fwd_mode<Element, head_dim, kMode, kTile.consumers, kTile.block_n, kTile.stages,
                                   kTile.blocks_per_sm, /*kMaySplit=*/!is_tall>(choice, p, stream);
    };
    const auto go_general = [&](auto mode, auto is_tall) {
      return go_general_in(mode, cute::Int<kHeadDimTile>{}, is_tall);
    };
    const auto go_key_bias = [&](auto head_dim) {
      constexpr Sm90FwdTile kTile = sm90_key_bias_fwd_tile(head_dim);
      return sm90::launch_fwd_mode<Element, head_dim, sm90::ScoreMode::kKeyBias, kTile.consumers, kTile.block_n,
                                   kTile.stages, kTile.blocks_per_sm, /*kMaySplit=*/false>(choice, p, stream);
    };
    if (has_plain_window(p)) return go_general(cute::C<sm90::ScoreMode::kWindow>{}, cute::false_type{});
    if (has_plain_softcap(p)) {
      if (p.packing.is_active()) return go_general(cute::C<sm90::ScoreMode::kPackedSoftcap>{}, cute::false_type{});
      return go_general(cute::C<sm90::ScoreMode::kSoftcap>{}, cute::false_type{});
    }
    constexpr int kSmaller = kHeadDimTile == 128 ? 96 : kHeadDimTile == 256 ? 192 : kHeadDimTile;
    if (is_general(choice.level) && sm90_has_key_bias_alone(p, p.num_splits)) {
      if (sm90_fwd_head_dim(p.head_dim) == kSmaller) return go_key_bias(cute::Int<kSmaller>{});
      return go_key_bias(cute::Int<kHeadDimTile>{});
    }
    if (is_general(choice.level)) {
      const bool is_simple = p.softcap == 0.f && p.softmax_scale > 0.f;
      if constexpr (kHeadDimTile <= 128) {
        const auto go_biased = [&](auto mode) {
          if constexpr (kHeadDimTile == 64) {
            if (sm90_general_fwd_is_tall(p, p.num_splits)) return go_general(mode, cute::true_type{});
          }
          return go_general(mode, cute::false_type{});
        };
        if (is_simple && p.bias.kind == BiasKind::kNone) {
          return go_general(cute::C<sm90::ScoreMode::kMask>{}, cute::false_type{});
        }
        if (is_simple && p.bias.kind == BiasKind::kKey) {
          return go_general(cute::C<sm90::ScoreMode::kMaskedKeyBias>{}, cute::false_type{});
        }
        if (is_simple && sm90::has_unaligned_bias(p)) return go_biased(cute::C<sm90::ScoreMode::kUnalignedBias>{});
        if (is_simple) return go_biased(cute::C<sm90::ScoreMode::kTileBias>{});
      } else {
        const auto go_wide = [&](auto mode) {
          if (sm90_fwd_head_dim(p.head_dim) == 192) return go_general_in(mode, cute::Int<192>{}, cute::false_type{});
          return go_general(mode, cute::false_type{});
        };
        if (is_simple && p.bias.kind == BiasKind::kNone) return go_wide(cute::C<sm90::ScoreMode::kMask>{});
        if (is_simple && p.bias.kind == BiasKind::kKey) return go_wide(cute::C<sm90::ScoreMode::kMaskedKeyBias>{});
        if (is_simple) return go_wide(cute::C<sm90::ScoreMode::kTileBias>{});
      }
      return go_general(cute::C<sm90::ScoreMode::kAny>{}, cute::false_type{});
    }
    const Sm90FwdShape shape = p.num_splits > 1 ? Sm90FwdShape::kShort : sm90_fwd_shape(p);
    if constexpr (kHeadDimTile == 64) {
      if (shape == Sm90FwdShape::kTwoBlocks) return go(cute::Int<64>{}, cute::C<Sm90FwdShape::kTwoBlocks>{});
      if (shape == Sm90FwdShape::kTall) return go(cute::Int<64>{}, cute::C<Sm90FwdShape::kTall>{});
    }
    const auto go_wide = [&](auto head_dim) {
      if constexpr (kHeadDimTile > 128) {
        if (shape == Sm90FwdShape::kFewKeys) return go(head_dim, cute::C<Sm90FwdShape::kFewKeys>{});
      }
      return go(head_dim, cute::C<Sm90FwdShape::kShort>{});
    };
    if (sm90_fwd_head_dim(p.head_dim) == kSmaller) return go_wide(cute::Int<kSmaller>{});
    return go_wide(cute::Int<kHeadDimTile>{});
  }
}

}  // namespace dmattn
