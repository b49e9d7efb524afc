// Backward attention for sm80 and later: the loop over query rows, and the kernel.
#pragma once

#include "bwd_block.cuh"
#include "bwd_dbias.cuh"
#include "bwd_epilogue.cuh"
#include "bwd_loads.cuh"

namespace dmattn {

template <class T>
__device__ __forceinline__ void BwdBlock<T>::add_dq(const float (&acc)[T::MTq][T::NTq][4], const Step& s) const {
  float* dst = p.dq_accum + dq_block(s) * (kBlockM * kHeadDim) + threadIdx.x;
  const float scale = T::kGeneral ? p.softmax_scale : 1.f;
  if (T::kGeneral && p.dq_semaphore != nullptr) wait_for_turn(s);
#pragma unroll
  for (int mt = 0; mt < T::MTq; ++mt)
#pragma unroll
    for (int nt = 0; nt < T::NTq; ++nt)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        atomicAdd(dst + ((mt * T::NTq + nt) * 4 + e) * T::kThreads, acc[mt][nt][e] * scale);
      }
  if (T::kGeneral && p.dq_semaphore != nullptr) pass_turn(s);
}

template <class T>
__device__ __forceinline__ void BwdBlock<T>::run() {
  if (!active) {
    if (takes_turns_dkv()) {
      wait_for_turn_dkv();
      pass_turn_dkv();
    }
    return;
  }
  float acc_dk[T::MTkv][T::NTkv][4], acc_dv[T::MTkv][T::NTkv][4];
  clear(acc_dk);
  clear(acc_dv);
  if (first.left > 0) loop(acc_dk, acc_dv);
  store_dkv(acc_dk, acc_dv);
}

template <class T>
__device__ __forceinline__ int BwdBlock<T>::load_key_idx() const {
  int idx = 0;
  if (threadIdx.x < kBlockN) {
    idx = read_position(threadIdx.x);
    key_idx()[threadIdx.x] = idx;
  }
  __syncthreads();
  return idx;
}

template <class T>
__device__ __forceinline__ void BwdBlock<T>::load_interval(int idx) const {
  if (!has_intervals() || threadIdx.x >= kBlockN) return;
  const bool exists = static_cast<int>(threadIdx.x) < keys;
  const int length = exists ? __ldg(p.keys.end + list_index() * p.seqlen_k + idx) - idx : 0;
  reinterpret_cast<KeyInterval*>(smem + T::kInterval)[threadIdx.x] = {idx, length};
}

template <class T>
__device__ __forceinline__ void BwdBlock<T>::prologue(const Step& s) const {
  // A thread block over an interval list has few steps, so its first loads are issued as early as possible: those of
  // rows before the list is read, and those of K and V before the intervals are.
  load_q(s, 0);
  load_dout(s, 0);
  load_row_stats(s, 0);
  int idx = 0;
  if constexpr (T::kGathered) idx = load_key_idx();
  load_kv(T::kK, p.k, p.k_stride, p.vec_k);
  load_kv(T::kV, p.v, p.v_stride, p.vec_v);
  cp_async_fence();
  if constexpr (T::kGathered) load_interval(idx);
  load_bias_and_mask(s);
  cp_async_fence();
  if (has_key_bias() && threadIdx.x < kBlockN) key_bias(0)[threadIdx.x] = fetch_key_bias(s);
}

