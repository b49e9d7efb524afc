// Attention of few query rows over many keys: bound by the bytes of K and V. A warp walks keys of its own through a
// ring of shared memory that no other warp touches, so the loop has no barrier; the warps' results are merged at the
// end, those of the splits by combine_splits(). One kernel for every bias and softcap: the arithmetic hides behind the
// loads.
#pragma once

#include "../common/cache_entry.cuh"
#include "../common/scores.cuh"
#include "../common/softmax.cuh"
#include "../tiles.h"
#include "launch.cuh"

namespace dmattn {

template <class Element_, int kHeadDim_, bool kGathered_>
struct DecodeTraits {
  using Element = Element_;
  static constexpr bool kIsBf16 = std::is_same_v<Element, cutlass::bfloat16_t>;
  static constexpr int kHeadDim = kHeadDim_, kRows = kDecodeRows, kKeys = kDecodeKeys;
  static constexpr bool kGathered = kGathered_;  // keys come from a list of kept keys
  static constexpr int kWarps = decode_tile(kHeadDim).warps, kStages = decode_tile(kHeadDim).stages;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int OT = kHeadDim / 8, NT = kKeys / 8;

  static constexpr uint32_t kTile = kKeys * kHeadDim * 2;
  static constexpr uint32_t kWarpBytes = 2 * kStages * kTile;  // [stage][K, V]
  static constexpr uint32_t kSmemBytes = kWarps * kWarpBytes;
  static_assert(kSmemBytes == decode_smem_bytes(kHeadDim));
  // The merge takes the place of the rings. Rows start on different banks.
  static constexpr int kMergePitch = kHeadDim + 8;
  static_assert(kWarps * kRows * kMergePitch * 4 <= kSmemBytes);
};

template <class T>
struct DecodeShared {
  CacheEntry low[T::kWarps];
  int32_t idx[T::kWarps][T::kGathered ? T::kStages : 1][T::kKeys];
  float key_bias[T::kWarps][T::kKeys];
  float max[T::kWarps][T::kRows], sum[T::kWarps][T::kRows];
};

template <class T>
struct DecodeBlock {
  using Element = typename T::Element;
  static constexpr int kHeadDim = T::kHeadDim;

  const DecodeParams& p;
  DecodeShared<T>& shared;
  char* smem;
  uint32_t ring;  // of this warp
  int warp, lane;
  int batch, head, row0, split;
  int rows;          // of this block
  int keys;          // keys, entries of the list, or entries of the cache
  int begin, end;    // steps of this warp
  int dropped = -1;  // entry that is not attended to; `keys` for the token
  const int32_t* list = nullptr;

  __device__ __forceinline__ DecodeBlock(const DecodeParams& params, char* smem_, DecodeShared<T>& shared_)
      : p(params),
        shared(shared_),
        smem(smem_),
        ring(smem_u32(smem_) + threadIdx.x / 32 * T::kWarpBytes),
        warp(threadIdx.x / 32),
        lane(threadIdx.x & 31) {
    const int row_blocks = (p.seqlen_q + T::kRows - 1) / T::kRows;
    int work = blockIdx.x;
    split = work % p.num_splits;
    work /= p.num_splits;
    row0 = work % row_blocks * T::kRows;
    work /= row_blocks;
    head = work % p.nheads;
    batch = work / p.nheads;
    rows = min(T::kRows, p.seqlen_q - row0);
    keys = p.seqlen_k;
    if constexpr (T::kGathered) {
      const int64_t i = static_cast<int64_t>(p.keys.batch > 1 ? batch : 0) * p.keys.heads + head / p.keys.head_ratio;
      list = p.keys.idx + i * p.keys.capacity;
      keys = __ldg(p.keys.count + i);
    }
    // The token is a step of its own, behind those of the cache's entries. All warps of all splits share evenly.
    const int64_t steps = (keys + T::kKeys - 1) / T::kKeys + (has_token() ? 1 : 0);
    const int share = split * T::kWarps + warp, shares = p.num_splits * T::kWarps;
    begin = static_cast<int>(steps * share / shares);
    end = static_cast<int>(steps * (share + 1) / shares);
  }

