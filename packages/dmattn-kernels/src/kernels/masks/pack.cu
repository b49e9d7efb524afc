// Packs a dense boolean mask: a bit for each entry, and the state (empty, partial, full) of each cell of 64 x 64.
#include <cstdlib>

#include "../attention/shared/seqlen.cuh"
#include "../attention/shared/work_index.cuh"
#include "masks.h"
#include "row.cuh"

namespace dmattn {
namespace {

using namespace prep;

// A thread block packs one band of 64 rows by 512 columns. Its eight cells fill one byte of any_rows and of all_rows,
// so that blocks share no byte and need no atomics. The 32 KB of mask that it reads keep enough loads in flight.
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kGroupCols = 512;
constexpr int kGroupWords = kGroupCols / 32;
constexpr int kRowsPerWarp = kMaskBand / kWarps;
// Pitch of rows in shared memory, in words: rows start on 16 bytes, and the words of a column lie in different banks.
constexpr int kPitch = kGroupWords + 4;
static_assert(kGroupCols / kMaskBand == 8 && kThreads * 4 == kMaskBand * kGroupWords);

enum class Access {
  kAligned16,  // unit column stride: 16 bytes a lane, which lie in the row either all or not at all
  kBytes16,    // unit column stride: 16 bytes a lane, of rows that may begin and end anywhere
  kAlongCols,  // any strides, neighbouring lanes read neighbouring columns
  kAlongRows,  // ... neighbouring rows (a transposed mask)
};

struct Group {
  const uint8_t* ptr;  // address of (row0, column 0) in the operand; row0 counts through packed sequences
  int row0, rows;      // rows: how many of the band lie inside the mask
  int col0, cols;      // cols: columns of the mask, from column 0 on
};

__device__ __forceinline__ void pack_aligned16(const MaskSource& mask, const Group& g, uint32_t* words) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int col = g.col0 + 16 * lane;
  uint4 x[kRowsPerWarp];
#pragma unroll
  for (int i = 0; i < kRowsPerWarp; ++i) {
    const int r = warp + i * kWarps;
    x[i] = make_uint4(0, 0, 0, 0);
    if (r < g.rows && col < g.cols) x[i] = *reinterpret_cast<const uint4*>(g.ptr + r * mask.row_stride + col);
  }
  __syncthreads();  // without it the compiler waits for the load of each row before it issues the next one
#pragma unroll
  for (int i = 0; i < kRowsPerWarp; ++i) {
    reinterpret_cast<uint16_t*>(words + (warp + i * kWarps) * kPitch)[lane] =
        static_cast<uint16_t>(nonzero_bytes(x[i]));
  }
}

__device__ __forceinline__ void pack_bytes16(const MaskSource& mask, const MaskExtent& extent, const Group& g,
                                             uint32_t* words) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto row_of = [&](int i) {
    const int r = warp + i * kWarps;
    return r < g.rows ? MaskRow{g.ptr + r * mask.row_stride, g.cols} : MaskRow{};
  };
  uint4 x[kRowsPerWarp];
  uint32_t ends = 0;  // bit i: the chunk of the i-th row reaches beyond the mask
#pragma unroll
  for (int i = 0; i < kRowsPerWarp; ++i) {
    const MaskRow row = row_of(i);
    bool is_at_end;
    x[i] = load_mask_chunk(row, row.lane_chunk(g.col0, lane), extent, is_at_end);
    ends |= static_cast<uint32_t>(is_at_end) << i;
  }
#pragma unroll
  for (int i = 0; i < kRowsPerWarp; ++i) {
    const MaskRow row = row_of(i);
    const uint32_t bits = mask_chunk_bits(row, row.lane_chunk(g.col0, lane), x[i], ends >> i & 1);
    reinterpret_cast<uint16_t*>(words + (warp + i * kWarps) * kPitch)[lane] =
        static_cast<uint16_t>(align_lane_bits(row, g.col0, lane, extent, bits));
  }
}

__device__ __forceinline__ void pack_along_cols(const MaskSource& mask, const Group& g, uint32_t* words) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int r = warp; r < kMaskBand; r += kWarps) {
#pragma unroll 8
    for (int w = 0; w < kGroupWords; ++w) {
      const int col = g.col0 + 32 * w + lane;
      bool keep = false;
      if (r < g.rows && col < g.cols) keep = __ldg(g.ptr + r * mask.row_stride + col * mask.col_stride) != 0;
      const uint32_t word = __ballot_sync(kFullWarp, keep);
      if (lane == 0) words[r * kPitch + w] = word;
    }
  }
}

