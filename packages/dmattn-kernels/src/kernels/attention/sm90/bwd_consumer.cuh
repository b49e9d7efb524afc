// The state of a consumer of the Hopper backward, and how it waits for buffers and releases them. What it computes is
// in bwd_kernel.cuh, how its results leave in bwd_results.cuh.
#pragma once

#include "../shared/element.cuh"
#include "bwd_gather.cuh"
#include "bwd_items.cuh"
#include "bwd_mask.cuh"

namespace dmattn::sm90 {

// An accumulator as its registers, in groups of eight columns.
template <int kFragments, class Accumulator>
__device__ __forceinline__ auto fragments(Accumulator& acc) -> float (&)[kFragments][4] {
  static_assert(cute::cosize_v<typename Accumulator::layout_type> == kFragments * 4);
  return *reinterpret_cast<float (*)[kFragments][4]>(acc.data());
}

// Rounds an accumulator into the first operand of the next product, whose registers have the same order.
template <class Element, class Operand, int kFragments>
__device__ __forceinline__ void to_operand(Operand& operand, const float (&from)[kFragments][4]) {
  auto packed = cute::recast<uint32_t>(operand);
#pragma unroll
  for (int i = 0; i < kFragments; ++i) {
    packed(2 * i) = ElementTraits<Element>::pack(from[i][0], from[i][1]);
    packed(2 * i + 1) = ElementTraits<Element>::pack(from[i][2], from[i][3]);
  }
}

// Copies words to other registers. The xor with `zero`, which is 0 but unknown to the compiler, keeps it from using
// the same registers for both.
template <class Operand>
__device__ __forceinline__ void move(Operand& to, const Operand& from, uint32_t zero) {
  auto to_words = cute::recast<uint32_t>(to);
  const auto from_words = cute::recast<const uint32_t>(from);
#pragma unroll
  for (int i = 0; i < cute::size(to_words); ++i) {
    asm volatile("xor.b32 %0, %1, %2;" : "=r"(to_words(i)) : "r"(from_words(i)), "r"(zero));
  }
}

template <class T>
struct BwdConsumerState {
  using Element = typename T::Element;
  using Dq = typename T::Dq;
  static constexpr int kFragmentsM = T::kBlockM / 8, kFragmentsD = T::kHeadDim / 8;
  // Numbers of named barriers, which only some of the block's threads use. 0 is __syncthreads().
  static constexpr int kdSBarrier = 1, kOwnBarrier = 2;
  // 64 keys and kBlockM rows. Of fragment i a thread has two keys, 16 * warp + lane / 4 (registers 0 and 1) and 8
  // further on (2 and 3), and two rows, 8 * i + lane % 4 * 2 (registers 0 and 2) and the next one (1 and 3).
  using Scores = float[kFragmentsM][4];

  const BwdArguments& p;
  typename T::Shared& s;
  const int consumer, thread, warp, lane;  // thread, warp: in the warpgroup
  float key_bias[2];                       // kKeyBias, consecutive keys: the bias of the thread's two keys
  HiddenKeys hidden;                       // kWideBias: the keys that a mask hides
  RingPlace<T::kStagesQ> q_next;           // the stage of Q whose scores are started next
  RingPlace<T::kStagesdO> dout_place;
  RingPlace<2> item_place, facts_place;
  RingPlace<T::kStagesOut> out_place;
  RingPlace<T::kStagesBias> bias_place;  // kPairs
  KvPlace<T::kStagesKv> kv_place;
  int ds_stage = 0;

  __device__ __forceinline__ BwdConsumerState(const BwdArguments& arguments, typename T::Shared& shared)
      : p(arguments),
        s(shared),
        consumer(cutlass::canonical_warp_group_idx() - 1),
        thread(threadIdx.x % 128),
        warp(threadIdx.x / 32 % 4),
        lane(threadIdx.x % 32) {}

