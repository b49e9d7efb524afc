// The forward on Hopper over lists of keys (running top-w, key masks), with an optional bias for each key.
//
// As in fwd_kernel.cuh a thread block stays on its SM and takes row blocks of heads until none is left, a warpgroup
// produces and two consume. But the producer's threads gather the rows of K and V that the list names
// (gather_producer.cuh), and the consumers' last tile is as narrow as the end of the list allows. One kernel more has
// items with a share of their list's tiles each. A row block is
// 128 rows of one head: gathered bytes for each product depend on the number of rows alone, so that other heads of the
// group in the same tile would save nothing.
#pragma once

#include "../../shared/early_start.cuh"
#include "../shared/softmax.cuh"
#include "fwd_output.cuh"
#include "gather_producer.cuh"

namespace dmattn::sm90 {

template <class T>
__device__ __forceinline__ void init_gather_barriers(typename T::Shared& s) {
  for (int i = 0; i < T::kQBarriers; ++i) {
    s.q_full[i].init(1);
    s.q_empty[i].init(T::kOneQ ? 1 : T::kConsumers);
  }
  for (int i = 0; i < T::kStages; ++i) {
    s.k_full[i].init(T::kBiasInProduct ? 128 + 4 : 128);  // and a warp each, of the bias
    s.v_full[i].init(128);
    s.k_empty[i].init(T::kBiasInProduct ? 4 * T::kConsumers : T::kConsumers);  // see release_keys()
    s.v_empty[i].init(T::kConsumers);
  }
  for (int i = 0; i < T::kFactStages; ++i) {
    s.facts_full[i].init(128);
    s.facts_empty[i].init(4 * T::kConsumers);  // a warp each
  }
  for (int i = 0; i < 2; ++i) {
    s.item_full[i].init(1);
    s.item_empty[i].init(4 * T::kConsumers);
  }
  cutlass::arch::fence_barrier_init();
}

template <class T>
struct GatherConsumer {
  static constexpr int kFragmentsN = T::kBlockN / 8, kFragmentsD = T::kHeadDim / 8;
  // Names of barriers for some of the block's threads; 0 is __syncthreads().
  static constexpr int kTurnBarrier = 1, kStoreBarrier = 1 + T::kConsumers;
  static_assert(kStoreBarrier + T::kConsumers <= GatherProducer<T>::kBarrier);

  const typename T::Arguments& p;
  typename T::Shared& s;
  const int consumer, thread, warp, lane;  // thread: among the consumers; warp: in the warpgroup
  RingPlace<T::kStages> k_place, v_place;
  RingPlace<T::kFactStages> facts_place;
  RingPlace<2> item_place;
  RingPlace<T::kQStages> q_place;
  int stored = -1;  // stage of Q from which the output is being written

  __device__ __forceinline__ GatherConsumer(const typename T::Arguments& arguments, typename T::Shared& shared)
      : p(arguments),
        s(shared),
        consumer(cutlass::canonical_warp_group_idx() - 1),
        thread(threadIdx.x - 128),
        warp(threadIdx.x / 32 % 4),
        lane(threadIdx.x % 32) {}

  __device__ __forceinline__ typename T::Announced next_item() {
    s.item_full[item_place.stage].wait(item_place.phase);
    typename T::Announced work = s.item[item_place.stage];
    work.index = __shfl_sync(0xffffffffu, work.index, 0);
    work.count = __shfl_sync(0xffffffffu, work.count, 0);
    work.full = __shfl_sync(0xffffffffu, work.full, 0);
    if constexpr (!T::kOverlaps) {
      work.item.m_block = __shfl_sync(0xffffffffu, work.item.m_block, 0);
      work.item.head = __shfl_sync(0xffffffffu, work.item.head, 0);
      work.item.batch = __shfl_sync(0xffffffffu, work.item.batch, 0);
    }
    if (lane == 0) s.item_empty[item_place.stage].arrive();
    item_place.advance();
    return work;
  }

