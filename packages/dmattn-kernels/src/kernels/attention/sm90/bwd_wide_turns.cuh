// Sums in a fixed order in the Hopper backward of wide heads: turns that clusters take at a tile of dq, and the warps
// that wait for them and pass them on.
#pragma once

#include "bwd_dq.cuh"
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
// once.
template <class T>
struct WideTurns {
  const BwdArguments& p;
  typename T::Shared& s;
  const int consumer;

  __device__ __forceinline__ void run(const BwdItemOf<T>& item) {
    constexpr int kTurns = T::kCluster * T::kConsumers;
    int phase = 0;
#pragma unroll 1
    for (WideSteps<T> steps(p, item); steps.left > 0; steps.advance()) {
      int32_t* const counter = p.dq_semaphore + dq_block_of<T>(p, item, steps.head, steps.m);
      // Rows that see a key see those before it, from the first of their window on.
      wait_for_turn(counter, (item.n_block - first_block_of_window<T>(p, steps.m)) * kTurns);
      s.turn_full[consumer].arrive();
      s.turn_used[consumer].wait(phase);
      pass_turn(counter);
      phase ^= 1;
    }
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