__device__ __forceinline__ void pack_along_rows(const MaskSource& mask, const Group& g, uint32_t* words) {
  constexpr int kWordsPerWarp = kMaskBand / 32 * kGroupWords / kWarps;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int r = warp % 2 * 32 + lane;
  for (int i = 0; i < kWordsPerWarp; ++i) {
    const int w = warp / 2 * kWordsPerWarp + i;
    uint32_t word = 0;
    if (r < g.rows) {
      const uint8_t* src = g.ptr + r * mask.row_stride + (g.col0 + 32 * w) * mask.col_stride;
      const int valid = g.cols - (g.col0 + 32 * w);
#pragma unroll 16
      for (int j = 0; j < 32; ++j) {
        if (j < valid) word |= static_cast<uint32_t>(__ldg(src + j * mask.col_stride) != 0) << j;
      }
    }
    words[r * kPitch + w] = word;
  }
}

// Bits of word `word` that lie inside `cols` columns.
__device__ __forceinline__ uint32_t word_extent(int word, int cols) {
  const int left = cols - 32 * word;
  return left >= 32 ? 0xffffffffu : left <= 0 ? 0u : (1u << left) - 1;
}

// Copies the group's words to `bits`, and finds which of its eight cells keep something (any) and which do not keep
// everything (lacking). A thread has four words, which are two cells of one row.
__device__ __forceinline__ void store_group(const MaskBits& bits, const Group& g, int64_t bh, const uint32_t* words,
                                            uint32_t& any, uint32_t& lacking) {
  const int r = threadIdx.x / 4, quad = threadIdx.x % 4;
  any = lacking = 0;
  if (r >= g.rows) return;
  const uint4 x = *reinterpret_cast<const uint4*>(words + r * kPitch + 4 * quad);
  const int word = g.col0 / 32 + 4 * quad;
  if (word < bits.words_per_row) {
    const int64_t offset = (bh * bits.rows + g.row0 + r) * bits.words_per_row + word;
    *reinterpret_cast<uint4*>(const_cast<uint32_t*>(bits.bits) + offset) = x;
  }
  const bool lacking0 = x.x != word_extent(word, g.cols) || x.y != word_extent(word + 1, g.cols);
  const bool lacking1 = x.z != word_extent(word + 2, g.cols) || x.w != word_extent(word + 3, g.cols);
  any = static_cast<uint32_t>((x.x | x.y) != 0) << 2 * quad | static_cast<uint32_t>((x.z | x.w) != 0) << (2 * quad + 1);
  lacking = static_cast<uint32_t>(lacking0) << 2 * quad | static_cast<uint32_t>(lacking1) << (2 * quad + 1);
}

// Band `band` of mask (batch, head) bh, from column col0 on.
__device__ __forceinline__ Group find_group(const MaskSource& mask, int64_t bh, int band, int col0) {
  int row0 = band * kMaskBand, rows = mask.seqlen_q - row0, cols = mask.seqlen_k;
  if (mask.packing.is_active()) {
    constexpr int kBandsPerWord = kMaskWordRows / kMaskBand;
    const PackedRows own = find_packed_rows(mask.packing, kMaskWordRows, band / kBandsPerWord);
    const int skipped = band % kBandsPerWord * kMaskBand;
    row0 = own.first + skipped;
    rows = max(own.rows - skipped, 0);
    cols = read_packed_range(mask.packing.cu_seqlens_k, own.sequence, mask.packing.total_k, cols).length;
  }
  return {mask.ptr + bh / mask.heads * mask.batch_stride + bh % mask.heads * mask.head_stride + row0 * mask.row_stride,
          row0, min(kMaskBand, rows), col0, cols};
}

