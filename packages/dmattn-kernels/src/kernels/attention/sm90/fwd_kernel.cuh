// The forward on Hopper, for the plain level: lengths and causality only, tiles of consecutive keys.
//
// A thread block stays on its SM and takes row blocks of heads (items) until none is left. One thread of the first
// warpgroup, the producer, copies Q, K and V tiles into shared memory by TMA. The other warpgroups, the consumers, own
// 64 rows each: they compute scores, probabilities and the output by WGMMA. In a consumer the softmax of a key block
// runs beside the second product of the block before it, and consumers take turns, so that the softmax of one runs
// beside the products of another.
#pragma once

#include "../shared/smem.cuh"
#include "../shared/softmax.cuh"
#include "fwd_items.cuh"
#include "fwd_output.cuh"
#include "fwd_params.h"
#include "fwd_traits.cuh"

namespace dmattn::sm90 {

// --- what both roles know -------------------------------------------------------------------------------------------

// The key blocks of an item: [0, end), of which [0, full) are seen by all its rows.
struct KeyBlocks {
  int full, end;
};
template <class T>
__device__ __forceinline__ KeyBlocks find_key_blocks(const FwdArguments& p, int m_block) {
  int seen_by_all = p.seqlen_k, seen = p.seqlen_k;
  if (p.is_causal) {
    const int first_limit = m_block * T::kBlockM + p.seqlen_k - p.seqlen_q + 1;
    seen_by_all = min(max(first_limit, 0), p.seqlen_k);
    seen = min(max(first_limit + T::kBlockM - 1, 0), p.seqlen_k);
  }
  return {seen_by_all / T::kBlockN, (seen + T::kBlockN - 1) / T::kBlockN};
}

template <class T>
__device__ __forceinline__ void init_barriers(typename T::Shared& s) {
  s.q_full.init(1);
  s.q_empty.init(T::kConsumers);
  for (int i = 0; i < T::kStages; ++i) {
    s.k_full[i].init(1);
    s.v_full[i].init(1);
    s.k_empty[i].init(T::kConsumers);
    s.v_empty[i].init(T::kConsumers);
  }
  for (int i = 0; i < 2; ++i) {
    s.item_full[i].init(1);
    s.item_empty[i].init(4 * T::kConsumers);  // a warp each
  }
  cutlass::arch::fence_barrier_init();
}

// --- the producer: one thread -----------------------------------------------------------------------------------------

template <class T>
struct FwdProducer {
  const FwdArguments& p;
  typename T::Shared& s;
  RingPlace<T::kStages> k_place, v_place;
  RingPlace<2> item_place;
  int q_phase = 0;

  __device__ __forceinline__ void run() {
    for (int index = blockIdx.x;;) {
      announce(index);
      if (index >= p.items) return;
      // Asked for before the loads, so that the answer is there when they have been issued.
      const int next = gridDim.x + (p.work_counter != nullptr ? atomicAdd(p.work_counter, 1) : p.items);
      load_item(find_item(p, index));
      index = next;
    }
  }

  __device__ __forceinline__ void announce(int index) {
    s.item_empty[item_place.stage].wait(item_place.phase ^ 1);
    s.item[item_place.stage] = index;
    s.item_full[item_place.stage].arrive();
    item_place.advance();
  }

  __device__ __forceinline__ void load_item(const FwdItem& item) {
    const KeyBlocks blocks = find_key_blocks<T>(p, item.m_block);
    s.q_empty.wait(q_phase ^ 1);
    q_phase ^= 1;
    if (blocks.end == 0) {
      s.q_full.arrive();
      return;
    }
    s.q_full.arrive_and_expect(T::kTileQ * sizeof(typename T::Element));
    load_tile<T::kBlockM, T::kPanels, T::kPanelCols>(p.q, s.q_full, cute::TMA::CacheHintSm90::EVICT_FIRST, s.q,
                                                     item.m_block * T::kBlockM, item.head, item.batch);
    // Scores of the next block are started before the output of this one: K is one block ahead of V.
    load_k(blocks.end - 1, item);
#pragma unroll 1  // in the producer's few registers there is no room for more
    for (int n = blocks.end - 1; n > 0; --n) {
      load_k(n - 1, item);
      load_v(n, item);
    }
    load_v(0, item);
  }

