// Sixteen bits from sixteen mask bytes.
#pragma once

#include "../shared/helper.cuh"

namespace dmattn {
namespace prep {

// A row of mask bytes with unit stride: [begin, end) as addresses.
struct MaskRow {
  uintptr_t begin = 0, end = 0;
  MaskRow() = default;
  __device__ __forceinline__ MaskRow(const uint8_t* row, int64_t cols)
      : begin(reinterpret_cast<uintptr_t>(row)), end(begin + cols) {}
  __device__ __forceinline__ bool covers(uintptr_t chunk) const { return chunk >= begin && chunk + 16 <= end; }
};

// Bit i: byte i of x is not zero (a bool holds 0 or 1, but other producers' bytes count as torch counts them).
__device__ __forceinline__ uint32_t nonzero_bytes(uint32_t x) {
  const uint32_t high = (((x & 0x7f7f7f7fu) + 0x7f7f7f7fu) | x) & 0x80808080u;
  // The product brings bits 0, 8, 16, 24 to 28..31; the other partial products fall on distinct lower bits.
  return ((high >> 7) * 0x10204080u) >> 28;
}
__device__ __forceinline__ uint32_t nonzero_bytes(uint4 x) {
  return nonzero_bytes(x.x) | nonzero_bytes(x.y) << 4 | nonzero_bytes(x.z) << 8 | nonzero_bytes(x.w) << 12;
}

__device__ __forceinline__ uint4 load_mask_chunk(const MaskRow& row, uintptr_t chunk) {
  return row.covers(chunk) ? __ldg(reinterpret_cast<const uint4*>(chunk)) : make_uint4(0, 0, 0, 0);
}
// Bits of the aligned 16-byte chunk; bytes outside the row are not read and give 0. `x` is the result of
// load_mask_chunk(), a function of its own so that callers can have several loads in flight.
__device__ __forceinline__ uint32_t mask_chunk_bits(const MaskRow& row, uintptr_t chunk, uint4 x) {
  uint32_t bits = nonzero_bytes(x);
  if (!row.covers(chunk) && chunk < row.end && chunk + 16 > row.begin) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const uintptr_t byte = chunk + i;
      if (byte >= row.begin && byte < row.end) {
        bits |= static_cast<uint32_t>(__ldg(reinterpret_cast<const uint8_t*>(byte)) != 0) << i;
      }
    }
  }
  return bits;
}

// The aligned chunk that holds the first of the lane's sixteen bytes, which start at column col0 + 16 * lane.
__device__ __forceinline__ uintptr_t lane_chunk(const MaskRow& row, int64_t col0, int lane) {
  return (row.begin + col0 + 16 * lane) & ~uintptr_t{15};
}
// Bits of columns col0 + 16 * lane + (0..15), given the bits of the lane's aligned chunk. All lanes are misaligned by
// the same number of bytes: each takes the bits that it lacks from the next lane. The whole warp calls this.
__device__ __forceinline__ uint32_t align_lane_bits(const MaskRow& row, int64_t col0, int lane, uint32_t chunk_bits) {
  const int misaligned = static_cast<int>((row.begin + col0) & 15);
  if (misaligned == 0) return chunk_bits;
  uint32_t next = __shfl_down_sync(kFullWarp, chunk_bits, 1);
  if (lane == 31) {
    const uintptr_t chunk = lane_chunk(row, col0, 32);
    next = mask_chunk_bits(row, chunk, load_mask_chunk(row, chunk));
  }
  return ((chunk_bits | next << 16) >> misaligned) & 0xffffu;
}

}  // namespace prep
}  // namespace dmattn
