// Backward attention for sm80 and later: what a thread block works on. A thread block has kBlockN keys of a kv head,
// and loops over the query rows (of all query heads of the group) that see them. dk and dv stay in registers; dq is
// added to global memory in fp32.
#pragma once

#include "../../tiles.h"
#include "../shared/attention_block.cuh"
#include "../shared/mask_tiles.cuh"
#include "../shared/scores.cuh"
#include "../shared/work_index.cuh"
#include "bias_tile.cuh"
#include "copy.cuh"
#include "launch.cuh"

namespace dmattn {

template <class Element_, int kHeadDim_, TileSet kTiles, bool kGathered_, Level kLevel>
struct BwdTraits {
  using Element = Element_;
  static constexpr BwdTile kTile = bwd_tile(kTiles, kHeadDim_);
  static constexpr int kHeadDim = kHeadDim_, kBlockM = kTile.block_m, kBlockN = kTile.block_n, kWarps = kTile.warps;
  static constexpr bool kGathered = kGathered_;
  // The plain kernel always computes all three gradients: without branches, the compiler schedules its last three
  // products together.
  static constexpr bool kGeneral = is_general(kLevel);
  static constexpr bool kPacked = kLevel == Level::kPacked, kMayBePacked = kGeneral;
  static constexpr bool kFull = kLevel == Level::kFull;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kStagesQ = kTile.stages_q;
  static constexpr int kMaskWords = kBlockN / 32;

  // S, dP: rows x keys.  dK, dV: keys x head_dim.  dQ: rows x head_dim.
  static constexpr int kWarpsMSdP = kTile.warps_m_sdp, kWarpsNSdP = kWarps / kWarpsMSdP;
  static constexpr int kWarpsNdKV = kTile.warps_n_dkv, kWarpsDdKV = kWarps / kWarpsNdKV;
  static constexpr int kWarpsMdQ = kTile.warps_m_dq, kWarpsDdQ = kWarps / kWarpsMdQ;
  static constexpr int MTs = kBlockM / (16 * kWarpsMSdP), NTs = kBlockN / (8 * kWarpsNSdP);
  static constexpr int MTkv = kBlockN / (16 * kWarpsNdKV), NTkv = kHeadDim / (8 * kWarpsDdKV);
  static constexpr int MTq = kBlockM / (16 * kWarpsMdQ), NTq = kHeadDim / (8 * kWarpsDdQ);

