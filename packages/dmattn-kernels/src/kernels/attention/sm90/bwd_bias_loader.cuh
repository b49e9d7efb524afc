// Copies tiles of a dense 16-bit bias whose rows do not start on 16 bytes to where TMA would have put them, by the
// three idle warps of the producer's warpgroup. Unlike in bias_rows.cuh a lane copies 16 bytes at a time, from
// multiples of 16 bytes. A row begins up to seven numbers behind such a multiple, so that each lane puts its eight
// numbers together from two chunks of 16 bytes once they have arrived. This takes 8 KB of shared memory, which the
// forward does not have.
#pragma once

#include "bwd_bias.cuh"
#include "bwd_traits.cuh"

namespace dmattn::sm90 {

// Copies 16 bytes, of which `valid` exist; the others become zeros. 0: nothing is read.
__device__ __forceinline__ void copy_chunk_async(uint32_t to, uintptr_t from, int valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid) : "memory");
}
__device__ __forceinline__ void copy_chunk_async(uint32_t to, uintptr_t from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// The same where memory may end behind the valid bytes. They are read number by number, as compute-sanitizer takes a
// copy to read all 16 bytes.
__device__ __forceinline__ void copy_chunk_end(uint32_t to, uintptr_t from, int valid) {
  const auto number = [&](int i) -> uint32_t {
    return 2 * i < valid ? __ldg(reinterpret_cast<const uint16_t*>(from) + i) : uint16_t{0};
  };
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = number(2 * i) | number(2 * i + 1) << 16;
  st_shared(to, make_uint4(words[0], words[1], words[2], words[3]));
}

// The eight numbers from number `shift` (0 to 7) on, of two chunks of eight that follow each other.
__device__ __forceinline__ uint4 eight_from(const uint4& chunk, const uint4& behind, uint32_t shift) {
  const uint32_t words[8] = {chunk.x, chunk.y, chunk.z, chunk.w, behind.x, behind.y, behind.z, behind.w};
  uint32_t from_two[6], from_one[5];  // from word `shift` / 4 * 2, and from word `shift` / 2
#pragma unroll
  for (int i = 0; i < 6; ++i) from_two[i] = shift & 4 ? words[i + 2] : words[i];
#pragma unroll
  for (int i = 0; i < 5; ++i) from_one[i] = shift & 2 ? from_two[i + 1] : from_two[i];
  const uint32_t bits = shift % 2 * 16;
  return make_uint4(__funnelshift_r(from_one[0], from_one[1], bits), __funnelshift_r(from_one[1], from_one[2], bits),
                    __funnelshift_r(from_one[2], from_one[3], bits), __funnelshift_r(from_one[3], from_one[4], bits));
}

// One of the three warps. It has every third group of eight rows of a tile, and copies two rows at a time: sixteen
// lanes have the 128 keys of a row, a chunk of eight each.
template <class T>
struct BwdBiasLoader {
  static constexpr int kRows = T::kBlockM, kPanelBytes = T::kPanel * 2, kTileBytes = T::kTiledS * 2;
  static constexpr int kChunks = 16, kTailChunk = kChunks;
  static constexpr int kEightBytes = 8 * kPanelRowBytes, kEights = kRows / 8;
  static_assert(T::kBlockN == 8 * kChunks && kPanelBytes == kEights * kEightBytes && kEightBytes == 1024);

  const BwdArguments& p;
  typename T::Shared& s;
  const int part, lane;

  __device__ __forceinline__ void run() const {
#pragma unroll 1
    for (RingPlace<T::kStagesBias> place;; place.advance()) {
      s.bias_requests.asked[place.stage].wait(place.phase);
      const BiasRequest& wanted = s.bias_requests.request[place.stage];
      if (wanted.row < 0) return;
      const uint32_t tile = smem_u32(s.bias.tiles) + place.stage * kTileBytes;
      copy_bias(tile, wanted);
      asm volatile("cp.async.wait_all;" ::: "memory");
      __syncwarp();
      shift_bias(tile, wanted);
      __syncwarp();
      if (lane == 0) s.bias_full[place.stage].arrive();
    }
  }

 private:
  __device__ __forceinline__ uint32_t own_chunk() const { return lane % kChunks; }
  // The lane's first row, which is in the warp's first group of eight.
  __device__ __forceinline__ uint32_t first_row() const { return 8 * part + lane / kChunks; }
  // Where a chunk of the lane's first row is in shared memory. The chunk behind the last one of a row is in a separate
  // panel, bias_tails.
  __device__ __forceinline__ uint32_t place_of(uint32_t tile, uint32_t chunk) const {
    const uint32_t in_eight = lane / kChunks, panel = tile + chunk / 8 * kPanelBytes;
    return (chunk == kTailChunk ? smem_u32(s.bias_tails) : panel) + part * kEightBytes + in_eight * kPanelRowBytes +
           ((chunk % 8 ^ in_eight) << 4);
  }
  // The same place in the j-th of the lane's four rows in a group of eight.
  static __device__ __forceinline__ uint32_t in_row(uint32_t place, int j) {
    return (place ^ j << 5) + j * (2 * kPanelRowBytes);
  }

  // Where the tile's numbers of the lane's first row begin in global memory.
  __device__ __forceinline__ uintptr_t bias_of(const BiasRequest& wanted) const {
    const BiasRows& rows = p.bias_rows;
    return reinterpret_cast<uintptr_t>(rows.data) + wanted.batch * rows.batch_stride + wanted.head * rows.head_stride +
           (wanted.row + static_cast<int64_t>(first_row())) * rows.row_stride + static_cast<int64_t>(wanted.key) * 2;
  }
  __device__ __forceinline__ void copy_bias(uint32_t tile, const BiasRequest& wanted) const {
    // What exists from the tile's first row and key on.
    const int rows = p.bias_rows.rows - wanted.row, bytes = (p.bias_rows.keys - wanted.key) * 2;
    if (rows >= kRows && bytes >= (kChunks + 1) * 16) {
      copy_chunks<Lacks::kNothing>(tile, bias_of(wanted), rows, bytes);
    } else if (rows > kRows) {
      copy_chunks<Lacks::kKeys>(tile, bias_of(wanted), rows, bytes);
    } else {
      copy_chunks<Lacks::kRowsAndKeys>(tile, bias_of(wanted), rows, bytes);
    }
  }
  // What a tile may lack. With kKeys all of its rows exist, and the tensor's last row is not among them: that one takes
  // more instructions, and a block of keys at the end would take them in all of its tiles.
  enum class Lacks { kNothing, kKeys, kRowsAndKeys };
  // Copies a chunk of which `left` bytes exist; none if that is negative. is_end: the chunk is in the tensor's last
  // row.
  template <Lacks kLacks>
  static __device__ __forceinline__ void copy_some(uint32_t to, uintptr_t from, int left, bool is_end) {
    if (kLacks == Lacks::kRowsAndKeys && is_end && left > 0 && left < 16) {
      copy_chunk_end(to, from, left);
    } else {
      copy_chunk_async(to, from, min(max(left, 0), 16));
    }
  }
  // Copies the 17 chunks that contain the 128 numbers of a row. In front of the tensor's first number up to 14 bytes
  // of the same chunk are read and not used; nothing behind its last number is read.
  template <Lacks kLacks>
  __device__ __forceinline__ void copy_chunks(uint32_t tile, uintptr_t from, int rows, int bytes) const {
    const int64_t stride = p.bias_rows.row_stride;
    const bool is_last = own_chunk() == kChunks - 1;
    uint32_t to = place_of(tile, own_chunk()), tail = place_of(tile, kTailChunk);
    from += own_chunk() * 16;
    rows -= static_cast<int>(first_row());
    bytes -= static_cast<int>(own_chunk()) * 16;
#pragma unroll 1
    for (int eight = part; eight < kEights; eight += kBiasWarps) {
#pragma unroll
      for (int j = 0; j < 4; ++j, from += 2 * stride) {
        const uintptr_t begin = from & ~uintptr_t{15};
        if constexpr (kLacks == Lacks::kNothing) {
          copy_chunk_async(in_row(to, j), begin);
          if (is_last) copy_chunk_async(in_row(tail, j), begin + 16);
        } else {
          const bool exists = kLacks == Lacks::kKeys || 2 * j < rows;
          const int left = exists ? bytes + static_cast<int>(from % 16) : 0;
          const bool is_end = 2 * j + 1 == rows;  // the last row
          copy_some<kLacks>(in_row(to, j), begin, left, is_end);
          if (is_last) copy_some<kLacks>(in_row(tail, j), begin + 16, left - 16, is_end);
        }
      }
      from += 8 * (kBiasWarps - 1) * stride;
      to += kBiasWarps * kEightBytes;
      tail += kBiasWarps * kEightBytes;
      rows -= 8 * kBiasWarps;
    }
  }
  __device__ __forceinline__ void shift_bias(uint32_t tile, const BiasRequest& wanted) const {
    const uint32_t stride = static_cast<uint32_t>(p.bias_rows.row_stride);
    uint32_t from = static_cast<uint32_t>(bias_of(wanted));
    uint32_t own = place_of(tile, own_chunk()), next = place_of(tile, own_chunk() + 1);
#pragma unroll 1
    for (int eight = part; eight < kEights; eight += kBiasWarps) {
#pragma unroll
      for (int j = 0; j < 4; ++j, from += 2 * stride) {
        const uint4 chunk = ld_shared_v4(in_row(own, j)), behind = ld_shared_v4(in_row(next, j));
        __syncwarp();  // the lane before this one has read the chunk, too
        st_shared(in_row(own, j), eight_from(chunk, behind, from % 16 / 2));
      }
      from += 8 * (kBiasWarps - 1) * stride;
      own += kBiasWarps * kEightBytes;
      next += kBiasWarps * kEightBytes;
    }
  }
};

}  // namespace dmattn::sm90