  __device__ __forceinline__ typename T::Announced next_item() {
    s.item_full[item_place.stage].wait(item_place.phase);
    typename T::Announced item = s.item[item_place.stage];
    item.index = __shfl_sync(0xffffffffu, item.index, 0);
    if constexpr (T::kGathered) {
      item.m_begin = __shfl_sync(0xffffffffu, item.m_begin, 0);
      item.m_end = __shfl_sync(0xffffffffu, item.m_end, 0);
      if constexpr (!T::kOrdered) item.heads = __shfl_sync(0xffffffffu, item.heads, 0);
    }
    if constexpr (T::kMasked) item.has_rows = __shfl_sync(0xffffffffu, item.has_rows, 0);
    if constexpr (!T::kPacked) finish_item();
    return item;
  }
  // Lets the producer overwrite what it has announced of the item.
  __device__ __forceinline__ void finish_item() {
    if constexpr (T::kPacked) __syncwarp();
    if (lane == 0) s.item_empty[item_place.stage].arrive();
    item_place.advance();
  }
  // The lengths of the item's packed sequence, or of all rows and keys.
  __device__ __forceinline__ decltype(auto) lengths() const {
    if constexpr (T::kPacked) {
      const typename T::Announced& own = s.item[item_place.stage];
      return PackedLengths{own.q.length, own.k.length, p.is_causal};
    } else {
      return (p);
    }
  }

  // What the list says about the item's keys.
  __device__ __forceinline__ const typename T::Facts& facts() const { return s.facts[facts_place.stage]; }
  // The thread's key in registers 0 and 1 of each fragment (half 0), or in registers 2 and 3 (half 1), counted in the
  // item.
  __device__ __forceinline__ int own_key(int half) const { return 64 * consumer + 16 * warp + lane / 4 + 8 * half; }
  // Waits for K or V. Where threads have copied them, a fence makes them visible to the tensor cores.
  __device__ __forceinline__ void wait_for_keys(Barrier (&full)[T::kStagesKv]) {
    full[kv_place.stage].wait(kv_place.phase);
    if constexpr (T::kGathered) cutlass::arch::fence_view_async_shared();
  }
  // Keys that a mask hides from all rows may be NaN, which a ds of 0 would not keep out of dq. So their rows of K and
  // V are set to zero. A consumer does that for its own keys, with two threads for each. The other consumer needs
  // these rows only for dq, which comes after the barrier of ds.
  __device__ __forceinline__ void clear_hidden_keys(const BwdItem& item) {
    static_assert(T::kMasked && T::kMembers == 1);
    if (!p.mask.is_key_only) return;
    const int own = 64 * consumer + thread / 2;
    const bool is_hidden = hides_key(p, item, item.n_block * T::kBlockN + own);
    wait_for_keys(s.k_full);
    wait_for_keys(s.v_full);
    if (is_hidden) {
      constexpr int kWords = T::kPanelCols / 16;  // of 16 bytes: half of a panel's row
#pragma unroll
      for (Element* const tile : {s.k, s.v}) {
#pragma unroll
        for (int panel = 0; panel < T::kPanels; ++panel) {
          Element* const row = tile + (panel * T::kBlockN + own) * T::kPanelCols;
          uint4* const part = reinterpret_cast<uint4*>(row) + thread % 2 * kWords;
#pragma unroll
          for (int i = 0; i < kWords; ++i) part[i] = make_uint4(0, 0, 0, 0);
        }
      }
    }
    cutlass::arch::fence_view_async_shared();
    sync_own();
  }

  __device__ __forceinline__ bool is_speaker() const { return thread == 0; }
  // One thread a warpgroup says that the warpgroup is done with a buffer.
  __device__ __forceinline__ void release(Barrier& empty) {
    if (is_speaker()) empty.arrive();
  }
  __device__ __forceinline__ void sync_own() { cutlass::arch::NamedBarrier::sync(128, kOwnBarrier + consumer); }
};

}  // namespace dmattn::sm90
