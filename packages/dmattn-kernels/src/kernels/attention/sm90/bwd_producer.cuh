// The producer of the Hopper backward: one thread, which takes items and has TMA copy their tiles.
#pragma once

#include "bwd_mask.cuh"

namespace dmattn::sm90 {

template <class T>
struct BwdProducer {
  using Element = typename T::Element;
  using Item = BwdItemOf<T>;
  static constexpr uint32_t kStatBytes = T::kBlockM * sizeof(float);

  const BwdArguments& p;
  typename T::Shared& s;
  RingPlace<T::kStagesQ> q_place;
  RingPlace<T::kStagesdO> dout_place;
  RingPlace<2> item_place;
  RingPlace<T::kStagesBias> bias_place;  // kPairs, kWideBias
  KvPlace<T::kStagesKv> kv_place;        // of consecutive keys
  ListNumbering numbering = {};          // of lists, in any order
  bool has_next = false;                 // of lists, in any order: the item after the current one has been announced

  static constexpr bool kInOrder = T::kOrdered || T::kHasTurnWarps;

  // Where dq is added up in order, a thread block takes all its items from the counter, even the first one: thread
  // blocks that run wait for items with lower numbers, and it is not known whether all thread blocks have an SM at the
  // same time. An item is taken only shortly before it begins, as items with higher numbers wait for its turns.
  __device__ __forceinline__ void run() {
    if constexpr (T::kGathered && !T::kOrdered) return run_over_lists();
    const int first = kInOrder ? 0 : gridDim.x;  // the first item, or mirrored pair, that is taken from the counter
    const int own = is_mirrored() ? 2 * blockIdx.x : blockIdx.x;
    for (int index = kInOrder ? atomicAdd(p.work_counter, 1) : own;;) {
      if constexpr (T::kMasked) {
        // load_masked_item() announces the item, with whether the mask leaves it any rows.
        if (index >= p.items) return announce({index, 0});
        load_masked_item(index);
        index = first + atomicAdd(p.work_counter, 1);
        continue;
      }
      const typename T::Announced item = look_up(index, first);
      announce(item);
      if (item.index >= p.items) return;
      index = load_item(find_item<T>(p, item),
                        [&] { return kInOrder ? first + atomicAdd(p.work_counter, 1) : index_behind(item, first); });
    }
  }

  // How many steps before the end of an item the next one is looked for, so that the facts of its keys arrive in time,
  // and the keys as well where they have a second stage. If it were looked for earlier, the last items would go to
  // thread blocks that are still at work on another one.
  static constexpr int kStepsAhead = T::kStagesKv > 1 ? 6 : 3;

  __device__ __forceinline__ void run_over_lists() {
    numbering = find_list_numbering<T>(p);
    has_next = announce_listed(blockIdx.x);
    while (true) {
      while (!has_next) find_next();
      const typename T::Announced item = s.item[item_place.stage ^ 1];  // the one that was announced last
      if (item.index >= p.items) return;
      has_next = false;
      load_item(find_item<T>(p, item), [] { return 0; });
    }
  }
  __device__ __forceinline__ void find_next() { has_next = announce_listed(gridDim.x + atomicAdd(p.work_counter, 1)); }
  // Announces the item with this number, or that there are no more. Returns false if the number stands for no tile, as
  // lists have room for more tiles than they fill.
  __device__ __forceinline__ bool announce_listed(int number) {
    const ListRoom room = list_room_of(p);
    if (number >= numbering.items(room)) {
      announce({p.items, 0, 0, 0});
      return true;
    }
    const ListPlace found = numbering.find(room, p.group_heads, number);
    const int2 rows = read_tile_rows(p, find_list_item<T>(p, found.place));
    if (rows.x >= rows.y) return false;
    announce({found.place, rows.x, rows.y, found.heads.word});
    return true;
  }