template <class T>
__device__ __forceinline__ void BwdBlock<T>::loop(float (&acc_dk)[T::MTkv][T::NTkv][4],
                                                  float (&acc_dv)[T::MTkv][T::NTkv][4]) {
  const int row_s = (warp % T::kWarpsMSdP) * 16 * T::MTs, col_s = (warp / T::kWarpsMSdP) * 8 * T::NTs;
  const int key_kv = (warp % T::kWarpsNdKV) * 16 * T::MTkv, dim_kv = (warp / T::kWarpsNdKV) * 8 * T::NTkv;
  const int row_q = (warp % T::kWarpsMdQ) * 16 * T::MTq, dim_q = (warp / T::kWarpsMdQ) * 8 * T::NTq;
  const FragmentMap map(row_s, col_s, lane);
  // S = Q K^T, dP = dO V^T
  const Operand<kHeadDim, true, false> q_rows(smem_base + T::kQ, row_s, lane), do_rows(smem_base + T::kdO, row_s, lane);
  const Operand<kHeadDim, false, false> k_rows(smem_base + T::kK, col_s, lane), v_rows(smem_base + T::kV, col_s, lane);
  // dV = P^T dO, dK = dS^T Q
  const Operand<kBlockN, true, true> p_cols(smem_base + T::kP, key_kv, lane), ds_cols(smem_base + T::kdS, key_kv, lane);
  const Operand<kHeadDim, false, true> do_cols(smem_base + T::kdO, dim_kv, lane),
      q_cols(smem_base + T::kQ, dim_kv, lane);
  // dQ = dS K
  const Operand<kBlockN, true, false> ds_rows(smem_base + T::kdS, row_q, lane);
  const Operand<kHeadDim, false, true> k_cols(smem_base + T::kK, dim_q, lane);

  float column_sums[T::NTs][2];
#pragma unroll
  for (int nt = 0; nt < T::NTs; ++nt) column_sums[nt][0] = column_sums[nt][1] = 0.f;

  Step step = first;
  prologue(step);
  int buf = 0;
  while (step.left > 0) {
    // The copies committed last are this step's bias and mask, which are needed only after the two products below.
    cp_async_wait<1>();
    __syncthreads();  // Q, dO of this step have landed; the last step's reads of P, dS and the other stages are over
    const Step following = skip_empty(next(step));
    const bool more = following.left > 0;
    if (more) {
      if constexpr (T::kStagesQ == 2) load_q(following, buf ^ 1);
      if constexpr (T::kStagesdO == 2) load_dout(following, buf ^ 1);
      load_row_stats(following, buf ^ 1);
    }
    cp_async_fence();
    float bias_next = 0.f;
    if (more && has_key_bias()) bias_next = fetch_key_bias(following);
    const uint32_t q_offset = T::kStagesQ == 2 ? buf * T::kTileQ : 0;
    const uint32_t do_offset = T::kStagesdO == 2 ? buf * T::kTileQ : 0;

    Scores s, dp;
    clear(s);
    gemm_ss<Element, kHeadDim / 16>(s, q_rows, k_rows, q_offset, 0);
    clear(dp);
    gemm_ss<Element, kHeadDim / 16>(dp, do_rows, v_rows, do_offset, 0);
    if (has_score_tiles()) {
      cp_async_wait<1>();
      __syncthreads();
    }
    middle(s, dp, step, buf, map, column_sums);
    __syncthreads();  // P and dS are complete

    if (wants_dv()) gemm_ss<Element, kBlockM / 16>(acc_dv, p_cols, do_cols, 0, do_offset);
    if (dbias_from_smem()) copy_dbias(step);
    if constexpr (T::kStagesdO == 1) {
      __syncthreads();  // dO is free
      if (more) load_dout(following, 0);
      cp_async_fence();
    }
    if (wants_dq()) {
      float acc_dq[T::MTq][T::NTq][4];
      clear(acc_dq);
      gemm_ss<Element, kBlockN / 16>(acc_dq, ds_rows, k_cols);
      add_dq(acc_dq, step);
    }
    if (wants_dk()) gemm_ss<Element, kBlockM / 16>(acc_dk, ds_cols, q_cols, 0, q_offset);
    if (T::kGeneral && p.dbias_kind == DbiasKind::kKey && (!more || following.head != step.head)) {
      flush_column_sums(column_sums, step.head, map);
    }
    if constexpr (T::kStagesQ == 1) {
      __syncthreads();  // Q is free
      if (more) load_q(following, 0);
      cp_async_fence();
    }
    if (has_score_tiles()) {
      if constexpr (T::kStagesQ == 2) __syncthreads();  // dS is free
      if (more) load_bias_and_mask(following);
    }
    cp_async_fence();
    if (has_key_bias() && threadIdx.x < kBlockN) key_bias(buf ^ 1)[threadIdx.x] = bias_next;
    step = following;
    buf ^= 1;
  }
}

