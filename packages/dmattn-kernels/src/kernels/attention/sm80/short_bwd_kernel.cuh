// The backward over few keys, in one launch: a thread block sees all keys of a kv head, so that dq of a tile is
// complete at once, and dk and dv stay in registers. Only the gradient of a shared bias is added up in memory.
//
// A warp computes the scores of 16 rows and 64 keys, a half or a quarter of these keys (a part) at a time. After that
// it computes dk and dv of 16 keys, and dq of 16 rows (where there are eight warps, half of their columns).
// Probabilities and gradients of logits are passed on to this second step through shared memory, rounded to 16 bits.
#pragma once

#include "short_block.cuh"

namespace dmattn {

// kSingle: a kv head has one query head, whose rows fit one tile, so that dk and dv are complete after this tile.
template <class Element_, int kHeadDim_, int kBlockN_, Level kLevel, bool kSingle_>
struct ShortBwdTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_, kBlockM = kShortRows, kBlockN = kBlockN_;
  static constexpr bool kGeneral = is_general(kLevel), kSingle = kSingle_;
  // The bias is kept in shared memory, and the sums of its gradient in registers.
  static constexpr bool kKeepsBias = kLevel == Level::kFull;
  static_assert(!kKeepsBias || kSingle);
  static constexpr int kWarpsN = kBlockN / 64, kWarps = 4 * kWarpsN, kThreads = 32 * kWarps;
  // NT, NTkv, NTq: the fragments that a warp has of a part of its scores, of dk and of dv, and of dq.
  static constexpr int kParts = kSingle || kGeneral || kHeadDim < 64 ? 2 : 4, NT = 8 / kParts, NTkv = kHeadDim / 8,
                       NTq = kHeadDim / (8 * kWarpsN);
  static constexpr int kMinBlocks = short_bwd_blocks_per_sm(kHeadDim, kBlockN, kLevel);

  static constexpr uint32_t kRowsBytes = kBlockM * kHeadDim * sizeof(Element),
                            kKeysBytes = kBlockN * kHeadDim * sizeof(Element),
                            kScoresBytes = kBlockM * kBlockN * sizeof(Element);
  static constexpr uint32_t kQ = 0;
  static constexpr uint32_t kdO = kQ + kRowsBytes;
  static constexpr uint32_t kK = kdO + kRowsBytes;
  static constexpr uint32_t kV = kK + kKeysBytes;
  static constexpr uint32_t kP = kV + kKeysBytes;
  static constexpr uint32_t kdS = kP + kScoresBytes;
  static constexpr uint32_t kStats = kdS + kScoresBytes;    // ShortRowStats [kBlockM]
  static constexpr uint32_t kBias = kStats + kBlockM * 16;  // float4 [kParts][NT][kThreads]
  static constexpr uint32_t kSmemBytes = kBias + (kKeepsBias ? kParts * NT * kThreads * sizeof(float4) : 0);
  static_assert(kSmemBytes <= static_cast<uint32_t>(smem_limit(TileSet::kNarrow)));
};

// For a row: its log-sum-exp (+inf where it keeps no key, so that its probabilities are 0), what rounding dropped
// from the log-sum-exp, and rowsum(out * dout) - dlse.
struct alignas(16) ShortRowStats {
  float lse, rest, delta;
};

template <class T>
struct ShortBwdBlock {
  using Element = typename T::Element;
  static constexpr int kHeadDim = T::kHeadDim, NT = T::NT, kBlockM = T::kBlockM, kBlockN = T::kBlockN;
  using Scores = ShortScores<Element, NT>;
  using Kept = typename Scores::Kept;
  using Fragments = float[1][NT][4];
  using AccKV = float[1][T::NTkv][4];
  // kFull: the thread's sums of the gradient of the bias.
  using DbiasSums = float[T::kParts][NT][4];
  // The loop over parts is unrolled so that these sums stay in registers. At kGeneral, where there are no such sums,
  // it is not, as a bias and a mask make the code of a part long.
  static constexpr int kUnrolledParts = T::kGeneral && !T::kKeepsBias ? 1 : T::kParts;

  const ShortBwdParams& p;
  char* smem;
  uint32_t smem_base;
  int thread, warp, lane;
  int head_k, slice;

  // The current tile: a block of rows of a query head.
  int batch, head, row0;

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
  // Where the warp's scores are: their first row in the tile, and the first key of a part.
  __device__ __forceinline__ int warp_row() const { return warp % 4 * 16; }
  __device__ __forceinline__ int key_of(int part) const { return warp / 4 * 64 + part * 8 * NT; }
  __device__ __forceinline__ Scores scores(int part) const {
    return {p, FragmentMap(warp_row(), key_of(part), lane), row0};
  }
  __device__ __forceinline__ ShortRowStats* stats() const { return reinterpret_cast<ShortRowStats*>(smem + T::kStats); }
  // kFull: the bias of the thread's own scores, which no other thread reads.
  __device__ __forceinline__ float4& kept_bias(int part, int nt) const {
    return reinterpret_cast<float4*>(smem + T::kBias)[(part * NT + nt) * T::kThreads + thread];
  }

