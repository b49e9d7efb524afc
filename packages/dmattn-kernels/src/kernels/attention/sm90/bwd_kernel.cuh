// The backward on Hopper for head dimensions up to 128: consecutive keys, also of packed sequences, with causality,
// and either softcap or a dense mask, a window of keys and a bias; or lists of keys for chunks of rows, with a bias
// for each key.
//
// A thread block stays on its SM and takes blocks of keys (items) until none is left. One thread of the first
// warpgroup, the producer, copies K and V once an item, then Q, dO, lse, delta and the tile of a dense bias for one
// block of rows after the other. Listed keys are copied by two warps beside it; their dk and dv are added to sums in
// memory, unless the item has all rows. In a fixed order one more warp adds dq when its turn comes (BwdDq), or two
// warps take the turns of the two consumers (DqTurns). The other two warpgroups, the consumers, own 64 keys each.
// Their products have keys as rows: s^T = k q^T and dp^T = v do^T leave p^T and ds^T in registers in the layout of the
// first operand of dv += p^T do and dk += ds^T q. Only ds goes through shared memory, as dq = ds k needs both
// consumers' keys. The gradient of a dense bias leaves from there, too.
//
// The products of a step are queued so that the tensor cores have work while registers are being worked on:
//   exp of the scores          beside  dk of the step before, dp
//   ds                         beside  dv
//   dq on its way to memory    beside  the next scores, dk
// Bytes, registers and cycles of the tiles are in docs/kernels/backward.md.
#pragma once

#include <climits>

#include "../../shared/early_start.cuh"
#include "../shared/element.cuh"
#include "bwd_bias_loader.cuh"
#include "bwd_mask.cuh"
#include "bwd_producer.cuh"
#include "bwd_results.cuh"
#include "bwd_turns.cuh"

namespace dmattn::sm90 {

template <class T>
__device__ __forceinline__ void init_barriers(const BwdArguments& p, typename T::Shared& s) {
  const int copiers = T::kGathered ? 32 * T::kGatherWarps : 1;
  for (int i = 0; i < T::kStagesKv; ++i) {
    s.k_full[i].init(copiers);
    s.v_full[i].init(copiers);
    s.k_empty[i].init(T::kConsumers);
    s.v_empty[i].init(T::kConsumers);
  }
  for (int i = 0; i < T::kStagesQ; ++i) {
    s.q_full[i].init(1);
    s.q_empty[i].init(T::kConsumers + (T::kMasked ? T::kTurnWarps : 0));  // the latter read the RowTile beside Q
  }
  if constexpr (T::kDenseBias) {
    for (int i = 0; i < T::kStagesBias; ++i) {
      s.bias_full[i].init(p.bias_rows.exist() ? kBiasWarps : 1);
      s.bias_empty[i].init(T::kConsumers);
    }
  }
  if constexpr (T::kCopiesBiasRows) s.bias_requests.init();
  for (int i = 0; i < T::kStagesdO; ++i) {
    s.dout_full[i].init(1);
    s.dout_empty[i].init(T::kConsumers);
  }
  for (int i = 0; i < 2; ++i) {
    s.item_full[i].init(1);
    s.item_empty[i].init(4 * T::kConsumers + T::kDqWarps + T::kGatherWarps + T::kTurnWarps);  // each warp arrives once
    s.facts_full[i].init(copiers);
    s.facts_empty[i].init(T::kConsumers);
  }
  for (int i = 0; i < T::kStagesOut; ++i) {
    s.out_full[i].init(4 * T::kConsumers);  // each warp arrives once
    s.out_empty[i].init(1);
  }
  if constexpr (T::kHasTurnWarps) {
    for (int i = 0; i < T::kConsumers; ++i) {
      s.turn_full[i].init(1);
      s.turn_used[i].init(T::kDqPath == DqPath::kVector ? 128 : 1);  // all threads of the consumer, or one
    }
  }
  cutlass::arch::fence_barrier_init();
}

// --- the consumers: a warpgroup each ---------------------------------------------------------------------------------

template <class T>
struct BwdConsumer : BwdResults<T> {
  using Base = BwdResults<T>;
  using Element = typename T::Element;
  using Dq = typename T::Dq;
  using Base::add_dbias, Base::add_dq, Base::add_grad, Base::bias_place, Base::bias_rows, Base::clear_hidden_keys,
      Base::consumer, Base::dout_place, Base::ds_stage, Base::facts, Base::facts_place, Base::finish_item, Base::hidden,
      Base::is_speaker, Base::kFragmentsD, Base::kFragmentsM, Base::key_bias, Base::kv_place, Base::lane, Base::lengths,
      Base::next_item, Base::own_key, Base::p, Base::pass_chunk, Base::pass_part, Base::q_next, Base::release,
      Base::release_sent, Base::s, Base::send_dbias, Base::store_dbias, Base::store_ds, Base::store_grad,
      Base::store_listed_grad, Base::store_pair_dbias, Base::sum_rows, Base::sync_out, Base::sync_own,
      Base::takes_chunk_turns, Base::wait_for_chunks, Base::wait_for_keys, Base::wait_for_parts, Base::warp,
      Base::wide_rows;
  using Base::Base;
  using typename Base::KeySums;
  using typename Base::Scores;
  // Derivatives of softcap, two fp16 a word. They are between 0 and 1 and multiply numbers that are rounded to 16 bits
  // next, so that fp16 is enough.
  using SoftcapFactors = uint32_t[T::kSoftcap ? 2 * kFragmentsM : 1];
  // What has been read ahead of a tile of the bias: each part has the words of two fragments.
  using BiasAhead = uint32_t[T::kBiasAhead + 1][4];