  __device__ __forceinline__ Barrier& q_full() { return s.q_full[T::kOneQ ? consumer : q_place.stage]; }

  // One thread a warpgroup says that the warpgroup is done with a buffer.
  __device__ __forceinline__ void release(Barrier& empty) {
    if (threadIdx.x % 128 == 0) empty.arrive();
  }
  // The stage of K. With a bias in the product every warp says for itself that it has read what the operands lack.
  __device__ __forceinline__ void release_keys() {
    if (threadIdx.x % (T::kBiasInProduct ? 32 : 128) == 0) s.k_empty[k_place.stage].arrive();
    k_place.advance();
  }
  __device__ __forceinline__ void wait_turn() { cutlass::arch::NamedBarrier::sync(256, kTurnBarrier + consumer); }
  __device__ __forceinline__ void pass_turn() {
    cutlass::arch::NamedBarrier::arrive(256, kTurnBarrier + (consumer + 1) % T::kConsumers);
  }
  __device__ __forceinline__ void wait_for_tile(Barrier* full, const RingPlace<T::kStages>& place) {
    full[place.stage].wait(place.phase);
    if constexpr (T::kFence == ProxyFence::kConsumer) cutlass::arch::fence_view_async_shared();
  }

  template <class Accumulator>
  static __device__ __forceinline__ auto fragments(Accumulator& acc)
      -> float (&)[1][cute::cosize_v<typename Accumulator::layout_type> / 4][4] {
    return *reinterpret_cast<float (*)[1][cute::cosize_v<typename Accumulator::layout_type> / 4][4]>(acc.data());
  }

  // Registers for the scores of a tail. Wide heads have none beside those of the other scores; those are cleared,
  // though the products would do so, because until then what is in them would be kept.
  template <class Scores, class Tail>
  static __device__ __forceinline__ auto tail_scores(Scores& scores, const Tail& tail) {
    if constexpr (T::kOneQ) {
      cute::clear(scores);
      return cute::make_tensor(scores.data(), typename Tail::layout_type{});
    } else {
      return tail;
    }
  }

  // The output of the item before has left its stage of Q.
  __device__ __forceinline__ void release_stored() {
    if constexpr (T::kOneQ) return;
    if (threadIdx.x % 128 == 0 && stored >= 0) {
      cute::tma_store_wait<0>();
      s.q_empty[stored].arrive();
    }
    stored = -1;
  }

