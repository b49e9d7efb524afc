// The backward's loads from global memory: Q, K, V, dO, lse and delta, bias and mask.
#pragma once

#include "bwd_block.cuh"

namespace dmattn {

template <class T>
__device__ __forceinline__ void BwdBlock<T>::load_kv(uint32_t dst, const void* base, const Strides3& s,
                                                     bool vec_given) const {
  const bool vec = !T::kGeneral || vec_given;
  const Element* src = head_ptr(base, s, head_k) + first_key() * s.row;
  if constexpr (T::kGathered) {
    load_tile<kBlockN, kHeadDim, T::kThreads>(smem_base + dst, src, s.row, keys, p.head_dim, vec, threadIdx.x,
                                              RowGather{key_idx()});
  } else {
    load_tile<kBlockN, kHeadDim, T::kThreads>(smem_base + dst, src + key0 * s.row, s.row, keys, p.head_dim, vec,
                                              threadIdx.x, RowIdentity{});
  }
}

template <class T>
__device__ __forceinline__ void BwdBlock<T>::load_rows(uint32_t dst, const void* base, const Strides3& s, bool vec,
                                                       const Step& step) const {
  const int row0 = step.m * kBlockM;
  load_tile<kBlockM, kHeadDim, T::kThreads>(
      smem_base + dst, head_ptr(base, s, step.head) + (first_row() + row0) * s.row, s.row, seqlen_q() - row0,
      p.head_dim, !T::kGeneral || vec, threadIdx.x, RowIdentity{});
}

template <class T>
__device__ __forceinline__ void BwdBlock<T>::load_q(const Step& s, int stage) const {
  load_rows(T::kQ + stage * T::kTileQ, p.q, p.q_stride, p.vec_q, s);
}

template <class T>
__device__ __forceinline__ void BwdBlock<T>::load_dout(const Step& s, int stage) const {
  load_rows(T::kdO + stage * T::kTileQ, p.dout, p.dout_stride, p.vec_dout, s);
}

// lse and delta of the step's rows. Rows past seqlen_q have values there that give probabilities of 0.
template <class T>
__device__ __forceinline__ void BwdBlock<T>::load_row_stats(const Step& s, int buf) const {
  constexpr int kChunks = kBlockM / 4;
  if (threadIdx.x < 2 * kChunks) {
    const int chunk = threadIdx.x % kChunks;
    const bool is_lse = threadIdx.x < kChunks;
    const float* src = (is_lse ? p.lse : p.delta) + row_stats(s);
    const uint32_t dst = smem_base + (is_lse ? T::kLse : T::kDelta) + buf * kBlockM * 4;
    cp_async16(dst + chunk * 16, src + chunk * 4, true);
  }
}

template <class T>
__device__ __forceinline__ void BwdBlock<T>::load_bias_and_mask(const Step& s) const {
  if constexpr (T::kGeneral && !T::kGathered) {
    if (p.bias.kind == BiasKind::kTile) {
      const int row0 = s.m * kBlockM;
      const ShiftedTile<kBlockN> tile = bias_tile(s);
      if (bias_is_shifted()) {
        tile.template load<kBlockM, T::kThreads>(smem_base + T::kP, seqlen_q() - row0, keys, threadIdx.x);
      } else {
        load_tile<kBlockM, kBlockN, T::kThreads>(smem_base + T::kdS, tile.src, p.bias.row_stride, seqlen_q() - row0,
                                                 keys, true, threadIdx.x, RowIdentity{});
      }
    }
    if (p.mask.bits != nullptr) {
      load_mask_words<kBlockM, T::kMaskWords, T::kThreads>(smem_base + T::kMask, p.mask, Base::mask_index(s.head),
                                                           first_row() + s.m * kBlockM, seqlen_q() - s.m * kBlockM,
                                                           n_block * T::kMaskWords);
    }
  }
}

// Whether rows of the bias do not start on 16 bytes. Then their tile is wider than that of dS, and lies over P and dS.
template <class T>
__device__ __forceinline__ bool BwdBlock<T>::bias_is_shifted() const {
  return T::kGeneral && !T::kGathered && p.bias.kind == BiasKind::kTile &&
         !(is_vec16(p.bias.ptr, p.bias.batch_stride, p.bias.head_stride, p.bias.row_stride) && p.seqlen_k % 8 == 0);
}

template <class T>
__device__ __forceinline__ bool BwdBlock<T>::has_score_tiles() const {
  return T::kGeneral && !T::kGathered && (p.bias.kind == BiasKind::kTile || p.mask.bits != nullptr);
}

template <class T>
__device__ __forceinline__ float BwdBlock<T>::fetch_key_bias(const Step& s) const {
  if (static_cast<int>(threadIdx.x) >= keys) return 0.f;
  const int64_t key = T::kGathered ? key_idx()[threadIdx.x] : key0 + static_cast<int>(threadIdx.x);
  constexpr bool kIsBf16 = std::is_same_v<Element, cutlass::bfloat16_t>;
  return load_bias(p.bias, Base::bias_base(s.head) + key * p.bias.col_stride, kIsBf16);
}

template <class T>
__device__ __forceinline__ float* BwdBlock<T>::key_bias(int buf) const {
  return reinterpret_cast<float*>(smem + T::kKeyBias) + buf * kBlockN;
}

}  // namespace dmattn
