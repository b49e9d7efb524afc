// Tiles of a 16-bit bias whose rows start anywhere.
#pragma once

#include "../shared/fragment.cuh"
#include "atoms.cuh"

namespace dmattn {

// The bias tile of the forward: rows of kCols + 8 elements, for a bias at any alignment. cp.async copies each row
// from the aligned 16 bytes in which it starts, so that element (row, col) lies shift(row) + 2 col bytes into its row
// of the tile.
template <int kCols>
struct ShiftedTile {
  static constexpr int kPitch = (kCols + 8) * 2;  // 16 (mod 128) bytes, or 80: eight rows fall on different banks
  const uint16_t* src;                            // element (0, 0)
  int64_t row_stride;

  __device__ __forceinline__ uint32_t shift(int row) const {
    return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(src + row * row_stride)) & 15;
  }
  template <int kRows, int kThreads>
  __device__ __forceinline__ void load(uint32_t dst, int rows, int cols, int thread) const {
    constexpr int kChunks = kPitch / 16;
#pragma unroll
    for (int i = 0; i < (kRows * kChunks + kThreads - 1) / kThreads; ++i) {
      if (kRows * kChunks % kThreads != 0 && thread + i * kThreads >= kRows * kChunks) break;
      const int chunk = (thread + i * kThreads) % kChunks, row = (thread + i * kThreads) / kChunks;
      const int skipped = shift(row);
      const int bytes = row < rows ? 2 * min(cols, kCols) + skipped - 16 * chunk : 0;
      const char* from = reinterpret_cast<const char*>(src + row * row_stride) - skipped + 16 * chunk;
      if (row + 1 != rows || bytes <= 0 || bytes >= 16) {
        cp_async16_bytes(dst + row * kPitch + chunk * 16, from, max(0, min(bytes, 16)));
      }
    }
    if (rows <= kRows && thread < 8) load_end(dst, rows - 1, 2 * min(cols, kCols), thread);
  }
  // The end of the last row, less than 16 bytes, is copied element by element: the memory of the bias may end there.
  __device__ __forceinline__ void load_end(uint32_t dst, int row, int row_bytes, int element) const {
    const int skipped = shift(row), chunk = (row_bytes + skipped) / 16, bytes = (row_bytes + skipped) % 16;
    const uint16_t* from = src + row * row_stride + (8 * chunk - skipped / 2) + element;
    if (bytes > 0) {
      st_shared_u16(dst + row * kPitch + chunk * 16 + 2 * element, 2 * element < bytes ? __ldg(from) : uint16_t{0});
    }
  }
  // Elements (row, col) and (row, col + 1), col even.
  __device__ __forceinline__ uint32_t pair(uint32_t tile, int row, uint32_t row_shift, int col) const {
    const uint32_t addr = tile + row * kPitch + row_shift + col * 2;
    if ((row_shift & 2) == 0) return ld_shared(addr);
    return __funnelshift_r(ld_shared(addr - 2), ld_shared(addr + 2), 16);
  }
};

// acc += bias from a ShiftedTile.
template <class Element, int kBlockN, int MT, int NT>
__device__ __forceinline__ void add_shifted_bias(float (&acc)[MT][NT][4], const ShiftedTile<kBlockN>& bias,
                                                 uint32_t tile, const FragmentMap& map) {
#pragma unroll
  for (int mt = 0; mt < MT; ++mt)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = map.row(mt, 2 * half);
      const uint32_t row_shift = bias.shift(row);
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
        const float2 b = ElementTraits<Element>::unpack(bias.pair(tile, row, row_shift, map.col(nt, 0)));
        acc[mt][nt][2 * half] += b.x;
        acc[mt][nt][2 * half + 1] += b.y;
      }
    }
}

}  // namespace dmattn
