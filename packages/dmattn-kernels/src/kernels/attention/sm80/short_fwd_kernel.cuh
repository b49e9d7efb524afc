// The forward over few keys: four warps of 16 rows each, which see all keys at once.
#pragma once

#include "../shared/softmax.cuh"
#include "short_block.cuh"

namespace dmattn {

template <class Element_, int kHeadDim_, Level kLevel>
struct ShortFwdTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_, kBlockM = kShortRows, kBlockN = kMostShortFwdKeys;
  static constexpr bool kGeneral = is_general(kLevel), kKeepsBias = kLevel == Level::kFull;
  static constexpr int kWarps = kBlockM / 16, kThreads = 32 * kWarps;
  static constexpr int NT = kBlockN / 8, OT = kHeadDim / 8;
  static constexpr int kMinBlocks = short_fwd_blocks_per_sm(kHeadDim, kLevel);

  static constexpr uint32_t kQ = 0;
  static constexpr uint32_t kK = kQ + kBlockM * kHeadDim * sizeof(Element);
  static constexpr uint32_t kV = kK + kBlockN * kHeadDim * sizeof(Element);
  static constexpr uint32_t kBias = kV + kBlockN * kHeadDim * sizeof(Element);  // float4 [NT][kThreads]
  static constexpr uint32_t kSmemBytes = kBias + (kKeepsBias ? NT * kThreads * sizeof(float4) : 0);
  static_assert(kSmemBytes <= static_cast<uint32_t>(smem_limit(TileSet::kNarrow)));
};

template <class T>
struct ShortFwdBlock {
  using Element = typename T::Element;
  static constexpr int kHeadDim = T::kHeadDim, NT = T::NT;
  using Scores = ShortScores<Element, NT>;
  using Kept = typename Scores::Kept;

  const ShortFwdParams& p;
  char* smem;
  uint32_t smem_base;
  int thread, warp, lane;
  int head, row0, slice;

  __device__ __forceinline__ ShortFwdBlock(const ShortFwdParams& params, char* smem_)
      : p(params), smem(smem_), smem_base(smem_u32(smem_)) {
    renew();
    WorkIndex work(blockIdx.x);
    head = work.take(static_cast<unsigned>(p.nheads));
    row0 = work.take(static_cast<unsigned>((p.seqlen_q + T::kBlockM - 1) / T::kBlockM)) * T::kBlockM;
    slice = static_cast<int>(work.rest);
  }

  __device__ __forceinline__ void renew() {
    thread = renewed_thread();
    warp = thread / 32;
    lane = thread & 31;
  }
  __device__ __forceinline__ Scores scores() const { return {p, FragmentMap(warp * 16, 0, lane), row0}; }
  // kFull: the bias of the thread's own scores, which no other thread reads.
  __device__ __forceinline__ float4& kept_bias(int nt) const {
    return reinterpret_cast<float4*>(smem + T::kBias)[nt * T::kThreads + thread];
  }

  template <int kRows>
  __device__ __forceinline__ void load(uint32_t tile, const Element* from, int64_t row_stride, int rows) const {
    load_tile<kRows, kHeadDim, T::kThreads>(smem_base + tile, from, row_stride, rows, p.head_dim, true, thread,
                                            RowIdentity{});
  }
  __device__ __forceinline__ void load_operands(int batch) const {
    const int head_k = head / p.head_ratio;
    load<T::kBlockM>(T::kQ, rows_at<Element>(p.q, p.q_stride, batch, head, row0), p.q_stride.row, p.seqlen_q - row0);
    load<T::kBlockN>(T::kK, rows_at<Element>(p.k, p.k_stride, batch, head_k, 0), p.k_stride.row, p.seqlen_k);
    cp_async_fence();
    load<T::kBlockN>(T::kV, rows_at<Element>(p.v, p.v_stride, batch, head_k, 0), p.v_stride.row, p.seqlen_k);
    cp_async_fence();
  }

