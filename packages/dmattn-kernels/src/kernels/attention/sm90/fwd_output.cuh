// The end of a Hopper forward kernel's item: log-sum-exp and output of the 64 rows of a consumer.
#pragma once

#include "../shared/softmax.cuh"
#include "fwd_items.cuh"
#include "fwd_traits.cuh"

namespace dmattn::sm90 {

// Divides the output by the sum of its row, and writes the log-sum-exp. scale: what turns the inputs of the softmax
// into logits. first_row: the first of the two rows that this thread has; the other is 8 later.
template <bool kLazy, int kFragmentsD, class Arguments, class Item>
__device__ __forceinline__ void finish_rows(const Arguments& p, OnlineSoftmax<1, kLazy>& softmax, float scale,
                                            float (&out)[1][kFragmentsD][4], const Item& item, int first_row) {
  const int64_t base = lse_offset(p, item);
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    float lse, rest;
    const float inverse = softmax.finish(j, scale, lse, rest);
    const int row = first_row + 8 * j;
    if (threadIdx.x % 4 == 0 && row < lengths_of(p, item).seqlen_q) {
      p.lse[base + row * p.lse_stride.row] = lse;
      if (p.lse_rest != nullptr) p.lse_rest[base + row * p.lse_stride.row] = rest;
    }
#pragma unroll
    for (int i = 0; i < kFragmentsD; ++i) {
      out[0][i][2 * j] *= inverse;
      out[0][i][2 * j + 1] *= inverse;
    }
  }
}

// Writes the output from registers, for kernels that have no shared memory for it. The four threads of a row exchange
// their pairs of columns, so that each has eight neighbouring columns (16 bytes). first_row: as above.
template <class Element, int kFragmentsD, class Arguments>
__device__ __forceinline__ void write_rows(const Arguments& p, const float (&out)[1][kFragmentsD][4],
                                           const FwdItem& item, int first_row) {
  const int thread = threadIdx.x % 4;  // of those that share a row
  const bool is_odd = thread & 1, is_upper = thread & 2;
  const Strides3& stride = p.out_rows.stride;
  Element* const to = static_cast<Element*>(p.out_rows.data) + item.batch * stride.batch + item.head * stride.head +
                      first_row * stride.row + thread * 8;
  static_assert(kFragmentsD % 4 == 0);
#pragma unroll
  for (int i = 0; i < kFragmentsD; i += 4) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      uint32_t word[4];  // of fragments i to i + 3; after the exchanges all of fragment i + thread
#pragma unroll
      for (int f = 0; f < 4; ++f)
        word[f] = ElementTraits<Element>::pack(out[0][i + f][2 * j], out[0][i + f][2 * j + 1]);
#pragma unroll
      for (int f = 0; f < 4; f += 2) {
        const uint32_t other = __shfl_xor_sync(0xffffffffu, is_odd ? word[f] : word[f + 1], 1);
        (is_odd ? word[f] : word[f + 1]) = other;
      }
#pragma unroll
      for (int f = 0; f < 2; ++f) {
        const uint32_t other = __shfl_xor_sync(0xffffffffu, is_upper ? word[f] : word[f + 2], 2);
        (is_upper ? word[f] : word[f + 2]) = other;
      }
      if (first_row + 8 * j < p.seqlen_q && 8 * (i + thread) < p.head_dim) {
        *reinterpret_cast<uint4*>(to + 8 * j * stride.row + 8 * i) = make_uint4(word[0], word[1], word[2], word[3]);
      }
    }
  }
}

// Writes the partial output of an item with a share of the keys. Each thread writes two columns at a time, so that
// the four threads of a row fill a sector of memory. first_row: as above.
template <int kFragmentsD, class Arguments>
__device__ __forceinline__ void write_partial_rows(const Arguments& p, const float (&out)[1][kFragmentsD][4],
                                                   const SplitFwdItem& item, int first_row) {
  float* const to = p.parts + lse_offset(p, item) * p.part_columns + threadIdx.x % 4 * 2;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int row = first_row + 8 * j;
    if (row >= p.seqlen_q) continue;
    float* const row_to = to + int64_t{row} * p.part_columns;
#pragma unroll
    for (int i = 0; i < kFragmentsD; ++i) {
      if (8 * i < p.part_columns) {
        *reinterpret_cast<float2*>(row_to + 8 * i) = make_float2(out[0][i][2 * j], out[0][i][2 * j + 1]);
      }
    }
  }
}

// Starts to write the warpgroup's 64 rows of the output, through `tile` in shared memory. TMA leaves out what is
// outside the tensor or behind a packed sequence. barrier: the id of a named barrier for this warpgroup. `tile` is
// free once the first thread of the warpgroup has waited for the store.
template <class T, class Arguments, class Accumulator, class Item>
__device__ __forceinline__ void store_rows(const Arguments& p, typename T::Element* tile, Accumulator& acc_o,
                                           typename T::OutMma& out_mma, int consumer, int barrier, const Item& item) {
  using Element = typename T::Element;
  auto rounded = cute::make_tensor_like<Element>(acc_o);
  auto packed = cute::recast<uint32_t>(rounded);
#pragma unroll
  for (int i = 0; i < cute::size(packed); ++i) packed(i) = ElementTraits<Element>::pack(acc_o(2 * i), acc_o(2 * i + 1));
  const auto copy = cute::make_tiled_copy_C(cute::Copy_Atom<cute::SM90_U32x4_STSM_N, Element>{}, out_mma);
  const auto slice = copy.get_slice(threadIdx.x - 128);
  auto to = cute::make_tensor(cute::make_smem_ptr(tile), typename T::LayoutQ{});
  cute::copy(copy, slice.retile_S(rounded), slice.partition_D(to));
  cutlass::arch::fence_view_async_shared();  // TMA sees what was written
  cutlass::arch::NamedBarrier::sync(128, barrier);
  if (threadIdx.x % 128 == 0) {
#pragma unroll
    for (int panel = 0; panel < T::kPanels; ++panel) {
      store_panel(p.out, tile + (panel * T::kBlockM + consumer * 64) * T::kPanelCols, panel * T::kPanelCols,
                  item.m_block * T::kBlockM + consumer * 64, item.head, place_of_rows(item));
    }
    cute::tma_store_arrive();
  }
}

}  // namespace dmattn::sm90
