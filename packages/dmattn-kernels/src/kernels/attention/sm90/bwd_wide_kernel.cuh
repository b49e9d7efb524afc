// The backward on Hopper for wide heads: consecutive keys, also of packed sequences, with causality, and either
// softcap and a window of keys, or a dense mask and a bias; or lists of keys for chunks of rows, with a bias for each
// key.
//
// dk and dv of 64 keys and 256 columns fill the registers of a warpgroup each, so that a thread block has no room for
// more keys. If thread blocks worked alone, dq would be added to sums in memory for every 64 keys. So two thread
// blocks of a cluster share 128 keys: each computes ds of its own 64, and they exchange it, so that each can compute
// half of the columns of dq = ds k for the keys of both. Q and dO are read from memory once for both.
//
// One thread of the first warpgroup, the producer, copies tiles. Listed keys are copied by warps beside it, and their
// dk and dv are added to sums in memory. The two consumers have the same keys:
//   the first    s^T = k q^T     p = exp(s - lse)        dv += p^T do     a panel of dq
//   the second   dp^T = v do^T   ds = p (dp - delta)     dk += ds^T q     another panel
// p goes from the first to the second through shared memory, ds to both, and to the other thread block. Each consumer
// queues the products of a step in the order dv (or dk), dq of the step before, scores (or dp) of the next step. So
// the exchange has a step's time, and one consumer's products run while the other one's registers are worked on.
//
// A cluster takes one block of keys, or one tile of a list. Where dq is added up in a fixed order, each consumer has a
// warp beside the producer that waits for its turns and passes them on; over lists it is one of the warps that have
// copied the keys.
// Bytes, registers and cycles are counted in docs/kernels/backward.md.
#pragma once

#include "../../shared/early_start.cuh"
#include "bwd_wide_gather.cuh"
#include "bwd_wide_producer.cuh"
#include "bwd_wide_scores.cuh"
#include "bwd_wide_turns.cuh"

namespace dmattn::sm90 {

// --- the consumers: a warpgroup each ---------------------------------------------------------------------------------

// kIsGradient: it is the second consumer, which computes ds and dk.
template <class T, bool kIsGradient>
struct WideConsumer : WideScores<T, kIsGradient> {
  using Base = WideScores<T, kIsGradient>;
  using Base::Base;
  using Base::clear_hidden_keys, Base::find_kept, Base::is_speaker, Base::item, Base::kConsumer, Base::kFragmentsD,
      Base::kFragmentsM, Base::kReadsBias, Base::kStagesOfFirst, Base::kStagesOfSecond, Base::kUnscale, Base::lane,
      Base::own_block, Base::own_key, Base::p, Base::rank, Base::read_bias, Base::read_key_bias, Base::s, Base::step,
      Base::sync_own, Base::take_exp, Base::thread, Base::warp;
  using typename Base::BiasAhead, typename Base::Element, typename Base::Item, typename Base::Scores,
      typename Base::SentScores, typename Base::Steps;

