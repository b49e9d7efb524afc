// The forward on Hopper over tiles of consecutive keys: the plain kernel, with lengths and causality only, the same
// over packed sequences, one with a window of keys, one with a bias for each key (fwd_key_bias.cuh), those with softcap
// (softcap.cuh), and the general ones, whose scores a bias or a dense mask changes, with or without softcap
// (fwd_general.cuh). Most of them have a variant that splits the keys between thread blocks.
//
// A thread block stays on its SM and takes row blocks of heads (items) until none is left. One thread of the first
// warpgroup, the producer, copies Q, K and V tiles into shared memory by TMA. The other warpgroups, the consumers,
// own 64 rows each: they compute scores, probabilities and the output by WGMMA. In a consumer the softmax of a key
// block runs beside the second product of the block before it, and consumers take turns, so that the softmax of one
// runs beside the products of another. With two thread blocks on an SM, a consumer computes one product after the
// other, and consumers take no turns (kOverlaps).
#pragma once

#include "../../shared/early_start.cuh"
#include "../shared/smem.cuh"
#include "../shared/softmax.cuh"
#include "fwd_general.cuh"
#include "fwd_items.cuh"
#include "fwd_output.cuh"
#include "fwd_params.h"
#include "fwd_traits.cuh"
#include "softcap.cuh"

namespace dmattn::sm90 {

// --- what both roles know -------------------------------------------------------------------------------------------

// Whether the producer asks other warps for the tiles of the bias.
template <class T>
__device__ __forceinline__ bool asks_for_bias(const typename T::Arguments& p) {
  return T::kHasBoxedBias || p.bias_rows.exist();
}
// Whether each warp of a consumer releases a stage of K for itself, since each has read what is beside it: which keys
// they are, or a bias.
template <class T>
constexpr bool kWarpsReleaseKeys = T::kGeneral || T::kBiasInProduct;
// How many arrivals fill a stage of the bias.
template <class T>
__device__ __forceinline__ int bias_arrivals(const typename T::Arguments& p) {
  if constexpr (T::kHasBoxedBias) {
    return decltype(T::Shared::general)::Boxes::kPanels;
  } else {
    return T::kHasTileBias && p.bias_rows.exist() ? kBiasWarps : 1;
  }
}

template <class T>
__device__ __forceinline__ void init_barriers(const typename T::Arguments& p, typename T::Shared& s) {
  constexpr int kOperandWarps = T::kBiasInProduct ? kBiasWarps : 0;  // see BiasOperandsLoader
  int item_readers = 4 * T::kConsumers + kOperandWarps;              // the warps of the consumers, and others
  if constexpr (T::kHasKeyBias && !T::kBiasInProduct) item_readers += has_key_bias(p);
  for (int i = 0; i < T::kQStages; ++i) {
    s.q_full[i].init(1);
    s.q_empty[i].init(T::kConsumers);
  }
  for (int i = 0; i < T::kStages; ++i) {
    s.k_full[i].init(1 + kOperandWarps);
    s.v_full[i].init(1);
    s.k_empty[i].init(kWarpsReleaseKeys<T> ? 4 * T::kConsumers : T::kConsumers);
    s.v_empty[i].init(T::kConsumers);
  }
  for (int i = 0; i < 2; ++i) {
    s.item_full[i].init(1);
    s.item_empty[i].init(item_readers);
  }
  if constexpr (T::kGeneral) {
    for (int i = 0; i < 2; ++i) {
      s.general.bias_full[i].init(bias_arrivals<T>(p));
      s.general.bias_empty[i].init(4 * T::kConsumers);
    }
    if constexpr (T::kHasTileBias) s.general.bias_requests.init();
  }
  cutlass::arch::fence_barrier_init();
}

// --- the producer: one thread ---------------------------------------------------------------------------------------

template <class T>
struct FwdProducer {
  const typename T::Arguments& p;
  typename T::Shared& s;
  RingPlace<T::kStages> k_place, v_place;
  RingPlace<2> item_place, bias_place;
  RingPlace<T::kQStages> q_place;