  __device__ __forceinline__ bool has_token() const { return !T::kGathered && p.token.k != nullptr; }
  __device__ __forceinline__ bool is_token(int step) const { return has_token() && step * T::kKeys >= keys; }
  __device__ __forceinline__ int keys_of(int step) const {
    return is_token(step) ? 1 : min(T::kKeys, keys - step * T::kKeys);
  }

  // --- loads ---------------------------------------------------------------------------------------------------------

  // Entry of the list for this lane (lanes beyond kKeys repeat), where gathered.
  __device__ __forceinline__ int fetch_idx(int step) const {
    const int entry = step * T::kKeys + lane % T::kKeys;
    return step < end && entry < keys ? __ldg(list + entry) : 0;
  }
  __device__ __forceinline__ int32_t* idx(int stage) const { return shared.idx[warp][stage]; }

  // K (which = 0) or V (1) of a step; one group of copies, empty behind the last step.
  __device__ __forceinline__ void load(int step, int stage, int which) const {
    if (step < end) {
      const bool token = is_token(step);
      const Strides3& s =
          which == 0 ? (token ? p.token.k_stride : p.k_stride) : (token ? p.token.v_stride : p.v_stride);
      const void* base = which == 0 ? (token ? p.token.k : p.k) : (token ? p.token.v : p.v);
      const Element* src = static_cast<const Element*>(base) + batch * s.batch + (head / p.head_ratio) * s.head;
      const bool vec = token ? p.token.vec : which == 0 ? p.vec_k : p.vec_v;
      const uint32_t dst = tile(stage, which);
      if constexpr (T::kGathered) {
        load_tile<T::kKeys, kHeadDim, 32>(dst, src, s.row, keys_of(step), p.head_dim, vec, lane, RowGather{idx(stage)});
      } else {
        const int64_t row = token ? 0 : static_cast<int64_t>(step) * T::kKeys;
        load_tile<T::kKeys, kHeadDim, 32>(dst, src + row * s.row, s.row, keys_of(step), p.head_dim, vec, lane,
                                          RowIdentity{});
      }
    }
    cp_async_fence();
  }
  __device__ __forceinline__ uint32_t tile(int stage, int which) const { return ring + (2 * stage + which) * T::kTile; }

  // The rows as the left operand of the first product, for all of head_dim.
  __device__ __forceinline__ void load_q(uint32_t (&q)[kHeadDim / 16][4]) const {
    const Element* src =
        static_cast<const Element*>(p.q) + batch * p.q_stride.batch + head * p.q_stride.head + row0 * p.q_stride.row;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4 + 8 * (i & 1);
      const Element* at = src + row * p.q_stride.row;
#pragma unroll
      for (int k = 0; k < kHeadDim / 16; ++k) {
        const int col = 16 * k + 8 * (i / 2) + 2 * (lane & 3);
        q[k][i] = row < rows && col < p.head_dim ? load_pair(at + col) : 0;
      }
    }
  }
  __device__ __forceinline__ uint32_t load_pair(const Element* at) const {
    if (p.vec_q) return __ldg(reinterpret_cast<const uint32_t*>(at));
    const uint16_t* halves = reinterpret_cast<const uint16_t*>(at);
    return __ldg(halves) | static_cast<uint32_t>(__ldg(halves + 1)) << 16;
  }

  __device__ __forceinline__ int64_t bias_base() const {
    return batch * p.bias.batch_stride + (head / p.bias.head_ratio) * p.bias.head_stride;
  }
  __device__ __forceinline__ int64_t key_of(int step, int stage, int col) const {
    return T::kGathered ? idx(stage)[col] : step * T::kKeys + col;
  }
  // A bias that is alike for all rows: that of this lane's key of the step (lanes beyond kKeys repeat).
  __device__ __forceinline__ float fetch_key_bias(int step, int stage) const {
    const int col = lane % T::kKeys;
    if (p.bias.kind != BiasKind::kKey || step >= end || col >= keys_of(step)) return 0.f;
    if (is_token(step)) return token_score();
    return load_bias(p.bias, bias_base() + key_of(step, stage, col) * p.bias.col_stride, T::kIsBf16);
  }

