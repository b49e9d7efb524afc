// The backward's epilogue: scales dk and dv, and writes them to global memory.
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
    // If deterministic, thread blocks that share a tile have a slot each or, over interval lists, add in turns.
    // Splits of tiles of neighbouring keys always use slots.
    const bool shares_rows = has_intervals() || (T::kGathered && num_splits > 1);
    if (accum != nullptr ? shares_rows : !p.deterministic) {
      add_fp32_rows(acc, row0, col0, slots, accum);
    } else {
      store_fp32_rows(acc, FragmentMap(row0, col0, lane), slots, accum);
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

// Where row `row` of the tile lies in the fp32 sums.
template <class T>
__device__ __forceinline__ float* BwdBlock<T>::fp32_row(int row, float* slots, float* accum) const {
  if (accum == nullptr) {
    return slots + (static_cast<int64_t>(p.deterministic ? slot : slot / num_splits) * kBlockN + row) * kHeadDim;
  }
  const int64_t key = T::kGathered ? read_position(row) : key0 + row;
  return accum + key_row(p.nheads_k, head_k, key) * p.head_dim;
}

// Adds the sums by atomics. Lanes exchange halves first, so that each instruction adds to whole 32-byte sectors: one
// to all eight columns of rows 0 to 3 of a fragment's half, the next one to rows 4 to 7.
template <class T>
__device__ __forceinline__ void BwdBlock<T>::add_fp32_rows(const AccKV& acc, int row0, int col0, float* slots,
                                                           float* accum) const {
  const bool is_upper = (lane & 16) != 0;
  const int width = accum != nullptr ? p.head_dim : kHeadDim;
#pragma unroll
  for (int mt = 0; mt < T::MTkv; ++mt)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row0 + 16 * mt + 8 * half + (lane / 4 & 3), col = col0 + 2 * (lane & 3) + (is_upper ? 1 : 0);
      float* const first = row < keys ? fp32_row(row, slots, accum) + col : nullptr;
      float* const second = row + 4 < keys ? fp32_row(row + 4, slots, accum) + col : nullptr;
#pragma unroll
      for (int nt = 0; nt < T::NTkv; ++nt) {
        const float x = acc[mt][nt][2 * half], y = acc[mt][nt][2 * half + 1];
        const float other = __shfl_xor_sync(0xffffffffu, is_upper ? x : y, 16);
        if (col0 + 8 * nt >= width) continue;
        if (first != nullptr) atomicAdd(first + 8 * nt, is_upper ? other : x);
        if (second != nullptr) atomicAdd(second + 8 * nt, is_upper ? y : other);
      }
    }
}

// For rows to which no other thread block of the launch adds: those of a slot of its own, or sums to which the
// launches for the heads of a group add one after the other.
template <class T>
__device__ __forceinline__ void BwdBlock<T>::store_fp32_rows(const AccKV& acc, const FragmentMap& map, float* slots,
                                                             float* accum) const {
#pragma unroll
  for (int mt = 0; mt < T::MTkv; ++mt)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = map.row(mt, 2 * half);
      if (row >= keys) continue;
      float* const dst = fp32_row(row, slots, accum);
#pragma unroll
      for (int nt = 0; nt < T::NTkv; ++nt) {
        const int col = map.col(nt, 0);
        float2 x = {acc[mt][nt][2 * half], acc[mt][nt][2 * half + 1]};
        if (accum != nullptr) {
          if (col >= p.head_dim) continue;
          const float2 old = *reinterpret_cast<const float2*>(dst + col);
          x.x += old.x;
          x.y += old.y;
        }
        *reinterpret_cast<float2*>(dst + col) = x;
      }
    }
}

}  // namespace dmattn
