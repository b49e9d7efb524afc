// The backward over few keys, in one launch: a block sees all keys of a kv head, so that dq of a tile is complete at once
// and dk and dv stay in registers. Nothing is added up in memory but the gradient of a shared bias.
//
// Each warp has 16 rows and 64 keys of the scores, and then 16 keys of dk and dv, and rows of dq; probabilities and their
// gradients go from one to the other through shared memory, rounded.
#pragma once

#include "short_block.cuh"

namespace dmattn {

// kSingle: a kv head has one query head of one tile, so that dk and dv need no registers beside the scores().
template <class Element_, int kHeadDim_, int kBlockN_, Level kLevel, bool kSingle_>
struct ShortBwdTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_, kBlockM = kShortRows, kBlockN = kBlockN_;
  static constexpr bool kGeneral = is_general(kLevel), kSingle = kSingle_;
  static constexpr int kWarpsN = kBlockN / 64, kWarps = 4 * kWarpsN, kThreads = 32 * kWarps;
  // Fragments of a warp: scores, dk and dv, dq.
  static constexpr int NT = 8, NTkv = kHeadDim / 8, NTq = kHeadDim / (8 * kWarpsN);
  using Scores = ShortScores<Element, NT, kThreads>;
  // A bias that batches share has a place only beside 64 keys.
  static constexpr bool kKeepsBias = kGeneral && kBlockN == 64;
  // The blocks of an SM hide each other's loads.
  static constexpr int kMinBlocks = kBlockN == 128  ? (kHeadDim == 32 && !kGeneral ? 2 : 1)
                                    : kSingle       ? (kGeneral ? 3 : 4)
                                    : kHeadDim < 64 ? (kGeneral ? 3 : 4)
                                                    : (kGeneral ? 2 : 3);

  static constexpr uint32_t kRowsBytes = kBlockM * kHeadDim * sizeof(Element),
                            kKeysBytes = kBlockN * kHeadDim * sizeof(Element),
                            kScoresBytes = kBlockM * kBlockN * sizeof(Element);
  static constexpr uint32_t kQ = 0;
  static constexpr uint32_t kdO = kQ + kRowsBytes;
  static constexpr uint32_t kK = kdO + kRowsBytes;
  static constexpr uint32_t kV = kK + kKeysBytes;
  static constexpr uint32_t kP = kV + kKeysBytes;
  static constexpr uint32_t kdS = kP + kScoresBytes;
  static constexpr uint32_t kStats = kdS + kScoresBytes;  // RowStats [kBlockM]
  static constexpr uint32_t kBias = kStats + kBlockM * 16;
  static constexpr uint32_t kSmemBytes = kBias + (kKeepsBias ? Scores::kStageBytes : 0);
  static_assert(kSmemBytes <= static_cast<uint32_t>(smem_limit(TileSet::kNarrow)));
};

// Of a row: its log-sum-exp (+inf where it keeps nothing, so that its probabilities are 0), what rounding dropped from that,
// and rowsum(out * dout) - dlse.
struct alignas(16) ShortRowStats {
  float lse, rest, delta;
};

template <class T>
struct ShortBwdBlock {
  using Element = typename T::Element;
  static constexpr int kHeadDim = T::kHeadDim, NT = T::NT, kBlockM = T::kBlockM, kBlockN = T::kBlockN;
  using Fragments = float[1][NT][4];
  using AccKV = float[1][T::NTkv][4];

  const ShortBwdParams& p;
  char* smem;
  uint32_t smem_base;
  int thread, warp, lane;
  int head_k, slice;
  bool shares_bias;

  __device__ __forceinline__ ShortBwdBlock(const ShortBwdParams& params, char* smem_)
      : p(params), smem(smem_), smem_base(smem_u32(smem_)) {
    renew();
    WorkIndex work(blockIdx.x);
    head_k = work.take(static_cast<unsigned>(p.nheads_k));
    slice = static_cast<int>(work.rest);
  }

  __device__ __forceinline__ void renew() {
    thread = renewed_thread();
    warp = thread / 32;
    lane = thread & 31;
  }
  __device__ __forceinline__ typename T::Scores scores() const { return {p, warp % 4 * 16, warp / 4 * 64, thread}; }

  __device__ __forceinline__ float4* bias_stage() const { return reinterpret_cast<float4*>(smem + T::kBias); }
  __device__ __forceinline__ ShortRowStats* stats() const { return reinterpret_cast<ShortRowStats*>(smem + T::kStats); }
  // Whether sums of dbias go on from batch to batch, in registers.
  __device__ __forceinline__ bool carries_dbias() const {
    return T::kGeneral && T::kSingle && p.dbias_kind == DbiasKind::kAccum && p.dbias_batch_stride == 0;
  }

