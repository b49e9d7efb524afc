// Enqueues the Hopper backward kernel: tensor maps, sections of work, the launch.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>

#include "../shared/launch.cuh"
#include "bwd_kernel.cuh"
#include "bwd_wide_kernel.cuh"
#include "tensor_map.h"

namespace dmattn {
namespace sm90 {

// Bytes of Q, dO and the fp32 dq of the parts of a section, which are to stay in L2. On an H200 20 MB were the best of
// 20, 40, 80 and 400, by 1% to 8%.
constexpr int64_t kBwdSectionBytes = 20 << 20;

// The last section has at least this many items for each thread block. Its longest items come first: with fewer items
// some thread blocks would still have such an item when the others have nothing left.
constexpr int32_t kLastItems = 3;

// Where dq is added up in order: how many thread blocks (for wide heads: clusters) work on the rows of a head at a
// time, if there are enough heads. The more of them begin together, the longer the last one waits for its first turn;
// the fewer, the more heads there are at a time, and the less stays in L2 of what they read. kBlocksOfEvenTurns is for
// the kernels with a mask or a bias, without causality: a mask that leaves half of the tiles of 16384 rows of 16 heads
// takes 1.41, 1.31 and 1.29 times as long as without an order with 8, 16 and 32 thread blocks for each head, but under
// causality 1.29, 1.33 and 1.49 times.
constexpr int64_t kBlocksOfTurns = 8, kBlocksOfEvenTurns = 24;

// Chooses sections of parts whose rows take kBwdSectionBytes, and a last one that evens out the work of the thread
// blocks. part_bytes: of the rows of a part.
template <class T>
void choose_sections(BwdArguments& a, int64_t part_bytes, int64_t items_of_part, int64_t blocks) {
  a.sections = 0;
  a.section_parts = a.all_parts;
  const int64_t last_parts = (kLastItems * blocks + items_of_part - 1) / std::max<int64_t>(items_of_part, 1);
  if (last_parts >= a.all_parts) return;
  int64_t section_parts = kBwdSectionBytes / std::max<int64_t>(part_bytes, 1);
  const bool takes_turns = T::kOrdered || a.dq_semaphore != nullptr;
  const bool are_even = (T::kHasTurnWarps || (T::kCluster > 1 && T::kMasked)) && !a.is_causal;
  if (takes_turns) section_parts = std::max(section_parts, blocks / (are_even ? kBlocksOfEvenTurns : kBlocksOfTurns));
  a.section_parts = static_cast<int32_t>(std::clamp<int64_t>(section_parts, 1, a.all_parts));
  a.sections = static_cast<int32_t>((a.all_parts - last_parts) / a.section_parts);
}

// The map of a tensor of rows or of keys, with boxes of `rows` of them.
template <class T>
cudaError_t map_rows(const TensorMapper& mapper, CUtensorMap& to, const void* tensor, const Strides3& stride,
                     const TensorExtents& extents, int rows) {
  if constexpr (T::kPacked) {
    return mapper.map_packed(to, tensor, stride, extents.heads, extents.head_dim, rows);
  } else {
    return mapper.map(to, tensor, stride, extents, rows);
  }
}

// How many parts of a block of keys divide the rows of the same heads between them: more than one only if there are
// more parts than heads, and then the same number for each head.
inline int32_t row_splits_of(int32_t num_splits, int32_t heads) { return std::max(1, num_splits / heads); }

// Consecutive keys: the maps of K and V, where dk and dv go, and how items are numbered.
template <class T>
cudaError_t fill_tiles(BwdArguments& a, const BwdParams& p, int64_t blocks, const TensorMapper& mapper) {
  const TensorExtents keys = {p.batch, p.seqlen_k, p.nheads_k, p.head_dim};
  cudaError_t status = map_rows<T>(mapper, a.k, p.k, p.k_stride, keys, T::kOwnKeys);
  if (status == cudaSuccess) status = map_rows<T>(mapper, a.v, p.v, p.v_stride, keys, T::kOwnKeys);
  if (p.dk_slots == nullptr) {
    if (status == cudaSuccess) status = map_rows<T>(mapper, a.dk, p.dk, p.dk_stride, keys, 64);
    if (status == cudaSuccess) status = map_rows<T>(mapper, a.dv, p.dv, p.dv_stride, keys, 64);
  }
  a.dk_slots = T::kPacked ? p.dk_accum : p.dk_slots;
  a.dv_slots = T::kPacked ? p.dv_accum : p.dv_slots;
  if (p.num_splits > 1) a.dkv_semaphore = p.dkv_semaphore;
  a.n_blocks = T::kPacked ? packed_blocks(p.packing.total_k, p.packing.sequences, T::kBlockN)
                          : (p.seqlen_k + T::kBlockN - 1) / T::kBlockN;
  a.num_splits = p.num_splits;
  a.row_splits = row_splits_of(p.num_splits, a.group_heads);
  a.all_parts = p.packing.slabs(p.batch) * p.nheads_k * p.num_splits / T::kMembers;
  a.mirrors_items = T::kMirrors && p.mirrors_items;
  a.items = (a.mirrors_items ? 2 * pairs_of_part<T>(a) : a.n_blocks) * a.all_parts;
  const int64_t head_bytes = int64_t{p.seqlen_q} * T::kHeadDim * (2 * sizeof(typename T::Element) + sizeof(float));
  choose_sections<T>(a, head_bytes * a.group_heads / p.num_splits * T::kMembers, a.n_blocks, blocks);
  return status;
}
inline Strides3 bias_strides(const BwdParams& p) {
  return {p.bias.batch_stride, p.bias.head_stride, p.bias.row_stride};
}
inline Strides3 dbias_strides(const BwdParams& p) {
  return {p.dbias_batch_stride, p.dbias_head_stride, p.dbias_row_stride};
}
// Whether the rows of dbias, or of its sums, start on 16 bytes.
inline bool has_tma_dbias(const BwdParams& p) {
  const bool is_wide = p.bias.kind == BiasKind::kDirect || p.dbias_kind == DbiasKind::kAccum;
  return p.dbias_kind == DbiasKind::kNone || has_tma_rows(p.dbias, dbias_strides(p), is_wide ? 4 : 2);
}
// Whether there is a 16-bit bias whose rows do not start on 16 bytes, without a gradient.
inline bool has_odd_bias_alone(const BwdParams& p) {
  return p.dbias_kind == DbiasKind::kNone && p.bias.kind == BiasKind::kTile &&
         !has_tma_rows(p.bias.ptr, bias_strides(p), 2);
}
// Which batches and heads share a bias, and its gradient. A stride of 0: all of them.
inline void fill_bias_sharing(BwdArguments& a, const BwdParams& p) {
  a.lse_rest = p.lse_rest;
  a.batches = p.batch;
  a.bias_batch_step = p.bias.batch_stride != 0 ? 1 : 0;
  a.bias_head_ratio = p.bias.head_stride != 0 ? p.bias.head_ratio : p.nheads;
  a.dbias_kind = p.dbias_kind;
  if (p.dbias_kind == DbiasKind::kNone) return;
  a.dbias_batch_step = p.dbias_batch_stride != 0 ? 1 : 0;
  a.dbias_head_ratio = p.dbias_head_stride != 0 ? p.bias.head_ratio : p.nheads;
  a.dbias_semaphore = p.dbias_semaphore;
}
inline TensorExtents bias_extents(const BwdParams& p, int32_t batch_step, int32_t head_ratio) {
  return {batch_step != 0 ? p.batch : 1, p.seqlen_q, p.nheads / head_ratio, p.seqlen_k};
}
// Up to head_dim 128: where the bias is, as tiles if TMA takes its rows, and where its gradient goes.
template <class T>
cudaError_t fill_bias(BwdArguments& a, const BwdParams& p) {
  const BiasParams& bias = p.bias;
  const TensorMapper mapper(T::kWideBias ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : tensor_map_dtype<typename T::Element>(),
                            T::kBiasPanelKeys);
  fill_bias_sharing(a, p);
  if constexpr (T::kWideBias) a.mask = p.mask;
  cudaError_t status = cudaSuccess;
  if (has_tma_rows(bias.ptr, bias_strides(p), sizeof(typename T::BiasElement))) {
    const TensorExtents extents = bias_extents(p, a.bias_batch_step, a.bias_head_ratio);
    status = mapper.map(a.bias_tiles, bias.ptr, bias_strides(p), extents, T::kBlockM);
  } else {
    a.bias_rows = bias_rows_of(bias, p.seqlen_q, p.seqlen_k);
  }
  if constexpr (T::kPairs) {
    a.pair_head_step = p.bias_pairs == BiasPairs::kHeads ? 1 : 0;
    a.pair_batch_step = p.bias_pairs == BiasPairs::kBatches ? 1 : 0;
  }
  if (status != cudaSuccess || p.dbias_kind == DbiasKind::kNone) return status;
  const Strides3 to = dbias_strides(p);
  const bool is_sum = p.dbias_kind == DbiasKind::kAccum;
  if constexpr (T::kDbiasRows) {
    a.dbias_rows = {p.dbias, to.batch, to.head, to.row, is_sum};
    return status;
  }
  const TensorExtents extents = bias_extents(p, a.dbias_batch_step, a.dbias_head_ratio);
  if (is_sum && !T::kWideBias) {
    a.dbias_sums = {static_cast<float*>(p.dbias), to.batch, to.head, to.row};
    if constexpr (T::kPairs) {
      const TensorMapper sums(CU_TENSOR_MAP_DATA_TYPE_FLOAT32, kWidePanelKeys);
      return sums.map(a.dbias_tiles, p.dbias, to, extents, T::kBlockM);
    }
    return status;
  }
  return mapper.map(a.dbias_tiles, p.dbias, to, extents, T::kBlockM);
}
// The same for wide heads, whose consumers read the bias from memory. Where its rows start on 16 bytes, TMA brings it
// into the L2 cache before. TMA stores or adds a gradient in 16 bits, if its rows do.
template <class T>
cudaError_t fill_wide_bias(BwdArguments& a, const BwdParams& p) {
  const BiasParams& bias = p.bias;
  const bool is_wide = bias.dtype == Dtype::kFloat32;
  const auto dtype = is_wide ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : tensor_map_dtype<typename T::Element>();
  const int element_bytes = is_wide ? 4 : 2, box_keys = 128 / element_bytes;
  fill_bias_sharing(a, p);
  a.bias_rows = bias_rows_of(bias, p.seqlen_q, p.seqlen_k);
  const TensorMapper mapper(dtype, box_keys);
  if (has_tma_rows(bias.ptr, bias_strides(p), element_bytes)) {
    const TensorExtents extents = bias_extents(p, a.bias_batch_step, a.bias_head_ratio);
    const cudaError_t status = mapper.map(a.bias_tiles, bias.ptr, bias_strides(p), extents, T::kBlockM);
    if (status != cudaSuccess) return status;
    a.bias_tile_keys = box_keys;
  }
  if (p.dbias_kind == DbiasKind::kNone) return cudaSuccess;
  const Strides3 to = dbias_strides(p);
  const bool is_sum = p.dbias_kind == DbiasKind::kAccum;
  if (is_sum && !is_wide) {
    a.dbias_sums = {static_cast<float*>(p.dbias), to.batch, to.head, to.row};
    return cudaSuccess;
  }
  if (is_wide || !has_tma_rows(p.dbias, to, element_bytes)) {
    a.dbias_rows = {p.dbias, to.batch, to.head, to.row, is_sum};
    return cudaSuccess;
  }
  const TensorExtents extents = bias_extents(p, a.dbias_batch_step, a.dbias_head_ratio);
  return mapper.map(a.dbias_tiles, p.dbias, to, extents, T::kBlockM);
}
inline void fill_key_bias(BwdArguments& a, const BwdParams& p) {
  a.bias = p.bias;
  a.lse_rest = p.lse_rest;
  a.dbias_cols = p.dbias_cols;
}
// The mask as tiles of bits.
template <class T>
cudaError_t fill_mask(BwdArguments& a, const BwdParams& p) {
  const MaskBits& mask = a.mask = p.mask;
  const TensorMapper mapper(CU_TENSOR_MAP_DATA_TYPE_INT32, T::kMaskWords);
  Strides3 strides;
  strides.row = mask.words_per_row;
  strides.head = strides.row * mask.rows;
  strides.batch = strides.head * mask.heads;
  return mapper.map(a.mask_bits, mask.bits, strides, {mask.batch, mask.rows, mask.heads, mask.words_per_row},
                    T::kBlockM);
}
// How many chunks make a group: so many that the group has about as many tiles as there are thread blocks. All groups
// are of about the same size: in a small last one, tiles would wait for those before them. `tiles`: of the list of a
// row block, which are most of a chunk's tiles.
inline int32_t group_chunks_of(const BwdArguments& a, int64_t blocks, int64_t tiles) {
  const int64_t chunks = a.keys.blocks;
  if (a.terms.first == nullptr || chunks == 0) return 1;
  const int64_t groups = std::clamp<int64_t>(chunks * tiles * a.all_parts / std::max<int64_t>(blocks, 1), 1, chunks);
  return static_cast<int32_t>((chunks + groups - 1) / groups);
}
// Chooses sections over lists. The tiles of a chunk read the same rows, so that a part counts with the rows of a
// chunk. Where row blocks have lists of their own, the capacity of these says about how long those of chunks are.
template <class T>
void choose_list_sections(BwdArguments& a, const BwdParams& p, int64_t blocks) {
  a.sections = 0;
  a.section_parts = a.all_parts;
  if (T::kOrdered) return;
  const int64_t rows = std::min(a.keys.block_rows, p.seqlen_q);
  const int64_t row_bytes = T::kHeadDim * static_cast<int64_t>(2 * sizeof(typename T::Element) + sizeof(float));
  const int64_t tiles = a.keys.end == nullptr ? a.n_blocks : p.keys.capacity / T::kBlockN;
  choose_sections<T>(a, rows * row_bytes * a.group_heads, tiles * a.keys.blocks, blocks);
}
template <class T>
void fill_lists(BwdArguments& a, const BwdParams& p, int64_t blocks) {
  a.gathered_k = gathered_tensor(p.k, p.k_stride);
  a.gathered_v = gathered_tensor(p.v, p.v_stride);
  a.keys = p.chunks.keys;
  a.all_rows_see = a.keys.end == nullptr && !p.is_causal;
  a.tile_rows = static_cast<const int2*>(p.chunks.tile_rows);
  fill_key_bias(a, p);
  a.dkv_semaphore = p.dkv_semaphore;
  a.terms = p.terms;
  const bool keeps_terms = a.terms.first != nullptr;
  a.dk_accum = keeps_terms ? a.terms.dk : p.dk_accum;
  a.dv_accum = keeps_terms ? a.terms.dv : p.dv_accum;
  if (a.dk_accum == nullptr) {
    a.lists_as_they_are = a.keys.end == nullptr;
    a.dk_rows = {p.dk, p.dk_stride};
    a.dv_rows = {p.dv, p.dv_stride};
  }
  a.n_blocks = a.keys.capacity / T::kBlockN;
  a.num_splits = 1;
  a.row_splits = 1;
  a.all_parts = p.batch * p.nheads_k;
  a.items = a.n_blocks * a.all_parts * a.keys.blocks;
  a.group_chunks = group_chunks_of(a, blocks, p.keys.capacity / T::kBlockN);
  choose_list_sections<T>(a, p, blocks);
}

template <class T>
cudaError_t fill_arguments(BwdArguments& a, const BwdParams& p, int64_t blocks) {
  const TensorMapper mapper(tensor_map_dtype<typename T::Element>(), T::kPanelCols);
  const TensorExtents rows = {p.batch, p.seqlen_q, p.nheads, p.head_dim};
  cudaError_t status = map_rows<T>(mapper, a.q, p.q, p.q_stride, rows, T::kBlockM);
  if (status == cudaSuccess) status = map_rows<T>(mapper, a.dout, p.dout, p.dout_stride, rows, T::kBlockM);
  a.lse = p.lse;
  a.delta = p.delta;
  a.dq_accum = p.dq_accum;
  a.dq_tile = T::kBlockM * p.dq_dims;
  a.dq_last_bytes = (a.dq_tile - T::Dq::kPart) * sizeof(float);
  a.dq_semaphore = p.dq_semaphore;
  a.dq_rows = {p.dq, p.dq_stride};
  a.head_dim = p.head_dim;
  a.seqlen_q = p.seqlen_q;
  a.seqlen_k = p.seqlen_k;
  a.seqlen_q_rounded = p.seqlen_q_rounded;
  a.nheads = p.nheads;
  a.nheads_k = p.nheads_k;
  a.head_ratio = p.head_ratio;
  a.group_begin = p.group_begin;
  a.group_heads = p.group_end - p.group_begin;
  a.dq_blocks = p.dq_blocks;
  a.m_blocks = (p.seqlen_q + T::kBlockM - 1) / T::kBlockM;
  a.softmax_scale = p.softmax_scale;
  a.softcap = p.softcap;
  a.is_causal = p.is_causal;
  a.work_counter = p.work_counter;
  a.window = p.window;
  a.zero = 0;
  if constexpr (T::kPacked) a.packing = p.packing;
  if (status != cudaSuccess) return status;
  if constexpr (T::kGathered) {
    fill_lists<T>(a, p, blocks);
    return status;
  } else {
    if constexpr (T::kKeyBias) fill_key_bias(a, p);
    if constexpr (T::kDenseBias) {
      if constexpr (T::kCluster > 1) {
        status = fill_wide_bias<T>(a, p);
      } else {
        status = fill_bias<T>(a, p);
      }
    }
    if constexpr (T::kMasked) {
      if (status == cudaSuccess && p.mask.bits != nullptr) status = fill_mask<T>(a, p);
    }
    return status != cudaSuccess ? status : fill_tiles<T>(a, p, blocks, mapper);
  }
}

// Whether a kernel has the tile for which the plan counted thread blocks and laid out the workspace.
template <class T>
bool has_planned_tile(const KernelChoice& choice) {
  const BwdTile& tile = choice.bwd_tile;
  return tile.block_m == T::kBlockM && tile.block_n == T::kBlockN && tile.cluster == T::kCluster;
}

template <class T>
cudaError_t launch_bwd_kernel(const KernelChoice& choice, const BwdParams& p, cudaStream_t stream) {
  if (!has_planned_tile<T>(choice)) return cudaErrorInvalidConfiguration;
  BwdArguments arguments = {};
  const cudaError_t status = fill_arguments<T>(arguments, p, choice.blocks);
  if (status != cudaSuccess) return status;
  static std::atomic<uint64_t> devices_ready{0};
  return launch</*kEarly=*/true>(bwd_kernel<T>, choice.blocks, T::kThreads, T::kSmemBytes, T::kSmemBytes, devices_ready,
                                 arguments, stream);
}

// Launches a cluster for each item. choice.blocks is the number of thread blocks that the GPU has room for at a time.
template <class T>
cudaError_t launch_wide_bwd_kernel(const KernelChoice& choice, const BwdParams& p, cudaStream_t stream) {
  if (!has_planned_tile<T>(choice)) return cudaErrorInvalidConfiguration;
  BwdArguments arguments = {};
  const cudaError_t status = fill_arguments<T>(arguments, p, choice.blocks / T::kCluster);
  if (status != cudaSuccess) return status;
  static std::atomic<uint64_t> devices_ready{0};
  return launch</*kEarly=*/true>(bwd_wide_kernel<T>, int64_t{T::kCluster} * arguments.items, T::kThreads, T::kSmemBytes,
                                 T::kSmemBytes, devices_ready, arguments, stream);
}

}  // namespace sm90

// As the plan's has_key_bias_alone(), when the bits of a mask have been packed.
inline bool has_key_bias_alone(const BwdParams& p) {
  return p.bias.kind == BiasKind::kKey && p.mask.bits == nullptr && p.window == 0 && !p.deterministic;
}

template <class Element, int kHeadDimTile, bool kGathered>
cudaError_t launch_bwd(const KernelChoice& choice, const BwdParams& p, cudaStream_t stream) {
  using sm90::BwdTraits, sm90::BwdVariant, sm90::launch_bwd_kernel;
  const auto go = [&](auto variant) {
    return launch_bwd_kernel<BwdTraits<Element, kHeadDimTile, decltype(variant)::value>>(choice, p, stream);
  };
  const auto go_in = [&](bool is_in_order, auto ordered, auto any) { return is_in_order ? go(ordered) : go(any); };
  if constexpr (kHeadDimTile > 128) {
    using sm90::BwdWideTraits, sm90::launch_wide_bwd_kernel;
    const auto go_wide = [&](auto variant) {
      constexpr BwdVariant kVariant = decltype(variant)::value;
      if (p.head_dim <= 192) {
        return launch_wide_bwd_kernel<BwdWideTraits<Element, 192, kVariant>>(choice, p, stream);
      }
      return launch_wide_bwd_kernel<BwdWideTraits<Element, kHeadDimTile, kVariant>>(choice, p, stream);
    };
    if constexpr (kGathered) {
      const bool has_bias = p.bias.kind != BiasKind::kNone;
      if (p.deterministic) {
        return has_bias ? go_wide(cute::C<BwdVariant::kOrderedBiasLists>{})
                        : go_wide(cute::C<BwdVariant::kOrderedLists>{});
      }
      return has_bias ? go_wide(cute::C<BwdVariant::kBiasLists>{}) : go_wide(cute::C<BwdVariant::kLists>{});
    } else {
      if (p.packing.is_active() && p.softcap > 0.f) return go_wide(cute::C<BwdVariant::kPackedSoftcap>{});
      if (p.packing.is_active()) return go_wide(cute::C<BwdVariant::kPacked>{});
      if (p.softcap > 0.f) return go_wide(cute::C<BwdVariant::kSoftcap>{});
      if (has_key_bias_alone(p)) return go_wide(cute::C<BwdVariant::kKeyBias>{});
      if (p.bias.kind == BiasKind::kKey) return go_wide(cute::C<BwdVariant::kMaskedKeyBias>{});
      if (p.bias.kind != BiasKind::kNone) return go_wide(cute::C<BwdVariant::kDenseBias>{});
      if (p.mask.bits != nullptr) return go_wide(cute::C<BwdVariant::kMask>{});
      if (p.window > 0) return go_wide(cute::C<BwdVariant::kWindow>{});
      return go_wide(cute::C<BwdVariant::kPlain>{});
    }
  } else if constexpr (kGathered) {
    if (p.bias.kind != BiasKind::kNone) {
      return go_in(p.deterministic, cute::C<BwdVariant::kOrderedBiasLists>{}, cute::C<BwdVariant::kBiasLists>{});
    }
    return go_in(p.deterministic, cute::C<BwdVariant::kOrderedLists>{}, cute::C<BwdVariant::kLists>{});
  } else {
    if (p.packing.is_active()) {
      if (p.softcap > 0.f) return go(cute::C<BwdVariant::kPackedSoftcap>{});
      return go_in(p.dq_semaphore != nullptr, cute::C<BwdVariant::kPackedOrdered>{}, cute::C<BwdVariant::kPacked>{});
    }
    if (has_key_bias_alone(p)) return go(cute::C<BwdVariant::kKeyBias>{});
    if (p.bias.kind == BiasKind::kKey) {
      return go_in(p.deterministic, cute::C<BwdVariant::kKeyBiasOrdered>{}, cute::C<BwdVariant::kMaskedKeyBias>{});
    }
    if (p.bias.kind != BiasKind::kNone) {
      const bool is_wide = p.bias.kind == BiasKind::kDirect;
      if constexpr (kHeadDimTile <= 64) {
        if (p.bias_pairs != BiasPairs::kNone) return go(cute::C<BwdVariant::kPairBias>{});
      }
      if (p.deterministic) {
        return is_wide ? go(cute::C<BwdVariant::kWideBiasOrdered>{}) : go(cute::C<BwdVariant::kDenseBiasOrdered>{});
      }
      if (sm90::has_tma_dbias(p) && !sm90::has_odd_bias_alone(p)) {
        return is_wide ? go(cute::C<BwdVariant::kWideBias>{}) : go(cute::C<BwdVariant::kDenseBias>{});
      }
      return is_wide ? go(cute::C<BwdVariant::kWideBiasRows>{}) : go(cute::C<BwdVariant::kDenseBiasRows>{});
    }
    if (p.mask.bits != nullptr && p.dq != nullptr) return go(cute::C<BwdVariant::kFewKeysMask>{});
    if (p.mask.bits != nullptr || p.window > 0) {
      return go_in(p.deterministic, cute::C<BwdVariant::kMaskOrdered>{}, cute::C<BwdVariant::kMask>{});
    }
    if (p.softcap > 0.f) return go(cute::C<BwdVariant::kSoftcap>{});
    if (p.dq != nullptr) return go(cute::C<BwdVariant::kFewKeys>{});
    return go_in(p.deterministic, cute::C<BwdVariant::kOrdered>{}, cute::C<BwdVariant::kPlain>{});
  }
}

}  // namespace dmattn