template <class T>
__device__ __forceinline__ bool BwdBlock<T>::wants_dk() const {
  return !T::kGeneral || p.dk != nullptr || p.dk_slots != nullptr || p.dk_accum != nullptr;
}

template <class T>
__device__ __forceinline__ bool BwdBlock<T>::wants_dv() const {
  return !T::kGeneral || p.dv != nullptr || p.dv_slots != nullptr || p.dv_accum != nullptr;
}

// From the two raw products to P and dS in shared memory. dbias is taken before the derivative of softcap is applied.
template <class T>
__device__ __forceinline__ void BwdBlock<T>::middle(Scores& s, Scores& dp, const Step& step, int buf,
                                                    const FragmentMap& map, float (&column_sums)[T::NTs][2]) {
  if (T::kFull && p.softcap > 0.f) {
    // The derivative of softcap needs the raw products, which the probabilities overwrite, so a copy of them is kept.
    // P is stored before the derivative is computed.
    Scores raw;
    copy(raw, s);
    probabilities(s, step, buf, map);
    logit_gradients(dp, s, buf, map);
    store_acc<Element, kBlockN>(smem_base + T::kP, s, map_row0(), map_col0(), lane);
    take_dbias(dp, step, map, column_sums);
    softcap_gradient(raw);
    multiply(dp, raw);
  } else {
    probabilities(s, step, buf, map);
    store_acc<Element, kBlockN>(smem_base + T::kP, s, map_row0(), map_col0(), lane);
    logit_gradients(dp, s, buf, map);
    take_dbias(dp, step, map, column_sums);
  }
  store_acc<Element, kBlockN>(smem_base + T::kdS, dp, map_row0(), map_col0(), lane);
}

template <class T>
__device__ __forceinline__ void BwdBlock<T>::take_dbias(const Scores& ds, const Step& step, const FragmentMap& map,
                                                        float (&column_sums)[T::NTs][2]) const {
  if constexpr (T::kGeneral) {
    if (p.dbias_kind == DbiasKind::kKey) {
      add_column_sums(column_sums, ds);
    } else if (T::kFull && p.dbias_kind != DbiasKind::kNone) {
      store_dbias(ds, step, map);
    }
  }
}

template <class T>
__device__ __forceinline__ void BwdBlock<T>::copy(Scores& dst, const Scores& src) {
#pragma unroll
  for (int mt = 0; mt < T::MTs; ++mt)
#pragma unroll
    for (int nt = 0; nt < T::NTs; ++nt)
#pragma unroll
      for (int e = 0; e < 4; ++e) dst[mt][nt][e] = src[mt][nt][e];
}

template <class T>
__device__ __forceinline__ void BwdBlock<T>::multiply(Scores& dst, const Scores& factor) {
#pragma unroll
  for (int mt = 0; mt < T::MTs; ++mt)
#pragma unroll
    for (int nt = 0; nt < T::NTs; ++nt)
#pragma unroll
      for (int e = 0; e < 4; ++e) dst[mt][nt][e] *= factor[mt][nt][e];
}

template <class T, int kTileSetBits>
__global__ void __launch_bounds__(T::kThreads, 1) bwd_kernel(const __grid_constant__ BwdParams p) {
  if constexpr (is_compiled_here<kTileSetBits>()) {
    extern __shared__ __align__(1024) char smem[];
    BwdBlock<T>(p, smem).run();
  } else {
    __trap();  // the host asked for another tile set
  }
}

}  // namespace dmattn
