// What a consumer of the Hopper backward knows and how it takes and gives back buffers. What it computes is in
// bwd_kernel.cuh, what becomes of its results in bwd_results.cuh.
#pragma once

#include "bwd_gather.cuh"
#include "bwd_items.cuh"

namespace dmattn::sm90 {

// An accumulator as its registers, in groups of eight columns.
template <int kFragments, class Accumulator>
__device__ __forceinline__ auto fragments(Accumulator& acc) -> float (&)[kFragments][4] {
  static_assert(cute::cosize_v<typename Accumulator::layout_type> == kFragments * 4);
  return *reinterpret_cast<float (*)[kFragments][4]>(acc.data());
}

template <class T>
struct BwdConsumerState {
  using Element = typename T::Element;
  using Dq = typename T::Dq;
  static constexpr int kFragmentsM = T::kBlockM / 8, kFragmentsD = T::kHeadDim / 8;
  // Names of barriers for some of the block's threads; 0 is __syncthreads().
  static constexpr int kdSBarrier = 1, kOwnBarrier = 2;
  // Of 64 keys and kBlockM rows: of fragment i, a thread has the keys 16 * warp + lane / 4 (registers 0 and 1) and 8 more
  // (2 and 3), and the rows 8 * i + lane % 4 * 2 (registers 0 and 2) and the next one (1 and 3).
  using Scores = float[kFragmentsM][4];

  const BwdArguments& p;
  typename T::Shared& s;
  const int consumer, thread, warp, lane;  // thread, warp: in the warpgroup
  float key_bias[2];                       // kKeyBias, consecutive keys: of the thread's two keys of the item
  RingPlace<T::kStagesQ> q_next;           // of the rows whose scores are started next
  RingPlace<T::kStagesdO> dout_place;
  RingPlace<2> item_place, facts_place;
  RingPlace<T::kStagesOut> out_place;
  int kv_phase = 0;
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
    }
    if constexpr (T::kMasked) item.has_rows = __shfl_sync(0xffffffffu, item.has_rows, 0);
    if (lane == 0) s.item_empty[item_place.stage].arrive();
    item_place.advance();
    return item;
  }

  // What is known of the item's keys.
  __device__ __forceinline__ const typename T::Facts& facts() const { return s.facts[facts_place.stage]; }
  // Of the 64 keys of the consumer those that the thread has in its registers 0 and 1, or 2 and 3, of each fragment.
  __device__ __forceinline__ int own_key(int half) const { return 64 * consumer + 16 * warp + lane / 4 + 8 * half; }
  // Tiles that threads have copied themselves.
  __device__ __forceinline__ void wait_for_keys(Barrier& full) {
    full.wait(kv_phase);
    if constexpr (T::kGathered) cutlass::arch::fence_view_async_shared();
  }

  __device__ __forceinline__ bool is_speaker() const { return thread == 0; }
  // One thread a warpgroup says that the warpgroup is done with a buffer.
  __device__ __forceinline__ void release(Barrier& empty) {
    if (is_speaker()) empty.arrive();
  }
  __device__ __forceinline__ void sync_own() { cutlass::arch::NamedBarrier::sync(128, kOwnBarrier + consumer); }
};

}  // namespace dmattn::sm90