  __device__ __forceinline__ void load_k(int n, const FwdItem& item) {
    load_keys(p.k, s.k, s.k_full, s.k_empty, k_place, n, item);
  }
  __device__ __forceinline__ void load_v(int n, const FwdItem& item) {
    load_keys(p.v, s.v, s.v_full, s.v_empty, v_place, n, item);
  }
  __device__ __forceinline__ void load_keys(const CUtensorMap& map, typename T::Element* tiles, Barrier* full,
                                            Barrier* empty, RingPlace<T::kStages>& place, int n, const FwdItem& item) {
    empty[place.stage].wait(place.phase ^ 1);
    full[place.stage].arrive_and_expect(T::kTileK * sizeof(typename T::Element));
    load_tile<T::kBlockN, T::kPanels, T::kPanelCols>(map, full[place.stage], cute::TMA::CacheHintSm90::EVICT_LAST,
                                                     tiles + place.stage * T::kTileK, n * T::kBlockN,
                                                     item.head / p.head_ratio, item.batch);
    place.advance();
  }
};

// --- the consumers: a warpgroup each ----------------------------------------------------------------------------------

template <class T>
struct FwdConsumer {
  static constexpr int kFragmentsN = T::kBlockN / 8, kFragmentsD = T::kHeadDim / 8;
  // Names of barriers for some of the block's threads; 0 is __syncthreads().
  static constexpr int kTurnBarrier = 1, kStoreBarrier = 1 + T::kConsumers;

  const FwdArguments& p;
  typename T::Shared& s;
  const int consumer, thread, warp, lane;  // thread: among the consumers; warp: in the warpgroup
  RingPlace<T::kStages> k_place, v_place;
  RingPlace<2> item_place;
  int q_phase = 0;

  __device__ __forceinline__ FwdConsumer(const FwdArguments& arguments, typename T::Shared& shared)
      : p(arguments),
        s(shared),
        consumer(cutlass::canonical_warp_group_idx() - 1),
        thread(threadIdx.x - 128),
        warp(threadIdx.x / 32 % 4),
        lane(threadIdx.x % 32) {}

  __device__ __forceinline__ void run() {
    if (consumer == T::kConsumers - 1) pass_turn();
    while (true) {
      const int index = next_item();
      if (index >= p.items) return;
      attend(find_item(p, index));
    }
  }

  __device__ __forceinline__ int next_item() {
    s.item_full[item_place.stage].wait(item_place.phase);
    const int index = __shfl_sync(0xffffffffu, s.item[item_place.stage], 0);
    if (lane == 0) s.item_empty[item_place.stage].arrive();
    item_place.advance();
    return index;
  }