  // --- the token of a cache ------------------------------------------------------------------------------------------

  __device__ __forceinline__ float token_score() const {
    BiasParams score;
    score.ptr = p.token.score;
    score.dtype = p.bias.dtype;
    return load_bias(score, batch * p.token.score_batch_stride + head * p.token.score_head_stride, T::kIsBf16);
  }
  __device__ __forceinline__ bool is_active() const {
    return p.token.active == nullptr || p.token.active[batch * p.token.active_stride] != 0;
  }
  // Which entry makes room: the lowest, if the token's score is not lower; else the token is the one not attended to.
  // Every block of a head comes to the same answer, the first one leaves it for cache_commit().
  // `score` is -inf where there is no token.
  __device__ __forceinline__ void place_token(const LowestEntry<T::kThreads>& search, float score) {
    const CacheEntry low = search.find([&](int i) { return entry_score(i); }, entry_positions(), keys, shared.low);
    const bool taken = score > -INFINITY && score >= low.score;
    dropped = taken ? low.slot : keys;
    if (split == 0 && row0 == 0 && threadIdx.x == 0) {
      int32_t* place = p.token.place + 2 * (static_cast<int64_t>(batch) * p.nheads + head);
      place[0] = taken ? low.slot : -1;
      place[1] = is_active() ? p.token.seen[batch] : -1;
    }
  }
  __device__ __forceinline__ float entry_score(int slot) const {
    return load_bias(p.bias, bias_base() + slot, T::kIsBf16);
  }
  __device__ __forceinline__ const int32_t* entry_positions() const {
    return p.token.entry_position + (static_cast<int64_t>(batch) * p.nheads + head) * p.seqlen_k;
  }

  // --- compute -------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void scores_of(float (&acc)[1][T::NT][4], const uint32_t (&q)[kHeadDim / 16][4],
                                            int stage) const {
    using Mma = typename ElementTraits<Element>::Mma;
    const Operand<kHeadDim, false, false> k(tile(stage, 0), 0, lane);
    clear(acc);
#pragma unroll
    for (int i = 0; i < kHeadDim / 16; ++i) {
      uint32_t frag[4];
      k.load(frag, 0, i);
#pragma unroll
      for (int nt = 0; nt < T::NT; ++nt) {
        float (&c)[4] = acc[0][nt];
        Mma::fma(c[0], c[1], c[2], c[3], q[i][0], q[i][1], q[i][2], q[i][3], frag[2 * nt], frag[2 * nt + 1], c[0], c[1],
                 c[2], c[3]);
      }
    }
  }
  __device__ __forceinline__ void modify_scores(float (&acc)[1][T::NT][4], int step, int stage) const {
    const FragmentMap map(0, 0, lane);
    const int count = keys_of(step);
    const int out = dropped - (is_token(step) ? keys : step * T::kKeys);
    scale_scores(acc, p.softmax_scale, p.softcap);
    add_bias(acc, step, stage, map);
#pragma unroll
    for (int nt = 0; nt < T::NT; ++nt)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int col = map.col(nt, e);
        if (col >= count || col == out) acc[0][nt][e] = -INFINITY;
      }
  }
  __device__ __forceinline__ void add_bias(float (&acc)[1][T::NT][4], int step, int stage,
                                           const FragmentMap& map) const {
    if (p.bias.kind == BiasKind::kKey) {
#pragma unroll
      for (int nt = 0; nt < T::NT; ++nt) {
        const float2 b = *reinterpret_cast<const float2*>(shared.key_bias[warp] + map.col(nt, 0));
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[0][nt][e] += (e & 1) ? b.y : b.x;
      }
    } else if (p.bias.kind != BiasKind::kNone) {
      // One of each query head's own: not worth a pipeline.
      const int count = keys_of(step);
#pragma unroll
      for (int nt = 0; nt < T::NT; ++nt)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int row = map.row(0, e), col = map.col(nt, e);
          if (row >= rows || col >= count) continue;
          acc[0][nt][e] += load_bias(
              p.bias, bias_base() + (row0 + row) * p.bias.row_stride + key_of(step, stage, col) * p.bias.col_stride,
              T::kIsBf16);
        }
    }
  }

  // --- the loop ------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void run() {
    LowestEntry<T::kThreads> search;
    float new_score = -INFINITY;
    if (has_token()) {  // first in line: behind the keys it would come late
      search.load([&](int i) { return entry_score(i); }, entry_positions(), keys);
      if (is_active()) new_score = token_score();
    }
    fill_ring();
    uint32_t q[kHeadDim / 16][4];
    load_q(q);
    float bias = fetch_key_bias(begin, 0);
    if (has_token()) place_token(search, new_score);

    float acc_o[1][T::OT][4];
    clear(acc_o);
    OnlineSoftmax<1> softmax;
    int stage = 0;