  __device__ __forceinline__ void run() {
    while (true) {
      const typename T::Announced item = next_item();
      if (item.index >= p.items) return;
      work(find_item<T>(p, item));
      if constexpr (T::kPacked) finish_item();
    }
  }

  __device__ __forceinline__ void work(const BwdItemOf<T>& item) {
    using namespace cute;
    typename T::ScoreMma score_mma;
    typename T::GradMma grad_mma;
    typename T::DqMma dq_mma;
    const auto score_slice = operand_slice(score_mma, consumer);
    const auto grad_slice = operand_slice(grad_mma, consumer);
    const auto dq_slice = operand_slice(dq_mma, consumer);
    const auto tile = [](Element* data, auto layout) { return make_tensor(make_smem_ptr(data), layout); };
    Element* const own_k = s.k + kv_place.stage * T::kTileK;
    Element* const own_v = s.v + kv_place.stage * T::kTileK;
    const auto k = score_slice.partition_fragment_A(tile(own_k, typename T::LayoutK{}));
    const auto v = score_slice.partition_fragment_A(tile(own_v, typename T::LayoutK{}));
    const auto q = score_slice.partition_fragment_B(tile(s.q, typename T::LayoutQ{}));
    const auto dout = score_slice.partition_fragment_B(tile(s.dout, typename T::LayoutdO{}));
    const auto qt = grad_slice.partition_fragment_B(tile(s.q, typename T::LayoutQt{}));
    const auto doutt = grad_slice.partition_fragment_B(tile(s.dout, typename T::LayoutdOt{}));
    const auto dq_operands = [&] {
      if constexpr (Dq::kTransposed) {
        return make_tuple(dq_slice.partition_fragment_A(tile(own_k, typename T::LayoutKt{})),
                          dq_slice.partition_fragment_B(tile(s.ds, typename T::LayoutdS{})));
      } else {
        return make_tuple(dq_slice.partition_fragment_B(tile(own_k, typename T::LayoutKt{})),
                          dq_slice.partition_fragment_A(tile(s.ds, typename T::LayoutdS{})));
      }
    }();
    const auto& kt = get<0>(dq_operands);
    const auto& ds = get<1>(dq_operands);
    // k, v and kt of the second member. In one tuple with those of the first they cost the kernel over lists with a
    // bias a register.
    const auto of_second = [&] {
      if constexpr (T::kPairs) {
        static_assert(!Dq::kTransposed);
        return make_tuple(score_slice.partition_fragment_A(tile(s.k + T::kTileK, typename T::LayoutK{})),
                          score_slice.partition_fragment_A(tile(s.v + T::kTileK, typename T::LayoutK{})),
                          dq_slice.partition_fragment_B(tile(s.k + T::kTileK, typename T::LayoutKt{})));
      } else {
        return make_tuple();
      }
    }();
    const auto of_member = [&](auto member, auto which, const auto& of_first) -> const auto& {
      if constexpr (member == 0) {
        return of_first;
      } else {
        return get<which>(of_second);
      }
    };
    auto acc_s = partition_fragment_C(score_mma, Shape<Int<T::kBlockN>, Int<T::kBlockM>>{});
    auto acc_dp = partition_fragment_C(score_mma, Shape<Int<T::kBlockN>, Int<T::kBlockM>>{});
    using Sums = decltype(partition_fragment_C(grad_mma, Shape<Int<T::kBlockN>, Int<T::kHeadDim>>{}));
    Sums acc_dk[T::kMembers], acc_dv[T::kMembers];
    using Operand = Layout<Shape<Shape<_2, _2, _2>, _1, Int<T::kBlockM / 16>>>;
    auto probabilities = make_tensor<Element>(Operand{});
    auto gradients = make_tensor<Element>(Operand{});
    auto moved_gradients = make_tensor<Element>(Operand{});
    const Scores& scores = fragments<kFragmentsM>(acc_s);
    const Scores& dp = fragments<kFragmentsM>(acc_dp);

#pragma unroll
    for (int i = 0; i < T::kMembers; ++i) {
      clear(acc_dk[i]);
      clear(acc_dv[i]);
      // The zeros have to be in registers before any product starts, or the compiler serializes all products.
      warpgroup_fence_operand(acc_dk[i]);
      warpgroup_fence_operand(acc_dv[i]);
    }
    KeySums key_sums = {0.f, 0.f};
    if constexpr (T::kKeyBias && !T::kGathered) read_key_bias(item);
    if constexpr (T::kWideBias) hidden.read(p, item, item.n_block * T::kBlockN + own_key(0));
    // The blocks of rows that see the keys. Where steps are announced, the first one is read once its Q has arrived.
    auto steps = [&] {
      if constexpr (T::kMasked) {
        return AnnouncedSteps<T>{};
      } else {
        return BwdSteps<T>(p, item);
      }
    }();
    if (item.m_begin < item.m_end && !(T::kWideBias && hides_item(p, item))) {
      RingPlace<T::kStagesQ> q_place = q_next;  // of the rows of this step
      KeptScores kept;                          // kMasked: of a tile with is_checked()
      // Called after the scores of the next step have been started: that waits for Q, and so for what is announced
      // beside it.
      const auto to_next_step = [&] {
        if constexpr (T::kMasked) {
          steps.read(s.mask.tile[q_place.stage]);
          if (steps.tile.is_checked()) kept = find_kept(steps.tile, item.n_block, q_place.stage);
        } else {
          steps.advance();
        }
      };
      const auto start_scores = [&](auto member) {
        s.q_full[q_next.stage].wait(q_next.phase);
        discard(acc_s);
        start_product<true>(score_mma, of_member(member, _0{}, k), q(_, _, _, q_next.stage), acc_s);
        q_next.advance();
      };
      const auto start_dp = [&](auto member) {
        s.dout_full[dout_place.stage].wait(dout_place.phase);
        discard(acc_dp);
        start_product<true>(score_mma, of_member(member, _1{}, v), dout(_, _, _, dout_place.stage), acc_dp);
      };
      const auto start_dq = [&](auto member, auto& acc_dq) {
        discard(acc_dq);
        if constexpr (Dq::kTransposed) {
          start_product<true>(dq_mma, of_member(member, _2{}, kt), ds(_, _, _, ds_stage), acc_dq);
        } else {
          start_product<true>(dq_mma, ds(_, _, _, ds_stage), of_member(member, _2{}, kt), acc_dq);
        }
        ds_stage ^= 1;
      };
      const auto start_dk = [&](auto member) {
        start_product<false>(grad_mma, moved_gradients, qt(_, _, _, q_place.stage), acc_dk[member]);
      };

      // A step of a member, in two halves. Between them only the product for dv is in flight, on all paths: if the
      // products in flight differed between paths, the compiler would serialize all of them.
      int q_before = 0;  // stage of Q of the step before
      const auto front = [&](auto is_first, auto member) {
        constexpr bool kIsFirst = decltype(is_first)::value;
        // Whether the member is the first, or the last, at a tile of the bias.
        constexpr bool kBeginsTile = member == 0, kEndsTile = member == T::kMembers - 1;
        constexpr auto before = Int<T::kMembers - 1 - member>{};  // member of the step before
        BiasAhead bias_ahead;
        if constexpr (T::kBiasAhead > 0) {
          wait_for_bias(q_place);
          read_bias_ahead(bias_ahead, q_place.stage);
        }
        // After the scores only dp has been started or, if they were started early, also dk of the step before.
        wait_for_product<T::kEarlyScores && !kIsFirst ? 2 : 1>(acc_s);
        SoftcapFactors factors;
        Scores weights;
        if constexpr (T::kDenseBias && T::kBiasAhead == 0 && kBeginsTile) wait_for_bias(q_place);
        take_exp(scores, weights, factors, q_place.stage, steps, item.n_block, kept, bias_ahead);
        wait_for_product<1>(acc_dk[before]);
        if constexpr (!kIsFirst) release(s.q_empty[q_before]);
        // The gradient in that stage has been on its way to memory since the step before. Waiting for it any earlier
        // would delay dp.
        if constexpr (T::kWideBias && !kIsFirst) release_sent(s.bias_empty[q_before]);
        to_operand<Element>(probabilities, weights);
        start_product<false>(grad_mma, probabilities, doutt(_, _, _, dout_place.stage), acc_dv[member]);
        wait_for_product<1>(acc_dp);
        take_ds(weights, dp, factors, dout_place.stage);
        if constexpr (T::kKeyBias) sum_rows(key_sums, weights);
        if constexpr (T::kWideBias) store_dbias(weights, q_place.stage);
        to_operand<Element>(gradients, weights);
        if constexpr (T::kPairs && kEndsTile) store_pair_dbias(weights);
        if constexpr (!T::kOwnOut && kIsFirst) sync_out();
        store_ds(gradients);
        if constexpr (T::kPairs && kEndsTile) {
          release(s.bias_empty[bias_place.stage]);
          bias_place.advance();
        }
        if constexpr (T::kDenseBias && !T::kWideBias && !T::kPairs) release(s.bias_empty[q_place.stage]);
      };
      const auto back = [&](auto is_last, auto member) {
        constexpr bool kIsLast = decltype(is_last)::value, kStartsEarly = T::kEarlyScores && !kIsLast;
        constexpr bool kEndsTile = member == T::kMembers - 1;
        constexpr auto after = Int<T::kMembers - 1 - member>{};
        auto acc_dq = partition_fragment_C(dq_mma, Shape<Int<Dq::kRows>, Int<Dq::kCols>>{});
        start_dq(member, acc_dq);
        if constexpr (T::kDenseBias && kEndsTile) send_dbias(item, steps.head, steps.m, q_place.stage);
        wait_for_product<1>(acc_dv[member]);
        release(s.dout_empty[dout_place.stage]);
        dout_place.advance();
        // ds moves to the registers that held p in 16 bits until dv was done. The next scores can then take those in
        // which ds was made from p in place. Without this, the products in progress would hold 16 registers more than
        // there are.
        move(moved_gradients, gradients, p.zero);
        if constexpr (kStartsEarly) start_scores(after);
        start_dk(member);
        wait_for_product<kStartsEarly ? 2 : 1>(acc_dq);
        if constexpr (member == 0) {
          add_dq(fragments<Dq::kFragments>(acc_dq), item, steps.head, steps.m);
        } else {
          const BwdItem second = item_of_member<T>(p, item, member);
          add_dq(fragments<Dq::kFragments>(acc_dq), second, steps.head + heads_to_second(p), steps.m);
        }
        if constexpr (T::kWideBias && kIsLast) release_sent(s.bias_empty[q_place.stage]);
        if constexpr (!kIsLast) {
          if constexpr (!kStartsEarly) start_scores(after);
          start_dp(after);
          q_before = q_place.stage;
          q_place.advance();
          if constexpr (kEndsTile) to_next_step();
        }
      };

      if constexpr (T::kGathered) s.facts_full[facts_place.stage].wait(facts_place.phase);
      if constexpr (T::kMasked) clear_hidden_keys(item);
      wait_for_keys(s.k_full);
      start_scores(_0{});
      wait_for_keys(s.v_full);
      start_dp(_0{});
      if constexpr (T::kMasked) to_next_step();
      // Waits until dk and dv of the item before have left the stage. The other threads know it after the barrier in
      // front().
      if (T::kDqPath == DqPath::kTurns && is_speaker()) tma_store_wait<0>();
      front(true_type{}, _0{});
      constexpr auto last_member = Int<T::kMembers - 1>{};
      if constexpr (T::kPairs) {
#pragma unroll 1
        while (true) {
          back(false_type{}, _0{});
          front(false_type{}, _1{});
          if (steps.is_last()) break;
          back(false_type{}, _1{});
          front(false_type{}, _0{});
        }
      } else {
#pragma unroll 1
        while (!steps.is_last()) {
          back(false_type{}, _0{});
          front(false_type{}, _0{});
        }
      }
      back(true_type{}, last_member);
      wait_for_product<0>(acc_dk[last_member]);
      if constexpr (!T::kOwnOut) sync_out();
      release(s.q_empty[q_place.stage]);
      release(s.k_empty[kv_place.stage]);
      release(s.v_empty[kv_place.stage]);
      kv_place.advance();
    }
    if constexpr (T::kGathered) {
      wait_for_chunks(item);
      // To save a register, only one of kv head and query head is kept: the one that the steps need.
      const int head_k = T::kOrdered ? item.head_k : steps.head / p.head_ratio;
      if constexpr (T::kKeyBias) add_dbias(key_sums, item, head_k * p.head_ratio + p.group_begin);
      const int64_t sums = static_cast<int64_t>(item.batch) * p.nheads_k + head_k;
      if (p.dk_rows.data != nullptr) {
        store_listed_grad(fragments<kFragmentsD>(acc_dv[0]), 1.f, p.dv_rows, item.batch, head_k);
        store_listed_grad(fragments<kFragmentsD>(acc_dk[0]), p.softmax_scale, p.dk_rows, item.batch, head_k);
      } else {
        add_grad(fragments<kFragmentsD>(acc_dv[0]), 1.f, p.dv_accum, sums);
        add_grad(fragments<kFragmentsD>(acc_dk[0]), p.softmax_scale, p.dk_accum, sums);
      }
      if (takes_chunk_turns()) __threadfence();  // before the turn is passed on
      sync_own();                                // all threads have read the facts, which are released below
      pass_chunk(item);
      release(s.facts_empty[facts_place.stage]);
      facts_place.advance();
    } else {
      wait_for_parts(item);
      if constexpr (T::kKeyBias) add_dbias(key_sums, item, heads_of(p, item).begin);
      store_grad(acc_dv[0], 1.f, p.dv, p.dv_slots, item);
      store_grad(acc_dk[0], p.softmax_scale, p.dk, p.dk_slots, item);
      pass_part(item);
      if constexpr (T::kPairs) {
        const BwdItem second = item_of_member<T>(p, item, 1);
        store_grad(acc_dv[1], 1.f, p.dv, p.dv_slots, second);
        store_grad(acc_dk[1], p.softmax_scale, p.dk, p.dk_slots, second);
      }
    }
  }