  __device__ __forceinline__ bool is_mirrored() const { return T::kMirrors && p.mirrors_items; }
  // Takes the next item over consecutive keys, in any order. `first`: see run().
  __device__ __forceinline__ int take_index(int first) const {
    const int next = first + atomicAdd(p.work_counter, 1);
    return is_mirrored() ? 2 * next : next;
  }
  // The item after `item`: the second one of its pair, if there is one, or one from the counter.
  __device__ __forceinline__ int index_behind(const typename T::Announced& item, int first) const {
    if (is_mirrored() && item.index % 2 == 0) {
      bool has_second;
      if constexpr (T::kPacked) {
        has_second = has_mirror_image(item.n_block, blocks_of_keys<T>(item.k.length));
      } else {
        has_second = has_mirror_image(item.index / 2 % pairs_of_part<T>(p), p.n_blocks);
      }
      if (has_second) return item.index + 1;
    }
    return take_index(first);
  }

  // The item with this number, or the next one that exists: lists have room for more tiles than they fill, and packed
  // sequences have numbers for more blocks of keys than there are.
  __device__ __forceinline__ typename T::Announced look_up(int index, int first) const {
    if constexpr (T::kGathered) {
      for (; index < p.items; index = first + atomicAdd(p.work_counter, 1)) {
        const int2 rows = read_tile_rows(p, find_list_item<T>(p, index));
        if (rows.x < rows.y) return {index, rows.x, rows.y, 0};
      }
      return {index, 0, 0, 0};
    } else if constexpr (T::kPacked) {
      for (; index < p.items; index = take_index(first)) {
        const typename T::Announced item = find_packed_item<T>(p, index);
        if (item.k.length > 0) return item;
      }
      return {index, 0, 0, 0, {}, {}};
    } else {
      return {index};
    }
  }

  __device__ __forceinline__ void announce(const typename T::Announced& item) {
    s.item_empty[item_place.stage].wait(item_place.phase ^ 1);
    s.item[item_place.stage] = item;
    s.item_full[item_place.stage].arrive();
    item_place.advance();
  }

  // Returns the number of the next item, which `take_next` finds. It is asked for beside the last loads, which wait
  // for the consumers: the answer arrives meanwhile. If it were asked for earlier, thread blocks with long items would
  // take another one before others are done with theirs.
  template <class TakeNext>
  __device__ __forceinline__ int load_item(const Item& item, TakeNext take_next) {
    BwdSteps<T> steps(p, item);
    if (steps.left == 0) return take_next();
    if constexpr (T::kWideBias) {
      if (hides_item(p, item)) return take_next();
    }
    if constexpr (T::kPairs) {
      load_pair(item, steps);
      return take_next();
    }
    // The first rows are loaded before the keys, for which the consumers may still need the stage. Listed keys are
    // copied by other warps.
    if constexpr (T::kDenseBias) load_bias(steps.head, steps.m, item);
    load_q(steps.head, steps.m, item, 0);
    if constexpr (!T::kGathered) load_keys(p.k, s.k, s.k_full, s.k_empty, item);
    load_dout(steps.head, steps.m, item);
    if constexpr (!T::kGathered) {
      load_keys(p.v, s.v, s.v_full, s.v_empty, item);
      kv_place.advance();
    }
    steps.advance();
    int next = steps.left > 0 ? 0 : take_next();
#pragma unroll 1  // few registers
    for (; steps.left > 0; steps.advance()) {
      if (!kInOrder && steps.left == 1) next = take_next();
      if constexpr (T::kGathered && !T::kOrdered) {
        if (!has_next && steps.left <= kStepsAhead) find_next();
      }
      // In the order in which the consumers release the stages.
      if constexpr (T::kWideBias) {
        load_dout(steps.head, steps.m, item);
        load_q(steps.head, steps.m, item, 0);
        load_bias(steps.head, steps.m, item);
      } else if constexpr (T::kDenseBias) {
        load_bias(steps.head, steps.m, item);
        load_dout(steps.head, steps.m, item);
        load_q(steps.head, steps.m, item, 0);
      } else {
        load_q(steps.head, steps.m, item, 0);
        load_dout(steps.head, steps.m, item);
      }
      if (kInOrder && steps.left == 1) next = take_next();
    }
    return next;
  }

