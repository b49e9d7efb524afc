// Copies tiles of rows between global and shared memory: 16 bytes at a time where rows start on 16 bytes, otherwise
// in words and single elements.
#pragma once

#include <type_traits>

#include "../../params.h"
#include "../shared/key_source.cuh"
#include "atoms.cuh"

namespace dmattn {

// The aligned word at ptr. Only its first `left` elements may be read; the others become 0.
__device__ __forceinline__ uint32_t load_word(const uint16_t* ptr, int left) {
  if (left >= 2) return __ldg(reinterpret_cast<const uint32_t*>(ptr));
  return left == 1 ? __ldg(ptr) : 0;
}

// load_tile() for rows that start anywhere: a warp takes whole rows and reads aligned words. Each word of a row that
// starts on an odd element is put together from two of these; the first one begins an element before the row, which
// still is in the tensor's storage.
template <int kRows, int kCols, int kThreads, class RowIndex>
__device__ __forceinline__ void load_tile_words(uint32_t dst, const uint16_t* src, int64_t row_stride, int rows,
                                                int cols, int thread, RowIndex row_index) {
  using Tile = SmemTile<kCols>;
  constexpr int kWords = kCols >= 64 ? kCols / 64 : 1;  // words of a row that a lane loads
  constexpr int kBatch = kWords <= 2 ? 4 : 2;           // rows whose loads a warp has in flight
  constexpr int kSweep = kThreads / 32 * kBatch;
  static_assert(kRows % kSweep == 0);
  const int warp = thread / 32, lane = thread & 31;
  if (kCols < 64 && lane >= kCols / 2) return;
#pragma unroll 1
  for (int row0 = warp * kBatch; row0 < kRows; row0 += kSweep) {
    uint32_t low[kBatch][kWords], high[kBatch][kWords];
    int shift[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int row = row0 + i;
      const uint16_t* ptr = src + (row < rows ? row_index(row) * row_stride : 0);
      shift[i] = static_cast<int>(reinterpret_cast<uintptr_t>(ptr) >> 1) & 1;
#pragma unroll
      for (int j = 0; j < kWords; ++j) {
        const int e = 2 * (lane + 32 * j) - shift[i];  // first element of the low word
        const int left = row < rows ? cols - e : 0;
        low[i][j] = load_word(ptr + e, left);
        high[i][j] = shift[i] ? load_word(ptr + e + 2, left - 2) : 0;
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
#pragma unroll
      for (int j = 0; j < kWords; ++j) {
        const int word = lane + 32 * j;
        st_shared(dst + Tile::offset(row0 + i, word / 4) + (word & 3) * 4,
                  __funnelshift_r(low[i][j], high[i][j], 16 * shift[i]));
      }
  }
}

// Copies kRows x kCols 16-bit elements into a SmemTile<kCols>. Row r of the tile comes from src + row_index(r) *
// row_stride; rows from `rows` and columns from `cols` on become 0. If `vec`, the copy is asynchronous (cp.async),
// and the caller commits and waits; otherwise it uses ordinary stores, which are visible after the same barrier.
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
    // Stepping the pointer keeps the compiler from holding an address for every pass across the main loop.
    const uint16_t* ptr = base + row0 * row_stride;
    const int64_t step = kRowsPerPass * row_stride;
#pragma unroll
    for (int i = 0; i < kPasses; ++i, ptr += step) {
      const int row = row0 + i * kRowsPerPass;
      const uint16_t* from = std::is_same_v<RowIndex, RowIdentity> ? ptr : base + row_index(row) * row_stride;
      cp_async16(dst + Tile::offset(row, chunk), from, col_valid && row < rows);
    }
  } else {
    load_tile_words<kRows, kCols, kThreads>(dst, static_cast<const uint16_t*>(src), row_stride, rows, cols, thread,
                                            row_index);
  }
}

// store_tile() for rows that start anywhere: a warp takes whole rows and writes aligned words, and single elements at
// the ends of a row.
template <int kRows, int kCols, int kThreads, class RowIndex>
__device__ __forceinline__ void store_tile_words(uint16_t* dst, uint32_t src, int64_t row_stride, int rows, int cols,
                                                 int thread, RowIndex row_index) {
  using Tile = SmemTile<kCols>;
  const auto element = [&](int row, int col) {
    return ld_shared_u16(src + Tile::offset(row, col / 8) + (col & 7) * 2);
  };
#pragma unroll 2
  for (int row = thread / 32; row < min(kRows, rows); row += kThreads / 32) {
    uint16_t* out = dst + row_index(row) * row_stride;
    const int shift = static_cast<int>(reinterpret_cast<uintptr_t>(out) >> 1) & 1;
    for (int first = 2 * (thread & 31) - shift; first < cols; first += 64) {
      if (first >= 0 && first + 1 < cols) {
        *reinterpret_cast<uint32_t*>(out + first) = element(row, first) | element(row, first + 1) << 16;
      } else {
        const int col = max(first, 0);  // the word sticks out at one end
        out[col] = static_cast<uint16_t>(element(row, col));
      }
    }
  }
}

// Writes the first `rows` rows and `cols` columns of a SmemTile to global memory. vec: rows start on 16 bytes and
// cols is a multiple of 8.
template <int kRows, int kCols, int kThreads, class RowIndex>
__device__ __forceinline__ void store_tile(void* dst, uint32_t src, int64_t row_stride, int rows, int cols, bool vec,
                                           int thread, RowIndex row_index) {
  using Tile = SmemTile<kCols>;
  constexpr int kRowsPerPass = kThreads / Tile::kChunks;
  static_assert(kRows % kRowsPerPass == 0);
  if (!vec) {
    store_tile_words<kRows, kCols, kThreads>(static_cast<uint16_t*>(dst), src, row_stride, rows, cols, thread,
                                             row_index);
    return;
  }
  const int chunk = thread % Tile::kChunks;
  if (chunk * 8 >= cols) return;
#pragma unroll
  for (int i = 0; i < kRows / kRowsPerPass; ++i) {
    const int row = thread / Tile::kChunks + i * kRowsPerPass;
    if (row >= rows) continue;
    uint16_t* out = static_cast<uint16_t*>(dst) + row_index(row) * row_stride + chunk * 8;
    *reinterpret_cast<uint4*>(out) = ld_shared_v4(src + Tile::offset(row, chunk));
  }
}

// Rounds a warp's accumulators and stores them in a SmemTile: fragment (mt, nt) starts at row row0 + 16 mt and column
// col0 + 8 nt.
template <class Element, int kCols, int MT, int NT>
__device__ __forceinline__ void store_acc(uint32_t tile, const float (&acc)[MT][NT][4], int row0, int col0, int lane) {
  using Tile = SmemTile<kCols>;
  const int row = row0 + lane / 4;
  // row & 7, and so the swizzle, is the same for all mt and for both halves of a fragment: these add multiples of 8.
  const uint32_t base = tile + row * Tile::kRowBytes + (lane & 3) * 4;
#pragma unroll
  for (int mt = 0; mt < MT; ++mt) {
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
      const uint32_t chunk = ((col0 / 8 + nt) ^ Tile::swizzle(row)) << 4;
      const uint32_t addr = base + chunk + mt * 16 * Tile::kRowBytes;
      // The swizzle of tiles with 4 chunks a row repeats every 8 rows, too, so that both halves share it.
      st_shared(addr, ElementTraits<Element>::pack(acc[mt][nt][0], acc[mt][nt][1]));
      st_shared(addr + 8 * Tile::kRowBytes, ElementTraits<Element>::pack(acc[mt][nt][2], acc[mt][nt][3]));
    }
  }
}

// Whether all rows of a 16-bit tensor start on 16 bytes, whichever batch, head and row is taken.
__device__ __forceinline__ bool is_vec16(const void* ptr, int64_t stride_a, int64_t stride_b, int64_t stride_c) {
  return ((reinterpret_cast<uintptr_t>(ptr) & 15) | ((stride_a | stride_b | stride_c) & 7)) == 0;
}

// Loads the packed mask bits of a tile: kRows x kWords words, from column word0 on. Only the first `rows` rows are
// read: those after them may belong to a packed sequence with fewer keys, whose bits are written only up to its last
// key.
template <int kRows, int kWords, int kThreads>
__device__ __forceinline__ void load_mask_words(uint32_t dst, const MaskBits& mask, int64_t index, int row0, int rows,
                                                int word0) {
  for (int row = threadIdx.x; row < kRows; row += kThreads) {
    if (row < rows) {
      const uint32_t* src = mask.bits + (index * mask.rows + row0 + row) * mask.words_per_row + word0;
      asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(dst + row * kWords * 4), "l"(src),
                   "n"(kWords * 4));
    }
  }
}

}  // namespace dmattn
