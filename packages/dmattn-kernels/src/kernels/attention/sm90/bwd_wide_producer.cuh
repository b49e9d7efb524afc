// The producer of the Hopper backward for wide heads, and how the two thread blocks of a cluster signal each other.
#pragma once

#include "bwd_mask.cuh"
#include "bwd_wide_traits.cuh"

namespace dmattn::sm90 {

// --- both thread blocks ----------------------------------------------------------------------------------------------

__device__ __forceinline__ int other_rank() { return static_cast<int>(cute::block_rank_in_cluster()) ^ 1; }

// Tells both thread blocks that this one is done with a buffer that both write.
__device__ __forceinline__ void release_in_both(Barrier& empty) {
  empty.arrive();
  cutlass::arch::ClusterBarrier::arrive(&empty.word, other_rank(), 1);
}

// Copies `bytes` of shared memory to `to` in the other thread block, whose barrier `full` counts them.
__device__ __forceinline__ void send_to_other(const void* from, void* to, Barrier& full, uint32_t bytes) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   cute::set_block_rank(smem_u32(to), other_rank())),
               "r"(smem_u32(from)), "r"(bytes), "r"(cute::set_block_rank(smem_u32(&full.word), other_rank()))
               : "memory");
}

template <class T>
__device__ __forceinline__ void init_wide_barriers(const BwdArguments& p, typename T::Shared& s) {
  s.k_full.init(T::kGathered ? 2 * 32 : 1);
  s.v_full.init(T::kGathered ? 32 : 1);
  s.facts_full.init(32);
  s.rows_known.init(1);
  // Q is released by the second consumers of both thread blocks: when they have p, the first ones are done with Q. dO
  // and ds are released by all four consumers. Warps that take turns read what is announced beside Q, and release it,
  // too.
  const int turn_warps = T::kMasked && p.dq_semaphore != nullptr ? T::kConsumers : 0;
  for (int i = 0; i < T::kStagesQ; ++i) {
    s.q_full[i].init(1);
    s.q_empty[i].init(T::kCluster + turn_warps);
  }
  for (int i = 0; i < T::kStagesdO; ++i) {
    s.dout_full[i].init(1);
    s.dout_empty[i].init(T::kCluster * T::kConsumers);
  }
  for (int i = 0; i < T::kStagesP; ++i) s.p_full[i].init(4);  // each warp arrives once
  for (int i = 0; i < T::kStagesdS; ++i) {
    s.ds_full[i].init(1);
    s.ds_empty[i].init(T::kCluster * T::kConsumers);
  }
  for (int i = 0; i < T::kConsumers; ++i) {
    s.turn_full[i].init(1);
    s.turn_used[i].init(4);  // each warp arrives once
  }
  cutlass::arch::fence_barrier_init();
}

// --- the producer: one thread ----------------------------------------------------------------------------------------

template <class T>
struct WideProducer {
  using Element = typename T::Element;
  using Item = BwdItemOf<T>;
  static constexpr uint32_t kStatBytes = T::kBlockM * sizeof(float);
  static constexpr uint16_t kBoth = 3;

  const BwdArguments& p;
  typename T::Shared& s;
  const int rank;
  RingPlace<T::kStagesQ> q_place;
  RingPlace<T::kStagesdO> dout_place;

  __device__ __forceinline__ void run(const Item& item) {
    if constexpr (T::kMasked) return run_masked(item);
    WideSteps<T> steps(p, item);
    if (steps.left == 0) return;
    load_q(steps.head, steps.m, item);
    if constexpr (!T::kGathered) load_k(item);
    load_dout(steps.head, steps.m, item);
    if constexpr (!T::kGathered) load_v(item);
    steps.advance();
#pragma unroll 1
    for (; steps.left > 0; steps.advance()) {
      load_q(steps.head, steps.m, item);
      load_dout(steps.head, steps.m, item);
    }
  }

  // Loads the tiles that the mask leaves, each announced beside its Q and beside its dO. Both thread blocks find the
  // same tiles. The next tile is found before one is announced, to know which is the last.
  __device__ __forceinline__ void run_masked(const BwdItem& item) {
    MaskedRows<T> rows(p, item);
    RowTile tile = rows.next();
    s.rows.exist = tile.exists();
    s.rows_known.arrive();
#pragma unroll 1
    for (bool is_first = true; tile.exists(); is_first = false) {
      const RowTile after = rows.next();
      tile = tile.as_last(!after.exists());
      prefetch(tile, item);
      // What was announced beside a stage has been read when all consumers have released the stage.
      s.q_empty[q_place.stage].wait(q_place.phase ^ 1);
      s.rows.with_q[q_place.stage] = tile;
      load_q(tile.head, tile.m(), item);
      if (is_first) load_k(item);
      s.dout_empty[dout_place.stage].wait(dout_place.phase ^ 1);
      s.rows.with_dout[dout_place.stage] = tile;
      load_dout(tile.head, tile.m(), item);
      if (is_first) load_v(item);
      tile = after;
    }
  }
  // Brings into the L2 cache what the first consumer reads from memory itself: the mask's bits and the bias.
  __device__ __forceinline__ void prefetch(RowTile tile, const BwdItem& item) const {
    const int row = tile.m() * T::kBlockM;
    if (tile.is_partial()) {
      cute::SM90_TMA_LOAD_4D::PREFETCH::copy(&p.mask_bits, item.n_block * T::kMaskWords, row,
                                             tile.head / p.mask.head_ratio, p.mask.batch > 1 ? item.batch : 0);
    }
    if constexpr (T::kDenseBias) {
      if (p.bias_tile_keys == 0) return;
      for (int key = 0; key < T::kOwnKeys; key += p.bias_tile_keys) {
        cute::SM90_TMA_LOAD_4D::PREFETCH::copy(&p.bias_tiles, first_key(item, rank) + key, row,
                                               tile.head / p.bias_head_ratio, item.batch * p.bias_batch_step);
      }
    }
  }

