// Sums in a fixed order in the Hopper backward with a mask or a bias: the warps that take turns at dq for the
// consumers.
#pragma once

#include "bwd_dbias.cuh"
#include "bwd_dq.cuh"
#include "bwd_mask.cuh"

namespace dmattn::sm90 {

// The number of a counter, and the value at which it is the block's turn.
struct Turn {
  int counter, value;
};

// Takes the turns of a block of keys, step by step. turns.begin() waits for the turn, unless end() of the step before
// has found that it has come, and turns.end() passes it on. The rows of the next step are found in between, during the
// additions, so that end() can ask for their turn while it waits for the fence, which takes longer than anything else.
// head, m: those of the first step. `advance` sets those of the next one; false: there is none.
template <class Turns, class Item, class Advance>
__device__ __forceinline__ void take_turns_at(Turns& turns, const Item& item, int head, int m, const Advance& advance) {
  auto turn = turns.find_turn(item, head, m);
  bool is_turn = false;
#pragma unroll 1
  while (true) {
    turns.begin(item, head, m, turn, is_turn);
    const bool has_next = advance(head, m);
    const auto next = has_next ? turns.find_turn(item, head, m) : turn;
    is_turn = turns.end(turn, next, has_next);
    if (!has_next) return;
    turn = next;
  }
}

// The next tile, as announced beside its Q. Whole warp.
template <class T>
__device__ __forceinline__ RowTile take_tile(typename T::Shared& s, const RowTile* announced,
                                             RingPlace<T::kStagesQ>& place, int lane) {
  s.q_full[place.stage].wait(place.phase);
  const RowTile tile = announced[place.stage];
  __syncwarp();
  if (lane == 0) s.q_empty[place.stage].arrive();
  place.advance();
  return tile;
}

// The turn at a tile of dbias that heads or batches share. Items that share a tile add to it in the order of their
// numbers. All heads and batches have the same tiles, and find_tiled_item() gives neighbouring numbers to items that
// share a block of keys.
template <class T>
__device__ __forceinline__ Turn find_dbias_turn(const BwdArguments& p, const BwdItem& item, int head, int m) {
  const DbiasPlace at = find_dbias_place<T>(p, item, head, m, /*consumer=*/0);
  const int map = at.batch * (p.nheads / p.dbias_head_ratio) + at.head;
  const bool shares_heads_k = p.dbias_head_ratio > p.head_ratio, shares_batches = p.dbias_batch_step == 0;
  int before = shares_heads_k ? item.head_k : 0;
  if (shares_batches) before = before * p.batches + item.batch;
  if (p.dbias_head_ratio > 1) {
    before = before * p.group_heads + head - item.head_k * p.head_ratio - p.group_begin;
  }
  return {(map * p.m_blocks + m) * p.n_blocks + item.n_block, before * T::kConsumers};
}

// Turns at dq as in BwdDq, whose comment says why nobody waits forever; but here a mask may leave out blocks of keys.
// Each consumer has a warp of its own, and each of these counts once. With DqPath::kBulk the consumer leaves its part
// of dq in shared memory, and the warp adds it. With kVector the consumer adds from registers; the warp tells it when,
// and waits until it has. Additions to a dbias that heads or batches share belong to the same turn. An fp32 bias is
// overwritten with its gradient: the warp sends this from the stage, and then releases the stage for the consumer.
template <class T>
struct DqTurns {
  const BwdArguments& p;
  typename T::Shared& s;
  const int consumer, lane;
  RingPlace<2> item_place = {};
  RingPlace<T::kStagesQ> q_place = {};
  int phase = 0;

