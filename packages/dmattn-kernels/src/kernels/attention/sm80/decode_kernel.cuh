// Attention of few query rows over many keys: bound by the bytes of K and V. A warp walks keys of its own through a
// ring of shared memory that no other warp touches, so the loop has no barrier; the warps' results are merged at the
// end, those of the splits by combine_splits(). One kernel for every bias and softcap: the arithmetic hides behind the
// loads.
#pragma once

#include "../../cache/entry.cuh"
#include "../../shared/chunk.cuh"
#include "../../tiles.h"
#include "../shared/attention_block.cuh"
#include "../shared/scores.cuh"
#include "../shared/softmax.cuh"
#include "../shared/work_index.cuh"
#include "copy.cuh"
#include "launch.cuh"

namespace dmattn {

template <class Element_, int kHeadDim_, bool kGathered_>
struct DecodeTraits {
  using Element = Element_;
  static constexpr bool kIsBf16 = std::is_same_v<Element, cutlass::bfloat16_t>;
  static constexpr int kHeadDim = kHeadDim_, kRows = kDecodeRows, kKeys = kDecodeKeys;
  static constexpr bool kGathered = kGathered_;  // keys come from a list of kept keys
  static constexpr bool kPacked = false, kMayBePacked = false, kKeepsSeqlens = false;
  static constexpr uint32_t kSeqlens = 0;  // not used
  static constexpr int kWarps = decode_tile(kHeadDim).warps, kStages = decode_tile(kHeadDim).stages;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int OT = kHeadDim / 8, NT = kKeys / 8;

  static constexpr uint32_t kTile = kKeys * kHeadDim * sizeof(Element);
  static constexpr uint32_t kWarpBytes = 2 * kStages * kTile;  // [stage][K, V]
  static constexpr uint32_t kSmemBytes = kWarps * kWarpBytes;
  static_assert(kSmemBytes == decode_smem_bytes(kHeadDim));
  // Indices and bias are fetched for several steps at once, one chunk ahead: loads issued after the copies of K and V
  // of a step would have to wait for those.
  static constexpr int kChunkSteps = 4, kChunkKeys = kChunkSteps * kKeys;
  static_assert(kStages <= kChunkSteps);  // a step and the one that takes its place: neighbouring chunks
  // The merge takes the place of the rings. Rows start on different banks.
  static constexpr int kMergePitch = kHeadDim + 8;
  static constexpr int kMergeFloats = kWarps * kRows * kMergePitch;
  // Static arrays beside the rings, in a family whose blocks have 99 KB.
  static_assert(kSmemBytes + 3 * 1024 <= 99 * 1024);
  static_assert((kMergeFloats + 2 * kWarps * kRows) * 4 <= kSmemBytes);
};

template <class T>
struct DecodeShared {
  float bias[T::kWarps][T::kChunkKeys];
  int32_t idx[T::kGathered ? T::kWarps : 1][2][T::kGathered ? T::kChunkKeys : 1];  // of even and odd chunks
};

template <class T>
struct DecodeBlock : AttentionBlock<T, DecodeParams> {
  using Base = AttentionBlock<T, DecodeParams>;
  using Element = typename T::Element;
  using Base::batch, Base::lane, Base::p, Base::smem, Base::warp;
  static constexpr int kHeadDim = T::kHeadDim;

  DecodeShared<T>& shared;
  uint32_t ring;  // of this warp
  int head, row0, split;
  int rows;           // of this block
  int keys;           // keys, entries of the list, or entries of the cache
  int begin, end;     // steps of this warp
  int replaced = -1;  // entry of the cache whose place the token takes
  const int32_t* list = nullptr;

  __device__ __forceinline__ DecodeBlock(const DecodeParams& params, char* smem_, DecodeShared<T>& shared_)
      : Base(params, smem_), shared(shared_), ring(smem_u32(smem_) + threadIdx.x / 32 * T::kWarpBytes) {
    WorkIndex work(static_cast<int>(blockIdx.x));
    split = work.take(p.num_splits);
    row0 = work.take((p.seqlen_q + T::kRows - 1) / T::kRows) * T::kRows;
    head = work.take(p.nheads);
    batch = work.rest;
    rows = min(T::kRows, p.seqlen_q - row0);
    keys = p.seqlen_k;
    if constexpr (T::kGathered) {
      const int64_t i = Base::list_index(head);
      list = Base::list_of(head, i);
      keys = read_list_count(p.keys, i);
    }
    // All warps of all splits share evenly.
    const int64_t steps = (keys + T::kKeys - 1) / T::kKeys;
    const int share = split * T::kWarps + warp, shares = p.num_splits * T::kWarps;
    begin = static_cast<int>(steps * share / shares);
    end = static_cast<int>(steps * (share + 1) / shares);
  }

