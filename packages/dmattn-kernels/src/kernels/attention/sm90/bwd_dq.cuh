// Sums in a fixed order in the Hopper backward: turns that blocks of keys take at a tile of dq, and the warp that takes
// them.
//
// A turn is a counter in memory, and waiting for it and passing it on take longer than anything else in a step. So the
// consumers do neither: they leave their parts of dq in shared memory and go on. This warp has them added when the turn
// has come, gives the stage back when it has been read, and passes the turn on when the additions have arrived.
#pragma once

#include "../shared/smem.cuh"
#include "bwd_items.cuh"

namespace dmattn::sm90 {

// Counters of turns, in memory.
//
// Without a fence: behind pass_turn() of another one.
__device__ __forceinline__ void count_turn(int32_t* counter) {
  asm volatile("red.relaxed.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}
// Who passes a turn on says by the fence that what it has added comes before. Bulk additions have to be complete by
// then (wait_for_bulk()), and those of other threads of the block to come before a barrier between them and this one.
__device__ __forceinline__ void pass_turn(int32_t* counter) {
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
  count_turn(counter);
}
// Where several pass a turn on, some of them may have passed on the next one already.
__device__ __forceinline__ int read_turn(const int32_t* counter) {
  int32_t now;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
  return now;
}
__device__ __forceinline__ void wait_for_turn(const int32_t* counter, int at_least) {
  while (read_turn(counter) < at_least) {
  }
}
// Without a fence: only after the next one may what is added rely on the value.
__device__ __forceinline__ int peek_at_turn(const int32_t* counter) {
  int32_t now;
  asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
  return now;
}

// Bytes of a consumer's part of a tile of dq in memory: the last fragments may be left out.
template <class T>
__device__ __forceinline__ uint32_t own_dq_bytes(const BwdArguments& p, int consumer) {
  return consumer == 0 ? T::Dq::kPart * sizeof(float) : p.dq_last_bytes;
}

// Whether dq is added up in order. Boundaries of packed sequences are the caller's and may be any numbers, and blocks
// of keys that there are not would be waited for: then nobody takes turns. All threads of a thread block.
template <class T>
__device__ __forceinline__ bool may_take_turns(const BwdArguments& p) {
  if (p.dq_semaphore == nullptr) return false;
  if constexpr (T::kPacked) return fit_packed_ranges(p.packing, p.seqlen_q, p.seqlen_k);
  return true;
}

// Blocks of keys that see a block of rows add to its dq one after the other, from the first to the last; over lists,
// the tiles of a chunk that do. Where several begin together each comes to wait for the one before it at its first
// steps. After that it stays behind it by as much as a turn takes, and does not wait again.
//
// Those that come before have lower item numbers. They have been taken, then, and thread blocks finish their
// items in order: who is waited for is running. What it still has to do before it passes its turns on waits for lower
// numbers alone. In particular this warp passes a turn on before it waits for the next one, and never waits for the
// consumers of its block to get past the step whose turn it is. The item with the lowest number waits for nobody.
template <class T>
struct BwdDq {
  const BwdArguments& p;
  typename T::Shared& s;
  const int lane;
  const bool takes_turns;
  RingPlace<2> item_place = {};
  RingPlace<T::kStagesOut> out_place = {};

  __device__ __forceinline__ void run() {
    while (true) {
      const typename T::Announced announced = take_announced<T>(s, item_place, lane);
      if (announced.index >= p.items) return;
      const BwdItemOf<T> item = find_item<T>(p, announced);
      if constexpr (T::kGathered) {  // for one thread that has to know it in each step
        const int seen_by = count_tiles_before(p, item, lane);
        if (lane < item.m_end - item.m_begin) s.tiles_before[lane] = seen_by;
        __syncwarp();
      }
      if (lane == 0) add_item(item);
      __syncwarp();
    }
  }

  __device__ __forceinline__ void add_item(const BwdItemOf<T>& item) {
    bool is_turn = !takes_turns;  // at the rows of the step
    BwdSteps<T> steps(p, item);
#pragma unroll 1  // few registers
    while (steps.left > 0) {
      const int block = block_of(item, steps);
      if (!is_turn) {
        wait_for_turn(p.dq_semaphore + block, turns_before(item, steps.m));
        asm volatile("fence.proxy.async.global;" ::: "memory");
      }
      s.out_full[out_place.stage].wait(out_place.phase);
      add_bulk(p.dq_accum + static_cast<int64_t>(block) * p.dq_tile, smem_u32(s.out[out_place.stage]),
               p.dq_tile * sizeof(float));
      cute::tma_store_arrive();
      cute::tma_store_wait<0>();
      s.out_empty[out_place.stage].arrive();
      out_place.advance();
      steps.advance();
      if (takes_turns) is_turn = finish_turn(block, item, steps);
    }
  }

  // Passes the turn on; whether it is already the block's at the rows of the next step. That is asked while additions
  // are on their way, and the fence in pass_turn() comes between the answer and what is added next, too.
  __device__ __forceinline__ bool finish_turn(int block, const BwdItemOf<T>& item, const BwdSteps<T>& next) {
    const int turns = next.left > 0 ? peek_at_turn(p.dq_semaphore + block_of(item, next)) : -1;
    wait_for_bulk();
    pass_turn(p.dq_semaphore + block);
    const bool is_turn = next.left > 0 && turns == turns_before(item, next.m);
    if (is_turn) asm volatile("fence.proxy.async.global;" ::: "memory");
    return is_turn;
  }

  __device__ __forceinline__ int block_of(const BwdItemOf<T>& item, const BwdSteps<T>& steps) const {
    return dq_block_of<T>(p, item, steps.head, steps.m);
  }
  __device__ __forceinline__ int turns_before(const BwdItem& item, int m) const {
    if constexpr (T::kGathered) {
      return s.tiles_before[m - item.m_begin];
    } else {
      return item.n_block;  // rows that see a key see those before it
    }
  }
};

}  // namespace dmattn::sm90