#pragma unroll 1
    for (int step = begin; step < end; ++step) {
      const int next_stage = stage + 1 == T::kStages ? 0 : stage + 1;
      const int refill = step + T::kStages;  // takes the place of this step
      if (lane < T::kKeys) shared.key_bias[warp][lane] = bias;
      bias = fetch_key_bias(step + 1, next_stage);
      int idx_refill = 0;
      if constexpr (T::kGathered) idx_refill = fetch_idx(refill);

      cp_async_wait<2 * T::kStages - 1>();
      __syncwarp();  // K of this step has landed
      float acc_s[1][T::NT][4];
      scores_of(acc_s, q, stage);
      modify_scores(acc_s, step, stage);
      __syncwarp();  // K, the indices and the bias of this step are no longer read
      if constexpr (T::kGathered) {
        if (lane < T::kKeys) idx(stage)[lane] = idx_refill;
        __syncwarp();
      }
      load(refill, stage, 0);

      softmax.template step<false>(acc_s, acc_o, 0.f);
      cp_async_wait<2 * T::kStages - 1>();
      __syncwarp();  // V of this step has landed
      gemm_pv<Element>(acc_o, acc_s, Operand<kHeadDim, false, true>(tile(stage, 1), 0, lane));
      __syncwarp();
      load(refill, stage, 1);
      stage = next_stage;
    }
    cp_async_wait<0>();
    __syncthreads();  // the rings are free
    leave(acc_o, softmax);
    __syncthreads();
    merge();
  }
  __device__ __forceinline__ void fill_ring() const {
    if constexpr (T::kGathered) {
      int ahead[T::kStages];
#pragma unroll
      for (int i = 0; i < T::kStages; ++i) ahead[i] = fetch_idx(begin + i);
#pragma unroll
      for (int i = 0; i < T::kStages; ++i) {
        if (lane < T::kKeys) idx(i)[lane] = ahead[i];
      }
      __syncwarp();
    }
#pragma unroll 1
    for (int i = 0; i < T::kStages; ++i) {
      load(begin + i, i, 0);
      load(begin + i, i, 1);
    }
  }

  // --- merge ---------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ float* merge_row(int w, int row) const {
    return reinterpret_cast<float*>(smem) + (w * T::kRows + row) * T::kMergePitch;
  }
  // What this warp has found, for the others.
  __device__ __forceinline__ void leave(const float (&acc_o)[1][T::OT][4], const OnlineSoftmax<1>& softmax) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane / 4 + 8 * half;
      float sum = softmax.row_sum[half];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      if (row >= rows) continue;
      if ((lane & 3) == 0) {
        shared.max[warp][row] = softmax.row_max[half];
        shared.sum[warp][row] = sum;
      }
      float* dst = merge_row(warp, row) + 2 * (lane & 3);
