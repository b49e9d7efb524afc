// Forward attention for sm80 and later, by mma.sync and cp.async: a thread block computes kBlockM query rows of a head.
#pragma once

#include "../../tiles.h"
#include "../shared/attention_block.cuh"
#include "../shared/mask_tiles.cuh"
#include "../shared/scores.cuh"
#include "../shared/softmax.cuh"
#include "../shared/work_index.cuh"
#include "bias_tile.cuh"
#include "copy.cuh"
#include "launch.cuh"

namespace dmattn {

// kTokenRows: rows are laid out as TokenRows, at Level::kPlain over contiguous keys. Then results are written as
// partial ones even if keys are not split: combine_splits() puts the rows in their places, for which this kernel has
// too few registers.
template <class Element_, int kHeadDim_, int kBlockM_, int kBlockN_, int kWarps_, bool kGathered_, Level kLevel,
          bool kTokenRows_ = false>
struct FwdTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_, kBlockM = kBlockM_, kBlockN = kBlockN_, kWarps = kWarps_;
  static constexpr bool kGathered = kGathered_;  // keys come from a list of kept keys
  static constexpr bool kGeneral = is_general(kLevel);
  static constexpr bool kPacked = kLevel == Level::kPacked, kMayBePacked = kGeneral;
  static constexpr bool kFull = kLevel == Level::kFull;
  static constexpr bool kTokenRows = kTokenRows_;
  static_assert(!kTokenRows || (kLevel == Level::kPlain && !kGathered));
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int MT = kBlockM / (16 * kWarps);
  static constexpr int NT = kBlockN / 8;
  static constexpr int OT = kHeadDim / 8;
  // Two thread blocks of 128 threads fill the register file, with 255 registers a thread, and hide each other's
  // softmax.
  static constexpr int kMinBlocks = kWarps == 4 ? 2 : 1;
  static constexpr int kMaskWords = kBlockN / 32;

  static constexpr uint32_t kQ = 0;
  static constexpr uint32_t kK = kQ + kBlockM * kHeadDim * sizeof(Element);
  static constexpr uint32_t kV = kK + kBlockN * kHeadDim * sizeof(Element);
  static constexpr uint32_t kKeyIdx = kV + kBlockN * kHeadDim * sizeof(Element);       // int32 [2][kBlockN]
  static constexpr uint32_t kInterval = kKeyIdx + (kGathered ? 2 * kBlockN * 4 : 0);   // KeyInterval [2][kBlockN]
  static constexpr uint32_t kKeyBias = kInterval + (kGathered ? 2 * kBlockN * 8 : 0);  // float [2][kBlockN]
  static constexpr uint32_t kMask = kKeyBias + (kGeneral ? 2 * kBlockN * 4 : 0);       // uint32 [kBlockM][kMaskWords]
  static constexpr uint32_t kSeqlens = kMask + (kGeneral && !kGathered ? kBlockM * kMaskWords * 4 : 0);  // SeqlenInfo
  // Not over lists: if lengths come from global memory, ptxas keeps them in uniform registers there, and with those
  // from shared memory it spilled 64 bytes at head_dim 128.
  static constexpr bool kKeepsSeqlens = (kPacked || kMayBePacked) && !kGathered;
  static constexpr uint32_t kBias = kSeqlens + (kKeepsSeqlens ? sizeof(SeqlenInfo) : 0);
  static constexpr uint32_t kBiasBytes =
      kGeneral && !kGathered ? kBlockM * ShiftedTile<kBlockN>::kPitch : 0;  // kTile only

  static uint32_t smem_bytes(const FwdParams& p) { return kBias + (p.bias.kind == BiasKind::kTile ? kBiasBytes : 0); }
};

template <class T>
struct FwdBlock : AttentionBlock<T, FwdParams> {
  using Base = AttentionBlock<T, FwdParams>;
  using Element = typename T::Element;
  using Base::batch, Base::lane, Base::p, Base::smem, Base::warp;
  using Base::first_key, Base::first_row, Base::has_intervals, Base::is_packed, Base::seqlen_k, Base::seqlen_q;
  static constexpr int kBlockM = T::kBlockM, kBlockN = T::kBlockN, kHeadDim = T::kHeadDim;

  uint32_t smem_base;
  int head, m_block, split;
  int row0;           // first query row of the block
  bool has_sequence;  // see find_sequence()
  // causal_offset() of listed keys, which may be packed. It is kept in a register because ptxas spilled 500 bytes
  // here when the sequence's lengths were read again.
  int list_offset;
  int keys_total;      // keys, or entries of the list
  int keys_full;       // interval lists: leading entries that every row keeps
  int n_begin, n_end;  // key tiles of this block and split
  const int32_t* list;
  MaskTiles<kBlockM, kBlockN> tiles;