template <Access kAccess>
__global__ void __launch_bounds__(kThreads)
    pack_kernel(const MaskSource mask, const MaskExtent extent, const MaskBits bits) {
  __shared__ __align__(16) uint32_t words[kMaskBand * kPitch];
  __shared__ uint32_t cells[2];
  follow_previous_kernel();
  const int groups = bits.words_k * 4;
  const int group = blockIdx.x % groups;
  const int band = blockIdx.x / groups % bits.bands_q;
  const int64_t bh = blockIdx.x / groups / bits.bands_q;
  const Group g = find_group(mask, bh, band, group * kGroupCols);
  if (threadIdx.x < 2) cells[threadIdx.x] = 0;
  if (g.col0 < g.cols) {  // else: the group only pads the last word of any_rows and all_rows
    if constexpr (kAccess == Access::kAligned16) {
      pack_aligned16(mask, g, words);
    } else if constexpr (kAccess == Access::kBytes16) {
      pack_bytes16(mask, extent, g, words);
    } else if constexpr (kAccess == Access::kAlongCols) {
      pack_along_cols(mask, g, words);
    } else {
      pack_along_rows(mask, g, words);
    }
    __syncthreads();
    uint32_t any, lacking;
    store_group(bits, g, bh, words, any, lacking);
    any = __reduce_or_sync(kFullWarp, any);
    lacking = __reduce_or_sync(kFullWarp, lacking);
    if (threadIdx.x % 32 == 0) {
      atomicOr(&cells[0], any);
      atomicOr(&cells[1], lacking);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    const int inside = max(0, min(8, bits.bands_k - 8 * group));
    const uint32_t extent = (1u << inside) - 1;
    const int64_t byte = (bh * bits.bands_q + band) * bits.words_k * 4 + group;
    const_cast<uint8_t*>(reinterpret_cast<const uint8_t*>(bits.any_rows))[byte] = static_cast<uint8_t>(cells[0]);
    const_cast<uint8_t*>(reinterpret_cast<const uint8_t*>(bits.all_rows))[byte] =
        static_cast<uint8_t>(extent & ~cells[1]);
  }
}

// For a mask that is the same for all rows: a thread block reads 2048 columns and writes their bits to all rows of one
// band. The cells of these columns fill a word of any_rows and of all_rows. In the first of every 32 bands, the block
// also writes any_cols and all_cols for these bands.
constexpr int kRowCols = 32 * kMaskBand;
constexpr int kRowWords = kRowCols / 32;
constexpr int kRowQuads = kRowWords / 4;  // 16 bytes each

__device__ __forceinline__ void pack_row(const MaskSource& mask, int64_t bh, int col0, uint32_t* words) {
  constexpr int kPasses = kRowCols / kThreads;
  const uint8_t* row = mask.ptr + bh / mask.heads * mask.batch_stride + bh % mask.heads * mask.head_stride;
  bool keep[kPasses];
#pragma unroll
  for (int i = 0; i < kPasses; ++i) {
    const int col = col0 + i * kThreads + threadIdx.x;
    keep[i] = col < mask.seqlen_k && __ldg(row + col * mask.col_stride) != 0;
  }
#pragma unroll
  for (int i = 0; i < kPasses; ++i) {
    const uint32_t word = __ballot_sync(kFullWarp, keep[i]);
    if (threadIdx.x % 32 == 0) words[i * kWarps + threadIdx.x / 32] = word;
  }
}

// Lane c of a warp has cell c of `word_k`.
__device__ __forceinline__ void store_row_cells(const MaskSource& mask, const MaskBits& bits, int64_t bh, int band,
                                                int word_k, const uint32_t* words) {
  const int cell = threadIdx.x, band_k = 32 * word_k + cell;
  const uint32_t x0 = words[2 * cell], x1 = words[2 * cell + 1];
  const bool is_inside = band_k < bits.bands_k;
  const bool any = (x0 | x1) != 0;
  const bool all =
      is_inside && x0 == word_extent(2 * band_k, mask.seqlen_k) && x1 == word_extent(2 * band_k + 1, mask.seqlen_k);
  const uint32_t any_word = __ballot_sync(kFullWarp, any), all_word = __ballot_sync(kFullWarp, all);
  if (cell == 0) {
    const int64_t offset = (bh * bits.bands_q + band) * bits.words_k + word_k;
    const_cast<uint32_t*>(bits.any_rows)[offset] = any_word;
    const_cast<uint32_t*>(bits.all_rows)[offset] = all_word;
  }
  if (band % 32 != 0 || !is_inside) return;
  const int64_t offset = (bh * bits.bands_k + band_k) * bits.words_q + band / 32;
  const uint32_t extent = word_extent(band / 32, bits.bands_q);
  const_cast<uint32_t*>(bits.any_cols)[offset] = any ? extent : 0;
  const_cast<uint32_t*>(bits.all_cols)[offset] = all ? extent : 0;
}

__global__ void __launch_bounds__(kThreads) pack_row_kernel(const MaskSource mask, const MaskBits bits) {
  __shared__ __align__(16) uint32_t words[kRowWords];
  follow_previous_kernel();
  WorkIndex work(blockIdx.x);
  const int word_k = work.take(bits.words_k);
  const int band = work.take(bits.bands_q);
  const int64_t bh = work.rest;
  pack_row(mask, bh, word_k * kRowCols, words);
  __syncthreads();
  constexpr int kRowsPerPass = kThreads / kRowQuads;
  const int quad = threadIdx.x % kRowQuads, word = word_k * kRowWords + 4 * quad;
  if (word < bits.words_per_row) {
    const uint4 x = reinterpret_cast<const uint4*>(words)[quad];
    const int row0 = band * kMaskBand;
    uint32_t* const to = const_cast<uint32_t*>(bits.bits) + (bh * bits.rows + row0) * bits.words_per_row + word;
    const int rows = min(kMaskBand, mask.seqlen_q - row0);
    for (int r = threadIdx.x / kRowQuads; r < rows; r += kRowsPerPass) {
      *reinterpret_cast<uint4*>(to + r * bits.words_per_row) = x;
    }
  }
  if (threadIdx.x < 32) store_row_cells(mask, bits, bh, band, word_k, words);
}

// any_cols and all_cols from any_rows and all_rows: a warp transposes 32 x 32 cells.
__global__ void __launch_bounds__(kThreads) transpose_cells_kernel(const MaskBits bits, int64_t warps) {
  follow_previous_kernel();
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (warp >= warps) return;
  const int lane = threadIdx.x % 32;
  const int word_k = static_cast<int>(warp % bits.words_k);
  const int word_q = static_cast<int>(warp / bits.words_k % bits.words_q);
  const int64_t bh = warp / bits.words_k / bits.words_q;
  const int band_q = word_q * 32 + lane, band_k = word_k * 32 + lane;
  uint32_t any = 0, all = 0;
  if (band_q < bits.bands_q) {
    const int64_t offset = (bh * bits.bands_q + band_q) * bits.words_k + word_k;
    any = bits.any_rows[offset];
    all = bits.all_rows[offset];
  }
  uint32_t any_t = 0, all_t = 0;
#pragma unroll
  for (int c = 0; c < 32; ++c) {
    const uint32_t any_c = __ballot_sync(kFullWarp, any >> c & 1);
    const uint32_t all_c = __ballot_sync(kFullWarp, all >> c & 1);
    if (lane == c) any_t = any_c, all_t = all_c;
  }
  if (band_k < bits.bands_k) {
    const int64_t offset = (bh * bits.bands_k + band_k) * bits.words_q + word_q;
    const_cast<uint32_t*>(bits.any_cols)[offset] = any_t;
    const_cast<uint32_t*>(bits.all_cols)[offset] = all_t;
  }
}

bool is_aligned16(const MaskSource& mask) {
  const int64_t all =
      reinterpret_cast<intptr_t>(mask.ptr) | mask.batch_stride | mask.head_stride | mask.row_stride | mask.seqlen_k;
  return all % 16 == 0 && !mask.packing.is_active();
}

Access choose_access(const MaskSource& mask) {
  if (mask.col_stride == 1) return is_aligned16(mask) ? Access::kAligned16 : Access::kBytes16;
  return std::abs(mask.row_stride) < std::abs(mask.col_stride) ? Access::kAlongRows : Access::kAlongCols;
}

cudaError_t launch_pack(const MaskSource& mask, const MaskBits& bits, int64_t blocks, cudaStream_t stream) {
  const auto go = [&](auto kernel) {
    return launch(kernel, blocks, kThreads, 0, stream, mask, find_extent(mask), bits);
  };
  switch (choose_access(mask)) {
    case Access::kAligned16:
      return go(pack_kernel<Access::kAligned16>);
    case Access::kBytes16:
      return go(pack_kernel<Access::kBytes16>);
    case Access::kAlongCols:
      return go(pack_kernel<Access::kAlongCols>);
    default:
      return go(pack_kernel<Access::kAlongRows>);
  }
}

}  // namespace

cudaError_t pack_mask(const MaskSource& mask, const MaskBits& bits, cudaStream_t stream) {
  const int64_t bh = static_cast<int64_t>(mask.batch) * mask.heads;
  if (bits.is_key_only && !mask.packing.is_active()) {
    return launch(pack_row_kernel, bh * bits.bands_q * bits.words_k, kThreads, 0, stream, mask, bits);
  }
  const cudaError_t status = launch_pack(mask, bits, bh * bits.bands_q * bits.words_k * 4, stream);
  if (status != cudaSuccess) return status;
  const int64_t warps = bh * bits.words_q * bits.words_k;
  return launch(transpose_cells_kernel, ceil_div<int64_t>(warps, kWarps), kThreads, 0, stream, bits, warps);
}

}  // namespace dmattn