  __device__ __forceinline__ void run() {
    using namespace cute;
    typename T::ScoreMma score_mma;
    typename T::GradMma grad_mma;
    typename T::DqMma dq_mma;
    const auto score_slice = operand_slice(score_mma, 0);
    const auto grad_slice = operand_slice(grad_mma, 0);
    const auto dq_slice = operand_slice(dq_mma, 0);
    const auto tile = [](Element* data, auto layout) { return make_tensor(make_smem_ptr(data), layout); };
    const auto columns = grad_slice.partition_fragment_B(
        tile(kIsGradient ? s.q : s.dout, typename T::template Columns<T::kBlockM, kStagesOfSecond>{}));
    const auto ds = dq_slice.partition_fragment_A(tile(s.ds[0][0], typename T::LayoutdS{}));
    const auto kt = dq_slice.partition_fragment_B(tile(s.k + panel() * T::kPanelK, typename T::LayoutKt{}));
    const auto other_kt =
        dq_slice.partition_fragment_B(tile(s.other_k + kConsumer * T::kPanelK, typename T::LayoutKt{}));
    auto acc_s = partition_fragment_C(score_mma, Shape<Int<T::kOwnKeys>, Int<T::kBlockM>>{});  // scores, or dp
    auto acc_grad = partition_fragment_C(grad_mma, Shape<Int<T::kOwnKeys>, Int<T::kHeadDim>>{});
    auto operand = make_tensor<Element>(Layout<Shape<Shape<_2, _2, _2>, _1, Int<T::kBlockM / 16>>>{});
    const Scores& scores = fragments<kFragmentsM>(acc_s);

    float key_sums[2] = {0.f, 0.f};  // kKeyBias: the gradient of the bias, of the thread's two keys
    clear(acc_grad);
    // The zeros have to be in registers before any product starts, or the compiler serializes all products.
    warpgroup_fence_operand(acc_grad);
    auto steps = [&] {
      if constexpr (T::kMasked) {
        return Steps{};
      } else {
        return Steps(p, item);
      }
    }();
    float key_bias[2] = {0.f, 0.f};  // the bias of the thread's two keys, if they are consecutive ones
    if constexpr (T::kKeyBias && !T::kGathered && !kIsGradient) read_key_bias(key_bias);
    if (has_rows(steps)) {
      int dq_before = 0;  // tile of dq of the step before; at the first step its own
      if constexpr (!T::kMasked) dq_before = dq_tile(steps);
      BiasAhead bias_ahead;
      KeptScores kept;  // kMasked: of a tile with is_checked()
      const auto start_scores = [&](int n) __attribute__((always_inline)) {
        const auto place = place_of<kStagesOfFirst>(n);
        (kIsGradient ? s.dout_full : s.q_full)[place.stage].wait(place.phase);
        // 0, which the compiler does not know. It would otherwise keep the addresses of all 16 parts of both operands
        // in registers.
        const int zero = n & static_cast<int>(p.zero);
        const auto keys =
            score_slice.partition_fragment_A(tile((kIsGradient ? s.v : s.k) + zero, typename T::LayoutK{}));
        const auto rows = score_slice.partition_fragment_B(
            tile((kIsGradient ? s.dout : s.q) + place.stage * T::kTileQ + zero, typename T::LayoutQ{}));
        discard(acc_s);
        start_product<true>(score_mma, keys, rows, acc_s);  // s^T = k q^T, or dp^T = v do^T
      };
      const auto start_dq = [&](int n, auto& acc_dq) __attribute__((always_inline)) {
        const auto place = place_of<T::kStagesdS>(n);
        s.ds_full[place.stage].wait(place.phase);
        discard(acc_dq);
        start_product<true>(dq_mma, ds(_, _, _, T::kCluster * place.stage), kt, acc_dq);
        start_product<false>(dq_mma, ds(_, _, _, T::kCluster * place.stage + 1), other_kt, acc_dq);
      };
      const auto finish_dq = [&](int n, auto& acc_dq) __attribute__((always_inline)) {
        if (is_speaker()) release_in_both(s.ds_empty[place_of<T::kStagesdS>(n).stage]);
        if (takes_turns<T>(p, s)) s.turn_full[kConsumer].wait(n % 2);
        add_dq(fragments<T::Dq::kFragments>(acc_dq), dq_before);
        if (takes_turns<T>(p, s)) {
          __syncwarp();
          if (lane == 0) s.turn_used[kConsumer].arrive();
        }
      };

      // Goes to step n, whose first product has been started: the step is announced beside Q or dO, for which that
      // product has waited. The first consumer requests the mask and the bias as soon as registers are free; with 256
      // columns those for a bias are free only after dq has left (finish_reading()).
      constexpr bool kReadsBiasEarly = kReadsBias && T::kHeadDim <= 192;
      MaskWords mask_ahead;  // used if there is no dense bias
      const auto go_to_step = [&](int n) __attribute__((always_inline)) {
        if constexpr (!T::kMasked) {
          if (n > 0) steps.advance();
        } else if constexpr (kIsGradient) {
          steps.read(s.rows.with_dout[n % T::kStagesdO]);
        } else {
          steps.read(s.rows.with_q[n % T::kStagesQ]);
          if constexpr (kReadsBiasEarly) read_bias(bias_ahead, steps);
          if constexpr (!kReadsBias) {
            if (steps.tile.is_partial()) this->template read_mask<true>(mask_ahead, steps);
          }
        }
      };
      const auto finish_reading = [&]() __attribute__((always_inline)) {
        if constexpr (T::kMasked && !kIsGradient) {
          if constexpr (kReadsBias && !kReadsBiasEarly) read_bias(bias_ahead, steps);
          if (steps.tile.is_checked()) kept = find_kept(steps, mask_ahead);
        }
      };

      // A step in two halves. Between them only the product for dv, or dk, is in flight, on all paths: see
      // BwdConsumer::work().
      const auto front = [&]() __attribute__((always_inline)) {
        Scores weights;
        wait_for_product<0>(acc_s);
        if constexpr (kIsGradient) {
          take_ds(scores, weights);
          if constexpr (T::kKeyBias) sum_key_rows(key_sums, weights);
          auto gradients = make_tensor_like(operand);
          to_operand<Element>(gradients, weights);
          send_ds(gradients);
          if constexpr (T::kDenseBias) {
            if (is_speaker()) dbias_of(steps).send_tile(s.ds[step % T::kStagesdS][0]);
          }
          // ds leaves the registers of dp, which the next dp needs: see BwdConsumer::work().
          move(operand, gradients, p.zero);
          // All threads have read delta before the barrier in send_ds().
          if (is_speaker()) release_in_both(s.dout_empty[place_of<T::kStagesdO>(step).stage]);
        } else {
          SentScores capped;
          if constexpr (kReadsBias) widen_bias_words<Element>(bias_ahead, p.bias_rows);
          take_exp(scores, weights, capped, steps, kept, key_bias, bias_ahead);
          send_probabilities(weights, capped);
          if constexpr (std::is_same_v<Element, cutlass::half_t> && !T::kSoftcap) {
            // The words are the same as those that were sent, and would otherwise stay in the registers of the scores.
            auto sent = make_tensor_like(operand);
            to_operand<Element>(sent, weights);
            move(operand, sent, p.zero);
          } else {
            to_operand<Element>(operand, weights);
          }
        }
        const auto place = place_of<kStagesOfSecond>(step);
        (kIsGradient ? s.q_full : s.dout_full)[place.stage].wait(place.phase);
        start_product<false>(grad_mma, operand, columns(_, _, _, place.stage), acc_grad);
        if constexpr (T::kDenseBias && kIsGradient) {
          dbias_of(steps).send_rows(weights, s.ds[step % T::kStagesdS][0], thread);
        }
      };
      const auto back = [&](auto is_first) __attribute__((always_inline)) {
        constexpr bool kHasDq = !decltype(is_first)::value;
        auto acc_dq = partition_fragment_C(dq_mma, Shape<Int<T::kBlockM>, Int<T::kPanelCols>>{});
        if constexpr (kHasDq) start_dq(step - 1, acc_dq);
        start_scores(step + 1);
        wait_for_product<kHasDq ? 3 : 1>(acc_grad);
        if (is_speaker())
          release_in_both((kIsGradient ? s.q_empty : s.dout_empty)[place_of<kStagesOfSecond>(step).stage]);
        const int dq_now = dq_tile(steps);
        if constexpr (T::kMasked) go_to_step(step + 1);
        if constexpr (kHasDq) {
          wait_for_product<1>(acc_dq);
          finish_dq(step - 1, acc_dq);
          dq_before = dq_now;
        }
        if constexpr (!T::kMasked) go_to_step(step + 1);
        finish_reading();
        ++step;
      };
      const auto compute_last_dq = [&](int n) __attribute__((always_inline)) {
        auto acc_dq = partition_fragment_C(dq_mma, Shape<Int<T::kBlockM>, Int<T::kPanelCols>>{});
        start_dq(n, acc_dq);
        wait_for_product<0>(acc_dq);
        finish_dq(n, acc_dq);
        dq_before = dq_tile(steps);  // of the last step
      };

      s.k_full.wait(0);
      if constexpr (kIsGradient) s.v_full.wait(0);
      if constexpr (T::kGathered) cutlass::arch::fence_view_async_shared();  // threads have copied them
      if constexpr (T::kMasked) clear_hidden_keys();
      start_scores(0);
      go_to_step(0);
      finish_reading();
      if constexpr (T::kMasked) dq_before = dq_tile(steps);
      if constexpr (T::kGathered) s.facts_full.wait(0);
      front();
      if (!steps.is_last()) {
        back(true_type{});
        front();
#pragma unroll 1
        while (!steps.is_last()) {
          back(false_type{});
          front();
        }
        compute_last_dq(step - 1);
      }
      wait_for_product<0>(acc_grad);
      compute_last_dq(step);
    }
    if constexpr (T::kGathered) {
      add_grad(fragments<kFragmentsD>(acc_grad), key_sums);
    } else {
      // dk and dv leave through the memory of Q and dO, which nobody reads any more: the first consumer has waited for
      // the last ds, before which the last dp was done, and the second one for the last p, before which the last
      // scores were done.
      store_grad(acc_grad, kIsGradient ? s.q : s.dout, key_sums);
    }
    if constexpr (T::kDenseBias && kIsGradient) {
      if (is_speaker()) cute::tma_store_wait<0>();  // TMA may still be reading shared memory
    }
  }

