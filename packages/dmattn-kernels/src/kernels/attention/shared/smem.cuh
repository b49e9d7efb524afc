// Tiles of 16-bit elements in shared memory, and accesses by 32-bit shared addresses.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace dmattn {

// A shared-memory tile of rows of kCols 16-bit elements, in 16-byte chunks. The chunk index is XORed with the row so
// that the eight rows of an 8x8 matrix (ldmatrix) or of an accumulator store fall on different banks. Addresses are
// 32-bit shared ones: CuTe's copy atoms take 64-bit generic pointers, which double the address registers of the main
// loops.
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
__device__ __forceinline__ uint2 ld_shared_v2(uint32_t addr) {
  uint2 r;
  asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];" : "=r"(r.x), "=r"(r.y) : "r"(addr));
  return r;
}

// Loads four 8 x 8 matrices of 16-bit elements. Lane l gives the address of row l % 8 of matrix l / 8.
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

}  // namespace dmattn
