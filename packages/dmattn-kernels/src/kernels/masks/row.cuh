// Reads the bytes of a mask sixteen at a time, as sixteen bits.
#pragma once

#include "../shared/helper.cuh"

namespace dmattn {
namespace prep {

// [begin, end) of all bytes between the first and the last one of a mask, as addresses: any of them may be read.
struct MaskExtent {
  uintptr_t begin = 0, end = 0;
};
inline MaskExtent find_extent(const MaskSource& mask) {
  MaskExtent extent{reinterpret_cast<uintptr_t>(mask.ptr), reinterpret_cast<uintptr_t>(mask.ptr)};
  const auto add = [&](int64_t count, int64_t stride) {
    const int64_t distance = (count - 1) * stride;
    (distance < 0 ? extent.begin : extent.end) += distance;
  };
  add(mask.batch, mask.batch_stride);
  add(mask.heads, mask.head_stride);
  add(mask.seqlen_q, mask.row_stride);
  add(mask.per_key ? mask.packing.total_k : mask.seqlen_k, mask.col_stride);
  ++extent.end;
  return extent;
}

// `cols` mask bytes of a row, with unit stride. A chunk is 16 bytes at a multiple of 16 and is named by the column of
// its first byte, which is negative if that byte comes before the row.
struct MaskRow {
  const uint8_t* ptr = nullptr;
  int cols = 0;
  __device__ __forceinline__ bool meets(int chunk) const { return chunk < cols && chunk > -16; }
  // Whether a chunk may be read, neighbours of the row included.
  __device__ __forceinline__ bool may_read(int chunk, const MaskExtent& readable) const {
    const uintptr_t address = reinterpret_cast<uintptr_t>(ptr) + chunk;
    return address >= readable.begin && address + 16 <= readable.end;
  }
  // The chunk that holds the first of the lane's sixteen columns from col0 + 16 * lane on.
  __device__ __forceinline__ int lane_chunk(int col0, int lane) const { return col0 + 16 * lane - misaligned(); }
  __device__ __forceinline__ int misaligned() const { return static_cast<int>(reinterpret_cast<uintptr_t>(ptr) & 15); }
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

// The bytes of a chunk; zeros if it lies outside the row or `is_at_end`, which says that it reaches beyond the whole
// mask and may not be read.
__device__ __forceinline__ uint4 load_mask_chunk(const MaskRow& row, int chunk, const MaskExtent& readable,
                                                 bool& is_at_end) {
  is_at_end = row.meets(chunk) && !row.may_read(chunk, readable);
  if (!row.meets(chunk) || is_at_end) return make_uint4(0, 0, 0, 0);
  return __ldg(reinterpret_cast<const uint4*>(row.ptr + chunk));
}
// Reads a chunk byte by byte. This is rare, and inlined it would be repeated in every unrolled loop.
static __device__ __noinline__ uint32_t read_end_bits(const uint8_t* ptr, int cols, int chunk) {
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int col = chunk + i;
    if (col >= 0 && col < cols) bits |= static_cast<uint32_t>(__ldg(ptr + col) != 0) << i;
  }
  return bits;
}
// The bits of a chunk; bytes outside the row give 0. `x` and `is_at_end` are from load_mask_chunk(), which is separate
// so that callers can have several loads in flight.
__device__ __forceinline__ uint32_t mask_chunk_bits(const MaskRow& row, int chunk, uint4 x, bool is_at_end) {
  if (is_at_end) return read_end_bits(row.ptr, row.cols, chunk);
  uint32_t bits = nonzero_bytes(x);
  if (chunk < 0) bits &= 0xffffu << -chunk;
  if (chunk + 16 > row.cols) bits &= (1u << max(row.cols - chunk, 0)) - 1;
  return bits;
}

// The bits of columns col0 + 16 * lane + (0..15), given the bits of the lane's chunk. The chunks of all lanes begin
// the same number of bytes before these columns, so each lane takes the bits that it lacks from the next one. Called
// by the whole warp; col0 is a multiple of 16.
__device__ __forceinline__ uint32_t align_lane_bits(const MaskRow& row, int col0, int lane, const MaskExtent& readable,
                                                    uint32_t chunk_bits) {
  const int misaligned = row.misaligned();
  if (misaligned == 0) return chunk_bits;
  uint32_t next = __shfl_down_sync(kFullWarp, chunk_bits, 1);
  if (lane == 31) {
    const int chunk = row.lane_chunk(col0, 32);
    bool is_at_end;
    const uint4 x = load_mask_chunk(row, chunk, readable, is_at_end);
    next = mask_chunk_bits(row, chunk, x, is_at_end);
  }
  return ((chunk_bits | next << 16) >> misaligned) & 0xffffu;
}

}  // namespace prep
}  // namespace dmattn
