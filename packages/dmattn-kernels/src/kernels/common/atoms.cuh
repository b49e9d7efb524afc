// The hardware's words: matrix instructions (from CuTe), ldmatrix, cp.async, swizzled shared-memory tiles.
#pragma once

#include <cuda_runtime.h>
#include <cutlass/numeric_types.h>

#include <cstdint>
#include <cute/arch/copy_sm80.hpp>
#include <cute/arch/mma_sm80.hpp>

namespace dmattn {

constexpr float kLog2e = 1.4426950408889634f;

template <class Element>
struct ElementTraits;

template <>
struct ElementTraits<cutlass::half_t> {
  using Mma = cute::SM80_16x8x16_F32F16F16F32_TN;
  // Two fp32 values rounded to nearest and packed, the first in the low half.
  static __device__ __forceinline__ uint32_t pack(float lo, float hi) {
    uint32_t r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
  }
  static __device__ __forceinline__ float2 unpack(uint32_t x) {
    float2 r;
    asm("{.reg .f16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}" : "=f"(r.x), "=f"(r.y) : "r"(x));
    return r;
  }
};

template <>
struct ElementTraits<cutlass::bfloat16_t> {
  using Mma = cute::SM80_16x8x16_F32BF16BF16F32_TN;
  static __device__ __forceinline__ uint32_t pack(float lo, float hi) {
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
  }
  static __device__ __forceinline__ float2 unpack(uint32_t x) {
    return {__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)};
  }
};

__device__ __forceinline__ float exp2_approx(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

// A shared-memory tile of 16-bit elements, kCols a row, in 16-byte chunks. The chunk index is XORed with the row so
// that the eight rows of an 8x8 matrix (ldmatrix) or of an accumulator store fall on different banks. 32-bit shared
// addresses: CuTe's copy atoms take 64-bit generic pointers, which double the address registers of the main loops.
template <int kCols>
struct SmemTile {
  static constexpr int kChunks = kCols / 8;
  static constexpr int kRowBytes = kCols * 2;
  static_assert(kChunks >= 4 && (kChunks & (kChunks - 1)) == 0);

  static __device__ __forceinline__ uint32_t swizzle(int row) { return kChunks >= 8 ? row & 7 : (row >> 1) & 3; }
  static __device__ __forceinline__ uint32_t offset(int row, int chunk) {
    return row * kRowBytes + ((chunk ^ swizzle(row)) << 4);
  }
};

template <bool kTranspose>
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t addr) {
  if constexpr (kTranspose) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(addr));
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(addr));
  }
}

__device__ __forceinline__ uint32_t smem_u32(const void* ptr) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(ptr));
}
__device__ __forceinline__ void st_shared(uint32_t addr, uint32_t x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(addr), "r"(x));
}
__device__ __forceinline__ void st_shared(uint32_t addr, uint4 x) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(addr), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w));
}
__device__ __forceinline__ void st_shared_u16(uint32_t addr, uint16_t x) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(addr), "h"(x));
}
__device__ __forceinline__ uint32_t ld_shared(uint32_t addr) {
  uint32_t r;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(r) : "r"(addr));
  return r;
}
__device__ __forceinline__ uint32_t ld_shared_u16(uint32_t addr) {
  uint32_t r;
  asm volatile("{.reg .u16 h; ld.shared.u16 h, [%1]; cvt.u32.u16 %0, h;}" : "=r"(r) : "r"(addr));
  return r;
}
__device__ __forceinline__ uint4 ld_shared_v4(uint32_t addr) {
  uint4 r;
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "r"(addr));
  return r;
}

// 16 bytes of shared memory: the first `bytes` (0 to 16) from global memory, zeros after them.
__device__ __forceinline__ void cp_async16_bytes(uint32_t dst, const void* src, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes));
}
// 16 bytes from global to shared memory; zeros instead when !valid (nothing is read then).
__device__ __forceinline__ void cp_async16(uint32_t dst, const void* src, bool valid) {
  cp_async16_bytes(dst, src, valid ? 16 : 0);
}
using cute::cp_async_fence;
using cute::cp_async_wait;

// One operand of a warp's matrix product inside a SmemTile. `Major` says which way the tile lies:
//   rows are the operand's outer index (m of A, n of B), columns the summed index k: plain ldmatrix
//   rows are the summed index k, columns the outer index: transposing ldmatrix
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
  using Mma = typename ElementTraits<Element>::Mma;
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

template <int MT, int NT>
__device__ __forceinline__ void clear(float (&acc)[MT][NT][4]) {
#pragma unroll
  for (int mt = 0; mt < MT; ++mt)
#pragma unroll
    for (int nt = 0; nt < NT; ++nt)
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[mt][nt][e] = 0.f;
}

}  // namespace dmattn