  __device__ __forceinline__ void modify(float (&acc_s)[1][NT][4], const Kept& kept, int batch) const {
    const Scores own = scores();
    if constexpr (T::kGeneral) {
      scale_scores(acc_s, p.softmax_scale, 0.f);
      if constexpr (T::kKeepsBias) {
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) Scores::add(acc_s, nt, kept_bias(nt));
      } else if (p.bias.kind != BiasKind::kNone) {
        own.for_each_bias(batch, head, [&](int nt, const float4& bias) { Scores::add(acc_s, nt, bias); });
      }
      if (p.mask.ptr != nullptr) Scores::apply_mask(acc_s, kept);
    }
    if (own.has_limits(T::kBlockN)) own.apply_limits(acc_s);
  }

  __device__ __forceinline__ void clear_hidden(uint32_t tile, int batch) const {
    if constexpr (T::kGeneral) {
      if (!hides_keys(p)) return;
      clear_hidden_keys<kHeadDim, T::kThreads>(smem_base + tile, mask_of(p, batch, head), p.mask.col_stride, p.seqlen_k,
                                               thread);
      __syncthreads();
    }
  }

  __device__ __forceinline__ void attend(int batch) const {
    load_operands(batch);
    Kept kept = {};
    if constexpr (T::kGeneral) {
      if (p.mask.ptr != nullptr) kept = scores().load_mask(batch, head, lane);
    }
    float acc_s[1][NT][4], acc_o[1][T::OT][4];
    clear(acc_s);
    cp_async_wait<1>();
    __syncthreads();
    clear_hidden(T::kK, batch);
    gemm_ss<Element, kHeadDim / 16>(acc_s, Operand<kHeadDim, true, false>(smem_base + T::kQ, warp * 16, lane),
                                    Operand<kHeadDim, false, false>(smem_base + T::kK, 0, lane));
    modify(acc_s, kept, batch);
    OnlineSoftmax<1> softmax;
#pragma unroll
    for (int r = 0; r < 2; ++r) softmax.template step_row<!T::kGeneral>(r, acc_s, p.softmax_scale * kLog2e);
    cp_async_wait<0>();
    __syncthreads();
    clear_hidden(T::kV, batch);
    clear(acc_o);
    gemm_pv<Element>(acc_o, acc_s, Operand<kHeadDim, false, true>(smem_base + T::kV, 0, lane));
    store(acc_o, softmax, batch);
  }

  __device__ __forceinline__ void store(float (&acc_o)[1][T::OT][4], OnlineSoftmax<1>& softmax, int batch) const {
    const int warp_row0 = row0 + warp * 16;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float lse, rest;
      const float inv_sum = softmax.finish(r, T::kGeneral ? 1.f : p.softmax_scale, lse, rest);
#pragma unroll
      for (int ot = 0; ot < T::OT; ++ot) {
        acc_o[0][ot][2 * r] *= inv_sum;
        acc_o[0][ot][2 * r + 1] *= inv_sum;
      }
      const int row = warp_row0 + r * 8 + lane / 4;
      if ((lane & 3) == 0 && row < p.seqlen_q) {
        const int64_t i = row_at(p.lse_stride, batch, head, row);
        p.lse[i] = lse;
        if (p.lse_rest != nullptr) p.lse_rest[i] = rest;
      }
    }
    store_rows(rows_at<Element>(p.out, p.out_stride, batch, head, warp_row0), p.out_stride.row, acc_o, 0,
               p.seqlen_q - warp_row0, p.head_dim, lane);
  }

  __device__ __forceinline__ void run() {
    if constexpr (!T::kKeepsBias) {
      attend(slice);
      return;
    }
    scores().for_each_bias(0, head, [&](int nt, const float4& bias) { kept_bias(nt) = bias; });
    for (int batch = slice; batch < p.batch; batch += p.batch_slices) {
      renew();
      attend(batch);
      __syncthreads();  // Q, K and V are no longer read
    }
  }
};

template <class T>
__global__ void __launch_bounds__(T::kThreads, T::kMinBlocks)
    short_fwd_kernel(const __grid_constant__ ShortFwdParams p) {
  extern __shared__ __align__(1024) char smem[];
  ShortFwdBlock<T>(p, smem).run();
}

}  // namespace dmattn