  __device__ __forceinline__ void run() {
    for (int index = blockIdx.x; index < p.items;) {
      if constexpr (T::kGeneral) {
        index = gridDim.x + load_general_item(index);
      } else {
        index = gridDim.x + load_item(index);
      }
    }
    announce(AnnouncedItem::of(p.items, true));
    if constexpr (T::kHasTileBias) {
      if (asks_for_bias<T>(p)) ask_for_bias({-1, 0, 0, 0});
    }
  }

  // The number of this block's next item, less the number of blocks: run() adds that, since any use of the counter's
  // answer waits for it. The next item is asked for beside the last loads of an item: the answer is there when they
  // have been issued, and blocks with long items are not given another one before others are done with theirs.
  // Without a counter a block takes every gridDim.x-th item.
  __device__ __forceinline__ int take_item(int index) const {
    return p.work_counter != nullptr ? next_number(p.work_counter) : index;
  }

  __device__ __forceinline__ void announce(AnnouncedItem item, const typename T::Item& found = {}) {
    s.item_empty[item_place.stage].wait(item_place.phase ^ 1);
    s.item[item_place.stage] = item.word;
    if constexpr (T::kSaysItems) s.general.found[item_place.stage] = found;
    s.item_full[item_place.stage].arrive();
    item_place.advance();
  }

  __device__ __forceinline__ typename T::Item look_up(int index) const {
    if constexpr (T::kPacked) {
      return find_packed_item<T>(p, index);
    } else {
      return find_item_of<T>(p, index);
    }
  }

  // Loads an item. Returns take_item(), which it calls kBlocksBehind blocks of keys before the last one, or at once
  // where no item of the call has more blocks.
  static constexpr int kBlocksBehind = 2;
  __device__ __forceinline__ int load_item(int index) {
    const bool all_are_short = p.seqlen_k <= kBlocksBehind * T::kBlockN;
    int next = all_are_short ? take_item(index) : 0;
    const typename T::Item item = look_up(index);
    if constexpr (T::kPacked) {
      if (!has_rows<T>(item)) return all_are_short ? next : take_item(index);
    }
    const KeyBlocks blocks = find_key_blocks_of<T>(p, item);
    const bool has_keys = blocks.end > (T::kSplit ? blocks.begin : 0);
    announce(AnnouncedItem::of(index, has_keys), item);
    if (!all_are_short && blocks.end - blocks.begin <= kBlocksBehind) next = take_item(index);
    load_q(item, has_keys);
    if (!has_keys) return next;
    // Consumers start the scores of the next block before the output of this one: K is one block ahead of V.
    load_k(blocks.end - 1, item);
#pragma unroll 1  // unrolled, it would not fit the producer's few registers
    for (int n = blocks.end - 1; n > blocks.begin; --n) {
      if (n == blocks.begin + kBlocksBehind) next = take_item(index);
      load_k(n - 1, item);
      load_v(n, item);
    }
    load_v(blocks.begin, item);
    return next;
  }