  __device__ __forceinline__ void run() {
    using namespace cute;
    typename T::ScoreMma score_mma;
    typename T::OutMma out_mma;
    const auto score_slice = score_mma.get_slice(thread);
    const auto all_q = make_tensor(make_smem_ptr(s.q), typename T::LayoutQs{});
    const auto all_k = make_tensor(make_smem_ptr(s.k), typename T::LayoutK{});
    const auto q = score_slice.partition_fragment_A(all_q);
    const auto k = score_slice.partition_fragment_B(all_k);
    const auto v =
        out_mma.get_slice(thread).partition_fragment_B(make_tensor(make_smem_ptr(s.v), typename T::LayoutVt{}));
    auto acc_s = partition_fragment_C(score_mma, Shape<Int<T::kBlockM>, Int<T::kBlockN>>{});
    auto acc_o = partition_fragment_C(out_mma, Shape<Int<T::kBlockM>, Int<T::kHeadDim>>{});
    // Probabilities as the first operand: the registers of the scores in the same order, 16 keys at a time.
    auto probabilities = make_tensor<typename T::Element>(Layout<Shape<Shape<_2, _2, _2>, _1, Int<T::kBlockN / 16>>>{});
    auto& scores = fragments(acc_s);
    auto& out = fragments(acc_o);
    OnlineSoftmax<1> softmax;
    float keep[2];         // what the running sums and the output are multiplied by, as the maximum has moved
    bool is_last = false;  // of the item's tiles: nobody needs Q after its scores
    typename T::Item item;

    // `found`: scores of as many keys as it has, which become probabilities.
    // seen_by_all: so many of its first keys are seen by all rows.
    const auto to_probabilities = [&](auto is_masked, auto& found, int seen_by_all) __attribute__((always_inline)) {
      change_scores(is_masked, found, item, seen_by_all);
      if constexpr (T::kBias) {
        softmax.probabilities_of_logits(found, keep);
      } else {
        softmax.template probabilities<true>(found, keep, p.softmax_scale * kLog2e);
      }
    };
    const auto to_operand = [&](auto& found) __attribute__((always_inline)) {
      constexpr int kFragments = sizeof(found[0]) / sizeof(found[0][0]);
      auto packed = recast<uint32_t>(probabilities);
#pragma unroll
      for (int i = 0; i < kFragments; ++i) {
        packed(2 * i) = ElementTraits<typename T::Element>::pack(found[0][i][0], found[0][i][1]);
        packed(2 * i + 1) = ElementTraits<typename T::Element>::pack(found[0][i][2], found[0][i][3]);
      }
    };
    // Scores of a tile by Q of stage q_place into acc, beside the output of the tile before it, of kKeys keys.
    const auto start_both = [&](auto keys, auto& mma, auto& a, auto& b, auto& acc) __attribute__((always_inline)) {
      constexpr int kKeys = decltype(keys)::value;
      const auto part = make_tensor(probabilities.data(), Layout<Shape<Shape<_2, _2, _2>, _1, Int<kKeys / 16>>>{});
      wait_for_tile(s.k_full, k_place);
      wait_turn();
      start_product<true>(mma, a(_, _, _, q_place.stage), b(_, _, _, k_place.stage), acc);
      wait_for_tile(s.v_full, v_place);
      start_product<false>(out_mma, part, v(_, _, _, v_place.stage), acc_o);
      pass_turn();
      wait_for_product<1>(acc);
      release(s.k_empty[k_place.stage]);
      k_place.advance();
    };
    const auto finish_output = [&]() __attribute__((always_inline)) {
      wait_for_product<0>(acc_o);
      release(s.v_empty[v_place.stage]);
      v_place.advance();
    };
    const auto step = [&](auto masked, auto& mma, auto& a, auto& b, auto& c, int seen) __attribute__((always_inline)) {
      release_stored();
      start_both(Int<T::kBlockN>{}, mma, a, b, c);
      if (T::kOneQ && is_last) release(s.q_empty[consumer]);
      auto& found = fragments(c);
      to_probabilities(masked, found, seen);
      finish_output();
      to_operand(found);
      OnlineSoftmax<1>::rescale(out, keep);
    };
    const auto tail_step = [&](auto keys, int seen_by_all) __attribute__((always_inline)) {
      constexpr int kKeys = decltype(keys)::value;
      typename T::template TailMma<kKeys> tail_mma;
      const auto slice = tail_mma.get_slice(thread);
      const auto tail_q = slice.partition_fragment_A(all_q);
      const auto first_keys = composition(all_k.layout(), make_tile(Layout<Int<kKeys>>{}, _, _));
      const auto tail_k = slice.partition_fragment_B(make_tensor(all_k.data(), first_keys));
      auto acc = tail_scores(acc_s, partition_fragment_C(tail_mma, Shape<Int<T::kBlockM>, Int<kKeys>>{}));
      is_last = true;
      step(true_type{}, tail_mma, tail_q, tail_k, acc, seen_by_all);
    };
    const auto start_scores = [&]() __attribute__((always_inline)) {
      wait_for_tile(s.k_full, k_place);
      if constexpr (T::kOneQ) clear(acc_s);
      start_product<true>(score_mma, q(_, _, _, q_place.stage), k(_, _, _, k_place.stage), acc_s);
    };
    const auto finish_scores = [&]() __attribute__((always_inline)) {
      wait_for_product<0>(acc_s);
      release(s.k_empty[k_place.stage]);
      k_place.advance();
    };
    // The output of the last tile, of kKeys keys; with two Qs beside the first scores of the next item, if it has any.
    const auto last_output = [&](auto keys, bool goes_on) __attribute__((always_inline)) {
      if (!T::kOneQ && goes_on) {
        q_full().wait(q_place.phase);
        start_both(keys, score_mma, q, k, acc_s);
        finish_output();
      } else {
        constexpr int kKeys = decltype(keys)::value;
        const auto part = make_tensor(probabilities.data(), Layout<Shape<Shape<_2, _2, _2>, _1, Int<kKeys / 16>>>{});
        wait_for_tile(s.v_full, v_place);
        start_product<false>(out_mma, part, v(_, _, _, v_place.stage), acc_o);
        finish_output();
      }
    };

    if (consumer == T::kConsumers - 1) pass_turn();
    typename T::Announced work = next_item();
    bool has_scores = false;  // of the item's first tile
#pragma unroll 1
    while (work.index < p.items) {
      item = find_item_of<T>(p, work.index);
      const int tiles = (work.count + T::kBlockN - 1) / T::kBlockN;
      const int last_width = tiles > 1 ? T::tile_width(work.count - (tiles - 1) * T::kBlockN) : T::kBlockN;
      const int whole = last_width < T::kBlockN ? tiles - 1 : tiles;  // tiles of kBlockN keys
      const int unmasked = min(work.full / T::kBlockN, whole);
      const int q_stage = q_place.stage;
      softmax = OnlineSoftmax<1>();
      clear(acc_o);
      const bool has_q = !T::kOneQ || tiles > 0;
      if (!has_scores && has_q) {
        q_full().wait(q_place.phase);
        if (tiles > 0) {
          start_scores();
          finish_scores();
        }
      }
      if (tiles > 0) {
        if (T::kOneQ && tiles == 1) release(s.q_empty[consumer]);
        if (unmasked > 0) {
          to_probabilities(false_type{}, scores, T::kBlockN);
        } else {
          to_probabilities(true_type{}, scores, work.full);
        }
        to_operand(scores);
        int n = 1;
#pragma unroll 1
        for (; n < unmasked; ++n) {
          is_last = n + 1 == tiles;
          step(false_type{}, score_mma, q, k, acc_s, T::kBlockN);
        }
#pragma unroll 1
        for (; n < whole; ++n) {
          is_last = n + 1 == tiles;
          step(true_type{}, score_mma, q, k, acc_s, work.full - n * T::kBlockN);
        }
        if constexpr (T::kShortTail) {
          const int seen_by_all = work.full - whole * T::kBlockN;
          if (last_width == T::kTail) tail_step(Int<T::kTail>{}, seen_by_all);
          if constexpr (T::kLongTail < T::kBlockN) {
            if (last_width == T::kLongTail) tail_step(Int<T::kLongTail>{}, seen_by_all);
          }
        }
      }
      release_stored();
      if (has_q) q_place.advance();
      const typename T::Announced next = next_item();
      has_scores = tiles > 0 && next.index < p.items && next.count > 0;
      if (tiles > 0) {
        if (last_width == T::kBlockN) {
          last_output(Int<T::kBlockN>{}, has_scores);
        } else if constexpr (T::kShortTail) {
          if (last_width == T::kTail) {
            last_output(Int<T::kTail>{}, has_scores);
          } else if constexpr (T::kLongTail < T::kBlockN) {
            last_output(Int<T::kLongTail>{}, has_scores);
          }
        }
      }
      const int first_row = item.m_block * T::kBlockM + consumer * 64 + warp * 16 + lane / 4;
      const auto finish_item = [&]() __attribute__((always_inline)) {
        finish_rows(p, softmax, T::kBias ? 1.f : p.softmax_scale, out, item, first_row);
        if constexpr (T::kSplit) {
          write_partial_rows(p, out, item, first_row);
          if constexpr (T::kOneQ) return;
          // Where there was no product one warp could be far ahead of the others, which have to see that Q has come.
          if (tiles == 0) cutlass::arch::NamedBarrier::sync(128, kStoreBarrier + consumer);
          stored = q_stage;
        } else if constexpr (T::kOneQ) {
          write_rows<typename T::Element>(p, out, item, first_row);
        } else {
          store_rows<T>(p, s.q + q_stage * T::kTileQ, acc_o, out_mma, consumer, kStoreBarrier + consumer, item);
          stored = q_stage;
        }
      };
      if (T::kOneQ && has_scores) {
        q_full().wait(q_place.phase);
        start_scores();
        finish_item();
        finish_scores();
      } else {
        finish_item();
      }
      work = next;
    }
  }