  static constexpr uint32_t kTileQ = kBlockM * kHeadDim * sizeof(Element),
                            kTileK = kBlockN * kHeadDim * sizeof(Element);
  static constexpr uint32_t kTileS = kBlockM * kBlockN * sizeof(Element);  // of P and of dS
  static constexpr uint32_t kK = 0;
  static constexpr uint32_t kV = kK + kTileK;
  static constexpr uint32_t kQ = kV + kTileK;
  static constexpr uint32_t kdO = kQ + kStagesQ * kTileQ;
  // A second stage of dO, where it fits, saves the barrier between the product for dV and the next load of dO.
  static constexpr uint32_t kSmallBytes = 4 * kBlockM * 4 + (kGathered ? 3 * kBlockN * 4 : 0) +
                                          (kGeneral ? 2 * kBlockN * 4 : 0) +
                                          (kGeneral && !kGathered ? kBlockM * kMaskWords * 4 : 0);
  static constexpr uint32_t kSmemLimit = smem_limit(kTiles);
  static constexpr int kStagesdO = kdO + 2 * kTileQ + 2 * kTileS + kSmallBytes <= kSmemLimit ? 2 : 1;
  static constexpr uint32_t kP = kdO + kStagesdO * kTileQ;
  static constexpr uint32_t kdS = kP + kTileS;                   // holds the bias tile until dS replaces it
  static constexpr uint32_t kLse = kdS + kTileS;                 // float [2][kBlockM]
  static constexpr uint32_t kDelta = kLse + 2 * kBlockM * 4;     // float [2][kBlockM]
  static constexpr uint32_t kKeyIdx = kDelta + 2 * kBlockM * 4;  // int32 [kBlockN]
  static constexpr uint32_t kInterval = kKeyIdx + (kGathered ? kBlockN * 4 : 0);   // KeyInterval [kBlockN]
  static constexpr uint32_t kKeyBias = kInterval + (kGathered ? kBlockN * 8 : 0);  // float [2][kBlockN]
  static constexpr uint32_t kMask = kKeyBias + (kGeneral ? 2 * kBlockN * 4 : 0);
  static constexpr uint32_t kSeqlens = kMask + (kGeneral && !kGathered ? kBlockM * kMaskWords * 4 : 0);  // SeqlenInfo
  // Two shapes of the general level fill the shared memory to the last byte, so that they do not keep lengths there.
  static constexpr bool kKeepsSeqlens = (kPacked || kMayBePacked) && kSeqlens + sizeof(SeqlenInfo) <= kSmemLimit;
  static constexpr uint32_t kSmemBytes = kSeqlens + (kKeepsSeqlens ? sizeof(SeqlenInfo) : 0);
  static_assert(kSmemBytes <= kSmemLimit);
};

template <class T>
struct BwdBlock : AttentionBlock<T, BwdParams> {
  using Base = AttentionBlock<T, BwdParams>;
  using Element = typename T::Element;
  using Base::batch, Base::lane, Base::p, Base::smem, Base::warp;
  using Base::causal_offset, Base::first_key, Base::first_row, Base::has_intervals, Base::is_packed;
  using Base::keys_before, Base::seqlen_k, Base::seqlen_q;
  static constexpr int kBlockM = T::kBlockM, kBlockN = T::kBlockN, kHeadDim = T::kHeadDim;
  // The plain kernel only scales scores and masks them by causality and lengths; the general one has bias, mask and
  // softcap.
  using Scores = float[T::MTs][T::NTs][4];

  // One step of the loop: a query head and a block of its rows.
  struct Step {
    int head;
    int m;
    int left;  // steps that remain, this one included; 0: done
  };

  uint32_t smem_base;
  int head_k, n_block;
  int slot;  // in dk_slots and dv_slots, if each split has one
  int num_splits;
  int key0, keys;  // first key (or list entry) and number of keys of the tile
  const int32_t* list;
  int keys_full;       // interval lists: leading keys of the tile that every row of the row block keeps
  int row_block;       // interval lists: block of query rows that the list belongs to
  int m_begin, m_end;  // row blocks that may see the tile
  Step first;
  MaskTiles<kBlockN, kBlockM> tiles;
  bool active;

  __device__ __forceinline__ BwdBlock(const BwdParams& params, char* smem_)
      : Base(params, smem_), smem_base(smem_u32(smem_)) {
    list = nullptr;
    active = find_tile();
    if (active) find_steps();
  }

  __device__ __forceinline__ int m_blocks() const { return (seqlen_q() + kBlockM - 1) / kBlockM; }

  // Index of a head in the arrays of the workspace, which have no batch if sequences are packed.
  __device__ __forceinline__ int64_t slab(int heads, int head) const {
    return static_cast<int64_t>(is_packed() ? 0 : batch) * heads + head;
  }
  // Index of the first row of a step in lse, its rest and delta.
  __device__ __forceinline__ int64_t row_stats(const Step& s) const {
    const int first = is_packed() ? first_packed_block(first_row(), batch, kRowPitch) : 0;
    return slab(p.nheads, s.head) * p.seqlen_q_rounded + static_cast<int64_t>(first) * kRowPitch + s.m * kBlockM;
  }
  // Index of the row block of a step in dq_accum and dq_semaphore.
  __device__ __forceinline__ int64_t dq_block(const Step& s) const {
    if (is_packed()) {
      return slab(p.nheads, s.head) * p.packing.m_blocks + first_packed_block(first_row(), batch, kBlockM) + s.m;
    }
    return slab(p.nheads, s.head) * (T::kGathered ? p.dq_blocks : m_blocks()) + s.m;
  }
  // Index of a key of the thread block's sequence in dbias_cols, dk_accum and dv_accum.
  __device__ __forceinline__ int64_t key_row(int heads, int head, int64_t key) const {
    return slab(heads, head) * (is_packed() ? p.packing.total_k : p.seqlen_k) + first_key() + key;
  }

