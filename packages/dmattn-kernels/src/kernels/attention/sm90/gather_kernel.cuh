// The forward on Hopper over lists of keys (running top-w, key masks), with an optional bias for each key.
//
// As in fwd_kernel.cuh, a thread block stays on its SM and takes items (row blocks of heads) until none is left; one
// warpgroup is the producer and two are consumers. Here the producer's threads gather the rows of K and V that the list
// names (gather_producer.cuh), and the last tile of an item is narrower where the end of the list allows it. With
// T::kSplit, an item has a share of the tiles of its list, and its results are partial ones. A row block is 128 rows of
// one head: the bytes gathered for each product depend only on the number of rows, so that mixing the heads of a group
// in a row block would save nothing.
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
    s.k_full[i].init(T::kTeamThreads + (T::kBiasInProduct ? T::kTeamWarps : 0));  // and a warp each, for the bias
    s.v_full[i].init(T::kTeamThreads);
    s.k_empty[i].init(T::kBiasInProduct ? 4 * T::kConsumers : T::kConsumers);  // see release_keys()
    s.v_empty[i].init(T::kConsumers);
  }
  for (int i = 0; i < T::kFactStages; ++i) {
    s.facts_full[i].init(T::kTeamThreads);
    s.facts_empty[i].init(4 * T::kConsumers);  // one arrival a warp
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
  // Numbers of named barriers. Number 0 is that of __syncthreads().
  static constexpr int kTurnBarrier = 1, kStoreBarrier = 1 + T::kConsumers;
  static_assert(kStoreBarrier + T::kConsumers <= GatherProducer<T>::kBarrier);
  // A lazy maximum saves time where the output has many registers: see docs/kernels/lists-forward.md.
  using Softmax = OnlineSoftmax<1, /*kLazy=*/T::kOneQ>;

  const typename T::Arguments& p;
  typename T::Shared& s;
  const int consumer, warp, lane;  // warp: its number in its warpgroup
  RingPlace<T::kStages> k_place, v_place;
  RingPlace<T::kFactStages> facts_place;
  RingPlace<2> item_place;
  RingPlace<T::kQStages> q_place;
  int stored = -1;  // the stage of Q from which TMA is still storing an output; -1: none

  __device__ __forceinline__ GatherConsumer(const typename T::Arguments& arguments, typename T::Shared& shared)
      : p(arguments),
        s(shared),
        consumer(cutlass::canonical_warp_group_idx() - 1),
        warp(threadIdx.x / 32 % 4),
        lane(threadIdx.x % 32) {}

  __device__ __forceinline__ typename T::Announced next_item() {
    s.item_full[item_place.stage].wait(item_place.phase);
    typename T::Announced work = s.item[item_place.stage];
    work.index = __shfl_sync(0xffffffffu, work.index, 0);
    work.count = __shfl_sync(0xffffffffu, work.count, 0);
    work.full = __shfl_sync(0xffffffffu, work.full, 0);
    work.item.m_block = __shfl_sync(0xffffffffu, work.item.m_block, 0);
    work.item.head = __shfl_sync(0xffffffffu, work.item.head, 0);
    work.item.batch = __shfl_sync(0xffffffffu, work.item.batch, 0);
    if constexpr (T::kSplit) work.item.split = __shfl_sync(0xffffffffu, work.item.split, 0);
    if (lane == 0) s.item_empty[item_place.stage].arrive();
    item_place.advance();
    return work;
  }

  __device__ __forceinline__ Barrier& q_full() { return s.q_full[T::kOneQ ? consumer : q_place.stage]; }

  // One thread of each warpgroup arrives, when the warpgroup is done with a buffer.
  __device__ __forceinline__ void release(Barrier& empty) {
    if (threadIdx.x % 128 == 0) empty.arrive();
  }
  // Releases the stage of K. With a bias in the product each warp arrives by itself, once it has read from shared
  // memory the part of the bias that the operands do not have.
  __device__ __forceinline__ void release_keys() {
    if (threadIdx.x % (T::kBiasInProduct ? 32 : 128) == 0) s.k_empty[k_place.stage].arrive();
    k_place.advance();
  }
  __device__ __forceinline__ void wait_turn() { cutlass::arch::NamedBarrier::sync(256, kTurnBarrier + consumer); }
  __device__ __forceinline__ void pass_turn() {
    cutlass::arch::NamedBarrier::arrive(256, kTurnBarrier + (consumer + 1) % T::kConsumers);
  }
  // K and V are written to shared memory by ordinary threads (the generic proxy) and read by matrix instructions (the
  // async proxy), which takes a fence between the two.
  __device__ __forceinline__ void wait_for_tile(Barrier* full, const RingPlace<T::kStages>& place) {
    full[place.stage].wait(place.phase);
    cutlass::arch::fence_view_async_shared();
  }

  template <class Accumulator>
  static __device__ __forceinline__ auto fragments(Accumulator& acc)
      -> float (&)[1][cute::cosize_v<typename Accumulator::layout_type> / 4][4] {
    return *reinterpret_cast<float (*)[1][cute::cosize_v<typename Accumulator::layout_type> / 4][4]>(acc.data());
  }

  // The registers for the scores of a tail (the narrower last tile). Above head_dim 128 none are left, so the tail uses
  // those of whole tiles. They are cleared here, although the first product overwrites them: otherwise the compiler
  // would keep their old values alive until then.
  template <class Scores, class Tail>
  static __device__ __forceinline__ auto tail_scores(Scores& scores, const Tail& tail) {
    if constexpr (T::kOneQ) {
      cute::clear(scores);
      return cute::make_tensor(scores.data(), typename Tail::layout_type{});
    } else {
      return tail;
    }
  }

  // Waits until the previous item's output has left its stage of Q, and releases that stage.
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
    const auto score_slice = operand_slice(score_mma, consumer);
    const auto all_q = make_tensor(make_smem_ptr(s.q), typename T::LayoutQs{});
    const auto all_k = make_tensor(make_smem_ptr(s.k), typename T::LayoutK{});
    const auto q = score_slice.partition_fragment_A(all_q);
    const auto k = score_slice.partition_fragment_B(all_k);
    const auto v =
        operand_slice(out_mma, consumer).partition_fragment_B(make_tensor(make_smem_ptr(s.v), typename T::LayoutVt{}));
    auto acc_s = partition_fragment_C(score_mma, Shape<Int<T::kBlockM>, Int<T::kBlockN>>{});
    auto acc_o = partition_fragment_C(out_mma, Shape<Int<T::kBlockM>, Int<T::kHeadDim>>{});
    // The probabilities as first operand of the second product: the scores' registers in the same order, in groups of
    // 16 keys.
    auto probabilities = make_tensor<typename T::Element>(Layout<Shape<Shape<_2, _2, _2>, _1, Int<T::kBlockN / 16>>>{});
    auto& scores = fragments(acc_s);
    auto& out = fragments(acc_o);
    Softmax softmax;
    float keep[2];         // factors of the running sums and of the output, since the maximum has changed
    bool is_last = false;  // whether this is the item's last tile: Q is not needed after its scores
    typename T::Announced work = next_item();
    const typename T::Item& item = work.item;

    // Turns the scores in `found` into probabilities. seen_by_all: how many of the tile's first keys all rows see.
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
    // Starts two products: the scores of a tile into acc, and the output of the tile before. Returns when the scores
    // are there.
    const auto start_both = [&](auto& mma, auto& a, auto& b, auto& acc) __attribute__((always_inline)) {
      wait_for_tile(s.k_full, k_place);
      wait_turn();
      start_product<true>(mma, a(_, _, _, q_place.stage), b(_, _, _, k_place.stage), acc);
      wait_for_tile(s.v_full, v_place);
      start_product<false>(out_mma, probabilities, v(_, _, _, v_place.stage), acc_o);
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
      start_both(mma, a, b, c);
      if (T::kOneQ && is_last) release(s.q_empty[consumer]);
      auto& found = fragments(c);
      to_probabilities(masked, found, seen);
      finish_output();
      to_operand(found);
      Softmax::rescale(out, keep);
    };
    const auto tail_step = [&](auto keys, int seen_by_all) __attribute__((always_inline)) {
      constexpr int kKeys = decltype(keys)::value;
      typename T::template TailMma<kKeys> tail_mma;
      const auto slice = operand_slice(tail_mma, consumer);
      const auto tail_q = slice.partition_fragment_A(all_q);
      const auto first_keys = composition(all_k.layout(), make_tile(Layout<Int<kKeys>>{}, _, _));
      const auto tail_k = slice.partition_fragment_B(make_tensor(all_k.data(), first_keys));
      auto acc = tail_scores(acc_s, partition_fragment_C(tail_mma, Shape<Int<T::kBlockM>, Int<kKeys>>{}));
      is_last = true;
      step(true_type{}, tail_mma, tail_q, tail_k, acc, seen_by_all);
    };
    // The scores of an item's first tile.
    const auto start_scores = [&]() __attribute__((always_inline)) {
      q_full().wait(q_place.phase);
      wait_for_tile(s.k_full, k_place);
      if constexpr (T::kOneQ) clear(acc_s);
      start_product<true>(score_mma, q(_, _, _, q_place.stage), k(_, _, _, k_place.stage), acc_s);
    };
    const auto finish_scores = [&]() __attribute__((always_inline)) {
      wait_for_product<0>(acc_s);
      release(s.k_empty[k_place.stage]);
      k_place.advance();
    };
    // The output of the item's last tile, which has kKeys keys.
    const auto last_output = [&](auto keys) __attribute__((always_inline)) {
      constexpr int kKeys = decltype(keys)::value;
      const auto part = make_tensor(probabilities.data(), Layout<Shape<Shape<_2, _2, _2>, _1, Int<kKeys / 16>>>{});
      wait_for_tile(s.v_full, v_place);
      start_product<false>(out_mma, part, v(_, _, _, v_place.stage), acc_o);
      finish_output();
    };

    if (consumer == T::kConsumers - 1) pass_turn();
    bool has_scores = false;  // whether the scores of the item's first tile have been computed already
#pragma unroll 1
    while (work.index < p.items) {
      const int tiles = (work.count + T::kBlockN - 1) / T::kBlockN;
      const int last_width = tiles > 1 ? T::tile_width(work.count - (tiles - 1) * T::kBlockN) : T::kBlockN;
      const int whole = last_width < T::kBlockN ? tiles - 1 : tiles;  // tiles computed with all kBlockN keys
      const int unmasked = min(work.full / T::kBlockN, whole);
      const int q_stage = q_place.stage;
      softmax = Softmax();
      clear(acc_o);
      const bool has_q = !T::kOneQ || tiles > 0;
      if (has_q && tiles == 0) q_full().wait(q_place.phase);
      if (tiles > 0) {
        if (!has_scores) {
          start_scores();
          finish_scores();
        }
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
        const int seen_by_all = work.full - whole * T::kBlockN;
        if (last_width == T::kTail) tail_step(Int<T::kTail>{}, seen_by_all);
        if constexpr (T::kLongTail < T::kBlockN) {
          if (last_width == T::kLongTail) tail_step(Int<T::kLongTail>{}, seen_by_all);
        }
      }
      release_stored();
      if (has_q) q_place.advance();
      const typename T::Announced next = next_item();
      has_scores = tiles > 0 && next.index < p.items && next.count > 0;
      if (tiles > 0) {
        if (last_width == T::kBlockN) {
          last_output(Int<T::kBlockN>{});
        } else if (last_width == T::kTail) {
          last_output(Int<T::kTail>{});
        } else if constexpr (T::kLongTail < T::kBlockN) {
          last_output(Int<T::kLongTail>{});
        }
      }
      const int first_row = item.m_block * T::kBlockM + consumer * 64 + warp * 16 + lane / 4;
      const auto finish_item = [&]() __attribute__((always_inline)) {
        finish_rows(p, softmax, T::kBias ? 1.f : p.softmax_scale, out, item, first_row);
        if constexpr (T::kSplit) {
          write_partial_rows(p, out, item, first_row);
          if constexpr (T::kOneQ) return;
          // Without a product, nothing has kept the warps together. All of them have to have waited for Q before its
          // stage is released.
          if (tiles == 0) cutlass::arch::NamedBarrier::sync(128, kStoreBarrier + consumer);
          stored = q_stage;
        } else if constexpr (T::kOneQ) {
          write_rows<typename T::Element>(p, out, item, first_row);
        } else {
          store_rows<T>(p, s.q + q_stage * T::kTileQ, acc_o, out_mma, consumer, kStoreBarrier + consumer, item);
          stored = q_stage;
        }
      };
      if (has_scores) {  // the first scores of the next item are computed while this one's results are written
        start_scores();
        finish_item();
        finish_scores();
      } else {
        finish_item();
      }
      work = next;
    }
  }

  // Does what run() does, but waits for each product before it goes on: used where two thread blocks share the SM.
  __device__ __forceinline__ void run_in_turn() {
    using namespace cute;
    typename T::ScoreMma score_mma;
    typename T::OutMma out_mma;
    const auto all_q = make_tensor(make_smem_ptr(s.q), typename T::LayoutQs{});
    const auto all_k = make_tensor(make_smem_ptr(s.k), typename T::LayoutK{});
    const auto v =
        operand_slice(out_mma, consumer).partition_fragment_B(make_tensor(make_smem_ptr(s.v), typename T::LayoutVt{}));
    auto acc_o = partition_fragment_C(out_mma, Shape<Int<T::kBlockM>, Int<T::kHeadDim>>{});
    auto& out = fragments(acc_o);
    Softmax softmax;
    float keep[2];  // factors of the running sums and of the output, since the maximum has changed
    typename T::Announced work = next_item();
    const FwdItem& item = work.item;

    // Computes a tile of kKeys keys, of which all rows see the first seen_by_all.
    const auto step = [&](auto is_masked, auto keys, int seen_by_all) __attribute__((always_inline)) {
      constexpr int kKeys = decltype(keys)::value;
      typename T::template TailMma<kKeys> mma;
      const auto slice = operand_slice(mma, consumer);
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
        Softmax::rescale(out, keep);
      };
      wait_for_tile(s.k_full, k_place);
      if constexpr (T::kBiasInProduct) {
        const bool is_large = __shfl_sync(0xffffffffu, s.bias_operands.is_large[k_place.stage], 0) != 0;
        start_scores_with_bias<kKeys>(mma, q(_, _, _, q_place.stage), k(_, _, _, k_place.stage), acc_s);
        release_stored();
        wait_for_product<0>(acc_s);
        // Each branch has its own copy of the softmax and of what follows, so that the compiler can mix their
        // instructions.
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
      softmax = Softmax();
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

  // Starts c = q k^T for kKeys keys, with their bias added by further columns of both operands (key_bias.cuh).
  template <int kKeys, class Mma, class Q, class K, class C>
  __device__ __forceinline__ void start_scores_with_bias(Mma& mma, const Q& q, const K& k, C& c) const {
    using namespace cute;
    using Operands = typename T::BiasOperands;
    typename T::template TailBiasMma<kKeys> bias_mma;
    const auto slice = operand_slice(bias_mma, 0);
    const auto all_keys =
        make_tensor(make_smem_ptr(s.bias_operands.keys), typename T::template BiasLayout<T::kBlockN, T::kStages>{});
    const auto rows = slice.partition_fragment_A(
        make_tensor(make_smem_ptr(s.bias_operands.rows), typename T::template BiasLayout<64, 1>{}));
    const auto keys = slice.partition_fragment_B(
        local_tile(all_keys, Shape<Int<kKeys>, Int<Operands::kCols>, Int<T::kStages>>{}, make_coord(_0{}, _0{}, _0{})));
    start_biased_scores(mma, q, k, bias_mma, rows(_, _, _, 0), keys(_, _, _, k_place.stage), c);
  }

  // Turns products into logits. bias: one number for each key of the tile, in shared memory.
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

  // Sets the scores of keys that a row does not see to -inf. The test takes three instructions a score. Keys that all
  // rows see come first, and groups of kGroup keys that have no others are not tested.
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

  // Adds the bias, unless the products have added it, and masks the scores. seen_by_all: how many of the tile's first
  // keys all rows see.
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
  let_next_kernel_start();  // its thread blocks may use SMs that have no items left
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