  __device__ __forceinline__ FwdBlock(const FwdParams& params, char* smem_)
      : Base(params, smem_), smem_base(smem_u32(smem_)) {
    const int m_blocks = (p.seqlen_q + kBlockM - 1) / kBlockM;
    WorkIndex work(static_cast<int>(blockIdx.x));
    // Under causality the last rows see the most keys. They are started first, so that the thread blocks that end
    // last are short ones.
    m_block = m_blocks - 1 - work.take(m_blocks);
    split = work.take(p.num_splits);
    head = work.take(p.nheads);
    batch = work.rest;
    row0 = m_block * kBlockM;
    has_sequence = Base::find_sequence();
    if constexpr (T::kGathered && T::kGeneral) list_offset = Base::causal_offset();
    find_key_range();
  }

  __device__ __forceinline__ int causal_offset() const {
    if constexpr (T::kTokenRows) return p.seqlen_k - p.token_rows.count;
    return T::kGathered && T::kGeneral ? list_offset : Base::causal_offset();
  }
  // The last position that a row sees under causality.
  __device__ __forceinline__ int last_position(int row) const {
    if constexpr (!T::kTokenRows) return row + causal_offset();
    uint32_t token = row;
    take(token, p.token_rows.group);
    return static_cast<int>(token) + causal_offset();
  }

  __device__ __forceinline__ void find_key_range() {
    keys_total = seqlen_k();
    list = nullptr;
    if constexpr (T::kGathered) {
      int64_t i = Base::list_index(head);
      if (has_intervals()) i = i * p.keys.blocks + row0 / p.keys.block_rows;
      list = Base::list_of(head, i);
      keys_total = has_sequence ? read_list_count(p.keys, i) : 0;
      if (has_intervals()) keys_full = read_list_full(p.keys, i, keys_total);
    }
    int visible = keys_total;
    if (p.is_causal && !has_intervals()) {
      const int end = last_position(min(row0 + kBlockM, seqlen_q()) - 1) + 1;  // first position that no row may see
      visible = T::kGathered ? warp_lower_bound(list, keys_total, end, lane) : min(visible, max(end, 0));
    }
    n_end = (visible + kBlockN - 1) / kBlockN;
    n_begin = 0;
    if (p.num_splits > 1) {
      const int per_split = (n_end + p.num_splits - 1) / p.num_splits;
      n_begin = split * per_split;
      n_end = min(n_end, n_begin + per_split);
    }
    if constexpr (T::kGeneral && !T::kGathered) {
      if (p.mask.bits != nullptr) {
        const int band = is_packed() ? 32 * first_packed_block(first_row(), batch, kMaskWordRows) : 0;
        const int64_t i = (Base::mask_index(head) * p.mask.bands_q + band) * p.mask.words_k;
        tiles = MaskTiles<kBlockM, kBlockN>(p.mask.any_rows + i, p.mask.all_rows + i, p.mask.words_k,
                                            (seqlen_q() + kMaskBand - 1) / kMaskBand, m_block);
      }
    }
  }

  __device__ __forceinline__ int previous(int n) const {
    if constexpr (T::kGeneral && !T::kGathered) return tiles.last_nonempty(n, n_begin);
    return n;
  }

