// Tiles of rows and keys in shared memory as the Hopper backward reads and writes them: those of a dense bias, of ds,
// and of the gradient of the bias.
//
// A panel has 64 keys of a tile's rows: [row][key] in 16 bits, 128 bytes a row, swizzled as TMA does. Scores have keys
// as rows, so that panels are read and written in 8 x 8 matrices that are transposed on the way.
#pragma once

#include "../shared/element.cuh"
#include "../shared/smem.cuh"
#include "bwd_items.cuh"

namespace dmattn::sm90 {

constexpr int kPanelKeys = 64;
constexpr int kPanelRowBytes = kPanelKeys * 2;
constexpr int kWidePanelKeys = kPanelRowBytes / 4;  // keys of a panel in fp32

// The address that a lane gives for four 8 x 8 matrices: 16 rows, and the 16 keys of its warp. Lane l gives that of
// row l % 8 of matrix l / 8. Matrices 0 and 1 have the first eight rows, with keys 0 to 7 and 8 to 15; matrices 2 and
// 3 have the other eight.
__device__ __forceinline__ uint32_t matrix_row(uint32_t panel, int warp, int lane) {
  const int matrix = lane / 8, in_matrix = lane % 8;
  const int row = matrix / 2 * 8 + in_matrix, chunk = 2 * warp + matrix % 2;
  return panel + row * kPanelRowBytes + ((chunk ^ in_matrix) << 4);
}
// Reads the four matrices in the order of the scores' registers, two elements a word: word 2 f + h is registers 2 h
// and 2 h + 1 of fragment 2 i + f, of a product with 64 keys as its rows. `rows`: matrix_row(), 16 i rows further on.
__device__ __forceinline__ void load_matrices(uint32_t (&words)[4], uint32_t rows) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(rows)
               : "memory");
}
__device__ __forceinline__ void store_matrices(uint32_t rows, uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(rows), "r"(x), "r"(y),
               "r"(z), "r"(w)
               : "memory");
}

// In fp32 a row of a panel has 32 keys, those of two warps. wide_row() is the address of the thread's first row and
// key, which are in register 0 of fragment 0. wide_entry() is that of the entry 8 i + e rows and 8 half keys further
// on. The swizzle puts chunk c of a row (four keys) in place c ^ (row % 8). The thread's first row is even, and its
// first chunk 0, 1, 4 or 5, so that one row or eight keys more change a single bit of the place. The threads of a warp
// use all 32 banks: the rows of four neighbouring lanes and two chunks of keys give eight places, of four keys each.
template <int kBlockM>
__device__ __forceinline__ uint32_t wide_row(uint32_t tile, int consumer, int warp, int lane) {
  const int panel = 2 * consumer + warp / 2, row = lane % 4 * 2, chunk = warp % 2 * 4 + lane / 16;
  return tile + (panel * kBlockM + row) * kPanelRowBytes + ((chunk ^ row) << 4) + lane / 4 % 4 * 4;
}
__device__ __forceinline__ uint32_t wide_entry(uint32_t first, int i, int half, int e) {
  return (first ^ (half << 5 | e << 4)) + (8 * i + e) * kPanelRowBytes;
}

// Adds a panel to fp32 sums. `to`: the sum of its first row and key; `rows` and `keys` exist from there on. Whole
// warpgroup; `to` and row_stride are multiples of four elements. Behind the last key up to three zeros are added, for
// which the rows of sums have room.
template <class Element, int kRows>
__device__ __forceinline__ void add_panel(float* to, int64_t row_stride, uint32_t panel, int rows, int keys,
                                          int thread) {
  constexpr int kPassRows = 128 * 4 / kPanelKeys;
  const int key = thread % (kPanelKeys / 4) * 4, row = thread / (kPanelKeys / 4);
  if (key >= keys) return;
  to += row * row_stride + key;
  panel += row * kPanelRowBytes + ((key / 8 ^ row) << 4) + key % 8 * 2;
  static_assert(kPassRows == 8 && kRows % kPassRows == 0);  // the swizzle of a thread's rows is that of the first
#pragma unroll 2                                            // few registers
  for (int i = 0; i < kRows; i += kPassRows) {
    if (row + i < rows) {
      const float2 low = ElementTraits<Element>::unpack(ld_shared(panel + i * kPanelRowBytes));
      const float2 high = ElementTraits<Element>::unpack(ld_shared(panel + i * kPanelRowBytes + 4));
      add_vector(to + i * row_stride, {low.x, low.y, high.x, high.y});
    }
  }
}

}  // namespace dmattn::sm90