  // Finds the keys: blockIdx.x -> (batch, kv head, tile, split). Returns false if this thread block has nothing to do.
  __device__ __forceinline__ bool find_tile() {
    slot = blockIdx.x;
    int keys_total;
    if (has_intervals()) return find_interval_tile();
    if constexpr (T::kGathered) {
      num_splits = __ldg(p.schedule);
      const int tile = slot / num_splits;
      if (tile >= __ldg(p.schedule + 1)) return false;
      const int32_t* first_tile = p.schedule + 2;
      const int i = warp_lower_bound(first_tile, p.batch * p.nheads_k + 1, tile + 1, lane) - 1;
      n_block = tile - __ldg(first_tile + i);
      head_k = i % p.nheads_k;
      batch = i / p.nheads_k;
      const bool fits = Base::find_sequence();
      list = Base::list_of(list_head(), list_index());
      keys_total = fits ? read_list_count(p.keys, list_index()) : 0;
    } else {
      num_splits = p.num_splits;
      WorkIndex work(slot / num_splits);
      n_block = work.take((p.seqlen_k + kBlockN - 1) / kBlockN);
      head_k = work.take(p.nheads_k);
      batch = work.rest;
      const bool fits = Base::find_sequence();
      keys_total = fits ? seqlen_k() : 0;  // returning here instead made the largest kernel spill
    }
    key0 = n_block * kBlockN;
    keys = min(kBlockN, keys_total - key0);
    if (!is_packed()) return true;
    return keys > 0 && list_ascends();  // each sequence has as many tiles in the grid as the longest one
  }
  // Whether the list is in order up to this tile. The list of a packed sequence ascends unless wrong cu_seqlens made
  // other sequences overwrite it. A tile could then wait for a turn of dq that an earlier tile with later keys never
  // takes (see wait_for_turn): so no tile from the first one out of order on may take part. Only checked in
  // deterministic causal calls, by a few loads a lane.
  __device__ __forceinline__ bool list_ascends() const {
    if (!(T::kGathered && T::kGeneral) || p.dq_semaphore == nullptr || !p.is_causal) return true;
    bool ascends = true;
    for (int tile = lane; tile < n_block; tile += 32) {
      ascends &= __ldg(list + tile * kBlockN) <= __ldg(list + (tile + 1) * kBlockN);
    }
    return __all_sync(0xffffffffu, ascends);
  }

  // All query heads of a group that a launch handles share the list of the first one.
  __device__ __forceinline__ int list_head() const { return head_k * p.head_ratio + p.group_begin; }
  __device__ __forceinline__ int64_t list_index() const { return Base::list_index(list_head()); }
  // The position that entry `entry` of the tile names.
  __device__ __forceinline__ int read_position(int entry) const {
    return Base::key_limits().position(__ldg(list + key0 + entry));
  }
  // Interval lists: blockIdx.x -> (batch, kv head, row block, tile of its list). The grid has tiles for the capacity
  // of each list, which nearly all lists fill.
  __device__ __forceinline__ bool find_interval_tile() {
    num_splits = 1;
    WorkIndex work(slot);
    n_block = work.take(tiles_per_list());
    row_block = p.row_block_begin + work.take(p.row_blocks);
    head_k = work.take(p.nheads_k);
    batch = work.rest;
    const int64_t list_i = list_index() * p.keys.blocks + row_block;
    list = p.keys.idx + list_i * p.keys.capacity;
    key0 = n_block * kBlockN;
    const int count = read_list_count(p.keys, list_i);
    keys = min(kBlockN, count - key0);
    keys_full = read_list_full(p.keys, list_i, count) - key0;
    return keys > 0;
  }