  // --- loads ---------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void load_keys(uint32_t tile, const void* base, const Strides3& s, int batch) const {
    load_tile<kBlockN, kHeadDim, T::kThreads>(smem_base + tile, rows_at<Element>(base, s, batch, head_k, 0), s.row,
                                              p.seqlen_k, p.head_dim, true, thread, RowIdentity{});
  }
  __device__ __forceinline__ void load_rows(uint32_t tile, const void* base, const Strides3& s, int batch, int head,
                                            int row0) const {
    load_tile<kBlockM, kHeadDim, T::kThreads>(smem_base + tile, rows_at<Element>(base, s, batch, head, row0), s.row,
                                              p.seqlen_q - row0, p.head_dim, true, thread, RowIdentity{});
  }

  // The rows of `out` that a thread has a part of, on their way while the copies to shared memory are, and what becomes of
  // them.
  static constexpr int kChunks = kHeadDim / 8, kRowsPerPass = T::kThreads / kChunks, kPasses = kBlockM / kRowsPerPass;
  struct OutRows {
    uint4 chunk[kPasses];
    float lse[kPasses], rest[kPasses], dlse[kPasses];
  };
  __device__ __forceinline__ void load_out(OutRows& out, int batch, int head, int row0) const {
    const int chunk = thread % kChunks;
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int row = row0 + i * kRowsPerPass + thread / kChunks;
      out.chunk[i] = make_uint4(0, 0, 0, 0);
      out.lse[i] = -INFINITY;
      out.rest[i] = out.dlse[i] = 0.f;
      if (row >= p.seqlen_q) continue;
      if (chunk * 8 < p.head_dim) {
        out.chunk[i] =
            __ldg(reinterpret_cast<const uint4*>(rows_at<Element>(p.out, p.out_stride, batch, head, row)) + chunk);
      }
      if (chunk == 0) {
        const int64_t at = row_at(p.lse_stride, batch, head, row);
        out.lse[i] = __ldg(p.lse + at);
        // Rounding drops less than 2^-11 below 2^14, no more than fp16 resolves.
        if (p.lse_rest != nullptr) out.rest[i] = __ldg(p.lse_rest + at);
        if (p.dlse != nullptr) out.dlse[i] = __ldg(p.dlse + row_at(p.dlse_stride, batch, head, row));
      }
    }
  }
  __device__ __forceinline__ void find_stats(const OutRows& out) const {
    using Traits = ElementTraits<Element>;
    const int chunk = thread % kChunks;
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int row = i * kRowsPerPass + thread / kChunks;
      const uint4 dout = ld_shared_v4(smem_base + T::kdO + SmemTile<kHeadDim>::offset(row, chunk));
      const uint32_t a[4] = {out.chunk[i].x, out.chunk[i].y, out.chunk[i].z, out.chunk[i].w};
      const uint32_t b[4] = {dout.x, dout.y, dout.z, dout.w};
      float sum = 0.f;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 x = Traits::unpack(a[j]), y = Traits::unpack(b[j]);
        sum = fmaf(x.x, y.x, fmaf(x.y, y.y, sum));
      }