  // Likewise, one product after the other: where two thread blocks share the SM.
  __device__ __forceinline__ void run_in_turn() {
    using namespace cute;
    typename T::ScoreMma score_mma;
    typename T::OutMma out_mma;
    const auto all_q = make_tensor(make_smem_ptr(s.q), typename T::LayoutQs{});
    const auto all_k = make_tensor(make_smem_ptr(s.k), typename T::LayoutK{});
    const auto v =
        out_mma.get_slice(thread).partition_fragment_B(make_tensor(make_smem_ptr(s.v), typename T::LayoutVt{}));
    auto acc_o = partition_fragment_C(out_mma, Shape<Int<T::kBlockM>, Int<T::kHeadDim>>{});
    auto& out = fragments(acc_o);
    OnlineSoftmax<1> softmax;
    float keep[2];  // what the running sums and the output are multiplied by, as the maximum has moved
    typename T::Announced work = next_item();
    const FwdItem& item = work.item;

    // A tile of kKeys keys, of which the first seen_by_all are seen by all rows.
    const auto step = [&](auto is_masked, auto keys, int seen_by_all) __attribute__((always_inline)) {
      constexpr int kKeys = decltype(keys)::value;
      typename T::template TailMma<kKeys> mma;
      const auto slice = mma.get_slice(thread);
      const auto q = slice.partition_fragment_A(all_q);
      const auto k = slice.partition_fragment_B(
          local_tile(all_k, Shape<Int<kKeys>, Int<T::kHeadDim>, Int<T::kStages>>{}, make_coord(_0{}, _0{}, _0{})));
      auto acc_s = partition_fragment_C(mma, Shape<Int<T::kBlockM>, Int<kKeys>>{});
      auto& scores = fragments(acc_s);
      auto probabilities = make_tensor<typename T::Element>(Layout<Shape<Shape<_2, _2, _2>, _1, Int<kKeys / 16>>>{});
      const auto finish_softmax = [&]() __attribute__((always_inline)) {
        auto packed = recast<uint32_t>(probabilities);
#pragma unroll
        for (int i = 0; i < kKeys / 8; ++i) {
          packed(2 * i) = ElementTraits<typename T::Element>::pack(scores[0][i][0], scores[0][i][1]);
          packed(2 * i + 1) = ElementTraits<typename T::Element>::pack(scores[0][i][2], scores[0][i][3]);
        }
        OnlineSoftmax<1>::rescale(out, keep);
      };
      wait_for_tile(s.k_full, k_place);
      if constexpr (T::kBiasInProduct) {
        const bool is_large = __shfl_sync(0xffffffffu, s.bias_operands.is_large[k_place.stage], 0) != 0;
        start_scores_with_bias<kKeys>(mma, q(_, _, _, q_place.stage), k(_, _, _, k_place.stage), acc_s);
        release_stored();
        wait_for_product<0>(acc_s);
        // Each branch has its own softmax and what follows: were they to meet before, the compiler could not mix these.
        if (is_large) {
          add_bias(scores, s.bias[k_place.stage]);
          __syncwarp();
          release_keys();
          change_scores(is_masked, scores, item, seen_by_all);
          softmax.probabilities_of_logits(scores, keep);
          finish_softmax();
        } else {
          release_keys();
          change_scores(is_masked, scores, item, seen_by_all);
          take_probabilities_of_products(softmax, scores, keep, p.softmax_scale, p.softmax_scale * kLog2e);
          finish_softmax();
        }
      } else {
        start_product<true>(mma, q(_, _, _, q_place.stage), k(_, _, _, k_place.stage), acc_s);
        release_stored();
        wait_for_product<0>(acc_s);
        release_keys();
        change_scores(is_masked, scores, item, seen_by_all);
        softmax.template probabilities<true>(scores, keep, p.softmax_scale * kLog2e);
        finish_softmax();
      }
      wait_for_tile(s.v_full, v_place);
      start_product<false>(out_mma, probabilities, v(_, _, _, v_place.stage), acc_o);
      wait_for_product<0>(acc_o);
      release(s.v_empty[v_place.stage]);
      v_place.advance();
    };

#pragma unroll 1
    while (work.index < p.items) {
      const int tiles = (work.count + T::kBlockN - 1) / T::kBlockN;
      const int last_width = tiles > 1 ? T::tile_width(work.count - (tiles - 1) * T::kBlockN) : T::kBlockN;
      const int whole = last_width < T::kBlockN ? tiles - 1 : tiles;  // tiles of kBlockN keys
      const int unmasked = min(work.full / T::kBlockN, whole);
      softmax = OnlineSoftmax<1>();
      clear(acc_o);
      s.q_full[q_place.stage].wait(q_place.phase);
      int n = 0;
#pragma unroll 1
      for (; n < unmasked; ++n) step(false_type{}, Int<T::kBlockN>{}, T::kBlockN);
#pragma unroll 1
      for (; n < whole; ++n) step(true_type{}, Int<T::kBlockN>{}, work.full - n * T::kBlockN);
      static_assert(T::kLongTail == T::kBlockN);
      if (n < tiles) step(true_type{}, Int<T::kTail>{}, work.full - n * T::kBlockN);
      release_stored();
      const int first_row = item.m_block * T::kBlockM + consumer * 64 + warp * 16 + lane / 4;
      finish_rows(p, softmax, T::kBias ? 1.f : p.softmax_scale, out, item, first_row);
      store_rows<T>(p, s.q + q_place.stage * T::kTileQ, acc_o, out_mma, consumer, kStoreBarrier + consumer, item);
      stored = q_place.stage;
      q_place.advance();
      work = next_item();
    }
  }

