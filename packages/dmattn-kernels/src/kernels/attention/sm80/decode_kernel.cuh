// Attention of few query rows over many keys, which is bound by the bytes of K and V. A warp copies its own keys to a
// ring buffer in shared memory that no other warp touches, so the loop has no barrier. The warps' results are merged
// at the end, and the last of the thread blocks that share a row combines the splits. Arithmetic is hidden behind the
// loads, but fetching instructions is not: so there are separate kernels, see DecodeCase.
#pragma once

#include "copy.cuh"
#include "decode_draft.cuh"
#include "decode_few_rows.cuh"
#include "decode_token.cuh"
#include "launch.cuh"

namespace dmattn {

template <class T>
struct DecodeShared {
  float bias[T::kWarps][T::kChunkKeys];
  union {  // a kernel uses at most one: in the cases with a token or a draft, keys are not listed
    SharedToken<T> token;
    SharedDraft<T> draft;
    int32_t idx[T::kGathered ? T::kWarps : 1][2][T::kGathered ? T::kChunkKeys : 1];  // [warp][chunk % 2][key]
  };
};

// As cp_async16(); if `first`, the lines that are read are marked to leave the L2 cache first. There are two
// predicated instructions because a cache policy chosen beforehand would be moved to uniform registers for every
// copy. kWholeLines: see DecodeLoop::copy().
template <bool kWholeLines>
__device__ __forceinline__ void cp_async16_or_first(uint32_t dst, const void* src, bool valid, bool first) {
  const int bytes = valid ? 16 : 0;
  if constexpr (kWholeLines) {
    asm volatile(
        "{\n"
        ".reg .pred first;\n"
        ".reg .b64 policy;\n"
        "setp.ne.s32 first, %3, 0;\n"
        "createpolicy.fractional.L2::evict_first.b64 policy;\n"
        "@first cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, policy;\n"
        "@!first cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n"
        "}" ::"r"(dst),
        "l"(src), "r"(bytes), "r"(static_cast<int>(first)));
  } else {
    asm volatile(
        "{\n"
        ".reg .pred first;\n"
        ".reg .b64 policy;\n"
        "setp.ne.s32 first, %3, 0;\n"
        "createpolicy.fractional.L2::evict_first.b64 policy;\n"
        "@first cp.async.cg.shared.global.L2::cache_hint.L2::64B [%0], [%1], 16, %2, policy;\n"
        "@!first cp.async.cg.shared.global.L2::64B [%0], [%1], 16, %2;\n"
        "}" ::"r"(dst),
        "l"(src), "r"(bytes), "r"(static_cast<int>(first)));
  }
}

template <class T>
struct DecodeLoop : DecodeFewRows<T> {
  using Base = DecodeFewRows<T>;
  using Element = typename T::Element;
  using Base::batch, Base::begin, Base::end, Base::has_key_bias, Base::head, Base::head_dim, Base::held, Base::is_vec,
      Base::keys, Base::lane, Base::list, Base::p, Base::row0, Base::rows, Base::warp;
  static constexpr int kHeadDim = T::kHeadDim;

  DecodeShared<T>& shared;
  uint32_t ring;  // shared address of this warp's ring
  DecodeToken<T> token;
  DecodeDraft<T> draft;

  __device__ __forceinline__ DecodeLoop(const DecodeArguments& params, char* smem, DecodeShared<T>& shared_)
      : Base(params, smem, shared_.token),
        shared(shared_),
        ring(smem_u32(smem) + threadIdx.x / 32 * T::kWarpBytes),
        draft{shared_.draft} {}

  __device__ __forceinline__ int keys_of(int step) const { return min(T::kKeys, keys - step * T::kKeys); }

  // --- loads ---------------------------------------------------------------------------------------------------------

  // The lane's entries of the list for a chunk: those of the chunk's keys `lane` and `lane` + 32. They stay as they
  // were read until they have arrived; then to_positions() clamps them.
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
  // The positions of the keys of a step.
  __device__ __forceinline__ const int32_t* idx(int step) const {
    const uint32_t at = step - begin;
    return shared.idx[warp][at / T::kChunkSteps & 1] + at % T::kChunkSteps * T::kKeys;
  }