  // Finds the rows: the (head, row block) pairs that see the tile, divided evenly between the splits. If
  // deterministic, a split has whole heads, so that the column sums of a head come from one thread block.
  __device__ __forceinline__ void find_steps() {
    m_end = m_blocks();
    m_begin = 0;
    if (has_intervals()) {
      m_begin = row_block * p.keys.block_rows / kBlockM;
      m_end = min(m_end, (row_block + 1) * p.keys.block_rows / kBlockM);
    } else if (p.is_causal) {
      const int first_position = T::kGathered ? read_position(0) : key0;
      m_begin = min(max(0, first_position - causal_offset()) / kBlockM, m_end);
    }
    const int per_head = m_end - m_begin;
    const int group = p.group_end - p.group_begin;
    const int split = slot % num_splits;
    int begin, end;
    if (p.deterministic) {
      begin = group * split / num_splits * per_head;
      end = group * (split + 1) / num_splits * per_head;
    } else {
      begin = static_cast<int>(static_cast<int64_t>(group) * per_head * split / num_splits);
      end = static_cast<int>(static_cast<int64_t>(group) * per_head * (split + 1) / num_splits);
    }
    first.left = end - begin;
    const int g = per_head > 0 ? begin / per_head : 0;
    first.head = head_k * p.head_ratio + p.group_begin + g;
    const int done = begin - g * per_head;  // row blocks of the first head that an earlier split takes
    first.m = m_end - 1 - done;
    if constexpr (T::kGeneral && !T::kGathered) {
      set_mask_tiles(first.head);
    }
    first = skip_empty(first);
  }

  __device__ __forceinline__ void set_mask_tiles(int head) {
    if (p.mask.bits == nullptr) return;
    const int word = is_packed() ? first_packed_block(first_row(), batch, kMaskWordRows) : 0;
    const int64_t i = Base::mask_index(head) * p.mask.bands_k * p.mask.words_q + word;
    tiles =
        MaskTiles<kBlockN, kBlockM>(p.mask.any_cols + i, p.mask.all_cols + i, p.mask.words_q, p.mask.bands_k, n_block);
  }

  // Row blocks are taken from the last one down. So under causality every thread block starts with rows that see all
  // keys, and a deterministic dq is passed from thread block to thread block without waiting. (Starting with
  // different rows, so that the atomics on dq do not meet, gained nothing.)
  __device__ __forceinline__ Step next(Step s) {
    if (--s.left <= 0) return {0, 0, 0};
    if (--s.m < m_begin) {
      s.m = m_end - 1;
      ++s.head;
      if constexpr (T::kGeneral && !T::kGathered) set_mask_tiles(s.head);
    }
    return s;
  }
  // The first step from s on whose tile of the mask is not empty. Skipped tiles still take their turn in a
  // deterministic dq.
  __device__ __forceinline__ Step skip_empty(Step s) {
    if constexpr (T::kGeneral && !T::kGathered) {
      if (p.mask.bits != nullptr) {
        while (s.left > 0 && tiles.state(s.m) == TileState::kEmpty) {
          if (p.dq_semaphore != nullptr) {  // general kernels only
            wait_for_turn(s);
            pass_turn(s);
          }
          s = next(s);
        }
      }
    }
    return s;
  }

  // --- deterministic dq ----------------------------------------------------------------------------------------------

  __device__ __forceinline__ int32_t* semaphore(const Step& s) const { return p.dq_semaphore + dq_block(s); }
  // Key tiles add to a row block in ascending order: a tile waits until as many turns have been taken as there are
  // tiles before it. Thread blocks start in ascending order, too, so that those waited for are already running. All
  // earlier tiles of a sequence take a turn at every row block that this one visits, since find_steps() begins no
  // later for them.
  __device__ __forceinline__ void wait_for_turn(const Step& s) const { wait_until(semaphore(s), n_block); }
  __device__ __forceinline__ void pass_turn(const Step& s) const { increment(semaphore(s)); }

