// Moving row tiles between global and shared memory: vectors where rows start on 16 bytes, element loads where not.
#pragma once

#include "atoms.cuh"

namespace dmattn {

// Eight 16-bit elements from an address that is only 2-byte aligned; elements at and past `valid` are 0. Reads whole
// aligned words (the word around the first element lies inside the tensor's storage) and never past the last
// valid element.
__device__ __forceinline__ uint4 load_chunk_unaligned(const uint16_t* src, int valid) {
  uint32_t w[5];
  int shift = (reinterpret_cast<uintptr_t>(src) >> 1) & 1;
  const uint16_t* base = src - shift;
#pragma unroll
  for (int i = 0; i < 5; ++i) {
    const int left = valid > 0 ? valid + shift - 2 * i : 0;  // elements from the start of word i
    w[i] = 0;
    if (left >= 2 && (i < 4 || shift)) {
      w[i] = __ldg(reinterpret_cast<const uint32_t*>(base) + i);
    } else if (left == 1 && (i < 4 || shift)) {
      w[i] = __ldg(base + 2 * i);
    }
  }
  uint4 r;
  r.x = __funnelshift_r(w[0], w[1], 16 * shift);
  r.y = __funnelshift_r(w[1], w[2], 16 * shift);
  r.z = __funnelshift_r(w[2], w[3], 16 * shift);
  r.w = __funnelshift_r(w[3], w[4], 16 * shift);
  return r;
}

// Copies kRows x kCols 16-bit elements into a SmemTile<kCols>. Row r of the tile comes from src + row_index(r) *
// row_stride; rows at and past `rows` and columns at and past `cols` become 0. Asynchronous (cp.async, the caller
// commits and waits) when `vec`; ordinary stores otherwise, visible after the same barrier.
template <int kRows, int kCols, int kThreads, class RowIndex>
__device__ __forceinline__ void load_tile(uint32_t dst, const void* src, int64_t row_stride, int rows, int cols,
                                          bool vec, int thread, RowIndex row_index) {
  using Tile = SmemTile<kCols>;
  constexpr int kRowsPerPass = kThreads / Tile::kChunks;
  static_assert(kRows % kRowsPerPass == 0);
  constexpr int kPasses = kRows / kRowsPerPass;
  const int chunk = thread % Tile::kChunks;
  const int row0 = thread / Tile::kChunks;
  const uint16_t* base = static_cast<const uint16_t*>(src) + chunk * 8;
  if (vec) {
    const bool col_valid = chunk * 8 < cols;
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int row = row0 + i * kRowsPerPass;
      cp_async16(dst + Tile::offset(row, chunk), base + row_index(row) * row_stride, col_valid && row < rows);
    }
  } else {
#pragma unroll 2
    for (int i = 0; i < kPasses; ++i) {
      const int row = row0 + i * kRowsPerPass;
      const int valid = row < rows ? cols - chunk * 8 : 0;
      st_shared(dst + Tile::offset(row, chunk), load_chunk_unaligned(base + row_index(row) * row_stride, valid));
    }
  }
}

struct RowIdentity {
  __device__ __forceinline__ int64_t operator()(int row) const { return row; }
};
// Rows picked by a list of key indices in shared memory.
struct RowGather {
  const int32_t* idx;
  __device__ __forceinline__ int64_t operator()(int row) const { return idx[row]; }
};

// Writes a SmemTile's first `rows` rows and `cols` columns to global memory.
template <int kRows, int kCols, int kThreads, class RowIndex>
__device__ __forceinline__ void store_tile(void* dst, uint32_t src, int64_t row_stride, int rows, int cols, bool vec,
                                           int thread, RowIndex row_index) {
  using Tile = SmemTile<kCols>;
  constexpr int kRowsPerPass = kThreads / Tile::kChunks;
  static_assert(kRows % kRowsPerPass == 0);
  const int chunk = thread % Tile::kChunks;
  const int valid = cols - chunk * 8;
  if (valid <= 0) return;
#pragma unroll
  for (int i = 0; i < kRows / kRowsPerPass; ++i) {
    const int row = thread / Tile::kChunks + i * kRowsPerPass;
    if (row >= rows) continue;
    const uint4 x = ld_shared_v4(src + Tile::offset(row, chunk));
    uint16_t* out = static_cast<uint16_t*>(dst) + row_index(row) * row_stride + chunk * 8;
    if (vec && valid >= 8) {
      *reinterpret_cast<uint4*>(out) = x;
    } else {
      const uint32_t w[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        if (e < valid) out[e] = static_cast<uint16_t>(w[e / 2] >> (16 * (e & 1)));
      }
    }
  }
}

// Rounds a warp's accumulators and puts them into a SmemTile: fragment (mt, nt) covers rows row0 + 16 mt, columns
// col0 + 8 nt.
template <class Element, int kCols, int MT, int NT>
__device__ __forceinline__ void store_acc(uint32_t tile, const float (&acc)[MT][NT][4], int row0, int col0, int lane) {
  using Tile = SmemTile<kCols>;
  const int row = row0 + lane / 4;
  // row & 7 does not change with mt or the lower half: multiples of 8 are added to it.
  const uint32_t base = tile + row * Tile::kRowBytes + (lane & 3) * 4;
#pragma unroll
  for (int mt = 0; mt < MT; ++mt) {
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
      const uint32_t chunk = ((col0 / 8 + nt) ^ Tile::swizzle(row)) << 4;
      const uint32_t addr = base + chunk + mt * 16 * Tile::kRowBytes;
      // For rows of 4 chunks the swizzle has period 8 rows too, so the lower half shares it.
      st_shared(addr, ElementTraits<Element>::pack(acc[mt][nt][0], acc[mt][nt][1]));
      st_shared(addr + 8 * Tile::kRowBytes, ElementTraits<Element>::pack(acc[mt][nt][2], acc[mt][nt][3]));
    }
  }
}

}  // namespace dmattn
