// Sums in a fixed order in the Hopper backward with a mask or a bias: the warps that take turns at dq for the
// consumers.
#pragma once

#include "bwd_dq.cuh"
#include "bwd_mask.cuh"

namespace dmattn::sm90 {

// As in BwdDq, which says why nobody waits forever, but a mask may leave out blocks of keys. Each consumer has a warp
// of its own, and each counts once. Where the consumer leaves its part of dq in shared memory the warp adds it. Where
// it adds from registers the warp says when, and waits for that. The rows of the next step are known before the turn is
// passed on, so that the answer to whether it is the block's turn there comes beside the additions and the fence.
template <class T>
struct DqTurns {
  const BwdArguments& p;
  typename T::Shared& s;
  const int consumer, lane;
  RingPlace<2> item_place = {};
  RingPlace<T::kStagesQ> q_place = {};
  int phase = 0;

  // Of a step: the block of rows among all, and what their counter says when it is the block's turn.
  struct Turn {
    int block, value;
  };
  static constexpr bool kIsStaged = T::kDqPath == DqPath::kBulk;

  __device__ __forceinline__ void run() {
    while (true) {
      const typename T::Announced announced = take_announced<T>(s, item_place, lane);
      if (announced.index >= p.items) return;
      take_turns(find_item<T>(p, announced));
    }
  }

  __device__ __forceinline__ void take_turns(const BwdItem& item) {
    if (item.m_begin >= item.m_end) return;
    if constexpr (T::kMasked) {
      RowTile tile = next_tile();
      take_turns(item, tile.head, tile.m(), [&](int& head, int& m) {
        if (tile.is_last()) return false;
        tile = next_tile();
        head = tile.head;
        m = tile.m();
        return true;
      });
    } else {
      if (hides_item(p, item)) return;
      BwdSteps<T> steps(p, item);
      take_turns(item, steps.head, steps.m, [&](int& head, int& m) {
        steps.advance();
        head = steps.head;
        m = steps.m;
        return steps.left > 0;
      });
    }
  }
  // `advance` finds the rows of the next step; false: there is none.
  template <class Advance>
  __device__ __forceinline__ void take_turns(const BwdItem& item, int head, int m, const Advance& advance) {
    Turn turn = find_turn(item, head, m);
    bool is_turn = false;
#pragma unroll 1
    while (true) {
      const bool has_next = advance(head, m);
      const Turn next = has_next ? find_turn(item, head, m) : turn;
      begin(turn, is_turn);
      is_turn = end(turn, next);
      if (!has_next) return;
      turn = next;
    }
  }

  // Announced beside its Q. Whole warp.
  __device__ __forceinline__ RowTile next_tile() {
    s.q_full[q_place.stage].wait(q_place.phase);
    const RowTile tile = s.mask.tile[q_place.stage];
    __syncwarp();
    if (lane == 0) s.q_empty[q_place.stage].arrive();
    q_place.advance();
    return tile;
  }

  __device__ __forceinline__ Turn find_turn(const BwdItem& item, int head, int m) const {
    return {dq_block_of<T>(p, item, head, m), blocks_before<T>(p, item, head, m, lane) * T::kConsumers};
  }

  // When it is the block's turn, adds the consumer's part of dq, or lets it add. is_turn: it is known to be.
  __device__ __forceinline__ void begin(const Turn& turn, bool is_turn) const {
    if (lane == 0) {
      if (!is_turn) wait_for_turn(p.dq_semaphore + turn.block, turn.value);
      if constexpr (kIsStaged) {
        asm volatile("fence.proxy.async.global;" ::: "memory");
        s.turn_used[consumer].wait(phase);
        add_bulk(p.dq_accum + static_cast<int64_t>(turn.block) * p.dq_tile + consumer * T::Dq::kPart,
                 smem_u32(s.out[0][consumer]), own_dq_bytes<T>(p, consumer));
        cute::tma_store_arrive();
        cute::tma_store_wait<0>();
      }
      s.turn_full[consumer].arrive();
    }
    __syncwarp();
  }
  // Passes the turn on when the part has been added; whether that of the next step has come already. The fence of
  // pass_turn() comes between the answer and what is added next.
  __device__ __forceinline__ bool end(const Turn& turn, const Turn& next) {
    int value = 0;
    if (lane == 0) {
      if constexpr (!kIsStaged) s.turn_used[consumer].wait(phase);
      value = peek_at_turn(p.dq_semaphore + next.block);
      if constexpr (kIsStaged) wait_for_bulk();
      pass_turn(p.dq_semaphore + turn.block);
    }
    phase ^= 1;
    return value >= next.value;
  }
};

}  // namespace dmattn::sm90