  static constexpr bool kIsStaged = T::kDqPath == DqPath::kBulk;
  struct Turns {
    Turn dq, dbias;
  };

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
      take_turns_at(*this, item, tile.head, tile.m(), [&](int& head, int& m) {
        if (tile.is_last()) return false;
        tile = next_tile();
        head = tile.head;
        m = tile.m();
        return true;
      });
    } else {
      if (hides_item(p, item)) return;
      BwdSteps<T> steps(p, item);
      take_turns_at(*this, item, steps.head, steps.m, [&](int& head, int& m) {
        steps.advance();
        head = steps.head;
        m = steps.m;
        return steps.left > 0;
      });
    }
  }
  __device__ __forceinline__ RowTile next_tile() { return take_tile<T>(s, s.mask.tile, q_place, lane); }

  __device__ __forceinline__ Turns find_turn(const BwdItem& item, int head, int m) const {
    Turns found = {};
    found.dq = {dq_block_of<T>(p, item, head, m), blocks_before<T>(p, item, head, m, lane) * T::kConsumers};
    if (orders_dbias<T>(p)) found.dbias = find_dbias_turn<T>(p, item, head, m);
    return found;
  }

  // Waits for the block's turn, and then adds the consumer's part of dq or lets the consumer add it.
  __device__ __forceinline__ void begin(const BwdItem& item, int head, int m, const Turns& turn, bool is_turn) {
    if (lane == 0) {
      if (!is_turn) {
        wait_for_turn(p.dq_semaphore + turn.dq.counter, turn.dq.value);
        if (orders_dbias<T>(p)) wait_for_turn(p.dbias_semaphore + turn.dbias.counter, turn.dbias.value);
      }
      if constexpr (kIsStaged) {
        asm volatile("fence.proxy.async.global;" ::: "memory");
        s.turn_used[consumer].wait(phase);
        add_bulk(p.dq_accum + static_cast<int64_t>(turn.dq.counter) * p.dq_tile + consumer * T::Dq::kPart,
                 smem_u32(s.out[0][consumer]), own_dq_bytes<T>(p, consumer));
        cute::tma_store_arrive();
        cute::tma_store_wait<0>();
      }
      s.turn_full[consumer].arrive();
      if constexpr (T::kWideBias) send_dbias(item, head, m);
    }
    __syncwarp();
  }
  // Sends the gradient of an fp32 bias, once the consumer has written it and has added its part of dq. One thread.
  __device__ __forceinline__ void send_dbias(const BwdItem& item, int head, int m) const {
    s.turn_used[consumer].wait(phase);
    if (p.dbias_kind == DbiasKind::kNone) return;
    asm volatile("fence.proxy.async.global;" ::: "memory");
    send_wide_dbias<T>(p, s.bias.tiles + q_place.stage * T::kTiledS, consumer,
                       find_dbias_place<T>(p, item, head, m, consumer));
    cute::tma_store_arrive();
  }
  // Passes the turn on when the part has been added. Returns whether the turn of the next step has come already. Its
  // counter is read before the fence of pass_turn(), which so comes between this read and the next additions; the
  // answer is used only after the fence, so that nothing waits for it before.
  __device__ __forceinline__ bool end(const Turns& turn, const Turns& next, bool) {
    int dq_value = 0, dbias_value = 0;
    if (lane == 0) {
      if constexpr (!kIsStaged && !T::kWideBias) s.turn_used[consumer].wait(phase);
      dq_value = peek_at_turn(p.dq_semaphore + next.dq.counter);
      if (orders_dbias<T>(p)) dbias_value = peek_at_turn(p.dbias_semaphore + next.dbias.counter);
      if (kIsStaged || (T::kWideBias && orders_dbias<T>(p))) wait_for_bulk();
      pass_turn(p.dq_semaphore + turn.dq.counter);
      if (orders_dbias<T>(p)) count_turn(p.dbias_semaphore + turn.dbias.counter);
      if constexpr (T::kWideBias) {
        cute::tma_store_wait<0>();
        s.bias_empty[q_place.stage].arrive();
      }
    }
    phase ^= 1;
    if constexpr (T::kWideBias) q_place.advance();
    return dq_value >= next.dq.value && dbias_value >= next.dbias.value;
  }
};

}  // namespace dmattn::sm90