  // c = q k^T of kKeys keys with their bias: see key_bias.cuh.
  template <int kKeys, class Mma, class Q, class K, class C>
  __device__ __forceinline__ void start_scores_with_bias(Mma& mma, const Q& q, const K& k, C& c) const {
    using namespace cute;
    using Operands = typename T::BiasOperands;
    typename T::template TailBiasMma<kKeys> bias_mma;
    const auto slice = bias_mma.get_slice(threadIdx.x % 128);
    const auto all_keys =
        make_tensor(make_smem_ptr(s.bias_operands.keys), typename T::template BiasLayout<T::kBlockN, T::kStages>{});
    const auto rows = slice.partition_fragment_A(
        make_tensor(make_smem_ptr(s.bias_operands.rows), typename T::template BiasLayout<64, 1>{}));
    const auto keys = slice.partition_fragment_B(
        local_tile(all_keys, Shape<Int<kKeys>, Int<Operands::kCols>, Int<T::kStages>>{}, make_coord(_0{}, _0{}, _0{})));
    start_biased_scores(mma, q, k, bias_mma, rows(_, _, _, 0), keys(_, _, _, k_place.stage), c);
  }

  // Products become logits. bias: of the keys of a tile, in shared memory.
  template <int kFragments>
  __device__ __forceinline__ void add_bias(float (&scores)[1][kFragments][4], const float* bias) const {
    const float* const own = bias + FragmentMap(consumer * 64 + warp * 16, 0, lane).col0;
#pragma unroll
    for (int i = 0; i < kFragments; ++i) {
      const float2 b = *reinterpret_cast<const float2*>(own + 8 * i);
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[0][i][e] = __fmaf_rn(scores[0][i][e], p.softmax_scale, e & 1 ? b.y : b.x);
    }
  }