  // Loads a tile of the bias, and then the rows of both members, for each block of rows.
  __device__ __forceinline__ void load_pair(const BwdItem& item, BwdSteps<T>& steps) {
    const auto load_second = [&] {
      const BwdItem second = item_of_member<T>(p, item, 1);
      const int head = steps.head + heads_to_second(p);
      load_dout(head, steps.m, second);
      load_q(head, steps.m, second, 0);
    };
    // The order of load_item().
    load_bias(steps.head, steps.m, item);
    load_q(steps.head, steps.m, item, 0);
    load_keys(p.k, s.k, s.k_full, s.k_empty, item);
    load_dout(steps.head, steps.m, item);
    load_keys(p.v, s.v, s.v_full, s.v_empty, item);
    kv_place.advance();
    load_second();
    steps.advance();
#pragma unroll 1  // few registers
    for (; steps.left > 0; steps.advance()) {
      load_bias(steps.head, steps.m, item);
      load_dout(steps.head, steps.m, item);
      load_q(steps.head, steps.m, item, 0);
      load_second();
    }
  }

  // Loads the tiles that the mask leaves, each announced beside its Q. The next tile is found before one is announced,
  // to know which is the last.
  __device__ __forceinline__ void load_masked_item(int index) {
    const BwdItem item = find_tiled_item<T>(p, index);
    MaskedRows<T> rows(p, item);
    RowTile tile = rows.next();
    announce({index, tile.exists()});
#pragma unroll 1  // few registers
    for (bool is_first = true; tile.exists(); is_first = false) {
      const RowTile after = rows.next();
      tile = tile.as_last(!after.exists());
      // The order of load_item().
      const bool is_q_late = T::kDenseBias && !is_first;
      if constexpr (T::kDenseBias) load_bias(tile.head, tile.m(), item);
      if (!is_q_late) load_announced(tile, item);
      if (is_first) load_keys(p.k, s.k, s.k_full, s.k_empty, item);
      load_dout(tile.head, tile.m(), item);
      if (is_first) {
        load_keys(p.v, s.v, s.v_full, s.v_empty, item);
        kv_place.advance();
      }
      if (is_q_late) load_announced(tile, item);
      tile = after;
    }
  }
  // Loads Q, and announces what the consumers have to know of its rows. They read this after they have waited for Q.
  // All of their threads have read it before the barrier of the step's ds, and the stage is released only after that:
  // see BwdConsumer::work().
  __device__ __forceinline__ void load_announced(RowTile tile, const BwdItem& item) {
    const int stage = q_place.stage;
    s.q_empty[stage].wait(q_place.phase ^ 1);
    s.mask.tile[stage] = tile;
    load_q(tile.head, tile.m(), item, tile.is_partial() ? sizeof(s.mask.bits[stage]) : 0);
    if (tile.is_partial()) load_bits(tile, item, stage);
  }
  // Loads the mask's bits, which load_q() has told the barrier to expect. Rows past the last one become zeros.
  __device__ __forceinline__ void load_bits(RowTile tile, const BwdItem& item, int stage) {
    cute::SM90_TMA_LOAD_4D::copy(&p.mask_bits, &s.q_full[stage].word,
                                 static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL), s.mask.bits[stage],
                                 item.n_block * T::kMaskWords, tile.m() * T::kBlockM, tile.head / p.mask.head_ratio,
                                 p.mask.batch > 1 ? item.batch : 0);
  }

