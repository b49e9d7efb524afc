// Sums in a fixed order in the Hopper backward of wide heads: turns that clusters take at a tile of dq, and the warps
// that wait for them and pass them on.
#pragma once

#include "bwd_dq.cuh"
#include "bwd_turns.cuh"
#include "bwd_wide_traits.cuh"

namespace dmattn::sm90 {

// Whether dq is added up in order: over lists a kernel of its own does that, otherwise may_take_turns() has decided.
template <class T>
__device__ __forceinline__ bool takes_turns(const BwdArguments& p, const typename T::Shared& s) {
  if constexpr (T::kGathered) return T::kOrdered;
  if constexpr (T::kPacked) return s.takes_turns;
  return p.dq_semaphore != nullptr;
}

// Turns at dq as in BwdDq, but the consumers add their parts themselves. Polling a counter, and the fence before it is
// advanced, take a good part of a step; in this warp they run beside the step. Each of the four consumers of a cluster
// counts once. Whole warp, of which one thread waits.
template <class T>
struct WideTurns {
  const BwdArguments& p;
  typename T::Shared& s;
  const int consumer, lane;
  int phase = 0;
  int tiles_before = 0;  // over lists, at the lane's block of rows: see count_tiles_before()

  __device__ __forceinline__ void run(const BwdItemOf<T>& item) {
    if constexpr (T::kGathered) tiles_before = count_tiles_before(p, item, lane);
    if constexpr (T::kMasked) {
      s.rows_known.wait(0);
      if (!s.rows.exist) return;
      RingPlace<T::kStagesQ> place;
      RowTile tile = take_tile<T>(s, s.rows.with_q, place, lane);
      take_turns_at(*this, item, tile.head, tile.m(), [&](int& head, int& m) {
        if (tile.is_last()) return false;
        tile = take_tile<T>(s, s.rows.with_q, place, lane);
        head = tile.head;
        m = tile.m();
        return true;
      });
    } else {
      WideSteps<T> steps(p, item);
      if (steps.left <= 0) return;
      take_turns_at(*this, item, steps.head, steps.m, [&](int& head, int& m) {
        steps.advance();
        head = steps.head;
        m = steps.m;
        return steps.left > 0;
      });
    }
  }
  __device__ __forceinline__ Turn find_turn(const BwdItemOf<T>& item, int head, int m) const {
    int before;
    if constexpr (T::kGathered) {
      before = __shfl_sync(0xffffffffu, tiles_before, m - item.m_begin);
    } else if constexpr (T::kMasked) {
      before = blocks_before<T>(p, item, head, m, lane);
    } else {
      before = item.n_block - first_block_of_window<T>(p, m);  // rows that see a key see those before it
    }
    return {dq_block_of<T>(p, item, head, m), before * T::kCluster * T::kConsumers};
  }
  // As in DqTurns, but the consumer may go on to the next step before the fence, if the next turn has come by then.
  __device__ __forceinline__ void begin(const BwdItemOf<T>&, int, int, const Turn& turn, bool is_turn) const {
    if (lane == 0 && !is_turn) {
      wait_for_turn(p.dq_semaphore + turn.counter, turn.value);
      s.turn_full[consumer].arrive();
    }
    __syncwarp();
  }
  __device__ __forceinline__ bool end(const Turn& turn, const Turn& next, bool has_next) {
    bool is_turn = has_next;
    if (lane == 0) {
      s.turn_used[consumer].wait(phase);
      if (has_next) is_turn = read_turn(p.dq_semaphore + next.counter) >= next.value;
      if (is_turn) s.turn_full[consumer].arrive();
      pass_turn(p.dq_semaphore + turn.counter);
    }
    phase ^= 1;
    return is_turn;
  }
};

// Takes the number of the cluster's item. Where clusters wait for each other, it must not follow from the number of
// the cluster: see BwdProducer::run(). All threads.
template <class T>
__device__ __forceinline__ int take_number(const BwdArguments& p, typename T::Shared& s, int rank) {
  cute::cluster_sync();  // the other thread block has started
  if (rank == 0 && threadIdx.x == 0) {
    const int number = atomicAdd(p.work_counter, 1);
    s.number = number;
    asm volatile("st.shared::cluster.s32 [%0], %1;" ::"r"(cute::set_block_rank(smem_u32(&s.number), 1)), "r"(number)
                 : "memory");
  }
  cute::cluster_sync();
  return s.number;
}

}  // namespace dmattn::sm90