  // One thread a warpgroup says that the warpgroup is done with a buffer.
  __device__ __forceinline__ void release(Barrier& empty) {
    if (threadIdx.x % 128 == 0) empty.arrive();
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

  __device__ __forceinline__ void attend(const FwdItem& item) {
    typename T::ScoreMma score_mma;
    typename T::OutMma out_mma;
    const auto score_slice = score_mma.get_slice(thread);
    const auto out_slice = out_mma.get_slice(thread);
    const auto q = score_slice.partition_fragment_A(cute::make_tensor(cute::make_smem_ptr(s.q), typename T::LayoutQ{}));
    const auto k = score_slice.partition_fragment_B(cute::make_tensor(cute::make_smem_ptr(s.k), typename T::LayoutK{}));
    const auto v = out_slice.partition_fragment_B(cute::make_tensor(cute::make_smem_ptr(s.v), typename T::LayoutVt{}));
    auto acc_s = cute::partition_fragment_C(score_mma, cute::Shape<Int<T::kBlockM>, Int<T::kBlockN>>{});
    auto acc_o = cute::partition_fragment_C(out_mma, cute::Shape<Int<T::kBlockM>, Int<T::kHeadDim>>{});
    // Probabilities as the first operand: the registers of the scores in the same order, 16 keys at a time.
    auto probabilities = cute::make_tensor<typename T::Element>(
        cute::Layout<cute::Shape<cute::Shape<cute::_2, cute::_2, cute::_2>, cute::_1, Int<T::kBlockN / 16>>>{});
    auto& scores = fragments<kFragmentsN>(acc_s);
    auto& out = fragments<kFragmentsD>(acc_o);

    const KeyBlocks blocks = find_key_blocks<T>(p, item.m_block);
    const int first_row = item.m_block * T::kBlockM + consumer * 64 + warp * 16 + lane / 4;
    OnlineSoftmax<1> softmax;
    float keep[2];  // what the running sums and the output are multiplied by, as the maximum has moved
    const float scale_log2 = p.softmax_scale * kLog2e;
    cute::clear(acc_o);
    s.q_full.wait(q_phase);
    q_phase ^= 1;

    const auto to_operand = [&] {
      auto packed = cute::recast<uint32_t>(probabilities);
#pragma unroll
      for (int i = 0; i < kFragmentsN; ++i) {
        packed(2 * i) = ElementTraits<typename T::Element>::pack(scores[0][i][0], scores[0][i][1]);
        packed(2 * i + 1) = ElementTraits<typename T::Element>::pack(scores[0][i][2], scores[0][i][3]);
      }
    };
    // Scores of block n, beside the output of block n + 1.
    const auto step = [&](auto is_masked, int n) {
      s.k_full[k_place.stage].wait(k_place.phase);
      wait_turn();
      start_product<true>(score_mma, q, k(cute::_, cute::_, cute::_, k_place.stage), acc_s);
      s.v_full[v_place.stage].wait(v_place.phase);
      start_product<false>(out_mma, probabilities, v(cute::_, cute::_, cute::_, v_place.stage), acc_o);
      pass_turn();
      wait_for_product<1>(acc_s);
      release(s.k_empty[k_place.stage]);
      k_place.advance();
      if constexpr (decltype(is_masked)::value) mask(scores, n, first_row);
      softmax.template probabilities<true>(scores, keep, scale_log2);
      wait_for_product<0>(acc_o);
      release(s.v_empty[v_place.stage]);
      v_place.advance();
      to_operand();
      OnlineSoftmax<1>::rescale(out, keep);
    };

    if (blocks.end > 0) {
      int n = blocks.end - 1;
      s.k_full[k_place.stage].wait(k_place.phase);
      start_product<true>(score_mma, q, k(cute::_, cute::_, cute::_, k_place.stage), acc_s);
      wait_for_product<0>(acc_s);
      release(s.k_empty[k_place.stage]);
      k_place.advance();
      if (n >= blocks.full) mask(scores, n, first_row);
      softmax.template probabilities<true>(scores, keep, scale_log2);
      to_operand();
      for (--n; n >= blocks.full; --n) step(cute::true_type{}, n);
#pragma unroll 1
      for (; n >= 0; --n) step(cute::false_type{}, n);
      if constexpr (T::kOwnOut) release(s.q_empty);
      s.v_full[v_place.stage].wait(v_place.phase);
      start_product<false>(out_mma, probabilities, v(cute::_, cute::_, cute::_, v_place.stage), acc_o);
      wait_for_product<0>(acc_o);
      release(s.v_empty[v_place.stage]);
      v_place.advance();
    } else if constexpr (T::kOwnOut) {
      release(s.q_empty);
    }
    finish_rows(p, softmax, p.softmax_scale, out, item, first_row);
    const bool is_speaker = threadIdx.x % 128 == 0;
    if constexpr (T::kOwnOut) {
      // The store of the item before has read this memory.
      if (is_speaker) cute::tma_store_wait<0>();
      cutlass::arch::NamedBarrier::sync(128, kStoreBarrier + consumer);
    }
    store_rows<T>(p, s.out(), acc_o, out_mma, consumer, kStoreBarrier + consumer, item);
    if constexpr (!T::kOwnOut) {
      if (is_speaker) {
        cute::tma_store_wait<0>();
        s.q_empty.arrive();
      }
    }
  }

  // Keys outside the sequence, or past what a row may see, get -inf.
  __device__ __forceinline__ void mask(float (&scores)[1][kFragmentsN][4], int n, int first_row) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int row = first_row + 8 * j;
      int limit = p.is_causal ? min(p.seqlen_k, row + 1 + p.seqlen_k - p.seqlen_q) : p.seqlen_k;
      limit -= n * T::kBlockN + (lane % 4) * 2;
#pragma unroll
      for (int i = 0; i < kFragmentsN; ++i) {
        if (8 * i >= limit) scores[0][i][2 * j] = -INFINITY;
        if (8 * i + 1 >= limit) scores[0][i][2 * j + 1] = -INFINITY;
      }
    }
  }
};

template <class T>
__global__ void __launch_bounds__(T::kThreads, 1) fwd_kernel(const __grid_constant__ FwdArguments p) {
  extern __shared__ char smem[];
  const uint32_t base = smem_u32(smem);
  auto& s = *reinterpret_cast<typename T::Shared*>(smem + ((base + 1023) / 1024 * 1024 - base));
  if (threadIdx.x == 0) init_barriers<T>(s);
  __syncthreads();
  if (cutlass::canonical_warp_group_idx() == 0) {
    cutlass::arch::warpgroup_reg_dealloc<T::kProducerRegisters>();
    if (threadIdx.x == 0) FwdProducer<T>{p, s}.run();
  } else {
    cutlass::arch::warpgroup_reg_alloc<T::kConsumerRegisters>();
    FwdConsumer<T>(p, s).run();
    if (threadIdx.x % 128 == 0) cute::tma_store_wait<0>();
  }
}

}  // namespace dmattn::sm90