  __device__ __forceinline__ bool has_rows(const Steps& steps) const {
    if constexpr (T::kMasked) {
      s.rows_known.wait(0);
      return s.rows.exist;
    } else {
      return steps.left > 0;
    }
  }

  // The panel of dq that the consumer computes.
  __device__ __forceinline__ int panel() const { return rank * T::kOwnPanels + kConsumer; }
  // The number of the step's tile among those of dq.
  __device__ __forceinline__ int dq_tile(const Steps& steps) const {
    return dq_block_of<T>(p, item, steps.head, steps.m);
  }
  // Adds to the consumer's part of a tile of dq.
  __device__ __forceinline__ void add_dq(const float (&acc)[T::Dq::kFragments][4], int dq_tile) const {
    if (T::kPanels < T::kAllPanels && panel() >= T::kPanels) return;
    const int first = panel() * T::Dq::kPart;  // the first element of that part
    float* const to = p.dq_accum + static_cast<int64_t>(dq_tile) * p.dq_tile + first + thread * 4;
    if (first + T::Dq::kPart <= p.dq_tile) {  // the usual case, without a comparison for each fragment
#pragma unroll
      for (int i = 0; i < T::Dq::kFragments; ++i) add_vector(to + i * 512, acc[i]);
    } else {
#pragma unroll
      for (int i = 0; i < T::Dq::kFragments; ++i) {
        if (first + i * 512 < p.dq_tile) add_vector(to + i * 512, acc[i]);
      }
    }
  }

