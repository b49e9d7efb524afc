// Sums in a fixed order in the Hopper backward of wide heads: turns that clusters take at a tile of dq, and the warps
// that wait for them and pass them on.
#pragma once

#include "bwd_dq.cuh"
#include "bwd_mask.cuh"
#include "bwd_wide_traits.cuh"

namespace dmattn::sm90 {

// Whether dq is added up in order: what may_take_turns() has said.
template <class T>
__device__ __forceinline__ bool takes_turns(const BwdArguments& p, const typename T::Shared& s) {
  if constexpr (T::kPacked) return s.takes_turns;
  return !T::kGathered && p.dq_semaphore != nullptr;
}

// As in BwdDq, but the consumers add their parts of dq themselves. Polling a counter, and the fence before it is
// advanced, take a good part of a step, beside which they run here. Each of the four consumers of a cluster counts
// once. Whole warp, of which one thread waits.
template <class T>
struct WideTurns {
  const BwdArguments& p;
  typename T::Shared& s;
  const int consumer, lane;
  int phase = 0;

  __device__ __forceinline__ void run(const BwdItemOf<T>& item) {
    if constexpr (T::kMasked) {
      run_announced(item);
    } else {
      if (lane != 0) return;
#pragma unroll 1
      for (WideSteps<T> steps(p, item); steps.left > 0; steps.advance()) {
        // Rows that see a key see those before it, from the first of their window on.
        take_turn(item, steps.head, steps.m, item.n_block - first_block_of_window<T>(p, steps.m));
      }
    }
  }
  __device__ __forceinline__ void run_announced(const BwdItem& item) {
    s.rows_known.wait(0);
    if (!s.rows.exist) return;
    bool is_last = false;
#pragma unroll 1
    for (RingPlace<T::kStagesQ> place; !is_last; place.advance()) {
      s.q_full[place.stage].wait(place.phase);
      const RowTile tile = s.rows.with_q[place.stage];
      __syncwarp();
      if (lane == 0) s.q_empty[place.stage].arrive();
      is_last = tile.is_last();
      const int before = blocks_before<T>(p, item, tile.head, tile.m(), lane);
      if (lane == 0) take_turn(item, tile.head, tile.m(), before);
      __syncwarp();
    }
  }
  // At the dq of these rows, behind as many blocks of keys.
  __device__ __forceinline__ void take_turn(const BwdItemOf<T>& item, int head, int m, int before) {
    int32_t* const counter = p.dq_semaphore + dq_block_of<T>(p, item, head, m);
    wait_for_turn(counter, before * T::kCluster * T::kConsumers);
    s.turn_full[consumer].arrive();
    s.turn_used[consumer].wait(phase);
    pass_turn(counter);
    phase ^= 1;
  }
};

// Where clusters wait for each other, no item belongs to one before it runs: see BwdProducer::run(). All threads.
template <class T>
__device__ __forceinline__ int take_number(const BwdArguments& p, typename T::Shared& s, int rank) {
  cute::cluster_sync();  // the other thread block has begun
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