  // --- deterministic dk, dv and dbias of interval lists --------------------------------------------------------------

  // Lists of different row blocks hold the same keys, whose sums are added in the order of the row blocks. The tiles
  // of one list hold different keys and take their turn at the same time, once all tiles of the lists before have
  // passed theirs. (With one tile after the other, 8192 rows took 165 ms; without an order they took 2.4 ms.)
  __device__ __forceinline__ bool takes_turns_dkv() const { return T::kGeneral && p.dkv_semaphore != nullptr; }
  __device__ __forceinline__ int tiles_per_list() const { return (p.keys.capacity + kBlockN - 1) / kBlockN; }
  __device__ __forceinline__ void wait_for_turn_dkv() const {
    const int per_head = tiles_per_list() * p.row_blocks;
    // With one launch for each head of the group, the count continues from that of the previous launch.
    const int launch = p.group_end - p.group_begin == 1 ? p.group_begin : 0;
    const int before = (row_block - p.row_block_begin) * tiles_per_list();
    wait_until(p.dkv_semaphore + slot / per_head, launch * per_head + before);
  }
  __device__ __forceinline__ void pass_turn_dkv() const {
    increment(p.dkv_semaphore + slot / (tiles_per_list() * p.row_blocks));
  }

  static __device__ __forceinline__ void wait_until(const int32_t* counter, int value) {
    if (threadIdx.x == 0) {
      const volatile int32_t* turn = counter;
      // "<" instead of "!=": if wrong cu_seqlens make sequences overlap, both raise the same counter.
      while (*turn < value) __nanosleep(64);
      __threadfence();
    }
    __syncthreads();
  }
  static __device__ __forceinline__ void increment(int32_t* counter) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) atomicAdd(counter, 1);
  }

  // --- loads: bwd_loads.cuh -----------------------------------------------------------------------------------------

  __device__ __forceinline__ const Element* head_ptr(const void* base, const Strides3& s, int head) const {
    return Base::template head_ptr<Element>(base, s, head);
  }
  __device__ __forceinline__ void load_kv(uint32_t dst, const void* base, const Strides3& s, bool vec_given) const;
  __device__ __forceinline__ void load_rows(uint32_t dst, const void* base, const Strides3& s, bool vec,
                                            const Step& step) const;
  __device__ __forceinline__ void load_q(const Step& s, int stage) const;
  __device__ __forceinline__ void load_dout(const Step& s, int stage) const;
  __device__ __forceinline__ void load_row_stats(const Step& s, int buf) const;
  __device__ __forceinline__ void load_bias_and_mask(const Step& s) const;
  __device__ __forceinline__ ShiftedTile<kBlockN> bias_tile(const Step& s) const {
    return {static_cast<const uint16_t*>(p.bias.ptr) + Base::bias_base(s.head) +
                static_cast<int64_t>(s.m) * kBlockM * p.bias.row_stride + key0,
            p.bias.row_stride};
  }
  __device__ __forceinline__ bool bias_is_shifted() const;
  __device__ __forceinline__ bool has_score_tiles() const;
  __device__ __forceinline__ bool has_key_bias() const { return T::kGeneral && p.bias.kind == BiasKind::kKey; }
  __device__ __forceinline__ float fetch_key_bias(const Step& s) const;
  __device__ __forceinline__ int32_t* key_idx() const { return reinterpret_cast<int32_t*>(smem + T::kKeyIdx); }
  __device__ __forceinline__ float* key_bias(int buf) const;

  // --- the elementwise middle ----------------------------------------------------------------------------------------

  // What rounding to fp32 dropped from a row's lse. It is only looked up from 2^14 on: below that it is less than
  // 2^-11, within the precision of fp16, and looking it up for every row cost 15% of the time.
  __device__ __forceinline__ float rest(const Step& step, int row, float row_lse) const {
    if (fabsf(row_lse) < 16384.f || p.lse_rest == nullptr) return 0.f;
    return __ldg(p.lse_rest + row_stats(step) + row);
  }
  // Turns raw products into probabilities, in place.
  __device__ __forceinline__ void probabilities(Scores& s, const Step& step, int buf, const FragmentMap& map) {
    ScoreInputs in;
    in.key_idx = T::kGathered ? key_idx() : nullptr;
    in.key_intervals = smem_base + T::kInterval;
    in.key0 = key0;
    in.keys = keys;
    in.row0 = step.m * kBlockM;
    in.rows = seqlen_q() - in.row0;
    if constexpr (T::kGeneral) {
      in.bias_tile = smem_base + T::kdS;
      in.key_bias = key_bias(buf);
      in.mask_words = reinterpret_cast<const uint32_t*>(smem + T::kMask);
      scale_scores(s, p.softmax_scale, T::kFull ? p.softcap : 0.f);
      if (bias_is_shifted()) {
        add_shifted_bias<Element>(s, bias_tile(step), smem_base + T::kP, map);
        __syncthreads();  // all threads have read the bias, which P and dS overwrite
      } else if (p.bias.kind != BiasKind::kNone) {
        add_bias<Element, kBlockN, T::kGathered, T::kFull>(s, p.bias, Base::bias_base(step.head), in, map);
      }
      if constexpr (!T::kGathered) {
        if (p.mask.bits != nullptr) apply_mask_words<kBlockN>(s, in, map);
      }
    }
    if (has_intervals()) {
      if (keys_full < kBlockN) apply_intervals(s, in, map, causal_offset());
    } else {
      const int last = T::kGathered ? in.key_idx[keys - 1] : key0 + kBlockN - 1;
      if (keys < kBlockN || (p.is_causal && last > in.row0 + causal_offset())) {
        apply_limits<T::kGathered>(s, in, map, p.is_causal, causal_offset());
      }
    }
    const float* lse = reinterpret_cast<const float*>(smem + T::kLse) + buf * kBlockM;
    const float scale_log2 = p.softmax_scale * kLog2e;
#pragma unroll
    for (int mt = 0; mt < T::MTs; ++mt)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float row_lse = lse[map.row(mt, 2 * half)];
        const float row_lse_log2 = (T::kGeneral ? rest(step, map.row(mt, 2 * half), row_lse) : row_lse) * kLog2e;
#pragma unroll
        for (int nt = 0; nt < T::NTs; ++nt)
#pragma unroll
          for (int e = 2 * half; e < 2 * half + 2; ++e) {
            s[mt][nt][e] = T::kGeneral ? exp2_approx(__fmaf_rn(s[mt][nt][e] - row_lse, kLog2e, -row_lse_log2))
                                       : exp2_approx(__fmaf_rn(s[mt][nt][e], scale_log2, -row_lse_log2));
          }
      }
  }

  // dp = prob * (dp - delta). The plain kernel multiplies by softmax_scale here, with an FFMA in place of an FADD, so
  // that neither dq nor dk has to be scaled. The general one cannot do so, since dbias takes the unscaled value.
  __device__ __forceinline__ void logit_gradients(Scores& dp, const Scores& prob, int buf,
                                                  const FragmentMap& map) const {
    const float* delta = reinterpret_cast<const float*>(smem + T::kDelta) + buf * kBlockM;
#pragma unroll
    for (int mt = 0; mt < T::MTs; ++mt)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float row_delta = delta[map.row(mt, 2 * half)] * (T::kGeneral ? 1.f : p.softmax_scale);
#pragma unroll
        for (int nt = 0; nt < T::NTs; ++nt)
#pragma unroll
          for (int e = 2 * half; e < 2 * half + 2; ++e) {
            dp[mt][nt][e] = prob[mt][nt][e] * (T::kGeneral ? dp[mt][nt][e] - row_delta
                                                           : __fmaf_rn(dp[mt][nt][e], p.softmax_scale, -row_delta));
          }
      }
  }

  // Turns raw products into the derivative of softcap, 1 - tanh^2, by which the gradient is multiplied.
  __device__ __forceinline__ void softcap_gradient(Scores& s) const {
    const float inner = p.softmax_scale / p.softcap;
#pragma unroll
    for (int mt = 0; mt < T::MTs; ++mt)
#pragma unroll
      for (int nt = 0; nt < T::NTs; ++nt)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float t = tanh_fast(s[mt][nt][e] * inner);
          s[mt][nt][e] = 1.f - t * t;
        }
  }

  // --- dbias: bwd_dbias.cuh -----------------------------------------------------------------------------------------

  __device__ __forceinline__ void add_column_sums(float (&sums)[T::NTs][2], const Scores& ds) const;
  __device__ __forceinline__ void flush_column_sums(float (&sums)[T::NTs][2], int head, const FragmentMap& map) const;
  __device__ __forceinline__ int64_t dbias_base(const Step& s) const;
  __device__ __forceinline__ void store_dbias(const Scores& ds, const Step& s, const FragmentMap& map) const;
  __device__ __forceinline__ bool dbias_from_smem() const;
  __device__ __forceinline__ void copy_dbias(const Step& s) const;

  // --- the loop: bwd_kernel.cuh -------------------------------------------------------------------------------------

  __device__ __forceinline__ void add_dq(const float (&acc)[T::MTq][T::NTq][4], const Step& s) const;
  __device__ __forceinline__ void run();
  // Copies the keys' positions to shared memory and returns this thread's (for threads below kBlockN). Ends with a
  // barrier.
  __device__ __forceinline__ int load_key_idx() const;
  __device__ __forceinline__ void load_interval(int idx) const;
  __device__ __forceinline__ void prologue(const Step& s) const;
  __device__ __forceinline__ void loop(float (&acc_dk)[T::MTkv][T::NTkv][4], float (&acc_dv)[T::MTkv][T::NTkv][4]);
  __device__ __forceinline__ bool wants_dq() const { return !T::kGeneral || p.dq_accum != nullptr; }
  __device__ __forceinline__ bool wants_dk() const;
  __device__ __forceinline__ bool wants_dv() const;
  __device__ __forceinline__ void middle(Scores& s, Scores& dp, const Step& step, int buf, const FragmentMap& map,
                                         float (&column_sums)[T::NTs][2]);
  __device__ __forceinline__ int map_row0() const { return (warp % T::kWarpsMSdP) * 16 * T::MTs; }
  __device__ __forceinline__ int map_col0() const { return (warp / T::kWarpsMSdP) * 8 * T::NTs; }
  __device__ __forceinline__ void take_dbias(const Scores& ds, const Step& step, const FragmentMap& map,
                                             float (&column_sums)[T::NTs][2]) const;
  static __device__ __forceinline__ void copy(Scores& dst, const Scores& src);
  static __device__ __forceinline__ void multiply(Scores& dst, const Scores& factor);

  // --- epilogue: bwd_epilogue.cuh -----------------------------------------------------------------------------------

  using AccKV = float[T::MTkv][T::NTkv][4];
  __device__ __forceinline__ void store_dkv(AccKV& acc_dk, AccKV& acc_dv) const;
  __device__ __forceinline__ void store_one(const AccKV& acc, void* out, const Strides3& stride, bool vec, float* slots,
                                            float* accum, uint32_t tile) const;
  __device__ __forceinline__ float* fp32_row(int row, float* slots, float* accum) const;
  __device__ __forceinline__ void add_fp32_rows(const AccKV& acc, int row0, int col0, float* slots, float* accum) const;
  __device__ __forceinline__ void store_fp32_rows(const AccKV& acc, const FragmentMap& map, float* slots,
                                                  float* accum) const;
};

}  // namespace dmattn