  // Gives -inf to the keys that a row does not see. The keys that all rows see come first and need no test, which would
  // be three instructions a score: it is left out for groups of kGroup keys that have no others.
  template <int kFragments>
  __device__ __forceinline__ void mask_scores(float (&scores)[1][kFragments][4], const ScoreInputs& in,
                                              const FragmentMap& map, int seen_by_all) const {
    constexpr int kGroup = 32, kInGroup = kGroup / 8;
    static_assert(kFragments % kInGroup == 0);
#pragma unroll
    for (int i = 0; i < kFragments; i += kInGroup) {
      if (8 * i + kGroup <= seen_by_all) continue;
      ScoreInputs group = in;
      group.key_intervals += 8 * i * sizeof(KeyInterval);
      apply_intervals(*reinterpret_cast<float (*)[1][kInGroup][4]>(scores[0][i]), group, map, position_offset(p));
    }
  }

  // Adds the bias, unless it came with the products, and masks the scores. seen_by_all: as above.
  template <class IsMasked, int kFragments>
  __device__ __forceinline__ void change_scores(IsMasked, float (&scores)[1][kFragments][4], const FwdItem& item,
                                                int seen_by_all) {
    constexpr bool kAddsBias = T::kBias && !T::kBiasInProduct;
    if constexpr (!kAddsBias && !IsMasked::value) return;
    s.facts_full[facts_place.stage].wait(facts_place.phase);
    const FragmentMap map(consumer * 64 + warp * 16, 0, lane);
    if constexpr (kAddsBias) add_bias(scores, s.bias[facts_place.stage]);
    if constexpr (IsMasked::value) {
      ScoreInputs in;
      in.key_intervals = smem_u32(s.intervals[facts_place.stage]);
      in.row0 = item.m_block * T::kBlockM;
      mask_scores(scores, in, map, seen_by_all);
    }
    __syncwarp();
    if (lane == 0) s.facts_empty[facts_place.stage].arrive();
    facts_place.advance();
  }
};

template <class T>
__global__ void __launch_bounds__(T::kThreads, T::kBlocksPerSm)
    gather_kernel(const __grid_constant__ typename T::Arguments p) {
  extern __shared__ char smem[];
  const uint32_t base = smem_u32(smem);
  auto& s = *reinterpret_cast<typename T::Shared*>(smem + ((base + 1023) / 1024 * 1024 - base));
  if (threadIdx.x == 0) init_gather_barriers<T>(s);
  __syncthreads();
  wait_for_previous_kernel();
  let_next_kernel_start();  // one that need not wait has room where there are no items left
  if (cutlass::canonical_warp_group_idx() == 0) {
    cutlass::arch::warpgroup_reg_dealloc<T::kProducerRegisters>();
    GatherProducer<T>(p, s).run();
  } else {
    cutlass::arch::warpgroup_reg_alloc<T::kConsumerRegisters>();
    if constexpr (T::kOverlaps) {
      GatherConsumer<T>(p, s).run();
    } else {
      GatherConsumer<T>(p, s).run_in_turn();
    }
    if (threadIdx.x % 128 == 0) cute::tma_store_wait<0>();
  }
}

}  // namespace dmattn::sm90