  // Loads the tiles in which the mask keeps something, each announced beside its K, and their bias. Returns as
  // load_item().
  __device__ __forceinline__ int load_general_item(int index) {
    const typename T::Item item = look_up(index);
    const KeyBlocks blocks = find_key_blocks_of<T>(p, item);
    auto tiles = walk_mask_tiles<T>(p, item, blocks.begin);
    auto tile = tiles.before(blocks.end);
    announce(AnnouncedItem::of(index, tile.n >= 0));
    load_q(item, tile.n >= 0);
    if (tile.n < 0) return take_item(index);
    const auto load_announced = [&](bool is_last) {
      s.k_empty[k_place.stage].wait(k_place.phase ^ 1);
      const bool is_cut = tile.n >= blocks.full || tile.n < blocks.whole;
      s.general.tile[k_place.stage] = KeyTile::of(tile.n, is_cut, tile.is_partial, is_last).word;
      load_k(tile.n, item);
    };
    auto next = tiles.before(tile.n);
    if (next.n < 0) index = take_item(index);
    load_announced(next.n < 0);
    load_bias(tile.n, item);
#pragma unroll 1  // unrolled, it would not fit the producer's few registers
    while (next.n >= 0) {
      const int before = tile.n;
      tile = next;
      next = tiles.before(tile.n);
      if (next.n < 0) index = take_item(index);
      load_announced(next.n < 0);
      load_v(before, item);
      load_bias(tile.n, item);
    }
    load_v(tile.n, item);
    return index;
  }
  __device__ __forceinline__ void load_bias(int n, const FwdItem& item) {
    if constexpr (!T::kHasTileBias) return;
    if constexpr (T::kHasBoxedBias) {
      ask_for_bias(find_bias(n * T::kBlockN, item));
    } else if (!T::kHasWideBias || p.bias.kind == BiasKind::kTile) {
      load_bias_panels<2>(n * T::kBlockN, item);
    } else if (p.bias.kind == BiasKind::kDirect) {
      load_bias_panels<4>(n * T::kBlockN, item);
      load_bias_panels<4>(n * T::kBlockN + T::kBlockN / 2, item);
    }
  }
  __device__ __forceinline__ BiasRequest find_bias(int key, const FwdItem& item) const {
    const int head = p.bias.head_stride == 0 ? 0 : item.head / p.bias.head_ratio;
    const int batch = p.bias.batch_stride == 0 ? 0 : item.batch;
    return {item.m_block * T::kBlockM, key, head, batch};
  }
  // Fills a stage of the bias, with keys of kBytes bytes each.
  template <int kBytes>
  __device__ __forceinline__ void load_bias_panels(int key, const FwdItem& item) {
    using General = decltype(s.general);
    const BiasRequest tile = find_bias(key, item);
    if (p.bias_rows.exist()) return ask_for_bias(tile);
    s.general.bias_empty[bias_place.stage].wait(bias_place.phase ^ 1);
    Barrier& full = s.general.bias_full[bias_place.stage];
    full.arrive_and_expect(General::kStageBytes);
    char* const stage = s.general.bias[bias_place.stage];
    constexpr int kPanelBytes = T::kBlockM * 128, kPanelKeys = 128 / kBytes;
#pragma unroll
    for (int panel = 0; panel < General::kStageBytes / kPanelBytes; ++panel) {
      cute::SM90_TMA_LOAD_4D::copy(
          &p.bias_tiles, &full.word, static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_FIRST),
          stage + panel * kPanelBytes, tile.key + panel * kPanelKeys, tile.row, tile.head, tile.batch);
    }
    bias_place.advance();
  }
  // Has the next stage of the bias filled by other warps.
  __device__ __forceinline__ void ask_for_bias(const BiasRequest& wanted) {
    if constexpr (T::kHasTileBias) {
      s.general.bias_empty[bias_place.stage].wait(bias_place.phase ^ 1);
      s.general.bias_requests.ask(bias_place.stage, wanted);
      bias_place.advance();
    }
  }

  __device__ __forceinline__ void load_q(const typename T::Item& item, bool is_needed) {
    s.q_empty[q_place.stage].wait(q_place.phase ^ 1);
    Barrier& full = s.q_full[q_place.stage];
    typename T::Element* const tile = s.q + q_place.stage * T::kTileQ;
    q_place.advance();
    if (!is_needed) {
      full.arrive();
      return;
    }
    full.arrive_and_expect(T::kTileQ * sizeof(typename T::Element));
    load_tile<T::kBlockM, T::kPanels, T::kPanelCols>(p.q, full, cute::TMA::CacheHintSm90::EVICT_FIRST, tile,
                                                     item.m_block * T::kBlockM, item.head, place_of_rows(item));
  }
  __device__ __forceinline__ void load_k(int n, const typename T::Item& item) {
    load_keys(p.k, s.k, s.k_full, s.k_empty, k_place, n, item);
  }
  __device__ __forceinline__ void load_v(int n, const typename T::Item& item) {
    load_keys(p.v, s.v, s.v_full, s.v_empty, v_place, n, item);
  }
  __device__ __forceinline__ void load_keys(const CUtensorMap& map, typename T::Element* tiles, Barrier* full,
                                            Barrier* empty, RingPlace<T::kStages>& place, int n,
                                            const typename T::Item& item) {
    empty[place.stage].wait(place.phase ^ 1);
    full[place.stage].arrive_and_expect(T::kTileK * sizeof(typename T::Element));
    load_tile<T::kBlockN, T::kPanels, T::kPanelCols>(map, full[place.stage], cute::TMA::CacheHintSm90::EVICT_LAST,
                                                     tiles + place.stage * T::kTileK, n * T::kBlockN,
                                                     item.head / p.head_ratio, place_of_keys(item));
    place.advance();
  }
};

