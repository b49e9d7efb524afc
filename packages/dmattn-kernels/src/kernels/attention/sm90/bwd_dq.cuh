// Sums in a fixed order in the Hopper backward: turns that blocks of keys take at a tile of dq, and the warp that
// takes them.
//
// A turn is a counter in memory. Waiting for it and passing it on take longer than anything else in a step, so that
// the consumers do neither: they leave their parts of dq in shared memory and go on. This warp adds the parts when the
// turn has come, releases the stage when it has been read, and passes the turn on when the additions have arrived.
#pragma once

#include "../shared/smem.cuh"
#include "bwd_items.cuh"

namespace dmattn::sm90 {

// Counters of turns, in memory.
//
// Advances a counter without a fence: only directly after pass_turn() of another counter, whose fence then counts for
// both.
__device__ __forceinline__ void count_turn(int32_t* counter) {
  asm volatile("red.relaxed.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}
// Passes a turn on. The fence orders the count behind the additions. Bulk additions have to be complete by then
// (wait_for_bulk()), and additions of other threads of the block need a barrier between them and this thread.
__device__ __forceinline__ void pass_turn(int32_t* counter) {
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
  count_turn(counter);
}
__device__ __forceinline__ int read_turn(const int32_t* counter) {
  int32_t now;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
  return now;
}
// The counter may be further on: where several pass a turn on, some of them may have passed on the next one already.
__device__ __forceinline__ void wait_for_turn(const int32_t* counter, int at_least) {
  while (read_turn(counter) < at_least) {
  }
}
// Reads a counter without ordering: additions may rely on the value only after the next fence.
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

// Whether dq is added up in order. Boundaries of packed sequences come from the caller and may be wrong. Thread blocks
// would then wait forever for blocks of keys that do not exist, so that nobody takes turns in this case. All threads
// of a thread block.
template <class T>
__device__ __forceinline__ bool may_take_turns(const BwdArguments& p) {
  if (p.dq_semaphore == nullptr) return false;
  if constexpr (T::kPacked) return fit_packed_ranges(p.packing, p.seqlen_q, p.seqlen_k);
  return true;
}

// The blocks of keys that a block of rows sees add to its dq one after the other, from the first to the last; over
// lists, the tiles of a chunk do. Items that begin together wait for each other at their first steps. After that each
// stays behind the one before it by as much as a turn takes, and does not wait again.
//
// Nobody waits forever: an item waits only for items with lower numbers. They have been taken already, and thread
// blocks finish their items in order, so that an item that is waited for is running, and itself waits only for lower
// numbers. This warp passes a turn on before it waits for the next one, and never waits for the consumers of its block
// to get past the step whose turn it is. The item with the lowest number waits for nobody.
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
      if constexpr (T::kGathered) {  // one thread has to know it in each step
        const int seen_by = count_tiles_before(p, item, lane);
        if (lane < item.m_end - item.m_begin) s.tiles_before[lane] = seen_by;
        __syncwarp();
      }
      if (lane == 0) add_item(item);
      __syncwarp();
    }
  }

  __device__ __forceinline__ void add_item(const BwdItemOf<T>& item) {
    bool is_turn = !takes_turns;  // whether the turn at the rows of the step has come
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

  // Passes the turn on. Returns whether the turn at the rows of the next step has come already. Its counter is read
  // while additions are in flight; the fence in pass_turn() comes between this read and the next additions, too.
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
      return item.n_block;  // rows that see a key see all keys before it
    }
  }
};

}  // namespace dmattn::sm90
