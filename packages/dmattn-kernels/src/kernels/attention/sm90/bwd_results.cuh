// How the results of the Hopper backward leave the consumers: ds for the product dq = ds k, the gradient of a bias,
// dq, and dk and dv, which are stored or, where other items contribute to the same keys, added to sums.
#pragma once

#include "../shared/element.cuh"
#include "../shared/smem.cuh"
#include "bwd_bias.cuh"
#include "bwd_consumer.cuh"
#include "bwd_dbias.cuh"
#include "bwd_dq.cuh"
#include "packed.cuh"

namespace dmattn::sm90 {

// Rounds the dk or dv of 64 keys.
template <class Element, class Accumulator>
__device__ __forceinline__ auto round_grad(const Accumulator& acc, float scale) {
  auto rounded = cute::make_tensor_like<Element>(acc);
  auto packed = cute::recast<uint32_t>(rounded);
#pragma unroll
  for (int i = 0; i < cute::size(packed); ++i) {
    packed(i) = ElementTraits<Element>::pack(acc(2 * i) * scale, acc(2 * i + 1) * scale);
  }
  return rounded;
}
// Writes a rounded gradient to shared memory, in the layout from which TMA stores it. Whole warpgroup.
template <class T, class Rounded>
__device__ __forceinline__ void stage_grad(const Rounded& rounded, typename T::Element* stage, int thread) {
  typename T::OneGradMma mma;
  const auto copy = cute::make_tiled_copy_C(cute::Copy_Atom<cute::SM90_U32x4_STSM_N, typename T::Element>{}, mma);
  const auto slice = copy.get_slice(thread);
  auto tile = cute::make_tensor(cute::make_smem_ptr(stage), typename T::LayoutOut{});
  cute::copy(copy, slice.retile_S(rounded), slice.partition_D(tile));
  cutlass::arch::fence_view_async_shared();
}
// Stores it from there to `out` by TMA. One thread. `where`: the batch, or the packed sequence.
template <class T, class Where>
__device__ __forceinline__ void send_grad(const CUtensorMap& out, const typename T::Element* stage, int key, int head_k,
                                          const Where& where) {
#pragma unroll
  for (int panel = 0; panel < T::kPanels; ++panel) {
    store_panel(out, stage + panel * 64 * T::kPanelCols, panel * T::kPanelCols, key, head_k, where);
  }
  cute::tma_store_arrive();
}
// Adds a thread's two numbers to 8 aligned bytes.
__device__ __forceinline__ void add_pair(float* to, float x, float y) {
  asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(x), "f"(y) : "memory");
}
// Adds dk or dv to sums in fp32, where several items or launches have parts of a tile. `row`: the first key that the
// thread has of the tile. Columns are added two at a time. If lanes exchanged halves first, to add four, the loops
// before this would lose their uniform registers, as the compiler would no longer take a warp's threads to be in step.
template <class T>
__device__ __forceinline__ void add_partial(const float (&acc)[T::kHeadDim / 8][4], float scale, float* slots,
                                            const BwdItem& item, const BwdArguments& p, int row, int lane) {
  const int64_t tile = (static_cast<int64_t>(item.batch) * p.nheads_k + item.head_k) * p.n_blocks + item.n_block;
  float* const to = slots + (tile * T::kBlockN + row) * T::kTileDim + lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < T::kHeadDim / 8; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      add_pair(to + half * 8 * T::kTileDim + 8 * i, acc[i][2 * half] * scale, acc[i][2 * half + 1] * scale);
    }
}

// The counter of a chunk, where chunks take turns at dk, dv and dbias of their keys. They add from the last chunk to
// the first, the order in which their tiles are taken. Each consumer of a tile counts once.
__device__ __forceinline__ int32_t* chunk_counter(const BwdArguments& p, const BwdItem& item, int chunk) {
  return p.dkv_semaphore + (static_cast<int64_t>(item.batch) * p.nheads_k + item.head_k) * p.keys.blocks + chunk;
}
// Waits for the first of the later chunks that has tiles: it has waited itself for all chunks behind it. One thread.
template <class T>
__device__ __forceinline__ void wait_for_later_chunks(const BwdArguments& p, const BwdItem& item) {
  for (int chunk = item.chunk + 1; chunk < p.keys.blocks; ++chunk) {
    const int tiles = count_tiles(p, item.batch, item.head_k, chunk, T::kBlockN);
    if (tiles == 0) continue;
    wait_for_turn(chunk_counter(p, item, chunk), tiles * T::kConsumers * T::kCluster);
    break;
  }
}