  // Computes the probabilities of the scores. They have registers of their own: if a branch wrote those of the scores,
  // which belong to a product, the compiler would serialize all products.
  template <class Steps>
  __device__ __forceinline__ void take_exp(const Scores& scores, Scores& probabilities, SoftcapFactors& factors,
                                           int stage, const Steps& steps, int n_block, KeptScores kept,
                                           const BiasAhead& bias_ahead) {
    if (is_cut(steps, n_block)) {
      take_exp<true>(scores, probabilities, factors, stage, steps.m, n_block, kept, bias_ahead);
    } else {
      take_exp<false>(scores, probabilities, factors, stage, steps.m, n_block, kept, bias_ahead);
    }
  }
  __device__ __forceinline__ void wait_for_bias(const RingPlace<T::kStagesQ>& q_place) {
    if constexpr (T::kPairs) {
      s.bias_full[bias_place.stage].wait(bias_place.phase);
    } else {
      s.bias_full[q_place.stage].wait(q_place.phase);
    }
  }
  // Reads the bias of the fragments 2 * part and 2 * part + 1. `stage`: that of Q.
  __device__ __forceinline__ void read_bias(uint32_t (&words)[4], int part, int stage) const {
    load_matrices(words, bias_rows(T::kPairs ? bias_place.stage : stage) + part * (16 * kPanelRowBytes));
  }
  __device__ __forceinline__ void read_bias_ahead(BiasAhead& ahead, int stage) const {
#pragma unroll
    for (int part = 0; part < T::kBiasAhead; ++part) read_bias(ahead[part], part, stage);
  }
  // Whether some scores of the tile have to be masked.
  template <class Steps>
  __device__ __forceinline__ bool is_cut(const Steps& steps, int n_block) const {
    if constexpr (T::kGathered) {
      const int2 all = facts().seen_by_all[consumer];
      const int offset = p.seqlen_k - p.seqlen_q;
      return steps.m * T::kBlockM + offset < all.x || (steps.m + 1) * T::kBlockM + offset > all.y;
    } else if constexpr (T::kMasked) {
      return steps.tile.is_checked();
    } else if constexpr (T::kPacked) {
      return steps.m < steps.cut_end;
    } else if constexpr (T::kWideBias) {
      return hidden.has_any() || cuts_tile<T>(p, steps.m, n_block);
    } else {
      return cuts_tile<T>(p, steps.m, n_block);
    }
  }
  // The rows that see a key, counted from the first one that the thread has.
  struct SeenBy {
    int first;
    uint32_t rows;
    __device__ __forceinline__ bool has(int row) const {
      return T::kGathered ? static_cast<uint32_t>(row - first) < rows : row >= first;
    }
  };
  __device__ __forceinline__ SeenBy seen_by(int half, int m, int n_block) const {
    const auto& own = lengths();
    const int own_row = m * T::kBlockM + lane % 4 * 2, offset = own.seqlen_k - own.seqlen_q;
    if constexpr (T::kGathered) {
      const KeyInterval interval = facts().interval[own_key(half)];
      const int begin = p.all_rows_see ? offset : interval.begin;
      return {begin - offset - own_row, static_cast<uint32_t>(interval.length)};
    } else {
      const int key = n_block * T::kBlockN + own_key(half);
      const int seen_from = p.is_causal ? key - offset : INT_MIN / 2;
      const bool is_hidden = key >= own.seqlen_k || (T::kWideBias && hidden.has(half));
      return {(is_hidden ? INT_MAX / 2 : seen_from) - own_row, 0};
    }
  }
  // Called while the scores are computed.
  __device__ __forceinline__ KeptScores find_kept(RowTile tile, int n_block, int stage) const {
    KeptScores kept;
    if (tile.is_partial()) kept.read(smem_u32(s.mask.bits[stage]), consumer, warp, lane);
    if (tile.is_cut()) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int first = seen_by(half, tile.m(), n_block).first;
        kept.cut(half, first);
        if (p.window > 0) kept.cut_from(half, first + p.window);
      }
    }
    return kept;
  }
  template <bool kIsCut>
  __device__ __forceinline__ void take_exp(const Scores& scores, Scores& probabilities, SoftcapFactors& factors,
                                           int stage, int m, int n_block, KeptScores kept,
                                           const BiasAhead& bias_ahead) {
    const float scale_log2 = T::kSoftcap ? kLog2e : p.softmax_scale * kLog2e;
    SeenBy seen[2];
    float item_bias[2];
    uint32_t tile_bias[4];
    uint32_t wide_bias;
    if constexpr (T::kWideBias) wide_bias = wide_rows(stage);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (kIsCut && !T::kMasked) seen[half] = seen_by(half, m, n_block);
      if constexpr (T::kListBias) item_bias[half] = facts().bias[own_key(half)];
      if constexpr (T::kKeyBias && !T::kListBias) item_bias[half] = key_bias[half];
    }
    const auto sees = [&](int i, int half, int e) {
      if constexpr (T::kMasked) {
        return kept.has(i, half, e);
      } else {
        return seen[half].has(8 * i + e);
      }
    };
    const float* lse = s.lse[stage] + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < kFragmentsM; ++i) {
      const float2 row_lse = *reinterpret_cast<const float2*>(lse + 8 * i);
      float2 row_rest;
      if constexpr (T::kBias) row_rest = *reinterpret_cast<const float2*>(s.lse_rest[stage] + lane % 4 * 2 + 8 * i);
      if constexpr (T::kWideBias) {
#pragma unroll
        for (int e = 0; e < 4; ++e) tile_bias[e] = ld_shared(wide_entry(wide_bias, i, e / 2, e % 2));
      } else if constexpr (T::kDenseBias) {
        if (i % 2 == 0 && i / 2 >= T::kBiasAhead) read_bias(tile_bias, i / 2, stage);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float x = scores[i][2 * half], y = scores[i][2 * half + 1];
        if constexpr (T::kSoftcap) cap(x, y, factors[2 * i + half]);
        if constexpr (T::kBias) {
          // In natural units, as the forward adds it: a bias of finfo.min times log2(e) would overflow.
          float2 bias;
          if constexpr (T::kWideBias) {
            bias = make_float2(__uint_as_float(tile_bias[2 * half]), __uint_as_float(tile_bias[2 * half + 1]));
          } else if constexpr (T::kDenseBias) {
            const uint32_t* const part = i / 2 < T::kBiasAhead ? bias_ahead[i / 2] : tile_bias;
            bias = ElementTraits<Element>::unpack(part[i % 2 * 2 + half]);
          } else {
            bias = make_float2(item_bias[half], item_bias[half]);
          }
          x = __fmaf_rn(x, p.softmax_scale, bias.x);
          y = __fmaf_rn(y, p.softmax_scale, bias.y);
        }
        // After the bias has been added: that of a masked score may be anything, even NaN.
        if (kIsCut && !sees(i, half, 0)) x = -INFINITY;
        if (kIsCut && !sees(i, half, 1)) y = -INFINITY;
        if constexpr (T::kBias) {
          x = __fmaf_rn(x - row_lse.x, kLog2e, -row_rest.x);
          y = __fmaf_rn(y - row_lse.y, kLog2e, -row_rest.y);
        } else {
          x = __fmaf_rn(x, scale_log2, -row_lse.x);
          y = __fmaf_rn(y, scale_log2, -row_lse.y);
        }
        probabilities[i][2 * half] = exp2_approx(x);
        probabilities[i][2 * half + 1] = exp2_approx(y);
      }
    }
  }
  // Keys past the last one get its bias; their scores are masked.
  __device__ __forceinline__ void read_key_bias(const BwdItem& item) {
    const int head = heads_of(p, item).begin / p.bias.head_ratio;
    const int64_t base = item.batch * p.bias.batch_stride + head * p.bias.head_stride;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = min(item.n_block * T::kBlockN + own_key(half), p.seqlen_k - 1);
      key_bias[half] = load_bias(p.bias, base + key * p.bias.col_stride, std::is_same_v<Element, cutlass::bfloat16_t>);
    }
  }

  // Turns two products of q and k into logits with softcap, and finds the derivatives of softcap.
  __device__ __forceinline__ void cap(float& x, float& y, uint32_t& factors) {
    const float inner = p.softmax_scale / p.softcap;
    x = tanh_fast(x * inner);
    y = tanh_fast(y * inner);
    factors = ElementTraits<cutlass::half_t>::pack(__fmaf_rn(-x, x, 1.f), __fmaf_rn(-y, y, 1.f));
    x *= p.softcap;
    y *= p.softcap;
  }

  // Turns probabilities into gradients of the logits.
  __device__ __forceinline__ void take_ds(Scores& probabilities, const Scores& dp, const SoftcapFactors& factors,
                                          int stage) {
    const float* delta = s.delta[stage] + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < kFragmentsM; ++i) {
      const float2 row_delta = *reinterpret_cast<const float2*>(delta + 8 * i);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float x = dp[i][2 * half] - row_delta.x, y = dp[i][2 * half + 1] - row_delta.y;
        if constexpr (T::kSoftcap) {
          const float2 factor = ElementTraits<cutlass::half_t>::unpack(factors[2 * i + half]);
          x *= factor.x;
          y *= factor.y;
        }
        probabilities[i][2 * half] *= x;
        probabilities[i][2 * half + 1] *= y;
      }
    }
  }
};

