// A dense boolean mask, read once: a bit per entry, and the state of every 64 x 64 cell.
#include <cstdlib>

#include "../attention/shared/seqlen.cuh"
#include "masks.h"
#include "row.cuh"

namespace dmattn {
namespace {

using namespace prep;

// A block packs one band of 64 rows by 512 columns: its cells fill one byte of any_rows and all_rows, so that blocks
// share no byte and need no atomics; 32 KB of mask keep enough loads in flight.
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kGroupCols = 512;
constexpr int kGroupWords = kGroupCols / 32;
constexpr int kRowsPerWarp = kMaskBand / kWarps;
// Words from row to row in shared memory: 16-byte rows, and columns spread over the banks.
constexpr int kPitch = kGroupWords + 4;
static_assert(kGroupCols / kMaskBand == 8 && kThreads * 4 == kMaskBand * kGroupWords);

enum class Access {
  kBytes16,    // unit column stride: 16 bytes a lane
  kAlongCols,  // any strides, neighbouring lanes read neighbouring columns
  kAlongRows,  // ... neighbouring rows (a transposed mask)
};

struct Group {
  const uint8_t* ptr;  // (row0, column 0) of the operand; row0 counts through packed sequences
  int row0, rows;      // rows: how many of the band lie inside the mask
  int col0, cols;      // cols: columns of the mask from column 0
};

__device__ __forceinline__ void pack_bytes16(const MaskSource& mask, const Group& g, uint32_t* words) {
  constexpr int kBatch = 4;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int i0 = 0; i0 < kRowsPerWarp; i0 += kBatch) {
    MaskRow row[kBatch];
    uint4 x[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int r = warp + (i0 + i) * kWarps;
      if (r < g.rows) row[i] = MaskRow(g.ptr + r * mask.row_stride, g.cols);
      x[i] = load_mask_chunk(row[i], lane_chunk(row[i], g.col0, lane));
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const uint32_t bits = mask_chunk_bits(row[i], lane_chunk(row[i], g.col0, lane), x[i]);
      const int r = warp + (i0 + i) * kWarps;
      reinterpret_cast<uint16_t*>(words + r * kPitch)[lane] =
          static_cast<uint16_t>(align_lane_bits(row[i], g.col0, lane, bits));
    }
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

// Copies the group's words to `bits` and finds which of its eight cells keep something, and which lack something.
// Four words a thread: two cells of one row.
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
__global__ void __launch_bounds__(kThreads) pack_kernel(const MaskSource mask, const MaskBits bits) {
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
    if constexpr (kAccess == Access::kBytes16) {
      pack_bytes16(mask, g, words);
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

// any_cols, all_cols from any_rows, all_rows: a warp turns 32 x 32 cells.
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

}  // namespace

cudaError_t pack_mask(const MaskSource& mask, const MaskBits& bits, cudaStream_t stream) {
  const int64_t bh = static_cast<int64_t>(mask.batch) * mask.heads;
  const int64_t blocks = bh * bits.bands_q * bits.words_k * 4;
  const auto kernel = mask.col_stride == 1                                    ? pack_kernel<Access::kBytes16>
                      : std::abs(mask.row_stride) < std::abs(mask.col_stride) ? pack_kernel<Access::kAlongRows>
                                                                              : pack_kernel<Access::kAlongCols>;
  const cudaError_t status = launch(kernel, blocks, kThreads, 0, stream, mask, bits);
  if (status != cudaSuccess) return status;
  const int64_t warps = bh * bits.words_q * bits.words_k;
  return launch(transpose_cells_kernel, ceil_div<int64_t>(warps, kWarps), kThreads, 0, stream, bits, warps);
}

}  // namespace dmattn