// Writes a panel of ds (see bwd_bias.cuh) from the operand of dk += ds^T q. Whole warpgroup.
template <int kBlockM, class Operand>
__device__ __forceinline__ void store_ds_panel(const Operand& gradients, uint32_t panel, int warp, int lane) {
  const auto packed = cute::recast<const uint32_t>(gradients);
  const uint32_t rows = matrix_row(panel, warp, lane);
#pragma unroll
  for (int i = 0; i < kBlockM / 16; ++i) {
    store_matrices(rows + i * (16 * kPanelRowBytes), packed(4 * i), packed(4 * i + 1), packed(4 * i + 2),
                   packed(4 * i + 3));
  }
  cutlass::arch::fence_view_async_shared();  // the tensor cores see what was written
}

// Collects four neighbouring columns of a row of dk or dv. A thread has two columns of each of two fragments, and the
// lane beside it has the next two. Even lanes get the four columns of the lower fragment, odd lanes those of the upper
// one. Whole warp.
__device__ __forceinline__ void exchange_halves(const float (&lower)[4], const float (&upper)[4], int half, float scale,
                                                bool is_odd, float (&sum)[4]) {
  float own[2], other[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const float x = lower[2 * half + e] * scale, y = upper[2 * half + e] * scale;
    other[e] = __shfl_xor_sync(0xffffffffu, is_odd ? x : y, 1);
    own[e] = is_odd ? y : x;
  }
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    sum[e] = is_odd ? other[e] : own[e];
    sum[2 + e] = is_odd ? own[e] : other[e];
  }
}
// Adds the thread's row of key `half` to a row of fp32 numbers, or stores it there if nobody else adds (is_stored).
template <int kFragments>
__device__ __forceinline__ void send_key_row(const float (&acc)[kFragments][4], int half, float scale, float* to,
                                             bool exists, bool is_stored, int head_dim, int lane) {
  const bool is_odd = lane % 2 != 0;
  const int col = is_odd ? 8 + (lane % 4 - 1) * 2 : lane % 4 * 2;
  to += col;
#pragma unroll
  for (int i = 0; i < kFragments; i += 2) {
    float sum[4];
    exchange_halves(acc[i], acc[i + 1], half, scale, is_odd, sum);
    if (exists && 8 * i + col < head_dim) {
      if (is_stored) {
        *reinterpret_cast<float4*>(to + 8 * i) = make_float4(sum[0], sum[1], sum[2], sum[3]);
      } else {
        add_vector(to + 8 * i, sum);
      }
    }
  }
}
// Adds the rows of the thread's two keys of a packed sequence to rows of sums. `first`: the first of the two, counted
// in the sequence.
template <int kFragments>
__device__ __forceinline__ void add_key_rows(const float (&acc)[kFragments][4], float scale, float* sums,
                                             const BwdArguments& p, int head_k, const SeqRange& keys, int first,
                                             int lane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int key = first + 8 * half;
    float* const to = sums + (static_cast<int64_t>(head_k) * p.packing.total_k + keys.first + key) * p.head_dim;
    send_key_row(acc, half, scale, to, /*exists=*/key < keys.length, /*is_stored=*/false, p.head_dim, lane);
  }
}
// Stores the thread's row of key `half`, rounded, to a row of the gradient itself; or a row of dq, whose fragments
// have query rows in place of keys.
template <class Element, int kFragments>
__device__ __forceinline__ void store_key_row(const float (&acc)[kFragments][4], int half, float scale, Element* to,
                                              bool exists, int head_dim, int lane) {
  const bool is_odd = lane % 2 != 0;
  const int col = is_odd ? 8 + (lane % 4 - 1) * 2 : lane % 4 * 2;
  to += col;
#pragma unroll
  for (int i = 0; i < kFragments; i += 2) {
    float sum[4];
    exchange_halves(acc[i], acc[i + 1], half, scale, is_odd, sum);
    if (exists && 8 * i + col < head_dim) {
      *reinterpret_cast<uint2*>(to + 8 * i) =
          make_uint2(ElementTraits<Element>::pack(sum[0], sum[1]), ElementTraits<Element>::pack(sum[2], sum[3]));
    }
  }
}
// Adds ds to a thread's sums over its rows, for its two keys: its part of the gradient of a bias for each key, in
// fp32.
template <int kFragments>
__device__ __forceinline__ void sum_key_rows(float (&sums)[2], const float (&ds)[kFragments][4]) {
  // Two sums for each key, so that additions do not wait for each other.
  float even[2] = {sums[0], sums[1]}, odd[2] = {0.f, 0.f};
#pragma unroll
  for (int i = 0; i < kFragments; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      even[half] += ds[i][2 * half];
      odd[half] += ds[i][2 * half + 1];
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) sums[half] = even[half] + odd[half];
}

