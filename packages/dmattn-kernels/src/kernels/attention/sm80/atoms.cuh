// The instructions of sm_80 that the kernels are made of: mma.sync (from CuTe), ldmatrix operands, cp.async.
#pragma once

#include <cute/arch/copy_sm80.hpp>
#include <cute/arch/mma_sm80.hpp>

#include "../shared/element.cuh"
#include "../shared/smem.cuh"

namespace dmattn {

// The m16n8k16 instruction of an element type, with fp32 sums.
template <class Element>
struct MmaAtom;
template <>
struct MmaAtom<cutlass::half_t> : cute::SM80_16x8x16_F32F16F16F32_TN {};
template <>
struct MmaAtom<cutlass::bfloat16_t> : cute::SM80_16x8x16_F32BF16BF16F32_TN {};

// Fills 16 bytes of shared memory: the first `bytes` (0 to 16) from global memory, the rest with zeros.
__device__ __forceinline__ void cp_async16_bytes(uint32_t dst, const void* src, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes));
}
// Copies 16 bytes from global to shared memory, or writes zeros if !valid (then nothing is read).
__device__ __forceinline__ void cp_async16(uint32_t dst, const void* src, bool valid) {
  cp_async16_bytes(dst, src, valid ? 16 : 0);
}
using cute::cp_async_fence;
using cute::cp_async_wait;

// One operand of a warp's matrix product inside a SmemTile. kTranspose says what the rows of the tile are:
//   false: the operand's outer index (m of A, n of B); columns are the summed index k. Plain ldmatrix
//   true:  the summed index k; columns are the outer index. Transposing ldmatrix
// kIsA picks the order in which ldmatrix's four 8x8 matrices form the fragment.
template <int kCols, bool kIsA, bool kTranspose>
struct Operand {
  using Tile = SmemTile<kCols>;
  uint32_t lane_addr;  // this lane's row address for outer block 0, k block 0

  // base: shared address of the tile; outer0: first outer index of this warp, a multiple of its power-of-two extent.
  __device__ __forceinline__ Operand(uint32_t base, int outer0, int lane) {
    constexpr bool kRowsFirst = kIsA != kTranspose;  // matrices 0, 1 are stacked along the tile's rows
    int row = kRowsFirst ? lane & 15 : (lane & 7) + ((lane >> 4) << 3);
    int half = kRowsFirst ? lane >> 4 : (lane >> 3) & 1;
    int row0 = kTranspose ? 0 : outer0;
    int chunk0 = kTranspose ? outer0 / 8 : 0;
    lane_addr = base + (row0 + row) * Tile::kRowBytes + (((chunk0 ^ half) ^ Tile::swizzle(row)) << 4);
  }
  // Fragment of 16 outer indices (block `outer`) by 16 summed indices (block `k`).
  __device__ __forceinline__ void load(uint32_t (&frag)[4], int outer, int k, uint32_t tile_offset = 0) const {
    int row_block = kTranspose ? k : outer;
    int col_block = kTranspose ? outer : k;
    ldmatrix_x4<kTranspose>(frag, ((lane_addr + tile_offset) ^ (col_block << 5)) + row_block * 16 * Tile::kRowBytes);
  }
};

// acc[MT][NT] += A (16 MT x 16 kKSteps) B^T (8 NT x 16 kKSteps), both from shared memory.
template <class Element, int kKSteps, int MT, int NT, class OperandA, class OperandB>
__device__ __forceinline__ void gemm_ss(float (&acc)[MT][NT][4], const OperandA& a, const OperandB& b,
                                        uint32_t offset_a = 0, uint32_t offset_b = 0) {
  using Mma = MmaAtom<Element>;
  static_assert(NT % 2 == 0);
#pragma unroll
  for (int k = 0; k < kKSteps; ++k) {
    uint32_t frag_a[MT][4];
#pragma unroll
    for (int mt = 0; mt < MT; ++mt) a.load(frag_a[mt], mt, k, offset_a);
#pragma unroll
    for (int np = 0; np < NT / 2; ++np) {
      uint32_t frag_b[4];
      b.load(frag_b, np, k, offset_b);
#pragma unroll
      for (int mt = 0; mt < MT; ++mt) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float (&c)[4] = acc[mt][2 * np + half];
          Mma::fma(c[0], c[1], c[2], c[3], frag_a[mt][0], frag_a[mt][1], frag_a[mt][2], frag_a[mt][3], frag_b[2 * half],
                   frag_b[2 * half + 1], c[0], c[1], c[2], c[3]);
        }
      }
    }
  }
}

// acc_o += P V. P are the score accumulators, rounded in registers; V is in shared memory, a row for each key.
template <class Element, int MT, int NT, int OT, class OperandV>
__device__ __forceinline__ void gemm_pv(float (&acc_o)[MT][OT][4], const float (&p)[MT][NT][4], const OperandV& v) {
  using Traits = ElementTraits<Element>;
#pragma unroll
  for (int k = 0; k < NT / 2; ++k) {
    uint32_t frag_p[MT][4];
#pragma unroll
    for (int mt = 0; mt < MT; ++mt)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* c = p[mt][2 * k + i / 2] + 2 * (i & 1);
        frag_p[mt][i] = Traits::pack(c[0], c[1]);
      }
#pragma unroll
    for (int op = 0; op < OT / 2; ++op) {
      uint32_t frag_v[4];
      v.load(frag_v, op, k);
#pragma unroll
      for (int mt = 0; mt < MT; ++mt)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float (&c)[4] = acc_o[mt][2 * op + half];
          MmaAtom<Element>::fma(c[0], c[1], c[2], c[3], frag_p[mt][0], frag_p[mt][1], frag_p[mt][2], frag_p[mt][3],
                                frag_v[2 * half], frag_v[2 * half + 1], c[0], c[1], c[2], c[3]);
        }
    }
  }
}

}  // namespace dmattn