  __device__ __forceinline__ void load_keys(const CUtensorMap& map, Element* tile, Barrier (&fulls)[T::kStagesKv],
                                            Barrier (&empties)[T::kStagesKv], const Item& item) {
    static_assert(T::kStagesKv == 1);
    Barrier& full = fulls[0];
    empties[0].wait(kv_place.phase ^ 1);
    full.arrive_and_expect(T::kMembers * T::kTileK * sizeof(Element));
    load_tile<T::kBlockN, T::kPanels, T::kPanelCols>(map, full, cute::TMA::CacheHintSm90::EVICT_FIRST, tile,
                                                     item.n_block * T::kBlockN, item.head_k, place_of_keys(item));
    if constexpr (T::kPairs) {
      const BwdItem second = item_of_member<T>(p, item, 1);
      load_tile<T::kBlockN, T::kPanels, T::kPanelCols>(map, full, cute::TMA::CacheHintSm90::EVICT_FIRST,
                                                       tile + T::kTileK, item.n_block * T::kBlockN, second.head_k,
                                                       second.batch);
    }
  }
  // `more`: further bytes that are copied to the same barrier.
  __device__ __forceinline__ void load_q(int head, int m, const Item& item, uint32_t more) {
    const int stage = q_place.stage;
    load_rows(p.q, p.lse, s.q + stage * T::kTileQ, s.lse[stage], s.q_full[stage], s.q_empty[stage], q_place.phase,
              (T::kBias ? kStatBytes : 0) + more, head, m, item);
    if constexpr (T::kBias) copy_stat(p.lse_rest, s.lse_rest[stage], s.q_full[stage], head, m, item);
    q_place.advance();
  }
  __device__ __forceinline__ void load_dout(int head, int m, const Item& item) {
    load_rows(p.dout, p.delta, s.dout + dout_place.stage * T::kTileQ, s.delta[dout_place.stage],
              s.dout_full[dout_place.stage], s.dout_empty[dout_place.stage], dout_place.phase, 0, head, m, item);
    dout_place.advance();
  }
  // Loads a tile of the bias, panel by panel, to the stage of its Q, or for a pair to the next stage of the bias. An
  // fp32 bias is loaded after its Q, so that bias_place counts its stages.
  __device__ __forceinline__ void load_bias(int head, int m, const BwdItem& item) {
    constexpr bool kOwnPlace = T::kPairs || T::kWideBias;
    const int stage = kOwnPlace ? bias_place.stage : q_place.stage;
    s.bias_empty[stage].wait((kOwnPlace ? bias_place.phase : q_place.phase) ^ 1);
    if constexpr (kOwnPlace) bias_place.advance();
    if constexpr (T::kCopiesBiasRows) {
      if (p.bias_rows.exist()) {
        s.bias_requests.ask(stage, {m * T::kBlockM, item.n_block * T::kBlockN, head / p.bias_head_ratio,
                                    item.batch * p.bias_batch_step});
        return;
      }
    }
    s.bias_full[stage].arrive_and_expect(T::kTiledS * sizeof(typename T::BiasElement));
#pragma unroll
    for (int panel = 0; panel < T::kBiasPanels; ++panel) {
      cute::SM90_TMA_LOAD_4D::copy(&p.bias_tiles, &s.bias_full[stage].word,
                                   static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_FIRST),
                                   s.bias.tiles + stage * T::kTiledS + panel * T::kBiasPanel,
                                   item.n_block * T::kBlockN + panel * T::kBiasPanelKeys, m * T::kBlockM,
                                   head / p.bias_head_ratio, item.batch * p.bias_batch_step);
    }
  }
  // Tells the warps that copy the bias, if there are any, that there are no more tiles.
  __device__ __forceinline__ void finish_bias() {
    if (!p.bias_rows.exist()) return;
    s.bias_empty[q_place.stage].wait(q_place.phase ^ 1);
    s.bias_requests.ask(q_place.stage, {-1, 0, 0, 0});
  }
  // Loads a block of rows of Q or dO, and their lse or delta.
  __device__ __forceinline__ void load_rows(const CUtensorMap& map, const float* stats, Element* tile, float* stat,
                                            Barrier& full, Barrier& empty, int phase, uint32_t more, int head, int m,
                                            const Item& item) {
    empty.wait(phase ^ 1);
    full.arrive_and_expect(T::kTileQ * sizeof(Element) + kStatBytes + more);
    load_tile<T::kBlockM, T::kPanels, T::kPanelCols>(map, full, cute::TMA::CacheHintSm90::EVICT_LAST, tile,
                                                     m * T::kBlockM, head, place_of_rows(item));
    copy_stat(stats, stat, full, head, m, item);
  }
  __device__ __forceinline__ void copy_stat(const float* from, float* to, Barrier& full, int head, int m,
                                            const Item& item) {
    cute::SM90_BULK_COPY_G2S::copy(from + row_of_stat<T>(p, item, head, m), &full.word, to, kStatBytes);
  }
};

}  // namespace dmattn::sm90