  // Copies K and V of a step as one group of copies, which is empty behind the last step.
  __device__ __forceinline__ void load(int step, int stage) const {
    if (step < end) {
      const int64_t first = T::kGathered ? 0 : static_cast<int64_t>(step) * T::kKeys;
      load_keys(tile(stage, 0), Base::head_of(p.k, p.k_stride) + first * p.k_stride.row, p.k_stride.row, step,
                is_vec(p.vec_k));
      load_keys(tile(stage, 1), Base::head_of(p.v, p.v_stride) + first * p.v_stride.row, p.v_stride.row, step,
                is_vec(p.vec_v));
    }
    cp_async_fence();
  }
  // Rows past the last key and columns past head_dim become 0.
  __device__ __forceinline__ void load_keys(uint32_t dst, const Element* src, int64_t stride, int step,
                                            bool vec) const {
    const auto row_of = [&](int row) -> int64_t { return T::kGathered ? idx(step)[row] : row; };
    if (!vec) {
      load_tile_words<T::kKeys, kHeadDim, 32>(dst, reinterpret_cast<const uint16_t*>(src), stride, keys_of(step),
                                              head_dim(), lane, row_of);
      return;
    }
    // The place of a chunk in the lane's other rows follows from that in its first row by an exclusive or, and an
    // offset that is known at compile time.
    using Tile = SmemTile<kHeadDim>;
    constexpr int kRowsPerPass = 32 / Tile::kChunks;
    const int chunk = lane % Tile::kChunks, row0 = lane / Tile::kChunks;
    const uint32_t at = dst + Tile::offset(row0, chunk);
    const int count = chunk * 8 < head_dim() ? keys_of(step) - row0 : 0;  // rows from the lane's first one on
    const Element* from = src + chunk * 8 + (T::kGathered ? 0 : row0 * stride);
#pragma unroll
    for (int i = 0; i < T::kKeys; i += kRowsPerPass) {
      const Element* row = T::kGathered ? from + row_of(row0 + i) * stride : from;
      copy((at ^ Tile::swizzle(i) << 4) + i * Tile::kRowBytes, row, i < count);
      if (!T::kGathered) from += kRowsPerPass * stride;
    }
  }
  // As cp_async16(), but if rows are not whole lines of 128 bytes, only 64 bytes are requested around the 16: the
  // rest of the line may belong to a head that another thread block reads, and would be read from memory twice.
  __device__ __forceinline__ void copy(uint32_t dst, const Element* src, bool valid) const {
    if constexpr (T::kMayEvictFirst) {
      cp_async16_or_first<T::kWholeRows>(dst, src, valid, p.evicts_first);
    } else if constexpr (T::kWholeRows) {
      cp_async16(dst, src, valid);
    } else {
      asm volatile("cp.async.cg.shared.global.L2::64B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(valid ? 16 : 0));
    }
  }
  __device__ __forceinline__ uint32_t tile(int stage, int which) const { return ring + (2 * stage + which) * T::kTile; }

  // Queries of a draft are read before the wait for the previous kernel, so these reads bypass the L1 cache, which
  // may hold older contents than earlier kernels wrote.
  template <class Word>
  static __device__ __forceinline__ Word load_early(const Word* src) {
    return T::kDraft ? __ldcg(src) : __ldg(src);
  }
  // The query rows as the left operand of the product Q K^T, with all of their columns.
  using Queries = uint32_t[T::MT][kHeadDim / 16][4];
  __device__ __forceinline__ void load_q(Queries& q) const {
    if (is_vec(p.vec_q)) {
      load_q(q, [](const uint16_t* src) { return load_early(reinterpret_cast<const uint32_t*>(src)); });
    } else {
      load_q(q, [](const uint16_t* src) { return load_early(src) | static_cast<uint32_t>(load_early(src + 1)) << 16; });
    }
  }
  template <class LoadPair>
  __device__ __forceinline__ void load_q(Queries& q, LoadPair&& load_pair) const {
    const uint16_t* const base =
        static_cast<const uint16_t*>(p.q) + batch * p.q_stride.batch + head * p.q_stride.head + 2 * (lane & 3);
    const uint16_t* src = base + (row0 + lane / 4) * p.q_stride.row;
#pragma unroll
    for (int r = 0; r < 2 * T::MT; ++r) {
      const int row = lane / 4 + 8 * r, cols = row < rows ? head_dim() : 0;
      if constexpr (T::kHasTokenRows) src = base + Base::row_at(p.q_stride, p.token_rows.q_token, row0 + row);
      asm volatile("" : "+l"(src));  // makes the compiler use one address for all columns
#pragma unroll
      for (int i = 0; i < kHeadDim / 8; ++i) {
        q[r / 2][i / 2][2 * (i & 1) + r % 2] = 8 * i < cols ? load_pair(src + 8 * i) : 0;
      }
      src += 8 * p.q_stride.row;
    }
  }

  // A bias that is the same for all rows, for the lane's keys of a chunk; if these are listed, `x` has their
  // positions. Except in a draft it stays as it was read, since converting it would wait for it.
  struct LaneBias {
    uint32_t bits[T::kChunkKeys / 32];
  };
  __device__ __forceinline__ LaneBias fetch_bias(int chunk, const LaneKeys& x) const {
    LaneBias found;
#pragma unroll
    for (int i = 0; i < T::kChunkKeys / 32; ++i) {
      const int entry = chunk_entry(chunk, i);
      found.bits[i] = 0;
      if (has_key_bias() && entry < min(keys, end * T::kKeys)) {
        if (T::kDraft && entry >= p.draft.entries) {
          found.bits[i] = __float_as_uint(draft.score_of(*this, entry));
          continue;
        }
        const int64_t key = T::kGathered ? x.idx[i] : entry;
        const int64_t at = Base::bias_base() + key * p.bias.col_stride;
        found.bits[i] = T::kDraft ? __float_as_uint(load_bias(p.bias, at, T::kIsBf16)) : bias_bits(p.bias, at);
      }
    }
    return found;
  }
  __device__ __forceinline__ void keep_bias(const LaneBias& x) const {
#pragma unroll
    for (int i = 0; i < T::kChunkKeys / 32; ++i) {
      shared.bias[warp][lane + 32 * i] =
          T::kDraft ? __uint_as_float(x.bits[i]) : bias_value<Element>(p.bias, x.bits[i]);
    }
  }

  // --- compute -------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void scores_of(float (&acc)[T::MT][T::NT][4], const Queries& q, int stage) const {
    using Mma = MmaAtom<Element>;
    const Operand<kHeadDim, false, false> k(tile(stage, 0), 0, lane);
    // Two sums where there are registers for them, since a product waits for the previous one of the same sum.
    constexpr bool kTwoSums = kHeadDim <= 128 && T::MT == 1;
    float odd[T::MT][T::NT][4];
    clear(acc);
    clear(odd);
#pragma unroll
    for (int i = 0; i < kHeadDim / 16; ++i) {
      uint32_t frag[4];
      k.load(frag, 0, i);
#pragma unroll
      for (int mt = 0; mt < T::MT; ++mt)
#pragma unroll
        for (int nt = 0; nt < T::NT; ++nt) {
          const uint32_t (&a)[4] = q[mt][i];
          float (&c)[4] = kTwoSums && i % 2 == 1 ? odd[mt][nt] : acc[mt][nt];
          Mma::fma(c[0], c[1], c[2], c[3], a[0], a[1], a[2], a[3], frag[2 * nt], frag[2 * nt + 1], c[0], c[1], c[2],
                   c[3]);
        }
    }
    if constexpr (kTwoSums) {
#pragma unroll
      for (int nt = 0; nt < T::NT; ++nt)
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[0][nt][e] += odd[0][nt][e];
    }
  }
  __device__ __forceinline__ void modify_scores(float (&acc)[T::MT][T::NT][4], int step) const {
    const FragmentMap map(0, 0, lane);
    scale_scores(acc, p.softmax_scale, T::kPlain ? 0.f : p.softcap);
    add_bias(acc, step, map);
    if constexpr (T::kDraft) draft.limit(acc, *this, step, map);
    if constexpr (T::kHasTokenRows && !T::kDraft) cut_later_keys(acc, step, map);
    const int count = keys_of(step);
    if (count == T::kKeys) return;
#pragma unroll
    for (int mt = 0; mt < T::MT; ++mt)
#pragma unroll
      for (int nt = 0; nt < T::NT; ++nt)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (map.col(nt, e) >= count) acc[mt][nt][e] = -INFINITY;
        }
  }
  __device__ __forceinline__ void add_bias(float (&acc)[T::MT][T::NT][4], int step, const FragmentMap& map) const {
    if (has_key_bias()) {
      const float* bias = shared.bias[warp] + static_cast<uint32_t>(step - begin) % T::kChunkSteps * T::kKeys;
#pragma unroll
      for (int nt = 0; nt < T::NT; ++nt) {
        const float2 b = *reinterpret_cast<const float2*>(bias + map.col(nt, 0));
#pragma unroll
        for (int mt = 0; mt < T::MT; ++mt)
#pragma unroll
          for (int e = 0; e < 4; ++e) acc[mt][nt][e] += (e & 1) ? b.y : b.x;
      }
    } else if (!T::kPlain && !T::kHasTokenRows && p.bias.kind != BiasKind::kNone) {
      // Here each query head has a bias of its own, which is not worth loading ahead.
      const int count = keys_of(step);
#pragma unroll
      for (int nt = 0; nt < T::NT; ++nt)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int row = map.row(0, e), col = map.col(nt, e);
          if (row >= rows || col >= count) continue;
          const int64_t key = T::kGathered ? idx(step)[col] : step * T::kKeys + col;
          acc[0][nt][e] += load_bias(
              p.bias, Base::bias_base() + (row0 + row) * p.bias.row_stride + key * p.bias.col_stride, T::kIsBf16);
        }
    }
  }

  // acc = -inf for keys behind the row's token; the last token is at the last key. Lists ascend, so that most steps
  // need only one comparison.
  __device__ __forceinline__ void cut_later_keys(float (&acc)[T::MT][T::NT][4], int step,
                                                 const FragmentMap& map) const {
    if (!p.is_causal) return;
    const auto position = [&](int col) { return T::kGathered ? idx(step)[col] : step * T::kKeys + col; };
    const int seen_by_all = p.seqlen_k - p.token_rows.count + 1;  // keys; each further token sees one more
    if (position(keys_of(step) - 1) < seen_by_all) return;
    int first_row = row0 + map.row0;
    asm volatile("" : "+r"(first_row));  // so that tokens of rows are not kept in registers from step to step
#pragma unroll
    for (int mt = 0; mt < T::MT; ++mt)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int seen = seen_by_all + Base::token_of(first_row + 16 * mt + 8 * half);
#pragma unroll
        for (int nt = 0; nt < T::NT; ++nt)
#pragma unroll
          for (int e = 2 * half; e < 2 * half + 2; ++e) {
            if (position(map.col(nt, e)) >= seen) acc[mt][nt][e] = -INFINITY;
          }
      }
  }

  // If this step has the thread block's lowest entry, that entry is left out of the softmax, and its logits and its
  // row of V go to the workspace, where the last thread block of the head finds them. The row becomes 0 in the tile,
  // since a probability of 0 would not hide a value that is not finite.
  __device__ __forceinline__ void keep_lowest(float (&acc)[T::MT][T::NT][4], int step, int stage) const {
    const int at = token.lowest - step * T::kKeys;
    if (!T::kTakesToken || static_cast<uint32_t>(at) >= T::kKeys) return;
    const FragmentMap map(0, 0, lane);
    float found[2] = {-INFINITY, -INFINITY};  // of this lane's two rows
#pragma unroll
    for (int nt = 0; nt < T::NT; ++nt)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const bool is_lowest = map.col(nt, e) == at;
        if (is_lowest) found[e / 2] = acc[0][nt][e];
        if (is_lowest) acc[0][nt][e] = -INFINITY;
      }
    if ((at & 6) == map.col0) {
      float* logit = p.lowest.logit + Base::partial_row(Base::split, row0);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = map.row(0, 2 * half);
        if (row < rows) logit[row] = found[half];
      }
    }
    using Tile = SmemTile<kHeadDim>;
    if (lane < Tile::kChunks) {
      const uint32_t v = tile(stage, 1) + Tile::offset(at, lane);
      if (row0 == 0 && 8 * lane < head_dim()) {
        Element* to = static_cast<Element*>(p.lowest.v) + Base::part_index(Base::split) * head_dim();
        reinterpret_cast<uint4*>(to)[lane] = ld_shared_v4(v);
      }
      st_shared(v, make_uint4(0, 0, 0, 0));
    }
    __syncwarp();
  }

  // Turns scores into probabilities, and rescales results so far to the new maxima. Most groups of heads have at most
  // eight rows, so that the lower half of the fragments has none; a short draft may leave more of them without rows.
  __device__ __forceinline__ void exponentiate(float (&acc_s)[T::MT][T::NT][4], float (&acc_o)[T::MT][T::OT][4],
                                               OnlineSoftmax<T::MT>& softmax) const {
#pragma unroll
    for (int r = 0; r < 2 * T::MT; ++r) {
      if (r > 0 && rows <= 8 * r) break;
      const float alpha = softmax.template step_row<false>(r, acc_s, 0.f);
      // The maximum of most rows settles within a few steps.
      if (!__any_sync(0xffffffffu, alpha != 1.f)) continue;
#pragma unroll
      for (int ot = 0; ot < T::OT; ++ot) {
        acc_o[r / 2][ot][2 * (r & 1)] *= alpha;
        acc_o[r / 2][ot][2 * (r & 1) + 1] *= alpha;
      }
    }
  }

  // --- the loop ------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void run() {
    LaneKeys idx_next = fetch_idx(0);
    to_positions(idx_next);
    if constexpr (T::kGathered) keep_idx(0, idx_next);
    __syncwarp();
    // The kernel of a draft starts early, behind cache_draft(), which writes the rows behind the entries and the
    // DraftTokens. cache_draft() lets it start only after its own wait, when all earlier kernels have ended. So
    // a warp whose keys are all entries can request these and the queries before the wait, by reads that bypass the L1
    // cache. kAsked stages are requested before the queries, and kAhead of them before the wait. The general level
    // requests none here: it would need one more copy of the code.
    constexpr int kAsked = T::kPlain ? 1 : 0, kAhead = T::kReadsAhead ? T::kStages - 1 : kAsked;
    if (T::kDraft && (!T::kPlain || end * T::kKeys > p.draft.entries)) wait_for_previous_kernel();
    if constexpr (kAsked > 0) load(begin, 0);
    Queries q;
    if constexpr (T::kReadsAhead) {
      load_q(q);
#pragma unroll 1
      for (int i = kAsked; i < kAhead; ++i) load(begin + i, i);
    }
    if constexpr (T::kDraft && T::kPlain) wait_for_previous_kernel();
    // These loads are issued before the other copies of K and V, behind which they would arrive otherwise. Issuing
    // them takes time as well, so the copies of the first step come before them.
    Arrivals blocks = Base::arrivals(), heads = Base::head_arrivals();
    const bool counts_blocks = threadIdx.x == 0 && blocks.count > 1;
    const bool counts_heads = threadIdx.x == 0 && T::kTakesToken && heads.count > 1;
    if (counts_blocks) blocks.look();
    if (counts_heads) heads.look();
    typename DecodeToken<T>::Reads reads;
    if constexpr (T::kTakesToken) token.load(*this, reads);
    const int2 drafted = draft.fetch(*this);
    LaneBias bias_next = fetch_bias(0, idx_next);
    idx_next = fetch_idx(1);
    if constexpr (!T::kReadsAhead) load_q(q);