template <class T>
__global__ void __launch_bounds__(T::kThreads, 1) bwd_kernel(const __grid_constant__ BwdArguments p) {
  extern __shared__ char smem[];
  const uint32_t base = smem_u32(smem);
  auto& s = *reinterpret_cast<typename T::Shared*>(smem + ((base + 1023) / 1024 * 1024 - base));
  if (threadIdx.x == 0) init_barriers<T>(p, s);
  __syncthreads();
  wait_for_previous_kernel();
  bool takes_turns = false;
  if constexpr (T::kDqPath == DqPath::kTurns) takes_turns = may_take_turns<T>(p);
  if (cutlass::canonical_warp_group_idx() == 0) {
    cutlass::arch::warpgroup_reg_dealloc<T::kProducerRegisters>();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
      BwdProducer<T> producer{p, s};
      producer.run();
      if constexpr (T::kCopiesBiasRows) producer.finish_bias();
    }
    if constexpr (T::kDqPath == DqPath::kTurns) {
      if (warp == 1) BwdDq<T>{p, s, lane, takes_turns}.run();
    }
    if constexpr (T::kHasTurnWarps) {
      if (warp > 0 && warp <= T::kTurnWarps) DqTurns<T>{p, s, warp - 1, lane}.run();
    }
    if constexpr (T::kCopiesBiasRows) {
      if (warp > 0 && p.bias_rows.exist()) {
        if constexpr (T::kShiftsBias) {
          BwdBiasLoader<T>{p, s, warp - 1, lane}.run();
        } else {
          BiasRowLoader<T::kBlockM, sizeof(typename T::BiasElement) * T::kBlockN, T::kStagesQ, /*kBatch=*/2>{
              p.bias_rows, s.bias_requests, s.bias_full, smem_u32(s.bias.tiles), warp - 1, lane}
              .run();
        }
      }
    }
    if constexpr (T::kGathered) {
      const int part = warp - (4 - T::kGatherWarps);
      if (part >= 0) BwdGather<T>{p, s, part, lane}.run();
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<T::kConsumerRegisters>();
    BwdConsumer<T> consumer(p, s);
    consumer.run();
    // TMA may still be reading shared memory, which has to exist until it is done.
    if (threadIdx.x % 128 == 0) cute::tma_store_wait<0>();
  }
}

}  // namespace dmattn::sm90