  __device__ __forceinline__ bool has_token() const { return !T::kGathered && p.token.k != nullptr; }
  __device__ __forceinline__ int keys_of(int step) const { return min(T::kKeys, keys - step * T::kKeys); }

  // --- loads ---------------------------------------------------------------------------------------------------------

  // Entries of the list for a chunk: this lane's are keys lane and lane + 32 of it. As they were read, until
  // to_positions() once they have arrived.
  struct LaneKeys {
    int idx[T::kChunkKeys / 32];
  };
  __device__ __forceinline__ int chunk_entry(int chunk, int i) const {
    return (begin + chunk * T::kChunkSteps) * T::kKeys + lane + 32 * i;
  }
  __device__ __forceinline__ LaneKeys fetch_idx(int chunk) const {
    LaneKeys found;
#pragma unroll
    for (int i = 0; i < T::kChunkKeys / 32; ++i) {
      const int entry = chunk_entry(chunk, i);
      found.idx[i] = T::kGathered && entry < min(keys, end * T::kKeys) ? __ldg(list + entry) : 0;
    }
    return found;
  }
  __device__ __forceinline__ void to_positions(LaneKeys& x) const {
    if constexpr (T::kGathered) {
#pragma unroll
      for (int i = 0; i < T::kChunkKeys / 32; ++i) x.idx[i] = Base::key_limits().position(x.idx[i]);
    }
  }
  __device__ __forceinline__ void keep_idx(int chunk, const LaneKeys& x) const {
#pragma unroll
    for (int i = 0; i < T::kChunkKeys / 32; ++i) shared.idx[warp][chunk & 1][lane + 32 * i] = x.idx[i];
  }
  // The entries of a step.
  __device__ __forceinline__ const int32_t* idx(int step) const {
    const int at = step - begin;
    return shared.idx[warp][at / T::kChunkSteps & 1] + at % T::kChunkSteps * T::kKeys;
  }

  // K (which = 0) or V (1) of a step; one group of copies, which is empty after the last step.
  __device__ __forceinline__ void load(int step, int stage, int which) const {
    if (step < end) {
      const Strides3& s = which == 0 ? p.k_stride : p.v_stride;
      const Element* src = Base::template head_ptr<Element>(which == 0 ? p.k : p.v, s, head / p.head_ratio);
      const bool vec = which == 0 ? p.vec_k : p.vec_v;
      if constexpr (T::kGathered) {
        load_tile<T::kKeys, kHeadDim, 32>(tile(stage, which), src, s.row, keys_of(step), p.head_dim, vec, lane,
                                          RowGather{idx(step)});
      } else {
        load_tile<T::kKeys, kHeadDim, 32>(tile(stage, which), src + static_cast<int64_t>(step) * T::kKeys * s.row,
                                          s.row, keys_of(step), p.head_dim, vec, lane, RowIdentity{});
      }
    }
    cp_async_fence();
  }
  __device__ __forceinline__ uint32_t tile(int stage, int which) const { return ring + (2 * stage + which) * T::kTile; }

  // The rows as the left operand of the first product, for all of head_dim.
  using Queries = uint32_t[kHeadDim / 16][4];
  __device__ __forceinline__ void load_q(Queries& q) const {
    const auto at = [&](int i, int k) {
      return static_cast<const uint16_t*>(p.q) + batch * p.q_stride.batch + head * p.q_stride.head +
             (row0 + lane / 4 + 8 * (i & 1)) * p.q_stride.row + 16 * k + 8 * (i / 2) + 2 * (lane & 3);
    };
    const auto exists = [&](int i, int k) {
      return lane / 4 + 8 * (i & 1) < rows && 16 * k + 8 * (i / 2) < p.head_dim;
    };
    if (p.vec_q) {
#pragma unroll
      for (int k = 0; k < kHeadDim / 16; ++k)
#pragma unroll
        for (int i = 0; i < 4; ++i) q[k][i] = exists(i, k) ? __ldg(reinterpret_cast<const uint32_t*>(at(i, k))) : 0;
    } else {
#pragma unroll
      for (int k = 0; k < kHeadDim / 16; ++k)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          q[k][i] = exists(i, k) ? __ldg(at(i, k)) | static_cast<uint32_t>(__ldg(at(i, k) + 1)) << 16 : 0;
        }
    }
  }

