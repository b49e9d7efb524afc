// The backward's gradient of the bias: column sums for a bias of keys, and entries from registers or shared memory.
#pragma once

#include "bwd_block.cuh"

namespace dmattn {

template <class T>
__device__ __forceinline__ void BwdBlock<T>::add_column_sums(float (&sums)[T::NTs][2], const Scores& ds) const {
#pragma unroll
  for (int nt = 0; nt < T::NTs; ++nt)
#pragma unroll
    for (int mt = 0; mt < T::MTs; ++mt)
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[nt][e & 1] += ds[mt][nt][e];
}

// Adds the head's column sums over the rows of this thread block to dbias_cols. Sums of different warps meet in P's
// tile, which is free here, and are added in a fixed order.
template <class T>
__device__ __forceinline__ void BwdBlock<T>::flush_column_sums(float (&sums)[T::NTs][2], int head,
                                                               const FragmentMap& map) const {
  float* scratch = reinterpret_cast<float*>(smem + T::kP);  // [kWarpsMSdP][kBlockN]
  if (takes_turns_dkv()) wait_for_turn_dkv();
  __syncthreads();
#pragma unroll
  for (int nt = 0; nt < T::NTs; ++nt)
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float x = sums[nt][c];
      x += __shfl_xor_sync(0xffffffffu, x, 4);
      x += __shfl_xor_sync(0xffffffffu, x, 8);
      x += __shfl_xor_sync(0xffffffffu, x, 16);
      if (lane < 4) scratch[(warp % T::kWarpsMSdP) * kBlockN + map.col(nt, c)] = x;
      sums[nt][c] = 0.f;
    }
  __syncthreads();
  if (static_cast<int>(threadIdx.x) < keys) {
    float x = 0.f;
#pragma unroll
    for (int w = 0; w < T::kWarpsMSdP; ++w) x += scratch[w * kBlockN + threadIdx.x];
    const int64_t key = T::kGathered ? key_idx()[threadIdx.x] : key0 + static_cast<int>(threadIdx.x);
    // If deterministic, no other thread block adds to the entry at this time; otherwise the splits of a head may.
    atomicAdd(p.dbias_cols + key_row(p.nheads, head, key), x);
  }
}

template <class T>
__device__ __forceinline__ int64_t BwdBlock<T>::dbias_base(const Step& s) const {
  return batch * p.dbias_batch_stride + (s.head / p.bias.head_ratio) * p.dbias_head_stride +
         first_row() * p.dbias_row_stride - (T::kGathered ? keys_before() : 0);
}

// Stores or adds the tile's entries of dbias from registers, in 16 bits or fp32, at any alignment.
template <class T>
__device__ __forceinline__ void BwdBlock<T>::store_dbias(const Scores& ds, const Step& s,
                                                         const FragmentMap& map) const {
  const bool is_f32 = p.bias.dtype == Dtype::kFloat32;
#pragma unroll
  for (int mt = 0; mt < T::MTs; ++mt)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = s.m * kBlockM + map.row(mt, 2 * half);
      if (row >= seqlen_q()) continue;
      const int64_t row_base = dbias_base(s) + row * p.dbias_row_stride;
#pragma unroll
      for (int nt = 0; nt < T::NTs; ++nt) {
        const uint32_t pair = ElementTraits<Element>::pack(ds[mt][nt][2 * half], ds[mt][nt][2 * half + 1]);
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int col = map.col(nt, c);
          if (col >= keys) continue;
          const int64_t key = T::kGathered ? key_idx()[col] : key0 + col;
          if (p.dbias_kind == DbiasKind::kAccum) {
            atomicAdd(static_cast<float*>(p.dbias) + row_base + key, ds[mt][nt][2 * half + c]);
          } else if (is_f32) {
            static_cast<float*>(p.dbias)[row_base + key] = ds[mt][nt][2 * half + c];
          } else {
            static_cast<uint16_t*>(p.dbias)[row_base + key] = static_cast<uint16_t>(pair >> (16 * c));
          }
        }
      }
    }
}

// Whether the tile's dbias is dS itself, in 16 bits, which copy_dbias() copies from shared memory.
template <class T>
__device__ __forceinline__ bool BwdBlock<T>::dbias_from_smem() const {
  return T::kGeneral && !T::kFull && !T::kGathered && p.dbias_kind == DbiasKind::kTile;
}

template <class T>
__device__ __forceinline__ void BwdBlock<T>::copy_dbias(const Step& s) const {
  Element* dst =
      static_cast<Element*>(p.dbias) + dbias_base(s) + static_cast<int64_t>(s.m) * kBlockM * p.dbias_row_stride + key0;
  store_tile<kBlockM, kBlockN, T::kThreads>(
      dst, smem_base + T::kdS, p.dbias_row_stride, seqlen_q() - s.m * kBlockM, keys,
      is_vec16(p.dbias, p.dbias_batch_stride, p.dbias_head_stride, p.dbias_row_stride) && keys % 8 == 0, threadIdx.x,
      RowIdentity{});
}

}  // namespace dmattn
