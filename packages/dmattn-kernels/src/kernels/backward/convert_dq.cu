// After the backward kernel: dq from its fp32 sums.
#include "../attention/shared/seqlen.cuh"
#include "../shared/helper.cuh"
#include "backward.h"

namespace dmattn {
namespace {

using namespace prep;

// Columns added to a row of the tile in shared memory, so that the eight rows of a fragment fall on different banks.
constexpr int kDqPad = 8;

// For DqOrder::kRegisters. Reads the tile as the backward kernel's threads wrote it (layout.threads threads, four
// registers of each m16n8 fragment at a time) and puts it, rounded, into a row-major tile.
template <class Element>
__device__ __forceinline__ void load_dq_fragments(const ConvertDqParams& p, int64_t tile, uint32_t* smem) {
  const DqTileLayout& t = p.layout;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warps_d = t.threads / 32 / t.warps_m;
  const int m_tiles = t.block_m / (16 * t.warps_m), n_tiles = t.head_dim_tile / (8 * warps_d);
  const int row0 = warp % t.warps_m * 16 * m_tiles + lane / 4;
  const int col0 = warp / t.warps_m * 8 * n_tiles + 2 * (lane % 4);
  const int pitch = (t.head_dim_tile + kDqPad) / 2;
  const float* src = p.dq_accum + tile * t.block_m * t.head_dim_tile + threadIdx.x;
  for (int mt = 0; mt < m_tiles; ++mt) {
#pragma unroll 4
    for (int nt = 0; nt < n_tiles; ++nt) {
      const float* fragment = src + (mt * n_tiles + nt) * 4 * t.threads;
      uint32_t* dst = smem + (row0 + 16 * mt) * pitch + (col0 + 8 * nt) / 2;
      dst[0] = Half2<Element>::pack(__ldg(fragment), __ldg(fragment + t.threads));
      dst[8 * pitch] = Half2<Element>::pack(__ldg(fragment + 2 * t.threads), __ldg(fragment + 3 * t.threads));
    }
  }
}

// The same for the other orders, in which the four registers that a thread has of a fragment lie side by side. A warp
// has 16 rows, of the tile or of the transposed tile, and its fragments lie one behind the other.
template <class Element, bool kTransposed>
__device__ __forceinline__ void load_dq_vectors(const ConvertDqParams& p, int64_t tile, uint16_t* smem) {
  const DqTileLayout& t = p.layout;
  const int thread = threadIdx.x % 128, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int fragments = t.block_m * t.head_dim_tile / (4 * t.threads);
  // Columns from `dims` on would be in the last fragments. They are not in memory, and nobody reads them from the
  // tile.
  const int first = static_cast<int>(threadIdx.x / 128) * fragments;  // of this warpgroup
  const int own_fragments = min(fragments, t.block_m * t.dims / 512 - first);
  const int row = warp % t.warps_m * 16 + lane / 4, col0 = warp / t.warps_m * 8 * fragments + 2 * (lane % 4);
  const int pitch = t.head_dim_tile + kDqPad;
  const float* src = p.dq_accum + tile * t.block_m * t.dims + first * 512 + thread * 4;
#pragma unroll 4
  for (int i = 0; i < own_fragments; ++i) {
    const float4 x = __ldg(reinterpret_cast<const float4*>(src + i * 512));
    const uint32_t pairs[] = {Half2<Element>::pack(x.x * p.scale, x.y * p.scale),
                              Half2<Element>::pack(x.z * p.scale, x.w * p.scale)};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = row + 8 * half, c = col0 + 8 * i;
      if constexpr (kTransposed) {
        smem[c * pitch + r] = static_cast<uint16_t>(pairs[half]);
        smem[(c + 1) * pitch + r] = static_cast<uint16_t>(pairs[half] >> 16);
      } else {
        *reinterpret_cast<uint32_t*>(smem + r * pitch + c) = pairs[half];
      }
    }
  }
}

// 512 threads are those of the largest tile, and three blocks for each SM leave them enough registers. With a limit of
// 1024 threads ptxas takes 32 registers and spills.
template <class Element>
__global__ void __launch_bounds__(512, 3) convert_dq_kernel(const ConvertDqParams p) {
  extern __shared__ __align__(16) uint32_t smem[];
  follow_previous_kernel();
  const int block_m = p.layout.block_m;
  const int64_t tile = blockIdx.x;
  const int m_block = static_cast<int>(tile % p.dq_blocks);
  const int h = static_cast<int>(tile / p.dq_blocks % p.nheads), b = static_cast<int>(tile / p.dq_blocks / p.nheads);
  int64_t m0 = static_cast<int64_t>(m_block) * block_m;
  int rows = static_cast<int>(min(static_cast<int64_t>(block_m), p.seqlen_q - m0));
  if (p.packing.is_active()) {
    const PackedRows own = find_packed_rows(p.packing, block_m, m_block);
    m0 = own.first;
    rows = min(block_m, own.rows);
  }
  if (rows <= 0) return;  // the last round may have fewer row blocks than dq_accum has room for
  if (p.layout.order == DqOrder::kRegisters) {
    load_dq_fragments<Element>(p, tile, smem);
  } else if (p.layout.order == DqOrder::kVectors) {
    load_dq_vectors<Element, false>(p, tile, reinterpret_cast<uint16_t*>(smem));
  } else {
    load_dq_vectors<Element, true>(p, tile, reinterpret_cast<uint16_t*>(smem));
  }
  __syncthreads();

  const int pitch = p.layout.head_dim_tile + kDqPad;
  const uint16_t* tile_rows = reinterpret_cast<const uint16_t*>(smem);
  uint16_t* dq = static_cast<uint16_t*>(p.dq) + row_offset(p.dq_stride, b, h, m0);
  if (p.vec_dq) {
    const int chunks = p.head_dim / 8;
    for (int i = threadIdx.x; i < rows * chunks; i += blockDim.x) {
      const int row = i / chunks, col = i % chunks * 8;
      *reinterpret_cast<uint4*>(dq + row * p.dq_stride.row + col) =
          *reinterpret_cast<const uint4*>(tile_rows + row * pitch + col);
    }
  } else {
    for (int i = threadIdx.x; i < rows * p.head_dim; i += blockDim.x) {
      const int row = i / p.head_dim, col = i % p.head_dim;
      dq[row * p.dq_stride.row + col] = tile_rows[row * pitch + col];
    }
  }
}

}  // namespace

cudaError_t convert_dq(const ConvertDqParams& p, Dtype dtype, cudaStream_t stream) {
  const DqTileLayout& t = p.layout;
  const int64_t blocks = static_cast<int64_t>(p.batch) * p.nheads * p.dq_blocks;
  const size_t smem = static_cast<size_t>(t.block_m) * (t.head_dim_tile + kDqPad) * sizeof(uint16_t);
  return with_half_type(dtype, [&](auto element) {
    return launch(convert_dq_kernel<decltype(element)>, blocks, t.threads, smem, stream, p);
  });
}

}  // namespace dmattn