  __device__ __forceinline__ int64_t bias_base() const { return Base::bias_base(head); }
  // A bias that is the same for all rows, for the keys of a chunk; `x` holds their positions, where gathered.
  struct LaneBias {
    float value[T::kChunkKeys / 32];
  };
  __device__ __forceinline__ LaneBias fetch_bias(int chunk, const LaneKeys& x) const {
    LaneBias found;
#pragma unroll
    for (int i = 0; i < T::kChunkKeys / 32; ++i) {
      const int entry = chunk_entry(chunk, i);
      found.value[i] = 0.f;
      if (p.bias.kind == BiasKind::kKey && entry < min(keys, end * T::kKeys)) {
        const int64_t key = T::kGathered ? x.idx[i] : entry;
        found.value[i] = load_bias(p.bias, bias_base() + key * p.bias.col_stride, T::kIsBf16);
      }
    }
    return found;
  }
  __device__ __forceinline__ void keep_bias(const LaneBias& x) const {
#pragma unroll
    for (int i = 0; i < T::kChunkKeys / 32; ++i) shared.bias[warp][lane + 32 * i] = x.value[i];
  }

  // --- the token of a cache ------------------------------------------------------------------------------------------

  // The token overwrites an entry in the tile that the entry has been loaded into. Every warp holds a copy of the token:
  // chunks of eight elements, first of its key, then of its value.
  struct Token {
    static constexpr int kChunks = kHeadDim / 8, kOwn = (2 * kChunks + 31) / 32;
    uint4 chunk[kOwn];
    float score;  // -inf: there is none
  };
  __device__ __forceinline__ bool is_active() const {
    return p.token.active == nullptr || p.token.active[batch * p.token.active_stride] != 0;
  }
  __device__ __forceinline__ Token load_token() const {
    Token found;
    found.score = -INFINITY;
    if (is_active()) {
      BiasParams score;
      score.ptr = p.token.score;
      score.dtype = p.bias.dtype;
      found.score = load_bias(score, batch * p.token.score_batch_stride + head * p.token.score_head_stride, T::kIsBf16);
    }
#pragma unroll
    for (int i = 0; i < Token::kOwn; ++i) {
      const int own = lane + 32 * i, which = own / Token::kChunks, col = own % Token::kChunks * 8;
      const Strides3& s = which == 0 ? p.token.k_stride : p.token.v_stride;
      const uint16_t* src =
          static_cast<const uint16_t*>(which == 0 ? p.token.k : p.token.v) + batch * s.batch + head * s.head + col;
      found.chunk[i] = which < 2 && col < p.head_dim ? load_chunk(src, p.token.vec) : make_uint4(0, 0, 0, 0);
    }
    return found;
  }
  // K (which = 0) or V (1) of the token into its row of a tile.
  __device__ __forceinline__ void put_token(const Token& token, int stage, int which) const {
#pragma unroll
    for (int i = 0; i < Token::kOwn; ++i) {
      const int own = lane + 32 * i;
      if (own / Token::kChunks != which) continue;
      st_shared(tile(stage, which) + SmemTile<kHeadDim>::offset(replaced % T::kKeys, own % Token::kChunks),
                token.chunk[i]);
    }
    __syncwarp();
  }
  // Which entry makes room: the lowest, if the token's score is not lower. Every block of a head comes to the same
  // answer, the first one leaves it for cache_commit().
  __device__ __forceinline__ void place_token(const LowestEntry<T::kThreads>& search, float score) {
    __shared__ CacheEntry warp_low[T::kWarps];
    const CacheEntry low = search.find([&](int i) { return entry_score(i); }, entry_positions(), keys, warp_low);
    // There is no lowest entry where every score is NaN.
    if (score > -INFINITY && score >= low.score && low.slot < keys) replaced = low.slot;
    if (split == 0 && row0 == 0 && threadIdx.x == 0) {
      int32_t* place = p.token.place + 2 * (static_cast<int64_t>(batch) * p.nheads + head);
      place[0] = replaced;
      place[1] = is_active() ? next_cache_position(p.token.seen[batch], 1) : -1;
    }
  }
  __device__ __forceinline__ float entry_score(int slot) const {
    return load_bias(p.bias, bias_base() + slot, T::kIsBf16);
  }
  __device__ __forceinline__ const int32_t* entry_positions() const {
    return p.token.entry_position + (static_cast<int64_t>(batch) * p.nheads + head) * p.seqlen_k;
  }
  __device__ __forceinline__ bool holds_token(int step) const {
    return !T::kGathered && replaced >= step * T::kKeys && replaced < (step + 1) * T::kKeys;
  }