  // --- the first consumer --------------------------------------------------------------------------------------------

  // The second consumer has read what the stage held two steps ago: this consumer has already used the ds that was
  // made of it.
  __device__ __forceinline__ void send_probabilities(const Scores& probabilities, const SentScores& capped) {
    using Half = ElementTraits<cutlass::half_t>;
    const int stage = step % T::kStagesP;
#pragma unroll
    for (int i = 0; i < kFragmentsM; i += 2) {
      const uint32_t to = smem_u32(&s.p[stage][i / 2][thread]);
      if constexpr (T::kSoftcap) {
        st_shared(to, make_uint4(capped[2 * i], capped[2 * i + 1], capped[2 * i + 2], capped[2 * i + 3]));
      } else {
        const float (&x)[4] = probabilities[i];
        const float (&y)[4] = probabilities[i + 1];
        st_shared(to, make_uint4(Half::pack(x[0], x[1]), Half::pack(x[2], x[3]), Half::pack(y[0], y[1]),
                                 Half::pack(y[2], y[3])));
      }
    }
    __syncwarp();
    if (lane == 0) s.p_full[stage].arrive();
  }

  // --- the second consumer -------------------------------------------------------------------------------------------

  __device__ __forceinline__ void take_ds(const Scores& dp, Scores& ds) {
    const auto p_place = place_of<T::kStagesP>(step);
    s.p_full[p_place.stage].wait(p_place.phase);
    const float* delta = s.delta[step % T::kStagesdO] + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < kFragmentsM; i += 2) {
      const uint4 words = ld_shared_v4(smem_u32(&s.p[p_place.stage][i / 2][thread]));
      const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int fragment = i + j / 2, half = j % 2;
        const float2 probability = ElementTraits<cutlass::half_t>::unpack(pairs[j]);
        const float2 row_delta = *reinterpret_cast<const float2*>(delta + 8 * fragment);
        ds[fragment][2 * half] = probability.x * __fmaf_rn(dp[fragment][2 * half], kUnscale, -row_delta.x * kUnscale);
        ds[fragment][2 * half + 1] =
            probability.y * __fmaf_rn(dp[fragment][2 * half + 1], kUnscale, -row_delta.y * kUnscale);
      }
    }
  }

  // Writes ds to this block's stage, and copies it from there to the other block's. The consumers of both blocks are
  // done with what the stages held; so the copy that read this stage is done, too.
  template <class Operand>
  __device__ __forceinline__ void send_ds(const Operand& operand) {
    constexpr uint32_t kBytes = T::kPaneldS * sizeof(Element);
    const auto place = place_of<T::kStagesdS>(step);
    const int stage = place.stage;
    s.ds_empty[stage].wait(place.phase ^ 1);
    store_ds_panel<T::kBlockM>(operand, smem_u32(s.ds[stage][0]), warp, lane);
    if constexpr (T::kDenseBias) {
      if (is_speaker()) cute::tma_store_wait<0>();  // what left from the other stage, which comes next, has been read
    }
    sync_own();
    if (is_speaker()) {
      s.ds_full[stage].arrive_and_expect(kBytes);
      send_to_other(s.ds[stage][0], s.ds[stage][1], s.ds_full[stage], kBytes);
    }
  }

  __device__ __forceinline__ WideDbias<T> dbias_of(const Steps& steps) const {
    return {p, item.batch, steps.head, steps.m * T::kBlockM, own_block() * T::kOwnKeys};
  }

  // --- dk and dv of listed keys are added to sums --------------------------------------------------------------------

  // In a fixed order as in BwdResults: each chunk has rows of its own, or chunks take turns.
  __device__ __forceinline__ void add_grad(float (&acc)[kFragmentsD][4], const float (&key_sums)[2]) const {
    const bool keeps_terms = T::kOrdered && p.terms.first != nullptr;
    const bool takes_turns = T::kOrdered && p.dkv_semaphore != nullptr;
    if (takes_turns) {
      if (is_speaker()) wait_for_later_chunks<T>(p, item);
      sync_own();
    }
    const int64_t entries = list_of(p, item) * p.keys.capacity + WideProducer<T>::first_key(item, rank);
    const int64_t sums = static_cast<int64_t>(item.batch) * p.nheads_k + item.head_k;
    const KeyLimits limits = {0, p.seqlen_k - 1};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      bool exists = s.facts.rows[own_key(half)] != 0;
      const int key = exists ? limits.position(__ldg(p.keys.idx + entries + own_key(half))) : 0;
      int64_t row = sums * p.seqlen_k + key;
      if (keeps_terms) {
        const int term = read_term(p, head_list_of(p, item.batch, item.head_k), item.chunk, key, exists);
        exists = term >= 0;
        row = sums * p.terms.capacity + max(term, 0);
      }
      float* const to = (kIsGradient ? p.dk_accum : p.dv_accum) + row * p.head_dim;
      send_key_row(acc, half, kIsGradient ? p.softmax_scale : kUnscale, to, exists, keeps_terms, p.head_dim, lane);
      if constexpr (T::kKeyBias && kIsGradient) {
        if (keeps_terms) {
          store_dbias_term(key_sums[half], row, exists);
        } else {
          add_dbias(key_sums[half], key, exists);
        }
      }
    }
    if (takes_turns) {
      __threadfence();  // what each thread has added comes before the turn
      sync_own();
      if (is_speaker()) pass_turn(chunk_counter(p, item, item.chunk));
    }
  }
  __device__ __forceinline__ void store_dbias_term(float sum, int64_t row, bool exists) const {
    if (p.dbias_cols == nullptr) return;
    sum = sum_of_row_lanes(sum);
    if (lane % 4 == 0 && exists) p.terms.dbias[row] = sum;
  }
  // Sums over four neighbouring lanes, which have the rows of a key.
  static __device__ __forceinline__ float sum_of_row_lanes(float sum) {
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    return sum + __shfl_xor_sync(0xffffffffu, sum, 2);
  }
  // All heads of the item share one bias, so that the sums may be added at any of them.
  __device__ __forceinline__ void add_dbias(float sum, int key, bool exists) const {
    if (p.dbias_cols == nullptr) return;
    sum = sum_of_row_lanes(sum);
    const int64_t head = static_cast<int64_t>(item.batch) * p.nheads + heads_of(p, item).begin;
    if (lane % 4 == 0 && exists) atomicAdd(p.dbias_cols + head * p.seqlen_k + key, sum);
  }

  // --- dk and dv leave -----------------------------------------------------------------------------------------------

  // The counter of turns of the block's own keys, where parts are added in order. dk and dv count at the same counter.
  // nullptr: parts are added in any order.
  __device__ __forceinline__ int32_t* part_counter() const {
    if (T::kGathered || p.dkv_semaphore == nullptr) return nullptr;
    const int64_t head = static_cast<int64_t>(item.batch) * p.nheads_k + item.head_k;
    return p.dkv_semaphore + (head * p.n_blocks + item.n_block) * T::kCluster + rank;
  }

  // Adds the gradient of a bias for each key, which the consumer of dk has.
  __device__ __forceinline__ void add_key_sums(const float (&key_sums)[2]) const {
    if constexpr (T::kKeyBias && kIsGradient) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int key = own_block() * T::kOwnKeys + own_key(half);
        add_dbias(key_sums[half], key, key < p.seqlen_k);
      }
    }
  }
  template <class Accumulator>
  __device__ __forceinline__ void store_grad(Accumulator& acc, Element* stage, const float (&key_sums)[2]) const {
    const float scale = kIsGradient ? p.softmax_scale : kUnscale;
    if constexpr (T::kPacked) {
      if (p.dk_slots != nullptr) {
        add_key_rows(fragments<kFragmentsD>(acc), scale, kIsGradient ? p.dk_slots : p.dv_slots, p, item.head_k, item.k,
                     WideProducer<T>::first_key(item, rank) + own_key(0), lane);
        return;
      }
    } else if (p.dk_slots != nullptr) {
      int32_t* const counter = part_counter();
      if (counter != nullptr) {
        if (is_speaker()) wait_for_turn(counter, item.split * T::kConsumers);
        sync_own();
      }
      add_partial<T>(fragments<kFragmentsD>(acc), scale, kIsGradient ? p.dk_slots : p.dv_slots, item, p,
                     rank * T::kOwnKeys + warp * 16 + lane / 4, lane);
      add_key_sums(key_sums);
      if (counter != nullptr) {
        __threadfence();  // what each thread has added comes before the turn
        sync_own();
        if (is_speaker()) pass_turn(counter);
      }
      return;
    }
    add_key_sums(key_sums);
    stage_grad<T>(round_grad<Element>(acc, scale), stage, thread);
    sync_own();
    if (!is_speaker()) return;
    send_grad<T>(kIsGradient ? p.dk : p.dv, stage, WideProducer<T>::first_key(item, rank), item.head_k,
                 place_of_keys(item));
    cute::tma_store_wait<0>();  // TMA may still be reading shared memory
  }
};