template <class T>
struct BwdResults : BwdConsumerState<T> {
  using Base = BwdConsumerState<T>;
  using Element = typename T::Element;
  using Dq = typename T::Dq;
  using Base::Base;
  using Base::consumer, Base::ds_stage, Base::facts, Base::is_speaker, Base::kdSBarrier, Base::kFragmentsD,
      Base::kFragmentsM, Base::kOwnBarrier, Base::item_place, Base::lane, Base::out_place, Base::own_key, Base::p,
      Base::s, Base::sync_own, Base::thread, Base::warp;
  using typename Base::Scores;
  static constexpr bool kTurnsSendDbias = T::kWideBias && T::kHasTurnWarps;  // see DqTurns
  // The gradient of a bias for each key: sums over the rows that the thread has, of all steps of an item.
  using KeySums = float[2];

  // --- ds, and the gradient of a bias --------------------------------------------------------------------------------

  __device__ __forceinline__ Element* own_ds(int stage) const {
    return s.ds + stage * T::kTiledS + consumer * T::kPanel;
  }
  // Writes the warpgroup's panel of ds as [row][key], for dq, which needs both consumers' keys. The products that read
  // this stage two steps ago are done: each consumer has waited for its own, and then met the other at the barrier of
  // the step between.
  template <class Operand>
  __device__ __forceinline__ void store_ds(const Operand& gradients) {
    store_ds_panel<T::kBlockM>(gradients, smem_u32(own_ds(ds_stage)), warp, lane);
    if constexpr (T::kDenseBias && !T::kWideBias) {
      if (is_speaker()) cute::tma_store_wait<0>();  // the other stage, which comes next, has been read
    }
    cutlass::arch::NamedBarrier::sync(128 * T::kConsumers, kdSBarrier);
  }

  // The lane's address in the warpgroup's panel of a stage of the bias.
  __device__ __forceinline__ uint32_t bias_rows(int stage) const {
    return matrix_row(smem_u32(s.bias.tiles) + (stage * T::kTiledS + consumer * T::kPanel) * 2, warp, lane);
  }