// --- three warps beside the producer: rows of a bias that TMA does not take -----------------------------------------

template <class T>
__device__ __forceinline__ void copy_bias_rows(const typename T::Arguments& p, typename T::Shared& s) {
  auto& general = s.general;
  BiasRowLoader<T::kBlockM, sizeof(general.bias[0]) / T::kBlockM, /*kStages=*/2, /*kBatch=*/4>{
      p.bias_rows,
      general.bias_requests,
      general.bias_full,
      smem_u32(general.bias),
      static_cast<int>(threadIdx.x / 32) - 1,
      static_cast<int>(threadIdx.x % 32)}
      .run();
}

// --- the consumers: a warpgroup each --------------------------------------------------------------------------------

template <class T>
struct FwdConsumer {
  static constexpr int kFragmentsN = T::kBlockN / 8, kFragmentsD = T::kHeadDim / 8;
  // Names of barriers for some of the block's threads; 0 is __syncthreads().
  static constexpr int kTurnBarrier = 1, kStoreBarrier = 1 + T::kConsumers;

  const typename T::Arguments& p;
  typename T::Shared& s;
  const int consumer, thread, warp, lane;  // thread: among the consumers; warp: in the warpgroup
  RingPlace<T::kStages> k_place, v_place;
  RingPlace<2> item_place, bias_place;
  RingPlace<T::kQStages> q_place;

  __device__ __forceinline__ FwdConsumer(const typename T::Arguments& arguments, typename T::Shared& shared)
      : p(arguments),
        s(shared),
        consumer(cutlass::canonical_warp_group_idx() - 1),
        thread(threadIdx.x - 128),
        warp(threadIdx.x / 32 % 4),
        lane(threadIdx.x % 32) {}

  __device__ __forceinline__ void run() {
    if (T::kOverlaps && consumer == T::kConsumers - 1) pass_turn();
    while (true) {
      if constexpr (T::kSaysItems) {
        typename T::Item found;
        const AnnouncedItem item = next_item<T>(s, item_place, found);
        if (item.index() >= p.items) return;
        attend(found, item.has_keys());
      } else {
        const AnnouncedItem item = next_item<T>(s, item_place);
        if (item.index() >= p.items) return;
        attend(find_item_of<T>(p, item.index()), item.has_keys());
      }
    }
  }

  // One thread of a warpgroup says that the warpgroup is done with a buffer.
  __device__ __forceinline__ void release(Barrier& empty) {
    if (threadIdx.x % 128 == 0) empty.arrive();
  }
  // Releases the stage of K.
  __device__ __forceinline__ void release_keys() {
    release_keys(k_place.stage);
    k_place.advance();
  }
  __device__ __forceinline__ void release_keys(int stage) {
    if (threadIdx.x % (kWarpsReleaseKeys<T> ? 32 : 128) == 0) s.k_empty[stage].arrive();
  }
  // Advances the place and returns the stage that it had. The asm keeps the compiler from doing so later.
  static __device__ __forceinline__ int leave_stage(RingPlace<T::kStages>& place) {
    const int stage = place.stage;
    place.advance();
    asm volatile("" : "+r"(place.stage), "+r"(place.phase));
    return stage;
  }
  __device__ __forceinline__ void wait_turn() { cutlass::arch::NamedBarrier::sync(256, kTurnBarrier + consumer); }
  __device__ __forceinline__ void pass_turn() {
    cutlass::arch::NamedBarrier::arrive(256, kTurnBarrier + (consumer + 1) % T::kConsumers);
  }