  // --- loads ---------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ const Element* head_ptr(const void* base, const Strides3& s, int h) const {
    return Base::template head_ptr<Element>(base, s, h);
  }
  __device__ __forceinline__ int64_t bias_base() const { return Base::bias_base(head); }
  // vec_* is tested at run time even in the plain kernel, where it is always true: the branch keeps the compiler from
  // moving the copies into the matrix products around them, which made the forward 15% slower.
  __device__ __forceinline__ void load_q() const {
    if constexpr (T::kTokenRows) return load_q_of_tokens();
    const Element* src = head_ptr(p.q, p.q_stride, head) + (first_row() + row0) * p.q_stride.row;
    load_tile<kBlockM, kHeadDim, T::kThreads>(smem_base + T::kQ, src, p.q_stride.row, seqlen_q() - row0, p.head_dim,
                                              p.vec_q, threadIdx.x, RowIdentity{});
  }
  __device__ __forceinline__ void load_q_of_tokens() const {
    using Tile = SmemTile<kHeadDim>;
    const Element* const first = head_ptr(p.q, p.q_stride, head);
    const int chunk = threadIdx.x % Tile::kChunks;
#pragma unroll 2  // to save registers
    for (int i = threadIdx.x / Tile::kChunks; i < kBlockM; i += T::kThreads / Tile::kChunks) {
      const int row = row0 + i;
      const int64_t at = token_row_offset(p.token_rows.group, p.token_rows.q_token, p.q_stride.row, row);
      cp_async16(smem_base + T::kQ + Tile::offset(i, chunk), first + at + chunk * 8,
                 row < p.seqlen_q && chunk * 8 < p.head_dim);
    }
  }
  __device__ __forceinline__ void load_kv(uint32_t dst, const void* base, const Strides3& s, bool vec, int n,
                                          int buf) const {
    const Element* src = head_ptr(base, s, head / p.head_ratio) + first_key() * s.row;
    const int key0 = n * kBlockN;
    if constexpr (T::kGathered) {
      load_tile<kBlockN, kHeadDim, T::kThreads>(smem_base + dst, src, s.row, keys_total - key0, p.head_dim, vec,
                                                threadIdx.x, RowGather{key_idx(buf)});
    } else {
      load_tile<kBlockN, kHeadDim, T::kThreads>(smem_base + dst, src + key0 * s.row, s.row, keys_total - key0,
                                                p.head_dim, vec, threadIdx.x, RowIdentity{});
    }
  }
  __device__ __forceinline__ int32_t* key_idx(int buf) const {
    return reinterpret_cast<int32_t*>(smem + T::kKeyIdx) + buf * kBlockN;
  }
  __device__ __forceinline__ KeyInterval* key_interval(int buf) const {
    return reinterpret_cast<KeyInterval*>(smem + T::kInterval) + buf * kBlockN;
  }
  // Length of a key's interval, 0 past the end of the list. Tiles of keys that every row keeps do not need it.
  __device__ __forceinline__ int fetch_interval_length(int n, int idx) const {
    const int entry = n * kBlockN + threadIdx.x;
    if ((n + 1) * kBlockN <= keys_full || threadIdx.x >= kBlockN || entry >= keys_total) return 0;
    return __ldg(p.keys.end + Base::list_index(head) * p.seqlen_k + idx) - idx;
  }
  __device__ __forceinline__ float* key_bias(int buf) const {
    return reinterpret_cast<float*>(smem + T::kKeyBias) + buf * kBlockN;
  }
  // This thread's entry of the tile's list, and its key's bias (threads below kBlockN), which are loaded a tile
  // ahead. The entry is returned as it was read, so that nothing waits for it yet; later, key_limits() clamps it to a
  // position.
  __device__ __forceinline__ int fetch_key_idx(int n) const {
    return threadIdx.x < kBlockN ? __ldg(list + n * kBlockN + threadIdx.x) : 0;
  }
  __device__ __forceinline__ float fetch_key_bias(int n, int idx) const {
    const int key = n * kBlockN + threadIdx.x;
    if (threadIdx.x >= kBlockN || key >= keys_total) return 0.f;
    constexpr bool kIsBf16 = std::is_same_v<Element, cutlass::bfloat16_t>;
    return load_bias(p.bias, bias_base() + static_cast<int64_t>(T::kGathered ? idx : key) * p.bias.col_stride, kIsBf16);
  }
  __device__ __forceinline__ bool has_key_bias() const { return T::kGeneral && p.bias.kind == BiasKind::kKey; }

  // Loads what the score modification of tile n reads besides Q and K.
  __device__ __forceinline__ void load_score_inputs(int n) const {
    if constexpr (T::kGeneral && !T::kGathered) {
      if (p.bias.kind == BiasKind::kTile) {
        bias_tile(n).template load<kBlockM, T::kThreads>(smem_base + T::kBias, seqlen_q() - row0,
                                                         seqlen_k() - n * kBlockN, threadIdx.x);
      }
      if (p.mask.bits != nullptr) {
        load_mask_words<kBlockM, T::kMaskWords, T::kThreads>(smem_base + T::kMask, p.mask, Base::mask_index(head),
                                                             first_row() + row0, seqlen_q() - row0, n * T::kMaskWords);
      }
    }
  }
  __device__ __forceinline__ ShiftedTile<kBlockN> bias_tile(int n) const {
    return {static_cast<const uint16_t*>(p.bias.ptr) + bias_base() + row0 * p.bias.row_stride + n * kBlockN,
            p.bias.row_stride};
  }

  // --- compute -------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void modify_scores(float (&acc_s)[T::MT][T::NT][4], int n, int buf) const {
    const FragmentMap map(warp * 16 * T::MT, 0, lane);
    ScoreInputs in;
    in.key_idx = T::kGathered ? key_idx(buf) : nullptr;
    in.key_intervals = smem_base + T::kInterval + buf * kBlockN * sizeof(KeyInterval);
    in.key0 = n * kBlockN;
    in.keys = keys_total - in.key0;
    in.row0 = row0;
    in.rows = seqlen_q() - row0;
    if constexpr (T::kGeneral) {
      in.key_bias = key_bias(buf);
      in.mask_words = reinterpret_cast<const uint32_t*>(smem + T::kMask);
      scale_scores(acc_s, p.softmax_scale, p.softcap);
      if (!T::kGathered && p.bias.kind == BiasKind::kTile) {
        add_shifted_bias<Element>(acc_s, bias_tile(n), smem_base + T::kBias, map);
      } else if (p.bias.kind != BiasKind::kNone) {
        add_bias<Element, kBlockN, T::kGathered, T::kFull>(acc_s, p.bias, bias_base(), in, map);
      }
      if constexpr (!T::kGathered) {
        if (p.mask.bits != nullptr && tiles.state(n) == TileState::kPartial) {
          apply_mask_words<kBlockN>(acc_s, in, map);
        }
      }
    }
    if (has_intervals()) {
      if (in.key0 + kBlockN > keys_full) apply_intervals(acc_s, in, map, causal_offset());
      return;
    }
    // Only tiles on the diagonal or at the end of the keys have scores to set to -inf.
    const int last = T::kGathered ? in.key_idx[min(kBlockN, in.keys) - 1] : in.key0 + kBlockN - 1;
    if (in.keys < kBlockN || (p.is_causal && last > last_position(row0))) {
      if constexpr (T::kTokenRows) {
        apply_limits_of_rows(acc_s, in, map, [&](int row) { return p.is_causal ? last_position(row) : INT_MAX; });
      } else {
        apply_limits<T::kGathered>(acc_s, in, map, p.is_causal, causal_offset());
      }
    }
  }

  __device__ __forceinline__ void run() {
    // The grid has as many row blocks for each sequence as the longest one needs.
    if (is_packed() && (!has_sequence || row0 >= seqlen_q())) return;
    float acc_o[T::MT][T::OT][4];
    clear(acc_o);
    OnlineSoftmax<T::MT> softmax;
    const float scale_log2 = p.softmax_scale * kLog2e;
    const Operand<kHeadDim, true, false> q(smem_base + T::kQ, warp * 16 * T::MT, lane);
    const Operand<kHeadDim, false, false> k(smem_base + T::kK, 0, lane);
    const Operand<kHeadDim, false, true> v(smem_base + T::kV, 0, lane);

    int n = previous(n_end - 1);
    int buf = 0;
    if (n >= n_begin) {
      int idx = 0;
      if constexpr (T::kGathered) {
        idx = Base::key_limits().position(fetch_key_idx(n));
        if (threadIdx.x < kBlockN) key_idx(0)[threadIdx.x] = idx;
        __syncthreads();
      }
      load_q();
      load_kv(T::kK, p.k, p.k_stride, p.vec_k, n, 0);
      load_score_inputs(n);
      cp_async_fence();
      if (has_key_bias() && threadIdx.x < kBlockN) key_bias(0)[threadIdx.x] = fetch_key_bias(n, idx);
      if (has_intervals() && threadIdx.x < kBlockN) key_interval(0)[threadIdx.x] = {idx, fetch_interval_length(n, idx)};
    }
    while (n >= n_begin) {
      const int n_next = previous(n - 1);
      const bool more = n_next >= n_begin;
      cp_async_wait<0>();
      __syncthreads();  // K of this tile has landed; nobody reads V of the last one any more
      load_kv(T::kV, p.v, p.v_stride, p.vec_v, n, buf);
      cp_async_fence();
      int idx_next = 0;
      if constexpr (T::kGathered) {
        if (more) idx_next = fetch_key_idx(n_next);
      }

      float acc_s[T::MT][T::NT][4];
      clear(acc_s);
      gemm_ss<Element, kHeadDim / 16>(acc_s, q, k);
      modify_scores(acc_s, n, buf);

      if constexpr (T::kGathered) {
        idx_next = Base::key_limits().position(idx_next);
        if (threadIdx.x < kBlockN) key_idx(buf ^ 1)[threadIdx.x] = idx_next;
      }
      cp_async_wait<0>();
      __syncthreads();  // V has landed; K, bias and mask of this tile are no longer read
      float bias_next = 0.f;
      int length_next = 0;
      if (more) {
        load_kv(T::kK, p.k, p.k_stride, p.vec_k, n_next, buf ^ 1);
        load_score_inputs(n_next);
        if (has_key_bias()) bias_next = fetch_key_bias(n_next, idx_next);
        if (has_intervals()) length_next = fetch_interval_length(n_next, idx_next);
      }
      cp_async_fence();
      softmax.template step<!T::kGeneral>(acc_s, acc_o, scale_log2);
      gemm_pv<Element>(acc_o, acc_s, v);
      if (has_key_bias() && threadIdx.x < kBlockN) key_bias(buf ^ 1)[threadIdx.x] = bias_next;
      if (has_intervals() && threadIdx.x < kBlockN) key_interval(buf ^ 1)[threadIdx.x] = {idx_next, length_next};
      n = n_next;
      buf ^= 1;
    }
    store(acc_o, softmax);
  }

  // --- epilogue ------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ bool leaves_parts() const { return T::kTokenRows || p.num_splits > 1; }

  __device__ __forceinline__ void store(float (&acc_o)[T::MT][T::OT][4], OnlineSoftmax<T::MT>& softmax) {
    const int64_t accum_row = ((static_cast<int64_t>(split) * p.batch + batch) * p.nheads + head) * p.seqlen_q;
#pragma unroll
    for (int r = 0; r < 2 * T::MT; ++r) {
      const int mt = r / 2, e0 = 2 * (r & 1);
      float lse, rest;
      const float inv_sum = softmax.finish(r, T::kGeneral ? 1.f : p.softmax_scale, lse, rest);
#pragma unroll
      for (int ot = 0; ot < T::OT; ++ot) {
        acc_o[mt][ot][e0] *= inv_sum;
        acc_o[mt][ot][e0 + 1] *= inv_sum;
      }
      const int row = row0 + warp * 16 * T::MT + mt * 16 + (r & 1) * 8 + lane / 4;
      if ((lane & 3) == 0 && row < seqlen_q()) {
        if (leaves_parts()) {
          const int64_t rows = static_cast<int64_t>(p.num_splits) * p.batch * p.nheads * p.seqlen_q;
          p.lse_accum[accum_row + row] = lse;
          p.lse_accum[rows + accum_row + row] = rest;
        } else {
          const int64_t i =
              batch * p.lse_stride.batch + head * p.lse_stride.head + (first_row() + row) * p.lse_stride.row;
          p.lse[i] = lse;
          if (p.lse_rest != nullptr) p.lse_rest[i] = rest;
        }
      }
    }
    if (leaves_parts()) {
      store_accum(acc_o, accum_row);
      return;
    }
    // No warp reads Q after the main loop's second barrier, so the rounded output goes through the tile of Q.
    store_acc<Element, kHeadDim>(smem_base + T::kQ, acc_o, warp * 16 * T::MT, 0, lane);
    __syncthreads();
    Element* out = static_cast<Element*>(p.out) + batch * p.out_stride.batch + head * p.out_stride.head +
                   (first_row() + row0) * p.out_stride.row;
    store_tile<kBlockM, kHeadDim, T::kThreads>(out, smem_base + T::kQ, p.out_stride.row, seqlen_q() - row0, p.head_dim,
                                               !T::kGeneral || p.vec_out, threadIdx.x, RowIdentity{});
  }

  __device__ __forceinline__ void store_accum(const float (&acc_o)[T::MT][T::OT][4], int64_t accum_row) const {
    const FragmentMap map(warp * 16 * T::MT, 0, lane);
#pragma unroll
    for (int mt = 0; mt < T::MT; ++mt)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = row0 + map.row(mt, 2 * half);
        if (row >= p.seqlen_q) continue;
        float* dst = p.out_accum + (accum_row + row) * p.head_dim;
#pragma unroll
        for (int ot = 0; ot < T::OT; ++ot) {
          const int col = map.col(ot, 0);
          if (col < p.head_dim) {
            *reinterpret_cast<float2*>(dst + col) = {acc_o[mt][ot][2 * half], acc_o[mt][ot][2 * half + 1]};
          }
        }
      }
  }
};

template <class T, int kTileSetBits>
__global__ void __launch_bounds__(T::kThreads, T::kMinBlocks) fwd_kernel(const __grid_constant__ FwdParams p) {
  if constexpr (is_compiled_here<kTileSetBits>()) {
    extern __shared__ __align__(1024) char smem[];
    FwdBlock<T>(p, smem).run();
  } else {
    __trap();  // the host asked for another tile set
  }
}

}  // namespace dmattn
