// Enqueues the decode kernels of a unit: one tile shape for all GPUs, and a kernel for each case and level.
#pragma once

#include <type_traits>

#include "decode_kernel.cuh"

namespace dmattn {

// If K and V have at most this many bytes, their lines leave the L2 cache first. If they have more, the changed lines
// of other kernels are a small part of them, and the rest is faster in the usual order: see "The L2 cache" in
// docs/kernels/decoding.md.
constexpr int64_t kEvictFirstBytes = int64_t{128} << 20;

template <class T>
cudaError_t launch_decode_kernel(const KernelChoice& choice, const DecodeParams& p, cudaStream_t stream) {
  DecodeArguments arguments;
  static_cast<DecodeParams&>(arguments) = p;
  arguments.row_blocks = (p.seqlen_q + T::kRows - 1) / T::kRows;
  arguments.parts = static_cast<int64_t>(p.batch) * p.nheads;
  arguments.rows_of_split = arguments.parts * p.seqlen_q;
  arguments.by_splits = Divisor(p.num_splits);
  arguments.by_row_blocks = Divisor(arguments.row_blocks);
  arguments.by_heads = Divisor(p.nheads);
  arguments.by_shares = Divisor(p.num_splits * T::kWarps);
  arguments.by_ratio = Divisor(p.head_ratio);
  arguments.by_bias_ratio = Divisor(p.bias.head_ratio);
  const int64_t bytes_of_key = 2 * p.head_dim * int64_t{sizeof(typename T::Element)};  // and of its value
  arguments.evicts_first = arguments.parts * p.seqlen_k * bytes_of_key <= kEvictFirstBytes;
  static std::atomic<uint64_t> devices_ready{0};
  // The kernel of a draft follows cache_draft(), and reads some of its operands before it waits: see DecodeLoop::run().
  return launch</*kEarly=*/T::kDraft>(decode_kernel<T>, choice.blocks, T::kThreads, T::kSmemBytes, T::kSmemBytes,
                                      devices_ready, arguments, stream);
}

template <class Element, int kHeadDim, DecodeCase kCase>
cudaError_t launch_decode_case(const KernelChoice& choice, const DecodeParams& p, cudaStream_t stream) {
  const auto go = [&](auto level) {
    return launch_decode_kernel<DecodeTraits<Element, kHeadDim, kCase, decltype(level)::value>>(choice, p, stream);
  };
  if (choice.level == Level::kPlain) return go(std::integral_constant<Level, Level::kPlain>{});
  if constexpr (has_cut_decoding(kHeadDim)) {
    if (choice.level == Level::kCut) return go(std::integral_constant<Level, Level::kCut>{});
  }
  return go(std::integral_constant<Level, Level::kGeneral>{});
}

template <class Element, int kHeadDim, bool kGathered>
cudaError_t launch_decode(const KernelChoice& choice, const DecodeParams& p, cudaStream_t stream) {
  if (choice.blocks == 0) return cudaSuccess;
  if constexpr (kGathered) {
    if (p.token_rows.count > 1) return launch_decode_case<Element, kHeadDim, DecodeCase::kListRows>(choice, p, stream);
    return launch_decode_case<Element, kHeadDim, DecodeCase::kList>(choice, p, stream);
  } else {
    if (p.draft.tokens != nullptr) return launch_decode_case<Element, kHeadDim, DecodeCase::kDraft>(choice, p, stream);
    if (p.token.k != nullptr) return launch_decode_case<Element, kHeadDim, DecodeCase::kToken>(choice, p, stream);
    if (p.token_rows.count > 1) return launch_decode_case<Element, kHeadDim, DecodeCase::kRows>(choice, p, stream);
    return launch_decode_case<Element, kHeadDim, DecodeCase::kDense>(choice, p, stream);
  }
}

}  // namespace dmattn