  template <int kFragments, class Accumulator>
  static __device__ __forceinline__ auto fragments(Accumulator& acc) -> float (&)[1][kFragments][4] {
    static_assert(cute::cosize_v<typename Accumulator::layout_type> == kFragments * 4);
    return *reinterpret_cast<float (*)[1][kFragments][4]>(acc.data());
  }

  __device__ __forceinline__ void attend(const typename T::Item& item, bool has_keys) {
    typename T::ScoreMma score_mma;
    typename T::OutMma out_mma;
    const auto score_slice = operand_slice(score_mma, consumer);
    const auto out_slice = operand_slice(out_mma, consumer);
    const auto all_q =
        score_slice.partition_fragment_A(cute::make_tensor(cute::make_smem_ptr(s.q), typename T::LayoutQs{}));
    const auto q = all_q(cute::_, cute::_, cute::_, q_place.stage);
    const auto k = score_slice.partition_fragment_B(cute::make_tensor(cute::make_smem_ptr(s.k), typename T::LayoutK{}));
    const auto v = out_slice.partition_fragment_B(cute::make_tensor(cute::make_smem_ptr(s.v), typename T::LayoutVt{}));
    auto acc_s = cute::partition_fragment_C(score_mma, cute::Shape<Int<T::kBlockM>, Int<T::kBlockN>>{});
    auto acc_o = cute::partition_fragment_C(out_mma, cute::Shape<Int<T::kBlockM>, Int<T::kHeadDim>>{});
    // Probabilities as the first operand of the output's product: the registers of the scores in the same order, 16
    // keys at a time.
    auto probabilities = cute::make_tensor<typename T::Element>(
        cute::Layout<cute::Shape<cute::Shape<cute::_2, cute::_2, cute::_2>, cute::_1, Int<T::kBlockN / 16>>>{});
    auto& scores = fragments<kFragmentsN>(acc_s);
    auto& out = fragments<kFragmentsD>(acc_o);
    // The operands of the columns that a bias for each key adds to Q and K.
    typename T::BiasMma bias_mma;
    const auto bias_operands = [&] {
      if constexpr (T::kBiasInProduct) {
        using Rows = typename T::template BiasLayout<64, 1>;
        using Keys = typename T::template BiasLayout<T::kBlockN, T::kStages>;
        const auto slice = operand_slice(bias_mma, 0);
        return cute::make_tuple(
            slice.partition_fragment_A(cute::make_tensor(cute::make_smem_ptr(s.general.rows), Rows{})),
            slice.partition_fragment_B(cute::make_tensor(cute::make_smem_ptr(s.general.keys), Keys{})));
      } else {
        return cute::make_tuple();
      }
    }();

    const int first_row = item.m_block * T::kBlockM + consumer * 64 + warp * 16 + lane / 4;
    OnlineSoftmax<1> softmax;
    float keep[2];  // factors of the running sums and of the output, since the maximum has moved
    const float scale_log2 = p.softmax_scale * kLog2e;
    cute::clear(acc_o);
    s.q_full[q_place.stage].wait(q_place.phase);

    const auto to_operand = [&] {
      auto packed = cute::recast<uint32_t>(probabilities);
#pragma unroll
      for (int i = 0; i < kFragmentsN; ++i) {
        packed(2 * i) = ElementTraits<typename T::Element>::pack(scores[0][i][0], scores[0][i][1]);
        packed(2 * i + 1) = ElementTraits<typename T::Element>::pack(scores[0][i][2], scores[0][i][3]);
      }
    };
    const auto finish_scores = [&](auto pending) {
      wait_for_product<decltype(pending)::value>(acc_s);
      release_keys();
      // This comes before keys are cut: the tanh of -inf would be a finite number.
      if constexpr (T::kSoftcap) cap_scores<T::kCapQuotients>(scores, p.scale_in_cap);
    };
    const auto finish_output = [&] {
      wait_for_product<0>(acc_o);
      release(s.v_empty[v_place.stage]);
      v_place.advance();
    };
    // With kBiasInProduct, the stages of a step. The places advance while the step's products run. Otherwise the
    // compiler would advance them after the two branches of the softmax have joined, and the next step would wait for
    // that.
    int k_stage = 0, v_stage = 0;
    const auto start_scores = [&] {
      const auto keys = k(cute::_, cute::_, cute::_, k_place.stage);
      if constexpr (T::kBiasInProduct) {
        const auto bias = cute::get<1>(bias_operands)(cute::_, cute::_, cute::_, k_place.stage);
        const auto ones = cute::get<0>(bias_operands)(cute::_, cute::_, cute::_, 0);
        start_biased_scores(score_mma, q, keys, bias_mma, ones, bias, acc_s);
      } else {
        start_product<true>(score_mma, q, keys, acc_s);
      }
    };
    const auto finish_step = [&] {
      if constexpr (T::kBiasInProduct) {
        wait_for_product<0>(acc_o);
        release(s.v_empty[v_stage]);
      } else {
        finish_output();
      }
      to_operand();
      OnlineSoftmax<1>::rescale(out, keep);
    };
    // Computes the scores of a tile beside the output of the tile before. meanwhile() is called while the scores are
    // computed; to_probabilities() then makes probabilities of them. With kBiasInProduct, to_probabilities(rest)
    // releases the keys and ends with rest(). Inlined at both calls, since a separate function would serialize the
    // products.
    const auto step = [&](auto&& meanwhile, auto&& to_probabilities) __attribute__((always_inline)) {
      wait_turn();
      start_scores();
      s.v_full[v_place.stage].wait(v_place.phase);
      start_product<false>(out_mma, probabilities, v(cute::_, cute::_, cute::_, v_place.stage), acc_o);
      pass_turn();
      meanwhile();
      if constexpr (T::kBiasInProduct) {
        k_stage = leave_stage(k_place);
        v_stage = leave_stage(v_place);
        wait_for_product<1>(acc_s);
        to_probabilities(finish_step);
      } else {
        finish_scores(cute::_1{});
        to_probabilities();
        if constexpr (T::kHoldsOutput) stay_behind(scores[0][kFragmentsN / 2 - 1][0], smem_u32(&s));
        finish_step();
      }
    };
    const auto first_step = [&](auto&& meanwhile, auto&& to_probabilities) {
      start_scores();
      meanwhile();
      if constexpr (T::kBiasInProduct) {
        k_stage = leave_stage(k_place);
        wait_for_product<0>(acc_s);
        to_probabilities(to_operand);
      } else {
        finish_scores(cute::_0{});
        to_probabilities();
        to_operand();
      }
    };

    // Computes the scores and the output of a tile, one product after the other.
    const auto plain_step = [&](auto&& to_probabilities) {
      start_product<true>(score_mma, q, k(cute::_, cute::_, cute::_, k_place.stage), acc_s);
      finish_scores(cute::_0{});
      to_probabilities();
      to_operand();
      OnlineSoftmax<1>::rescale(out, keep);
      s.v_full[v_place.stage].wait(v_place.phase);
      start_product<false>(out_mma, probabilities, v(cute::_, cute::_, cute::_, v_place.stage), acc_o);
      finish_output();
    };

    // Skips a tile in which these rows see nothing. One thread releases the buffers for all warps, and no product
    // keeps the warps together: that thread could get so far ahead that other warps would wait for a phase of the
    // barriers that is over. So the warps meet first.
    const auto pass_over = [&] {
      s.v_full[v_place.stage].wait(v_place.phase);
      cutlass::arch::NamedBarrier::sync(128, kStoreBarrier + consumer);
      release_keys();
      release(s.v_empty[v_place.stage]);
      v_place.advance();
    };

    const auto wait_for_keys = [&] { s.k_full[k_place.stage].wait(k_place.phase); };
    if constexpr (T::kGeneral) {
      ScoreChanges<T> changes(p, s.general, bias_place, thread / 32, lane, item);
      KeyTile tile;
      const auto meanwhile = [&] {
        tile.word = __shfl_sync(0xffffffffu, s.general.tile[k_place.stage], 0);  // the same for all lanes
        changes.read_ahead(tile);
      };
      const auto to_probabilities = [&] {
        changes.change(scores, tile);
        if constexpr (T::kMode == ScoreMode::kTileBias || T::kMode == ScoreMode::kMaskedKeyBias || T::kHasBoxedBias) {
          softmax.probabilities_of_logits(scores, keep);
        } else {
          softmax.template probabilities<!T::kLogits>(scores, keep, scale_log2);
        }
      };
      if (has_keys) {
        wait_for_keys();
        first_step(meanwhile, to_probabilities);
#pragma unroll 1
        while (!tile.is_last()) wait_for_keys(), step(meanwhile, to_probabilities);
      }
    } else {
      constexpr bool kHasWindow = T::kWindows != Windows::kNever;
      const auto& lengths = lengths_of(p, item);
      const KeyBlocks blocks = find_key_blocks_of<T>(p, item);
      int n = blocks.end - 1;
      const auto nothing = [] {};
      const auto whole = [&] { softmax.template probabilities<true>(scores, keep, scale_log2); };
      const auto cut_only = [&] {
        cut_keys(lengths, scores, n * T::kBlockN, first_row, lane);
        if constexpr (kHasWindow) {
          if (has_window<T>(p)) cut_keys_before_window(p, scores, n * T::kBlockN, first_row, lane);
        }
      };
      const auto cut = [&] {
        cut_only();
        whole();
      };
      if constexpr (T::kBiasInProduct) {
        float middle = 0.f;  // of the tile's bias: see KeyBiasShared
        const auto read_middle = [&] { middle = __shfl_sync(0xffffffffu, s.general.middle[k_place.stage], 0); };
        // Each branch has its own softmax and all that follows it: the compiler could not interleave these if the
        // branches joined in between.
        const auto take_biased = [&](bool is_cut, auto&& rest) __attribute__((always_inline)) {
          if (middle != middle) {  // none of the bias is in the product
            add_large_bias<T>(scores, s.general.large[k_stage], p.softmax_scale, lane);
            release_keys(k_stage);
            if (is_cut) cut_only();
            softmax.probabilities_of_logits(scores, keep);
            rest();
          } else {
            release_keys(k_stage);
            if (is_cut) cut_only();
            take_probabilities_of_products(softmax, scores, keep, p.softmax_scale, scale_log2, middle);
            if constexpr (T::kHoldsOutput) stay_behind(scores[0][kFragmentsN / 2 - 1][0], smem_u32(&s));
            rest();
          }
        };
        if (has_keys) {
          wait_for_keys();
          first_step(read_middle, [&](auto&& rest) { take_biased(n >= blocks.full, rest); });
#pragma unroll 1
          for (--n; n >= blocks.full; --n)
            wait_for_keys(), step(read_middle, [&](auto&& rest) { take_biased(true, rest); });
#pragma unroll 1
          for (; n >= blocks.whole; --n)
            wait_for_keys(), step(read_middle, [&](auto&& rest) { take_biased(false, rest); });
        }
      } else if constexpr (!T::kOverlaps) {
        // The key blocks that the rows of this consumer see, among those of the item.
        const KeyBlocks own = find_key_blocks<T>(lengths, item.m_block * T::kBlockM + consumer * 64, 64);
#pragma unroll 1
        for (; n >= max(own.end, blocks.begin); --n) wait_for_keys(), pass_over();
#pragma unroll 1
        for (; n >= own.begin; --n) {
          wait_for_keys();
          plain_step([&] {
            if (n >= own.full || (kHasWindow && n < own.whole)) cut_only();
            whole();
          });
        }
        if constexpr (kHasWindow) {
#pragma unroll 1
          for (; n >= blocks.begin; --n) wait_for_keys(), pass_over();
        }
      } else if (has_keys) {
        wait_for_keys();
        first_step(nothing, [&] { n >= blocks.full || (kHasWindow && n < blocks.whole) ? cut() : whole(); });
        for (--n; n >= blocks.full; --n) wait_for_keys(), step(nothing, cut);
#pragma unroll 1
        for (; n >= blocks.whole; --n) wait_for_keys(), step(nothing, whole);
        if constexpr (kHasWindow) {
#pragma unroll 1
          for (; n >= blocks.begin; --n) wait_for_keys(), step(nothing, cut);
        }
      }
    }
    if constexpr (T::kFreesQ) {
      if (!has_keys) cutlass::arch::NamedBarrier::sync(128, kStoreBarrier + consumer);  // as in pass_over()
      release(s.q_empty[q_place.stage]);
    }
    if (T::kOverlaps && has_keys) {
      s.v_full[v_place.stage].wait(v_place.phase);
      start_product<false>(out_mma, probabilities, v(cute::_, cute::_, cute::_, v_place.stage), acc_o);
      finish_output();
    }
    finish_rows(p, softmax, T::kLogits ? 1.f : p.softmax_scale, out, item, first_row);
    if constexpr (T::kSplit) {
      write_partial_rows(p, out, item, first_row);
    } else {
      const bool is_speaker = threadIdx.x % 128 == 0;
      if constexpr (T::kOwnOut) {
        // Wait until the store of the previous item has read this memory.
        if (is_speaker) cute::tma_store_wait<0>();
        cutlass::arch::NamedBarrier::sync(128, kStoreBarrier + consumer);
      }
      store_rows<T>(p, s.out(), acc_o, out_mma, consumer, kStoreBarrier + consumer, item);
      if constexpr (!T::kOwnOut) {
        if (is_speaker) {
          cute::tma_store_wait<0>();
          s.q_empty[q_place.stage].arrive();
        }
      }
    }
    q_place.advance();
  }
};