  // --- loads ---------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void keep_bias() {
    row0 = 0;
#pragma unroll
    for (int part = 0; part < T::kParts; ++part) {
      scores(part).for_each_bias(0, head_k, [&](int nt, const float4& bias) { kept_bias(part, nt) = bias; });
    }
  }
  __device__ __forceinline__ void load_keys(uint32_t tile, const void* base, const Strides3& s) const {
    load_tile<kBlockN, kHeadDim, T::kThreads>(smem_base + tile, rows_at<Element>(base, s, batch, head_k, 0), s.row,
                                              p.seqlen_k, p.head_dim, true, thread, RowIdentity{});
  }
  __device__ __forceinline__ void load_rows(uint32_t tile, const void* base, const Strides3& s) const {
    load_tile<kBlockM, kHeadDim, T::kThreads>(smem_base + tile, rows_at<Element>(base, s, batch, head, row0), s.row,
                                              p.seqlen_q - row0, p.head_dim, true, thread, RowIdentity{});
  }

  // The rows of `out` whose statistics a warp computes, each loaded by kChunks lanes. These loads are in flight at the
  // same time as the copies to shared memory. With four warps (64 keys) they are the rows of the warp's own scores.
  static constexpr int kChunks = kHeadDim / 8, kRowsPerPass = 32 / kChunks, kRowsPerWarp = kBlockM / T::kWarps,
                       kPasses = kRowsPerWarp / kRowsPerPass;
  static_assert(kPasses >= 1);
  static constexpr bool kFindsOwnRows = T::kWarpsN == 1;
  struct OutRows {
    uint4 chunk[kPasses];
    float lse[kPasses], rest[kPasses], dlse[kPasses];
  };
  __device__ __forceinline__ int out_row(int pass) const {
    return warp * kRowsPerWarp + pass * kRowsPerPass + lane / kChunks;
  }
  __device__ __forceinline__ void load_out(OutRows& out) const {
    const int chunk = lane % kChunks;
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int row = row0 + out_row(i);
      out.chunk[i] = make_uint4(0, 0, 0, 0);
      out.lse[i] = -INFINITY;
      out.rest[i] = out.dlse[i] = 0.f;
      if (row >= p.seqlen_q) continue;
      if (chunk * 8 < p.head_dim) {
        const Element* from = rows_at<Element>(p.out, p.out_stride, batch, head, row) + chunk * 8;
        out.chunk[i] = __ldg(reinterpret_cast<const uint4*>(from));
      }
      if (chunk == 0) {
        const int64_t at = row_at(p.lse_stride, batch, head, row);
        out.lse[i] = __ldg(p.lse + at);
        if (p.lse_rest != nullptr) out.rest[i] = __ldg(p.lse_rest + at);
        if (p.dlse != nullptr) out.dlse[i] = __ldg(p.dlse + row_at(p.dlse_stride, batch, head, row));
      }
    }
  }
  __device__ __forceinline__ void find_stats(const OutRows& out) const {
    using Traits = ElementTraits<Element>;
    const int chunk = lane % kChunks;
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const uint4 dout = ld_shared_v4(smem_base + T::kdO + SmemTile<kHeadDim>::offset(out_row(i), chunk));
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
        stats()[out_row(i)] = {keeps_nothing ? INFINITY : out.lse[i], out.rest[i],
                               keeps_nothing ? 0.f : sum - out.dlse[i]};
      }
    }
  }

  // --- one tile ------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void modify(Fragments& s, int part, const Kept& kept) const {
    const Scores own = scores(part);
    if constexpr (T::kGeneral) {
      scale_scores(s, p.softmax_scale, 0.f);
      if constexpr (T::kKeepsBias) {
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) Scores::add(s, nt, kept_bias(part, nt));
      } else if (p.bias.kind != BiasKind::kNone) {
        own.for_each_bias(batch, head, [&](int nt, const float4& bias) { Scores::add(s, nt, bias); });
      }
      if (p.mask.ptr != nullptr) Scores::apply_mask(s, kept);
    }
    if (own.has_limits(kBlockN)) own.apply_limits(s);
  }

  // s: logits (kPlain: raw products) become probabilities. dp becomes the gradients of the logits.
  __device__ __forceinline__ void differentiate(Fragments& s, Fragments& dp) const {
    const float scale_log2 = p.softmax_scale * kLog2e;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const ShortRowStats row = stats()[warp_row() + lane / 4 + 8 * half];
      const float lse_log2 = row.lse * kLog2e, rest_log2 = row.rest * kLog2e;
#pragma unroll
      for (int nt = 0; nt < NT; ++nt)
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
          // Logits with a bias may be huge, so the log-sum-exp is subtracted before the multiplication.
          s[0][nt][e] = T::kGeneral ? exp2_approx(__fmaf_rn(s[0][nt][e] - row.lse, kLog2e, -rest_log2))
                                    : exp2_approx(__fmaf_rn(s[0][nt][e], scale_log2, -lse_log2));
          dp[0][nt][e] = s[0][nt][e] * (dp[0][nt][e] - row.delta);
        }
    }
  }

  // Computes P and dS of a part of the warp's scores, and stores them in shared memory.
  __device__ __forceinline__ void differentiate_part(int part, const Kept& kept, DbiasSums& dbias) const {
    Fragments s, dp;
    clear(s);
    gemm_ss<Element, kHeadDim / 16>(s, Operand<kHeadDim, true, false>(smem_base + T::kQ, warp_row(), lane),
                                    Operand<kHeadDim, false, false>(smem_base + T::kK, key_of(part), lane));
    modify(s, part, kept);
    clear(dp);
    gemm_ss<Element, kHeadDim / 16>(dp, Operand<kHeadDim, true, false>(smem_base + T::kdO, warp_row(), lane),
                                    Operand<kHeadDim, false, false>(smem_base + T::kV, key_of(part), lane));
    differentiate(s, dp);
    store_acc<Element, kBlockN>(smem_base + T::kP, s, warp_row(), key_of(part), lane);
    store_acc<Element, kBlockN>(smem_base + T::kdS, dp, warp_row(), key_of(part), lane);
    if constexpr (T::kGeneral) take_dbias(dp[0], part, dbias);
  }

  template <int kColumns>
  __device__ __forceinline__ void scale(float (&acc)[1][kColumns][4]) const {
#pragma unroll
    for (int nt = 0; nt < kColumns; ++nt)
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[0][nt][e] *= p.softmax_scale;
  }
  // acc += X^T Y, where X is P or dS, and Y the tile's rows of dO or Q.
  __device__ __forceinline__ void add_keys(AccKV& acc, uint32_t x, uint32_t y) const {
    gemm_ss<Element, kBlockM / 16>(acc, Operand<kBlockN, true, true>(smem_base + x, warp * 16, lane),
                                   Operand<kHeadDim, false, true>(smem_base + y, 0, lane));
  }
  __device__ __forceinline__ void store_keys(void* to, const Strides3& s, const AccKV& acc) const {
    if (T::kGeneral && to == nullptr) return;
    store_rows(rows_at<Element>(to, s, batch, head_k, warp * 16), s.row, acc, 0, p.seqlen_k - warp * 16, p.head_dim,
               lane);
  }
  __device__ __forceinline__ void find_dq() const {
    if (T::kGeneral && p.dq == nullptr) return;
    const int col0 = warp / 4 * 8 * T::NTq;
    float dq[1][T::NTq][4];
    clear(dq);
    gemm_ss<Element, kBlockN / 16>(dq, Operand<kBlockN, true, false>(smem_base + T::kdS, warp_row(), lane),
                                   Operand<kHeadDim, false, true>(smem_base + T::kK, col0, lane));
    scale(dq);
    const int row = row0 + warp_row();
    store_rows(rows_at<Element>(p.dq, p.dq_stride, batch, head, row), p.dq_stride.row, dq, col0, p.seqlen_q - row,
               p.head_dim, lane);
  }

  // Element `part` of `kept`. If the loop over parts is not unrolled, an index would put `kept` into local memory.
  static __device__ __forceinline__ Kept part_of(const Kept (&kept)[T::kParts], int part) {
    if constexpr (T::kParts == 2) return Scores::choose(part == 0, kept[0], kept[1]);
    return kept[part];
  }

  __device__ __forceinline__ void clear_hidden() const {
    if constexpr (T::kGeneral) {
      if (!hides_keys(p)) return;
      const uint8_t* mask = mask_of(p, batch, head);
      clear_hidden_keys<kHeadDim, T::kThreads>(smem_base + T::kK, mask, p.mask.col_stride, p.seqlen_k, thread);
      clear_hidden_keys<kHeadDim, T::kThreads>(smem_base + T::kV, mask, p.mask.col_stride, p.seqlen_k, thread);
      __syncthreads();
    }
  }

  // Computes the tile, whose copies of Q and dO (of the first tile also K and V) are in flight. Adds to dk and dv,
  // and stores them if the tile is the last one.
  __device__ __forceinline__ void attend(bool is_first, bool is_last, AccKV& dk, AccKV& dv, DbiasSums& dbias) const {
    OutRows out;
    load_out(out);
    Kept kept[T::kParts] = {};
    if constexpr (T::kGeneral) {
      if (p.mask.ptr != nullptr) {
#pragma unroll
        for (int part = 0; part < T::kParts; ++part) kept[part] = scores(part).load_mask(batch, head, lane);
      }
    }
    cp_async_wait<0>();
    __syncthreads();
    find_stats(out);
    if (is_first) clear_hidden();
    if constexpr (kFindsOwnRows) {
      __syncwarp();
    } else {
      __syncthreads();
    }
#pragma unroll kUnrolledParts
    for (int part = 0; part < T::kParts; ++part) differentiate_part(part, part_of(kept, part), dbias);
    __syncthreads();  // P and dS are complete
    add_keys(dv, T::kP, T::kdO);
    if (is_last) store_keys(p.dv, p.dv_stride, dv);
    add_keys(dk, T::kdS, T::kQ);
    if (is_last) {
      scale(dk);
      store_keys(p.dk, p.dk_stride, dk);
    }
    find_dq();
  }

  // --- dbias ---------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void take_dbias(const float (&ds)[NT][4], int part, DbiasSums& sums) const {
    if constexpr (T::kKeepsBias) {
#pragma unroll
      for (int nt = 0; nt < NT; ++nt)
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[part][nt][e] += ds[nt][e];
    } else if (p.dbias_kind == DbiasKind::kAccum) {
      add_dbias(ds, part);
    } else if (p.dbias_kind == DbiasKind::kTile) {
      store_dbias(ds, part);
    }
  }
  // Calls f(offset, value) for the entries of dbias that the thread has.
  template <class F>
  __device__ __forceinline__ void for_each_entry(const float (&values)[NT][4], int part, F&& f) const {
    const int64_t base = batch * p.dbias_batch_stride + (head / p.bias.head_ratio) * p.dbias_head_stride;
    const Scores own = scores(part);
#pragma unroll
    for (int nt = 0; nt < NT; ++nt)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = row0 + own.map.row(0, e), col = own.map.col(nt, e);
        if (own.exists(row, col)) f(base + row * p.dbias_row_stride + col, values[nt][e]);
      }
  }
  __device__ __forceinline__ void add_dbias(const float (&values)[NT][4], int part) const {
    for_each_entry(values, part, [&](int64_t i, float x) { atomicAdd(static_cast<float*>(p.dbias) + i, x); });
  }
  __device__ __forceinline__ void store_dbias(const float (&values)[NT][4], int part) const {
    if (p.bias.dtype == Dtype::kFloat32) {
      for_each_entry(values, part, [&](int64_t i, float x) { static_cast<float*>(p.dbias)[i] = x; });
    } else {
      for_each_entry(values, part, [&](int64_t i, float x) { static_cast<Element*>(p.dbias)[i] = Element(x); });
    }
  }

  // --- all of it -----------------------------------------------------------------------------------------------------

  // All tiles of a batch.
  __device__ __forceinline__ void attend_batch(DbiasSums& dbias) {
    const int row_blocks = T::kSingle ? 1 : (p.seqlen_q + kBlockM - 1) / kBlockM;
    const int tiles = T::kSingle ? 1 : p.head_ratio * row_blocks;
    AccKV dk, dv;
    clear(dk);
    clear(dv);
    load_keys(T::kK, p.k, p.k_stride);
    load_keys(T::kV, p.v, p.v_stride);
    for (int tile = 0; tile < tiles; ++tile) {
      if (tile > 0) renew();
      head = head_k * (T::kSingle ? 1 : p.head_ratio) + tile / row_blocks;
      row0 = tile % row_blocks * kBlockM;
      load_rows(T::kQ, p.q, p.q_stride);
      load_rows(T::kdO, p.dout, p.dout_stride);
      cp_async_fence();
      attend(tile == 0, tile + 1 == tiles, dk, dv, dbias);
      if (tile + 1 < tiles) __syncthreads();  // nothing in shared memory is read any more
    }
  }

  __device__ __forceinline__ void run() {
    DbiasSums dbias = {};
    batch = slice;
    if constexpr (!T::kKeepsBias) {
      attend_batch(dbias);
      return;
    }
    keep_bias();
    for (; batch < p.batch; batch += p.batch_slices) {
      renew();
      attend_batch(dbias);
      __syncthreads();  // nothing in shared memory is read any more
    }
    if (p.dbias_kind == DbiasKind::kNone) return;
    batch = 0;
#pragma unroll
    for (int part = 0; part < T::kParts; ++part) add_dbias(dbias[part], part);
  }
};

template <class T>
__global__ void __launch_bounds__(T::kThreads, T::kMinBlocks)
    short_bwd_kernel(const __grid_constant__ ShortBwdParams p) {
  extern __shared__ __align__(1024) char smem[];
  ShortBwdBlock<T>(p, smem).run();
}

}  // namespace dmattn
