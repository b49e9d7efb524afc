// Hopper's asynchronous parts: barriers in shared memory, TMA loads, matrix products of a warpgroup.
#pragma once

#include <cuda.h>
#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>

#include <cstdint>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/tensor.hpp>

namespace dmattn::sm90 {

using cute::Int;

// A barrier in shared memory. Each wait names the phase it waits for: 0 first, then 1, then 0 again.
struct Barrier {
  uint64_t word;

  __device__ __forceinline__ void init(int arrivals) { cutlass::arch::ClusterBarrier::init(&word, arrivals); }
  __device__ __forceinline__ void wait(int phase) { cutlass::arch::ClusterBarrier::wait(&word, phase); }
  __device__ __forceinline__ void arrive() { cutlass::arch::ClusterBarrier::arrive(&word); }
  // Arrives, and keeps the phase from ending before `bytes` bytes have been copied.
  __device__ __forceinline__ void arrive_and_expect(uint32_t bytes) {
    cutlass::arch::ClusterTransactionBarrier::arrive_and_expect_tx(&word, bytes);
  }
  // Arrives once all that this thread has started to copy by copy_async() has been copied. Counts as one of the
  // arrivals.
  __device__ __forceinline__ void arrive_when_copied() { cutlass::arch::cpasync_barrier_arrive_noinc(&word); }
};

// Takes the next number of a counter, which counts to 2^31 - 1 at most. The thread does not wait before it uses the
// number. With an atomic addition it could wait at once, as the compiler adds up for a whole warp and distributes the
// numbers to its lanes. This is an increment that starts again at 0 beyond a bound, and the compiler leaves it alone.
__device__ __forceinline__ int next_number(int32_t* counter) {
  constexpr uint32_t kBound = INT32_MAX;
  uint32_t number;
  asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(number)
               : "l"(__cvta_generic_to_global(counter)), "r"(kBound));
  return static_cast<int>(number);
}

// A place in a ring of kStages buffers, and the phase of its barriers.
template <int kStages>
struct RingPlace {
  int stage = 0, phase = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
};

// Copies a panel of a tile into shared memory: the columns from `col` on, of as many rows as a box of the map has.
// Rows and columns outside the tensor become zeros.
__device__ __forceinline__ void load_panel(const CUtensorMap& map, Barrier& full, cute::TMA::CacheHintSm90 hint,
                                           void* panel, int col, int row, int head, int batch) {
  cute::SM90_TMA_LOAD_4D::copy(&map, &full.word, static_cast<uint64_t>(hint), panel, col, row, head, batch);
}
// Copies it to the same place in several thread blocks of the cluster, a bit of `blocks` for each. Each of them
// counts the bytes on its own barrier.
__device__ __forceinline__ void load_panel_to(uint16_t blocks, const CUtensorMap& map, Barrier& full,
                                              cute::TMA::CacheHintSm90 hint, void* panel, int col, int row, int head,
                                              int batch) {
  cute::SM90_TMA_LOAD_MULTICAST_4D::copy(&map, &full.word, blocks, static_cast<uint64_t>(hint), panel, col, row, head,
                                         batch);
}

// Copies 16 bytes from global to shared memory, or writes 16 zeros if they do not exist (nothing is read then).
// `policy`: the L2 cache policy.
__device__ __forceinline__ void copy_async(uint32_t to, const void* from, bool exists, uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::256B [%0], [%1], 16, %2, %3;" ::"r"(to), "l"(from),
               "r"(exists ? 16 : 0), "l"(policy)
               : "memory");
}

// The same with the default policy.
__device__ __forceinline__ void copy_async(uint32_t to, const void* from, bool exists) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(exists ? 16 : 0)
               : "memory");
}

// Waits until all bulk copies from shared memory that this thread has committed have been written.
__device__ __forceinline__ void wait_for_bulk() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Starts to add fp32 numbers from shared memory to as many in global memory.
__device__ __forceinline__ void add_bulk(float* to, uint32_t from, uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from),
               "r"(bytes)
               : "memory");
}
// Adds a thread's four numbers to 16 aligned bytes.
__device__ __forceinline__ void add_vector(float* to, const float (&x)[4]) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]),
               "f"(x[3])
               : "memory");
}

// Where a consumer looks up its part of an operand in shared memory: as the first thread of its warpgroup. All threads
// of a warpgroup have the same descriptor of it. Of the number of the consumer the compiler knows that, unlike of
// threadIdx.x. It then computes descriptors in uniform registers, where WGMMA wants them. Otherwise it keeps them in
// registers of each thread, or in local memory, and moves each one in front of its product.
template <class Mma>
__device__ __forceinline__ auto operand_slice(const Mma& mma, int consumer) {
  return mma.get_slice(consumer * 128);
}

// Starts c = a * b (kClear) or c += a * b. The products run until warpgroup_wait() says that they are done; until then
// nobody may touch c, or a where it lies in registers.
template <bool kClear, class Mma, class A, class B, class C>
__device__ __forceinline__ void start_product(Mma& mma, const A& a, const B& b, C& c) {
  cute::warpgroup_fence_operand(c);
  cute::warpgroup_arrive();
  mma.accumulate_ = kClear ? cute::GMMA::ScaleOut::Zero : cute::GMMA::ScaleOut::One;
#pragma unroll
  for (int k = 0; k < cute::size<2>(a); ++k) {
    cute::gemm(mma, a(cute::_, cute::_, k), b(cute::_, cute::_, k), c);
    mma.accumulate_ = cute::GMMA::ScaleOut::One;
  }
  cute::warpgroup_commit_batch();
  cute::warpgroup_fence_operand(c);
}

// Says that nobody needs what is in c, so that its registers are free until the next product writes them. (That product
// takes c as an input, even if it ignores it.)
template <class C>
__device__ __forceinline__ void discard(C& c) {
#pragma unroll
  for (int i = 0; i < cute::size(c); ++i) asm volatile("" : "=f"(c(i)));
}

// Waits until all but the last kPending products that this warpgroup started are done.
template <int kPending, class C>
__device__ __forceinline__ void wait_for_product(C& c) {
  cute::warpgroup_wait<kPending>();
  cute::warpgroup_fence_operand(c);
}

// Keeps what waits or writes after this behind the probability, in the compiled program, too. The compiler sees no
// order between exponentials and the wait for the previous product, and put that wait before all of them. But it
// keeps the order of writes and waits, so here is a write that depends on the probability. It never happens: no
// probability is below zero, and NaN is not, either.
__device__ __forceinline__ void stay_behind(float probability, uint32_t smem) {
  asm volatile("{.reg .pred p; setp.lt.f32 p, %0, 0f00000000; @p st.shared.u32 [%1], 0;}" ::"f"(probability), "r"(smem)
               : "memory");
}

}  // namespace dmattn::sm90