  static __device__ __forceinline__ int first_key(const Item& item, int rank) {
    return item.n_block * T::kBlockN + rank * T::kOwnKeys;
  }
  // Loads K of the block's own keys and, of the other block's keys, the columns of dq that this block computes.
  __device__ __forceinline__ void load_k(const Item& item) {
    s.k_full.arrive_and_expect((T::kWholeK + T::kOwnPanels * T::kPanelK) * sizeof(Element));
    load_tile<T::kOwnKeys, T::kAllPanels, T::kPanelCols>(p.k, s.k_full, cute::TMA::CacheHintSm90::EVICT_FIRST, s.k,
                                                         first_key(item, rank), item.head_k, place_of_keys(item));
#pragma unroll
    for (int panel = 0; panel < T::kOwnPanels; ++panel) {
      load_panel(p.k, s.k_full, cute::TMA::CacheHintSm90::EVICT_FIRST, s.other_k + panel * T::kPanelK,
                 (rank * T::kOwnPanels + panel) * T::kPanelCols, first_key(item, rank ^ 1), item.head_k,
                 place_of_keys(item));
    }
  }
  __device__ __forceinline__ void load_v(const Item& item) {
    s.v_full.arrive_and_expect(T::kTileK * sizeof(Element));
    load_tile<T::kOwnKeys, T::kPanels, T::kPanelCols>(p.v, s.v_full, cute::TMA::CacheHintSm90::EVICT_FIRST, s.v,
                                                      first_key(item, rank), item.head_k, place_of_keys(item));
  }
  __device__ __forceinline__ void load_q(int head, int m, const Item& item) {
    const int stage = q_place.stage;
    load_rows(p.q, p.lse, s.q + stage * T::kTileQ, s.lse[stage], s.q_full[stage], s.q_empty[stage], q_place.phase,
              T::kBias ? kStatBytes : 0, head, m, item);
    if constexpr (T::kBias) copy_stat(p.lse_rest, s.lse_rest[stage], s.q_full[stage], head, m, item);
    q_place.advance();
  }
  __device__ __forceinline__ void load_dout(int head, int m, const Item& item) {
    const int stage = dout_place.stage;
    load_rows(p.dout, p.delta, s.dout + stage * T::kTileQ, s.delta[stage], s.dout_full[stage], s.dout_empty[stage],
              dout_place.phase, 0, head, m, item);
    dout_place.advance();
  }
  // Copies half of the panels to both thread blocks, as the other block does with the other half, and to this one
  // alone lse or delta of the rows. `more`: further bytes that are copied to the same barrier. What the other block
  // copies may arrive before the barrier is told to expect it: no phase ends before this thread has arrived.
  __device__ __forceinline__ void load_rows(const CUtensorMap& map, const float* stats, Element* tile, float* stat,
                                            Barrier& full, Barrier& empty, int phase, uint32_t more, int head, int m,
                                            const Item& item) {
    empty.wait(phase ^ 1);
    full.arrive_and_expect(T::kTileQ * sizeof(Element) + kStatBytes + more);
#pragma unroll
    for (int i = 0; i < T::kOwnPanels; ++i) {
      const int panel = rank * T::kOwnPanels + i;
      if (panel >= T::kPanels) break;
      load_panel_to(kBoth, map, full, cute::TMA::CacheHintSm90::EVICT_LAST, tile + panel * T::kPanelQ,
                    panel * T::kPanelCols, m * T::kBlockM, head, place_of_rows(item));
    }
    copy_stat(stats, stat, full, head, m, item);
  }
  __device__ __forceinline__ void copy_stat(const float* from, float* to, Barrier& full, int head, int m,
                                            const Item& item) {
    const int64_t row = row_of_stat<T>(p, item, head, m);
    cute::SM90_BULK_COPY_G2S::copy(from + row, &full.word, to, kStatBytes);
  }
};

}  // namespace dmattn::sm90