  // --- compute -------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void scores_of(float (&acc)[1][T::NT][4], const uint32_t (&q)[kHeadDim / 16][4],
                                            int stage) const {
    using Mma = MmaAtom<Element>;
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
  __device__ __forceinline__ void modify_scores(float (&acc)[1][T::NT][4], int step) const {
    const FragmentMap map(0, 0, lane);
    const int count = keys_of(step);
    scale_scores(acc, p.softmax_scale, p.softcap);
    add_bias(acc, step, map);
#pragma unroll
    for (int nt = 0; nt < T::NT; ++nt)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int col = map.col(nt, e);
        if (col >= count) acc[0][nt][e] = -INFINITY;
      }
  }
  __device__ __forceinline__ void add_bias(float (&acc)[1][T::NT][4], int step, const FragmentMap& map) const {
    if (p.bias.kind == BiasKind::kKey) {
      const float* bias = shared.bias[warp] + (step - begin) % T::kChunkSteps * T::kKeys;
#pragma unroll
      for (int nt = 0; nt < T::NT; ++nt) {
        const float2 b = *reinterpret_cast<const float2*>(bias + map.col(nt, 0));
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
          const int64_t key = T::kGathered ? idx(step)[col] : step * T::kKeys + col;
          acc[0][nt][e] +=
              load_bias(p.bias, bias_base() + (row0 + row) * p.bias.row_stride + key * p.bias.col_stride, T::kIsBf16);
        }
    }
  }

  // --- the loop ------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void run() {
    LowestEntry<T::kThreads> search;
    Token token;
    // Issued before the copies of K and V, for which all of these loads would wait otherwise.
    if (has_token()) {
      search.load([&](int i) { return entry_score(i); }, entry_positions(), keys);
      token = load_token();
    }
    LaneKeys idx_next = fetch_idx(0);
    to_positions(idx_next);
    LaneBias bias_next = fetch_bias(0, idx_next);
    if constexpr (T::kGathered) keep_idx(0, idx_next);
    idx_next = fetch_idx(1);
    Queries q;
    load_q(q);
    __syncwarp();
#pragma unroll 1
    for (int i = 0; i < T::kStages; ++i) {
      load(begin + i, i, 0);
      load(begin + i, i, 1);
    }
    if constexpr (!T::kGathered) {
      if (has_token()) place_token(search, token.score);
    }

    float acc_o[1][T::OT][4];
    clear(acc_o);
    OnlineSoftmax<1> softmax;
    int stage = 0;
#pragma unroll 1
    for (int step = begin; step < end; ++step) {
      if ((step - begin) % T::kChunkSteps == 0) {
        const int chunk = (step - begin) / T::kChunkSteps;
        keep_bias(bias_next);
        to_positions(idx_next);
        if constexpr (T::kGathered) keep_idx(chunk + 1, idx_next);
        bias_next = fetch_bias(chunk + 1, idx_next);
        idx_next = fetch_idx(chunk + 2);
      }
      cp_async_wait<2 * T::kStages - 1>();
      __syncwarp();  // K of this step has landed, and the chunk is there
      if (holds_token(step)) {
        if (lane == 0) shared.bias[warp][(replaced - begin * T::kKeys) % T::kChunkKeys] = token.score;
        put_token(token, stage, 0);
      }
      float acc_s[1][T::NT][4];
      scores_of(acc_s, q, stage);
      modify_scores(acc_s, step);
      __syncwarp();  // K of this step and, at its end, the chunk are no longer read
      load(step + T::kStages, stage, 0);

      softmax.template step<false>(acc_s, acc_o, 0.f);
      cp_async_wait<2 * T::kStages - 1>();
      __syncwarp();  // V of this step has landed
      if (holds_token(step)) put_token(token, stage, 1);
      gemm_pv<Element>(acc_o, acc_s, Operand<kHeadDim, false, true>(tile(stage, 1), 0, lane));
      __syncwarp();
      load(step + T::kStages, stage, 1);
      stage = stage + 1 == T::kStages ? 0 : stage + 1;
    }
    cp_async_wait<0>();
    __syncthreads();  // the rings are free
    leave(acc_o, softmax);
    __syncthreads();
    merge();
  }

  // --- merge ---------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ float* merge_row(int w, int row) const {
    return reinterpret_cast<float*>(smem) + (w * T::kRows + row) * T::kMergePitch;
  }
  // Maximum (0) or sum (1) of a row.
  __device__ __forceinline__ float& merge_stats(int which, int w, int row) const {
    return reinterpret_cast<float*>(smem)[T::kMergeFloats + (which * T::kWarps + w) * T::kRows + row];
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
        merge_stats(0, warp, row) = softmax.row_max[half];
        merge_stats(1, warp, row) = sum;
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
      for (int w = 0; w < T::kWarps; ++w) max = fmaxf(max, merge_stats(0, w, row));
      const float shift = max == -INFINITY ? 0.f : max;  // nothing kept: all weights are exp(-inf) = 0
      float sum = 0.f;
      float2 out = {0.f, 0.f};
#pragma unroll
      for (int w = 0; w < T::kWarps; ++w) {
        const float weight = exp2_approx((merge_stats(0, w, row) - shift) * kLog2e);
        const float2 x = *reinterpret_cast<const float2*>(merge_row(w, row) + col);
        sum += weight * merge_stats(1, w, row);
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