#pragma unroll
      for (int mask = 1; mask < kChunks; mask *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
      if (chunk == 0) {
        const bool keeps_nothing = out.lse[i] == -INFINITY;
        stats()[row] = {keeps_nothing ? INFINITY : out.lse[i], out.rest[i], keeps_nothing ? 0.f : sum - out.dlse[i]};
      }
    }
  }

  // --- one tile ------------------------------------------------------------------------------------------------------

  // s: raw products -> probabilities. dp -> gradients of the logits.
  __device__ __forceinline__ void differentiate(Fragments& s, Fragments& dp) const {
    const float scale_log2 = p.softmax_scale * kLog2e;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const ShortRowStats row = stats()[scores().map.row(0, 2 * half)];
      const float lse_log2 = row.lse * kLog2e, rest_log2 = row.rest * kLog2e;
#pragma unroll
      for (int nt = 0; nt < NT; ++nt)
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
          // Logits with a bias may be huge: the difference is taken first.
          s[0][nt][e] = T::kGeneral ? exp2_approx(__fmaf_rn(s[0][nt][e] - row.lse, kLog2e, -rest_log2))
                                    : exp2_approx(__fmaf_rn(s[0][nt][e], scale_log2, -lse_log2));
          dp[0][nt][e] = s[0][nt][e] * (dp[0][nt][e] - row.delta);
        }
    }
  }

  __device__ __forceinline__ void modify(Fragments& s, const KeptScores<NT>& kept, int batch, int head,
                                         int row0) const {
    if constexpr (T::kGeneral) {
      scale_scores(s, p.softmax_scale, 0.f);
      if (shares_bias) {
        scores().add_kept_bias(s, bias_stage());
      } else if (p.bias.kind != BiasKind::kNone) {
        float bias[NT][4];
        scores().load_bias_tile(bias, batch, head, row0);
        T::Scores::add(s, bias);
      }
    }
    if (!kept.has_all()) kept.apply(s);
  }

  // Adds a tile's share to dk and dv, and leaves its dq in dq.
  __device__ __forceinline__ void multiply(AccKV& dk, AccKV& dv, float (&dq)[1][T::NTq][4]) const {
    const int key0 = warp * 16;
    const Operand<kBlockN, true, true> p_t(smem_base + T::kP, key0, lane), ds_t(smem_base + T::kdS, key0, lane);
    gemm_ss<Element, kBlockM / 16>(dv, p_t, Operand<kHeadDim, false, true>(smem_base + T::kdO, 0, lane));
    // V was last read before P and dS were there: its place takes dv at once, where its registers are wanted.
    if constexpr (T::kSingle) store_acc<Element, kHeadDim>(smem_base + T::kV, dv, key0, 0, lane);
    gemm_ss<Element, kBlockM / 16>(dk, ds_t, Operand<kHeadDim, false, true>(smem_base + T::kQ, 0, lane));
    clear(dq);
    gemm_ss<Element, kBlockN / 16>(dq, Operand<kBlockN, true, false>(smem_base + T::kdS, warp % 4 * 16, lane),
                                   Operand<kHeadDim, false, true>(smem_base + T::kK, warp / 4 * 8 * T::NTq, lane));
  }

  template <int kColumns>
  __device__ __forceinline__ void scale(float (&acc)[1][kColumns][4]) const {
#pragma unroll
    for (int nt = 0; nt < kColumns; ++nt)
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[0][nt][e] *= p.softmax_scale;
  }

  // A tile of rows, whose Q, dO (and K, V) are on their way. is_last: of those that add to dk and dv, which are stored.
  __device__ __forceinline__ void attend(int batch, int head, int row0, bool is_last, AccKV& dk, AccKV& dv,
                                         float (&dbias)[NT][4]) {
    OutRows out;
    load_out(out, batch, head, row0);
    KeptScores<NT> kept;
    kept.fill();
    scores().apply_limits(kept, row0);
    if constexpr (T::kGeneral) {
      if (p.mask.ptr != nullptr) scores().apply_mask(kept, batch, head, row0);
    }
    cp_async_wait<0>();
    __syncthreads();
    find_stats(out);
    {
      Fragments s, dp;
      const int col0 = warp / 4 * 64;
      clear(s);
      gemm_ss<Element, kHeadDim / 16>(s, Operand<kHeadDim, true, false>(smem_base + T::kQ, warp % 4 * 16, lane),
                                      Operand<kHeadDim, false, false>(smem_base + T::kK, col0, lane));
      modify(s, kept, batch, head, row0);
      clear(dp);
      gemm_ss<Element, kHeadDim / 16>(dp, Operand<kHeadDim, true, false>(smem_base + T::kdO, warp % 4 * 16, lane),
                                      Operand<kHeadDim, false, false>(smem_base + T::kV, col0, lane));
      __syncthreads();  // the statistics are there
      differentiate(s, dp);
      store_acc<Element, kBlockN>(smem_base + T::kP, s, warp % 4 * 16, col0, lane);
      store_acc<Element, kBlockN>(smem_base + T::kdS, dp, warp % 4 * 16, col0, lane);
      if constexpr (T::kGeneral) take_dbias(dp, dbias, batch, head, row0);
    }
    __syncthreads();  // P and dS are there
    float dq[1][T::NTq][4];
    multiply(dk, dv, dq);
    scale(dq);
    __syncthreads();  // nothing but the results is read from here on
    renew();
    store_acc<Element, kHeadDim>(smem_base + T::kQ, dq, warp % 4 * 16, warp / 4 * 8 * T::NTq, lane);
    if (is_last) {
      scale(dk);
      store_acc<Element, kHeadDim>(smem_base + T::kK, dk, warp * 16, 0, lane);
      if constexpr (!T::kSingle) store_acc<Element, kHeadDim>(smem_base + T::kV, dv, warp * 16, 0, lane);
    }
    __syncthreads();
    if (!T::kGeneral || p.dq != nullptr) {
      store_tile<kBlockM, kHeadDim, T::kThreads>(rows_at<Element>(p.dq, p.dq_stride, batch, head, row0),
                                                 smem_base + T::kQ, p.dq_stride.row, p.seqlen_q - row0, p.head_dim,
                                                 true, thread, RowIdentity{});
    }
    if (is_last) {
      store_keys(p.dk, p.dk_stride, T::kK, batch);
      store_keys(p.dv, p.dv_stride, T::kV, batch);
    }
  }
  __device__ __forceinline__ void store_keys(void* to, const Strides3& s, uint32_t tile, int batch) const {
    if (T::kGeneral && to == nullptr) return;
    store_tile<kBlockN, kHeadDim, T::kThreads>(rows_at<Element>(to, s, batch, head_k, 0), smem_base + tile, s.row,
                                               p.seqlen_k, p.head_dim, true, thread, RowIdentity{});
  }

  // --- dbias ---------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void take_dbias(const Fragments& ds, float (&sums)[NT][4], int batch, int head,
                                             int row0) const {
    if (p.dbias_kind == DbiasKind::kTile) {
      store_dbias(ds, batch, head, row0);
    } else if (carries_dbias()) {
      T::Scores::add_to(sums, ds);
    } else if (p.dbias_kind == DbiasKind::kAccum) {
      add_dbias(ds[0], batch, head, row0);
    }
  }
  // Calls f(offset, nt, e) for the entries of dbias that the thread has.
  template <class F>
  __device__ __forceinline__ void for_each_entry(int batch, int head, int row0, F&& f) const {
    const int64_t base = batch * p.dbias_batch_stride + (head / p.bias.head_ratio) * p.dbias_head_stride;
#pragma unroll
    for (int nt = 0; nt < NT; ++nt)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = row0 + scores().map.row(0, e), col = scores().map.col(nt, e);
        if (scores().exists(row, col)) f(base + row * p.dbias_row_stride + col, nt, e);
      }
  }
  __device__ __forceinline__ void store_dbias(const Fragments& ds, int batch, int head, int row0) const {
    if (p.bias.dtype == Dtype::kFloat32) {
      for_each_entry(batch, head, row0,
                     [&](int64_t i, int nt, int e) { static_cast<float*>(p.dbias)[i] = ds[0][nt][e]; });
    } else {
      for_each_entry(batch, head, row0,
                     [&](int64_t i, int nt, int e) { static_cast<Element*>(p.dbias)[i] = Element(ds[0][nt][e]); });
    }
  }
  __device__ __forceinline__ void add_dbias(const float (&sums)[NT][4], int batch, int head, int row0) const {
    for_each_entry(batch, head, row0,
                   [&](int64_t i, int nt, int e) { atomicAdd(static_cast<float*>(p.dbias) + i, sums[nt][e]); });
  }
  static __device__ __forceinline__ void clear_sums(float (&dbias)[NT][4]) {
#pragma unroll
    for (int nt = 0; nt < NT; ++nt)
#pragma unroll
      for (int e = 0; e < 4; ++e) dbias[nt][e] = 0.f;
  }

  // --- all of it -----------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void prepare() {
    shares_bias = T::kKeepsBias && T::kSingle && p.bias.kind != BiasKind::kNone && p.bias.batch_stride == 0 &&
                  p.batch_slices < p.batch;
    if (shares_bias) {
      float bias[NT][4];
      scores().load_bias_tile(bias, 0, head_k, 0);
      scores().keep_bias(bias_stage(), bias);
    }
  }

  __device__ __forceinline__ void run() {
    prepare();
    const int row_blocks = T::kSingle ? 1 : (p.seqlen_q + kBlockM - 1) / kBlockM;
    const int tiles = T::kSingle ? 1 : p.head_ratio * row_blocks;
    float dbias[NT][4];
    clear_sums(dbias);
    for (int batch = slice; batch < p.batch; batch += p.batch_slices) {
      renew();
      load_keys(T::kK, p.k, p.k_stride, batch);
      load_keys(T::kV, p.v, p.v_stride, batch);
      float dk[1][T::NTkv][4], dv[1][T::NTkv][4];
      clear(dk);
      clear(dv);
      for (int tile = 0; tile < tiles; ++tile) {
        const int head = head_k * (T::kSingle ? 1 : p.head_ratio) + tile / row_blocks;
        const int row0 = tile % row_blocks * kBlockM;
        renew();
        load_rows(T::kQ, p.q, p.q_stride, batch, head, row0);
        load_rows(T::kdO, p.dout, p.dout_stride, batch, head, row0);
        cp_async_fence();
        attend(batch, head, row0, tile + 1 == tiles, dk, dv, dbias);
        __syncthreads();  // the results have been read, and the next tile may come
      }
    }
    if (carries_dbias()) add_dbias(dbias, 0, head_k, 0);
  }
};

template <class T>
__global__ void __launch_bounds__(T::kThreads, T::kMinBlocks)
    short_bwd_kernel(const __grid_constant__ ShortBwdParams p) {
  extern __shared__ __align__(1024) char smem[];
  ShortBwdBlock<T>(p, smem).run();
}

}  // namespace dmattn