template <class T>
__global__ void __launch_bounds__(T::kThreads, T::kBlocksPerSm)
    fwd_kernel(const __grid_constant__ typename T::Arguments p) {
  extern __shared__ char smem[];
  const uint32_t base = smem_u32(smem);
  auto& s = *reinterpret_cast<typename T::Shared*>(smem + ((base + 1023) / 1024 * 1024 - base));
  if (threadIdx.x == 0) init_barriers<T>(p, s);
  if constexpr (T::kBiasInProduct) {
    s.general.write_constants(threadIdx.x, T::kThreads);
    cutlass::arch::fence_view_async_shared();  // the tensor cores see what was written
  }
  __syncthreads();
  wait_for_previous_kernel();
  if (cutlass::canonical_warp_group_idx() == 0) {
    cutlass::arch::warpgroup_reg_dealloc<T::kProducerRegisters>();
    if (threadIdx.x == 0) FwdProducer<T>{p, s}.run();
    if constexpr (T::kHasBoxedBias) {
      const int panel = static_cast<int>(threadIdx.x / 32) - 1;
      const bool has_one = panel >= 0 && panel < decltype(T::Shared::general)::Boxes::kPanels;
      if (has_one && threadIdx.x % 32 == 0) copy_bias_boxes(p.bias_classes, s.general, panel);
    } else if constexpr (T::kHasTileBias) {
      if (threadIdx.x >= 32 && p.bias_rows.exist()) copy_bias_rows<T>(p, s);
    }
    if constexpr (T::kBiasInProduct) {
      if (threadIdx.x >= 32) BiasOperandsLoader<T>(p, s, threadIdx.x / 32 - 1, threadIdx.x % 32).run();
    } else if constexpr (T::kHasKeyBias) {
      if (threadIdx.x / 32 == 1 && has_key_bias(p)) KeyBiasLoader<T>{p, s, static_cast<int>(threadIdx.x % 32)}.run();
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<T::kConsumerRegisters>();
    FwdConsumer<T>(p, s).run();
    if (threadIdx.x % 128 == 0) cute::tma_store_wait<0>();
  }
}

}  // namespace dmattn::sm90