  // The same in fp32: the address of the thread's first row and key.
  __device__ __forceinline__ uint32_t wide_rows(int stage) const {
    return wide_row<T::kBlockM>(smem_u32(s.bias.tiles) + stage * (T::kTiledS * 4), consumer, warp, lane);
  }
  // Overwrites an fp32 bias with its gradient: each entry belongs to one thread.
  __device__ __forceinline__ void store_dbias(const Scores& ds, int stage) const {
    if (p.dbias_kind == DbiasKind::kNone) return;
    store_wide(ds, wide_rows(stage));
  }
  __device__ __forceinline__ void store_wide(const Scores& ds, uint32_t rows) const {
#pragma unroll
    for (int i = 0; i < kFragmentsM; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) st_shared(wide_entry(rows, i, e / 2, e % 2), __float_as_uint(ds[i][e]));
  }
  // Writes the gradient of a pair's bias: the sum of the second member's ds and the first member's, which each thread
  // wrote a step ago. The gradient that lay here has been read by TMA: the speaker waited for that before the barrier
  // of the first member's ds.
  __device__ __forceinline__ void store_pair_dbias(Scores& ds) const {
    const uint32_t first = matrix_row(smem_u32(own_ds(ds_stage ^ 1)), warp, lane);
#pragma unroll
    for (int i = 0; i < kFragmentsM; i += 2) {
      uint32_t words[4];
      load_matrices(words, first + i * (8 * kPanelRowBytes));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 of_first = ElementTraits<Element>::unpack(words[j]);
        ds[i + j / 2][j % 2 * 2] += of_first.x;
        ds[i + j / 2][j % 2 * 2 + 1] += of_first.y;
      }
    }
    if (p.dbias_kind == DbiasKind::kAccum) {
      store_wide(ds, wide_row<T::kBlockM>(smem_u32(s.bias.dbias), consumer, warp, lane));
    } else {
      const uint32_t rows = matrix_row(smem_u32(pair_panel()), warp, lane);
#pragma unroll
      for (int i = 0; i < kFragmentsM; i += 2) {
        const auto pack = [&](int j) {
          return ElementTraits<Element>::pack(ds[i + j / 2][j % 2 * 2], ds[i + j / 2][j % 2 * 2 + 1]);
        };
        store_matrices(rows + i * (8 * kPanelRowBytes), pack(0), pack(1), pack(2), pack(3));
      }
    }
  }
  // The consumer's panel of a pair's gradient in 16 bits.
  __device__ __forceinline__ Element* pair_panel() const {
    return reinterpret_cast<Element*>(s.bias.dbias) + consumer * T::kPanel;
  }
  // Releases the warpgroup's part of a stage of the bias, once TMA has read its gradient from there.
  __device__ __forceinline__ void release_sent(Barrier& empty) const {
    if (kTurnsSendDbias || !is_speaker()) return;
    cute::tma_store_wait<0>();
    empty.arrive();
  }

  static __device__ __forceinline__ void sum_rows(KeySums& sums, const Scores& ds) { sum_key_rows(sums, ds); }
  // All heads of the item share one bias, so that the sums may be added at any of them.
  __device__ __forceinline__ void add_dbias(const KeySums& sums, const BwdItem& item, int head) {
    if (p.dbias_cols == nullptr) return;
    float* const to = p.dbias_cols + (static_cast<int64_t>(item.batch) * p.nheads + head) * p.seqlen_k;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = sums[half];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      if (keeps_terms()) {
        const int64_t row = static_cast<int64_t>(item.batch) * p.nheads_k + item.head_k;
        const KeyInterval term = find_term(half);
        if (lane % 4 == 0 && term.length > 0) p.terms.dbias[row * p.terms.capacity + term.begin] = sum;
        continue;
      }
      if constexpr (T::kGathered) {
        const KeyInterval interval = facts().interval[own_key(half)];
        if (lane % 4 == 0 && interval.length > 0) atomicAdd(to + interval.begin, sum);
      } else {
        const int key = item.n_block * T::kBlockN + own_key(half);
        if (lane % 4 == 0 && key < p.seqlen_k) atomicAdd(to + key, sum);
      }
    }
  }

  // Sends the gradient of a dense bias. In 16 bits it is ds, which has just been written to shared memory; in fp32 it
  // is in the stage of the bias. It is stored if each score has an entry of its own, and added if scores share one.
  __device__ __forceinline__ void send_dbias(const BwdItem& item, int head, int m, int bias_stage) const {
    if (p.dbias_kind == DbiasKind::kNone) return;
    if constexpr (kTurnsSendDbias) return;
    const int stage = ds_stage ^ 1;
    const DbiasPlace to = find_dbias_place<T>(p, item, head, m, consumer);
    if constexpr (T::kDbiasRows) {
      send_dbias_rows(to, T::kWideBias ? bias_stage : stage);
    } else if constexpr (T::kPairs) {
      if (!is_speaker()) return;
      if (p.dbias_kind == DbiasKind::kAccum) {
        send_wide_dbias<T>(p, s.bias.dbias, consumer, to);
      } else {
        send_dbias_by_tma(p, pair_panel(), to);
      }
      cute::tma_store_arrive();
    } else if constexpr (T::kWideBias) {
      if (!is_speaker()) return;
      send_wide_dbias<T>(p, s.bias.tiles + bias_stage * T::kTiledS, consumer, to);
      cute::tma_store_arrive();
    } else if (p.dbias_kind == DbiasKind::kAccum) {
      if constexpr (!T::kHasTurnWarps) add_dbias_panel(to);  // else with dq: see add_dq()
    } else if (is_speaker()) {
      send_dbias_by_tma(p, own_ds(stage), to);
      cute::tma_store_arrive();
    }
  }
  // Adds the panel of ds whose dq has been started to sums in fp32. Whole warpgroup.
  __device__ __forceinline__ void add_dbias_panel(const DbiasPlace& place) const {
    const DbiasSums& sums = p.dbias_sums;
    float* const to = sums.data + place.batch * sums.batch_stride + place.head * sums.head_stride;
    add_panel<Element, T::kBlockM>(to + place.row * sums.row_stride + place.key, sums.row_stride,
                                   smem_u32(own_ds(ds_stage ^ 1)), p.seqlen_q - place.row, p.seqlen_k - place.key,
                                   thread);
  }
  // Sends a tile of a gradient whose rows do not start on 16 bytes. `stage`: that of ds; for an fp32 bias that of the
  // bias, which is released next.
  __device__ __forceinline__ void send_dbias_rows(const DbiasPlace& place, int stage) const {
    const DbiasRows& rows = p.dbias_rows;
    const int64_t at =
        place.batch * rows.batch_stride + place.head * rows.head_stride + place.row * rows.row_stride + place.key;
    DbiasPart part = {nullptr, rows.row_stride, p.seqlen_q - place.row, p.seqlen_k - place.key};
    if constexpr (T::kWideBias) {
      constexpr int kPanels = T::kBiasPanels / T::kConsumers;
      const uint32_t panels = smem_u32(s.bias.tiles + stage * T::kTiledS + consumer * (kPanels * T::kBiasPanel));
      part.to = static_cast<float*>(rows.data) + at;
#pragma unroll 1
      for (int panel = 0; panel < kPanels; ++panel) {
        send_wide_dbias_panel<T::kBlockM>(part, panels + panel * (T::kBiasPanel * 4), rows.is_sum, warp, lane);
        part.to = static_cast<float*>(part.to) + T::kBiasPanelKeys;
        part.keys -= T::kBiasPanelKeys;
      }
      __syncwarp();
      cutlass::arch::NamedBarrier::sync(128, kOwnBarrier + consumer);  // all threads have read the stage
    } else {
      part.to = static_cast<Element*>(rows.data) + at;
      send_dbias_panel<T::kBlockM>(part, smem_u32(own_ds(stage)), warp, lane);
    }
  }

  // --- dq leaves -----------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void add_dq(float (&acc)[Dq::kFragments][4], const BwdItem& item, int head, int m) {
    if constexpr (T::kDqPath == DqPath::kRows) return store_dq(acc, item.batch, head, m);
    int64_t block = (static_cast<int64_t>(item.batch) * p.nheads + head) * p.dq_blocks + m;
    if constexpr (T::kPacked) {
      const typename T::Announced& own = s.item[item_place.stage];
      block += first_row_block(own.q, own.sequence, T::kBlockM);
    }
    float* const to = p.dq_accum + block * tile_of_dq() + consumer * Dq::kPart;
    if constexpr (T::kDqPath == DqPath::kVector) {
      // The phase of turn_full changes with each step, like ds_stage, so that no register has to keep it. The product
      // has been started, so that ds_stage is that of the next step.
      if constexpr (T::kHasTurnWarps) s.turn_full[consumer].wait(ds_stage ^ 1);
#pragma unroll
      for (int i = 0; i < Dq::kFragments; ++i) add_vector(to + (i * 128 + thread) * 4, acc[i]);
      if constexpr (T::kHasTurnWarps && T::kDenseBias && !T::kWideBias) {
        if (p.dbias_kind == DbiasKind::kAccum) add_dbias_panel(find_dbias_place<T>(p, item, head, m, consumer));
      }
      if constexpr (T::kHasTurnWarps) s.turn_used[consumer].arrive();
    } else if constexpr (T::kDqPath == DqPath::kBulk) {
      wait_for_stage(/*is_started=*/true);
      sync_own();
      stage_dq(acc);
      sync_own();
      if (!is_speaker()) return;
      if constexpr (T::kHasTurnWarps) {
        s.turn_used[consumer].arrive();  // DqTurns does the rest
      } else {
        add_bulk(to, smem_u32(own_out()), own_dq_bytes<T>(p, consumer));
        cute::tma_store_arrive();
      }
    } else {
      // BwdDq does the rest. Each warp says that its part is there.
      s.out_empty[out_place.stage].wait(out_free_phase(true));
      stage_dq(acc);
      __syncwarp();
      if (lane == 0) s.out_full[out_place.stage].arrive();
      out_place.advance();
    }
  }
  // Stores dq, to which no other item contributes (DqPath::kRows). A consumer has its share of the columns, of all
  // rows.
  __device__ __forceinline__ void store_dq(float (&acc)[Dq::kFragments][4], int batch, int head, int m) const {
    static_assert(!Dq::kTransposed && Dq::kRows == 64);
    constexpr int kCols = Dq::kColsOfOne;
    const RowsOfOut& dq = p.dq_rows;
    Element* const to = static_cast<Element*>(dq.data) + batch * dq.stride.batch + head * dq.stride.head;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = m * T::kBlockM + warp * 16 + lane / 4 + 8 * half;
      store_key_row(acc, half, p.softmax_scale, to + row * dq.stride.row + consumer * kCols, row < p.seqlen_q,
                    p.head_dim - consumer * kCols, lane);
    }
  }
  // Elements of a tile of dq in memory. Additions from registers add all columns: leaving some out would take a
  // comparison for each fragment.
  __device__ __forceinline__ int tile_of_dq() const {
    return T::kDqPath == DqPath::kVector ? T::kBlockM * T::kHeadDim : p.dq_tile;
  }
  // The phase to wait for until the next stage of `out` is free: of out_empty for kTurns, of turn_full for kBulk in a
  // fixed order. With a single stage it changes with each tile, like ds_stage, so that no register has to keep it.
  // is_started: the tile's product has been started, so that ds_stage is that of the next tile.
  __device__ __forceinline__ int out_free_phase(bool is_started) const {
    if constexpr (T::kStagesOut > 1) return out_place.phase ^ 1;
    return is_started ? ds_stage : ds_stage ^ 1;
  }
  // Waits until what the stage held has been read: by TMA, for which only the speaker waits, or by the warp that takes
  // turns. is_started: see out_free_phase().
  __device__ __forceinline__ void wait_for_stage(bool is_started) const {
    if constexpr (T::kDqPath == DqPath::kTurns) s.out_empty[out_place.stage].wait(out_free_phase(is_started));
    if constexpr (T::kDqPath == DqPath::kBulk && T::kHasTurnWarps) {
      s.turn_full[consumer].wait(out_free_phase(is_started));
    }
    if (is_speaker()) cute::tma_store_wait<0>();
  }
  // The consumer's part of the stage that comes next.
  __device__ __forceinline__ char* own_out() const { return s.out[out_place.stage][consumer]; }
  __device__ __forceinline__ void stage_dq(float (&acc)[Dq::kFragments][4]) const {
    const uint32_t stage = smem_u32(own_out()) + thread * 16;
#pragma unroll
    for (int i = 0; i < Dq::kFragments; ++i) {
      st_shared(stage + i * 2048, make_uint4(__float_as_uint(acc[i][0]), __float_as_uint(acc[i][1]),
                                             __float_as_uint(acc[i][2]), __float_as_uint(acc[i][3])));
    }
    cutlass::arch::fence_view_async_shared();
  }

  // --- dk and dv of listed keys are added to sums --------------------------------------------------------------------

  // In a fixed order: a key is in one tile of a chunk at most. What the chunks contribute to its dk, dv and dbias is
  // kept apart or, where that would take too much memory, chunks add it from the last to the first, the order in which
  // their tiles are taken. A sole chunk with all rows needs neither.
  __device__ __forceinline__ bool takes_chunk_turns() const { return T::kOrdered && p.dkv_semaphore != nullptr; }
  __device__ __forceinline__ bool keeps_terms() const { return T::kOrdered && p.terms.first != nullptr; }
  __device__ __forceinline__ void wait_for_chunks(const BwdItem& item) const {
    if constexpr (T::kOrdered) {
      if (!takes_chunk_turns()) return;
      if (is_speaker()) wait_for_later_chunks<T>(p, item);
      cutlass::arch::NamedBarrier::sync(128, kOwnBarrier + consumer);
    }
  }
  __device__ __forceinline__ void pass_chunk(const BwdItem& item) const {
    if constexpr (T::kOrdered) {
      if (takes_chunk_turns() && is_speaker()) pass_turn(chunk_counter(p, item, item.chunk));
    }
  }

  // Adds dk or dv of lists whose keys have rows in other chunks as well. With keeps_terms(), `accum` has a row for the
  // part of each chunk in a key's sum, and this row is stored.
  __device__ __forceinline__ void add_grad(float (&acc)[kFragmentsD][4], float scale, float* accum, int64_t head) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const KeyInterval interval = keeps_terms() ? find_term(half) : facts().interval[own_key(half)];
      const int rows = keeps_terms() ? p.terms.capacity : p.seqlen_k;
      float* const to = accum + (head * rows + interval.begin) * p.head_dim;
      send_key_row(acc, half, scale, to, interval.length > 0, keeps_terms(), p.head_dim, lane);
    }
  }
  // Stores dk or dv of lists whose items have all rows of their keys.
  __device__ __forceinline__ void store_listed_grad(float (&acc)[kFragmentsD][4], float scale, const RowsOfOut& out,
                                                    int batch, int head_k) {
    Element* const head = static_cast<Element*>(out.data) + batch * out.stride.batch + head_k * out.stride.head;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const KeyInterval interval = facts().interval[own_key(half)];
      store_key_row(acc, half, scale, head + interval.begin * out.stride.row, interval.length > 0, p.head_dim, lane);
    }
  }
  // The row in ChunkTerms of the thread's key `half`, as an interval of one row or of none.
  __device__ __forceinline__ KeyInterval find_term(int half) const {
    if constexpr (!T::kOrdered) {
      return {0, 0};
    } else {
      const int term = facts().term[own_key(half)];
      return {term, term >= 0};
    }
  }

  // --- dk and dv leave -----------------------------------------------------------------------------------------------

  // Where dk and dv share memory with ds: waits until nobody reads the one any more, TMA included, before the other is
  // written.
  __device__ __forceinline__ void sync_out() const {
    if (is_speaker()) cute::tma_store_wait<0>();
    cutlass::arch::NamedBarrier::sync(128 * T::kConsumers, kdSBarrier);
  }

  // Whether the parts of a block of keys are added in order: from the first, which has been taken first.
  __device__ __forceinline__ bool takes_part_turns() const {
    return (T::kOrdered || T::kHasTurnWarps) && p.dkv_semaphore != nullptr;
  }
  __device__ __forceinline__ int32_t* part_counter(const BwdItem& item) const {
    const int64_t head = static_cast<int64_t>(item.batch) * p.nheads_k + item.head_k;
    return p.dkv_semaphore + (head * p.n_blocks + item.n_block) * T::kConsumers + consumer;
  }
  __device__ __forceinline__ void wait_for_parts(const BwdItem& item) {
    if (!takes_part_turns()) return;
    if (is_speaker()) wait_for_turn(part_counter(item), item.split);
    sync_own();
  }
  __device__ __forceinline__ void pass_part(const BwdItem& item) {
    if (!takes_part_turns()) return;
    __threadfence();  // what each thread has added comes before the turn
    sync_own();
    if (is_speaker()) pass_turn(part_counter(item));
  }

  // Adds dk or dv to `slots` or, if that is nullptr, stores it in `out`: the item then has all contributions to it.
  template <class Accumulator>
  __device__ __forceinline__ void store_grad(Accumulator& acc, float scale, const CUtensorMap& out, float* slots,
                                             const BwdItem& item) {
    if (slots != nullptr) {
      const int row = consumer * 64 + warp * 16 + lane / 4;
      if constexpr (T::kPacked) {
        add_key_rows(fragments<kFragmentsD>(acc), scale, slots, p, item.head_k, s.item[item_place.stage].k,
                     item.n_block * T::kBlockN + row, lane);
      } else {
        add_partial<T>(fragments<kFragmentsD>(acc), scale, slots, item, p, row, lane);
      }
      return;
    }
    const auto rounded = round_grad<Element>(acc, scale);
    Element* const stage = reinterpret_cast<Element*>(own_out());
    wait_for_stage(/*is_started=*/false);  // the next tile of dq in this stage waits for the same phase
    sync_own();
    stage_grad<T>(rounded, stage, thread);
    sync_own();
    if (!is_speaker()) return;
    const int key = item.n_block * T::kBlockN + consumer * 64;
    if constexpr (T::kPacked) {
      send_grad<T>(out, stage, key, item.head_k, s.item[item_place.stage].k);
    } else {
      send_grad<T>(out, stage, key, item.head_k, item.batch);
    }
  }
};

}  // namespace dmattn::sm90