#pragma unroll 1
    for (int i = kAhead; i < T::kStages; ++i) load(begin + i, i);
    if constexpr (T::kDraft) draft.keep(*this, drafted);
    if (counts_blocks) blocks.prepare();
    if (counts_heads) heads.prepare();
    if constexpr (T::kTakesToken) token.begin(*this, reads, q[0]);

    float acc_o[T::MT][T::OT][4];
    clear(acc_o);
    OnlineSoftmax<T::MT> softmax;
    int stage = 0;
#pragma unroll 1
    for (int step = begin; step < end; ++step) {
      const uint32_t at = step - begin;
      if (at % T::kChunkSteps == 0) {
        const int chunk = at / T::kChunkSteps;
        keep_bias(bias_next);
        to_positions(idx_next);
        if constexpr (T::kGathered) keep_idx(chunk + 1, idx_next);
        bias_next = fetch_bias(chunk + 1, idx_next);
        idx_next = fetch_idx(chunk + 2);
      }
      cp_async_wait<T::kStages - 1>();
      __syncwarp();  // K and V of this step have landed, and the chunk's bias and positions
      float acc_s[T::MT][T::NT][4];
      scores_of(acc_s, q, stage);
      modify_scores(acc_s, step);
      keep_lowest(acc_s, step, stage);
      exponentiate(acc_s, acc_o, softmax);
      gemm_pv<Element>(acc_o, acc_s, Operand<kHeadDim, false, true>(tile(stage, 1), 0, lane));
      __syncwarp();  // no lane reads K and V of this step, nor a chunk that ends here, any more
      load(step + T::kStages, stage);
      stage = stage + 1 == T::kStages ? 0 : stage + 1;
    }
    cp_async_wait<0>();
    __syncwarp();  // the ring is free
    // Hides from the compiler that the batch is the same as before the loop. What it derives from the batch is then
    // computed again below, and not kept in registers through the loop.
    asm volatile("" : "+r"(batch));
    Base::leave(acc_o, softmax);
    __syncthreads();
    Base::merge();
    const Arrivals ended = Base::arrivals();
    typename Base::LaneSources sources;
    if constexpr (T::kReducesByWarps) sources = Base::sources(first_row());
    if (ended.count > 1 && !ended.is_last()) return;
    if constexpr (T::kTakesToken) return finish_token(ended.count, sources);
    if (p.num_splits > 1) combine(sources);
  }

  // Called by the last thread block of a head, which combines the splits and puts the token into the cache.
  __device__ __forceinline__ void finish_token(uint64_t blocks, const typename Base::LaneSources& sources) const {
    if (blocks == 1) __syncthreads();  // else is_last() was the barrier
    // The last thread block of a head counts itself here as soon as it knows that it is the last. The number of
    // tokens may be raised when all thread blocks have read it, and they did so before they were counted.
    Arrivals heads = Base::head_arrivals();
    if (threadIdx.x == 0 && heads.count > 1) {
      if (blocks == 1) device_fence();
      heads.count_in();
    }
    token.commit_entry(*this, combine(sources));
    if (threadIdx.x == 0 && (heads.count == 1 || heads.was_last())) token.commit_count(*this);
  }

  // Combines the splits of the rows whose thread blocks have all ended, from first_row() on. Returns the entry whose
  // place the token takes, or -1 if it takes none.
  __device__ __forceinline__ int first_row() const { return T::kTakesToken ? 0 : row0; }
  __device__ __forceinline__ int combine(const typename Base::LaneSources& sources) const {
    const int first = first_row(), end_row = T::kTakesToken ? p.seqlen_q : row0 + rows;
    if (Base::has_warps_for(end_row - first)) return Base::combine_by_warps(first, end_row - first, sources);
    if (Base::has_lanes_for_token_rows()) {
      Base::combine_token_rows(first, end_row - first);
      return -1;
    }
    int replaced = -1;
#pragma unroll 1
    for (int row = first; row < end_row; row += T::kRows) {
      if (row > first) __syncthreads();
      replaced = Base::combine(row, min(T::kRows, end_row - row));
    }
    return replaced;
  }
};

template <class T>
__global__ void __launch_bounds__(T::kThreads, 2) decode_kernel(const __grid_constant__ DecodeArguments p) {
  extern __shared__ __align__(1024) char smem[];
  __shared__ DecodeShared<T> shared;
  static_assert(sizeof(shared) <= 3 * 1024);  // the rings start on 1 KB: more would take 4 KB
  DecodeLoop<T>(p, smem, shared).run();
}

}  // namespace dmattn
