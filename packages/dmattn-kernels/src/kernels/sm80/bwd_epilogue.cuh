// The backward's epilogue: dk and dv leave the registers.
#pragma once

#include "bwd_block.cuh"

namespace dmattn {

template <class T>
__device__ __forceinline__ void BwdBlock<T>::store_dkv(AccKV& acc_dk, AccKV& acc_dv) const {
  if constexpr (T::kGeneral) {
#pragma unroll
    for (int mt = 0; mt < T::MTkv; ++mt)
#pragma unroll
      for (int nt = 0; nt < T::NTkv; ++nt)
#pragma unroll
        for (int e = 0; e < 4; ++e) acc_dk[mt][nt][e] *= p.softmax_scale;
  }
  cp_async_wait<0>();
  __syncthreads();
  if (takes_turns_dkv()) wait_for_turn_dkv();
  store_one(acc_dk, p.dk, p.dk_stride, p.vec_dk, p.dk_slots, p.dk_accum, T::kK);
  store_one(acc_dv, p.dv, p.dv_stride, p.vec_dv, p.dv_slots, p.dv_accum, T::kV);
  if (takes_turns_dkv()) pass_turn_dkv();
}

template <class T>
__device__ __forceinline__ void BwdBlock<T>::store_one(const AccKV& acc, void* out, const Strides3& stride, bool vec,
                                                       float* slots, float* accum, uint32_t tile) const {
  const int row0 = (warp % T::kWarpsNdKV) * 16 * T::MTkv, col0 = (warp / T::kWarpsNdKV) * 8 * T::NTkv;
  if (accum != nullptr || (num_splits > 1 && slots != nullptr)) {
    const FragmentMap map(row0, col0, lane);
#pragma unroll
    for (int mt = 0; mt < T::MTkv; ++mt)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = map.row(mt, 2 * half);
        if (row >= keys) continue;
        store_fp32_row(acc[mt], half, row, map, slots, accum);
      }
  } else if (out != nullptr) {
    store_acc<Element, kHeadDim>(smem_base + tile, acc, row0, col0, lane);
    __syncthreads();
    Element* dst = static_cast<Element*>(out) + batch * stride.batch + head_k * stride.head + first_key() * stride.row;
    if constexpr (T::kGathered) {
      if (first.left <= 0) load_key_idx();  // the prologue, which loads the indices, was skipped
      store_tile<kBlockN, kHeadDim, T::kThreads>(dst, smem_base + tile, stride.row, keys, p.head_dim, vec, threadIdx.x,
                                                 RowGather{key_idx()});
    } else {
      store_tile<kBlockN, kHeadDim, T::kThreads>(dst + key0 * stride.row, smem_base + tile, stride.row, keys,
                                                 p.head_dim, vec, threadIdx.x, RowIdentity{});
    }
  }
}

template <class T>
__device__ __forceinline__ void BwdBlock<T>::store_fp32_row(const float (&acc)[T::NTkv][4], int half, int row,
                                                            const FragmentMap& map, float* slots, float* accum) const {
  float* dst;
  if (accum != nullptr) {
    const int64_t key = T::kGathered ? __ldg(list + key0 + row) : key0 + row;
    dst = accum + key_row(p.nheads_k, head_k, key) * p.head_dim;
  } else {
    dst = slots + (static_cast<int64_t>(p.deterministic ? slot : slot / num_splits) * kBlockN + row) * kHeadDim;
  }
#pragma unroll
  for (int nt = 0; nt < T::NTkv; ++nt) {
    const int col = map.col(nt, 0);
    float2 x = {acc[nt][2 * half], acc[nt][2 * half + 1]};
    if (accum != nullptr && col >= p.head_dim) continue;
    if (accum != nullptr ? has_intervals() : !p.deterministic) {
      atomicAdd(dst + col, x.x);
      atomicAdd(dst + col + 1, x.y);
      continue;
    }
    if (accum != nullptr) {
      // Launches for the heads of a group follow one another and a key belongs to one block of each.
      const float2 old = *reinterpret_cast<const float2*>(dst + col);
      x.x += old.x;
      x.y += old.y;
    }
    *reinterpret_cast<float2*>(dst + col) = x;
  }
}

}  // namespace dmattn