#pragma unroll
      for (int ot = 0; ot < T::OT; ++ot) {
        *reinterpret_cast<float2*>(dst + 8 * ot) = {acc_o[0][ot][2 * half], acc_o[0][ot][2 * half + 1]};
      }
    }
  }
  // Two columns of a row a thread at a time.
  __device__ __forceinline__ void merge() const {
    constexpr int kPairs = kHeadDim / 2;
    for (int i = threadIdx.x; i < rows * kPairs; i += T::kThreads) {
      const int row = i / kPairs, col = i % kPairs * 2;
      float max = -INFINITY;
#pragma unroll
      for (int w = 0; w < T::kWarps; ++w) max = fmaxf(max, shared.max[w][row]);
      const float shift = max == -INFINITY ? 0.f : max;  // nothing kept: all weights are exp(-inf) = 0
      float sum = 0.f;
      float2 out = {0.f, 0.f};
#pragma unroll
      for (int w = 0; w < T::kWarps; ++w) {
        const float weight = exp2_approx((shared.max[w][row] - shift) * kLog2e);
        const float2 x = *reinterpret_cast<const float2*>(merge_row(w, row) + col);
        sum += weight * shared.sum[w][row];
        out.x += weight * x.x;
        out.y += weight * x.y;
      }
      const float scale = sum > 0.f ? 1.f / sum : 0.f;
      if (col < p.head_dim) store(row, col, out.x * scale, out.y * scale);
      if (col == 0) store_lse(row, max, sum);
    }
  }
  __device__ __forceinline__ bool is_partial() const { return p.num_splits > 1 || has_token(); }
  __device__ __forceinline__ int64_t partial_row(int row) const {
    return ((static_cast<int64_t>(split) * p.batch + batch) * p.nheads + head) * p.seqlen_q + row0 + row;
  }
  __device__ __forceinline__ void store(int row, int col, float x, float y) const {
    if (is_partial()) {
      *reinterpret_cast<float2*>(p.out_accum + partial_row(row) * p.head_dim + col) = {x, y};
      return;
    }
    uint16_t* dst = static_cast<uint16_t*>(p.out) + batch * p.out_stride.batch + head * p.out_stride.head +
                    (row0 + row) * p.out_stride.row + col;
    const uint32_t pair = ElementTraits<Element>::pack(x, y);
    if (p.vec_out) {
      *reinterpret_cast<uint32_t*>(dst) = pair;
    } else {
      dst[0] = static_cast<uint16_t>(pair);
      dst[1] = static_cast<uint16_t>(pair >> 16);
    }
  }
  __device__ __forceinline__ void store_lse(int row, float max, float sum) const {
    const bool empty = !(sum > 0.f);
    const float log_sum = logf(sum);
    const float lse = empty ? -INFINITY : max + log_sum;
    const float rest = empty ? 0.f : (max - lse) + log_sum;  // see OnlineSoftmax::finish
    if (is_partial()) {
      const int64_t all = static_cast<int64_t>(p.num_splits) * p.batch * p.nheads * p.seqlen_q;
      p.lse_accum[partial_row(row)] = lse;
      p.lse_accum[all + partial_row(row)] = rest;
      return;
    }
    const int64_t i = batch * p.lse_stride.batch + head * p.lse_stride.head + (row0 + row) * p.lse_stride.row;
    p.lse[i] = lse;
    if (p.lse_rest != nullptr) p.lse_rest[i] = rest;
  }
};

template <class T>
__global__ void __launch_bounds__(T::kThreads, 2) decode_kernel(const __grid_constant__ DecodeParams p) {
  extern __shared__ __align__(1024) char smem[];
  __shared__ DecodeShared<T> shared;
  DecodeBlock<T>(p, smem, shared).run();
}

}  // namespace dmattn