template <class T>
__device__ __forceinline__ BwdItemOf<T> find_wide_item(const BwdArguments& p, int index) {
  if constexpr (T::kGathered) {
    const ListItem item = find_list_item<T>(p, index);
    const int2 rows = read_tile_rows(p, item);
    return {item.tile, item.head_k, 0, item.batch, rows.x, rows.y, item.chunk};
  } else if constexpr (T::kPacked) {
    return to_item<T>(p, find_packed_item<T>(p, index));
  } else {
    return find_tiled_item<T>(p, index);
  }
}

template <class T>
__device__ __forceinline__ bool is_no_item(const BwdItemOf<T>& item) {
  if constexpr (T::kPacked) return item.k.length == 0;
  return T::kGathered && item.m_begin >= item.m_end;
}

template <class T>
__global__ void __cluster_dims__(T::kCluster, 1, 1) __launch_bounds__(T::kThreads, 1)
    bwd_wide_kernel(const __grid_constant__ BwdArguments p) {
  extern __shared__ char smem[];
  const uint32_t base = smem_u32(smem);
  auto& s = *reinterpret_cast<typename T::Shared*>(smem + ((base + 1023) / 1024 * 1024 - base));
  const int rank = static_cast<int>(cute::block_rank_in_cluster());
  wait_for_previous_kernel();
  int index = blockIdx.x / T::kCluster;
  if constexpr (!T::kGathered || T::kOrdered) {
    const bool in_turns = may_take_turns<T>(p);
    if (in_turns) index = take_number<T>(p, s, rank);
    if constexpr (T::kPacked) s.takes_turns = in_turns;  // all threads write the same
  }
  const BwdItemOf<T> item = find_wide_item<T>(p, index);
  // Lists have room for more tiles than they fill, and packed sequences numbers for more blocks of keys than there are.
  // The other thread block ends here, too.
  if (is_no_item<T>(item)) return;
  if (threadIdx.x == 0) {
    init_wide_barriers<T>(p, s);
    if constexpr (T::kPacked) s.item = item;
  }
  cute::cluster_sync();  // the barriers of both exist before the first copy to both
  const int group = cutlass::canonical_warp_group_idx();
  if (group == 0) {
    cutlass::arch::warpgroup_reg_dealloc<T::kProducerRegisters>();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) WideProducer<T>{p, s, rank}.run(item);
    if constexpr (T::kGathered) {
      if (warp > 0) WideGather<T>{p, s, rank, lane}.run(item, warp - 1);
    }
    const bool has_consumer = warp > 0 && warp <= T::kConsumers;
    if (takes_turns<T>(p, s) && has_consumer) WideTurns<T>{p, s, warp - 1, lane}.run(item);
  } else {
    cutlass::arch::warpgroup_reg_alloc<T::kConsumerRegisters>();
    const BwdItemOf<T>* own = &item;
    if constexpr (T::kPacked) own = &s.item;  // to save registers
    if (group == 1) {
      WideConsumer<T, false>(p, s, *own, rank).run();
    } else {
      WideConsumer<T, true>(p, s, *own, rank).run();
    }
  }
  // No thread block ends while the other still accesses its shared memory.
  __syncwarp();
  cute::cluster_sync();
}

}  // namespace dmattn::sm90
