// Around the backward kernel's query side: delta and lse before it, the schedule of gathered work, dq after it.
#include "../common/key_source.cuh"
#include "../common/seqlen.cuh"
#include "../common/work_index.cuh"
#include "prep.h"
#include "prep_common.cuh"

namespace dmattn {
namespace {

using namespace prep;

// --- preprocess ----------------------------------------------------------------------------------------------------

constexpr int kThreads = 256;
constexpr int kRows = 64;  // rows of one (batch, head) a block

// The rows of the tensors that kRows entries of the results from row0 on stand for: the others are padding.
struct Rows {
  int first, count;
};
__device__ __forceinline__ Rows find_rows(const BwdPreprocessParams& p, int row0) {
  if (!p.packing.is_active()) return {row0, p.seqlen_q - row0};
  const PackedRows found = find_packed_rows(p.packing, kRowPitch, row0 / kRowPitch);
  const int skipped = row0 % kRowPitch;
  return {found.first + skipped, found.rows - skipped};
}

// kLanes lanes hold a row, eight columns each. Heads are the fastest block index: in the usual (b, s, h, d) layout
// the blocks in flight together then read one contiguous range.
template <class Element, int kLanes, bool kVec>
__global__ void __launch_bounds__(kThreads) preprocess_kernel(const BwdPreprocessParams p) {
  constexpr int kRowsPerPass = kThreads / kLanes;
  constexpr int kPasses = kRows / kRowsPerPass;
  constexpr int kBatch = kPasses < 4 ? kPasses : 4;  // loads in flight: 2 * kBatch * 16 bytes a thread
  __shared__ float dots[kRows];
  const int tiles = ceil_div(p.seqlen_q_rounded, kRows);
  WorkIndex work(blockIdx.x);
  const int h = work.take(p.nheads);
  const int row0 = work.take(tiles) * kRows;
  const int b = work.rest;
  const Rows own = find_rows(p, row0);
  const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;
  const uint16_t* out = static_cast<const uint16_t*>(p.out) + row_offset(p.out_stride, b, h, own.first) + lane * 8;
  const uint16_t* dout = static_cast<const uint16_t*>(p.dout) + row_offset(p.dout_stride, b, h, own.first) + lane * 8;

#pragma unroll
  for (int pass0 = 0; pass0 < kPasses; pass0 += kBatch) {
    uint4 x[kBatch], dx[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int row = (pass0 + i) * kRowsPerPass + group;
      x[i] = dx[i] = make_uint4(0, 0, 0, 0);
      if (row < own.count && lane * 8 < p.head_dim) {
        x[i] = load_chunk(out + row * p.out_stride.row, kVec);
        dx[i] = load_chunk(dout + row * p.dout_stride.row, kVec);
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      float o[8], g[8], dot = 0.f;
      unpack_chunk<Element>(x[i], o);
      unpack_chunk<Element>(dx[i], g);
#pragma unroll
      for (int e = 0; e < 8; ++e) dot = fmaf(o[e], g[e], dot);
      dot = lanes_sum<kLanes>(dot);
      if (lane == 0) dots[(pass0 + i) * kRowsPerPass + group] = dot;
    }
  }
  __syncthreads();
  const int row = threadIdx.x;
  if (row >= kRows || row0 + row >= p.seqlen_q_rounded) return;
  float lse = -INFINITY;
  if (row < own.count) lse = __ldg(p.lse + row_offset(p.lse_stride, b, h, own.first + row));
  float delta = 0.f;
  if (lse == -INFINITY) {  // keeps nothing: exp(score - inf) is 0
    lse = INFINITY;
  } else {
    delta = dots[row];
    if (p.dlse != nullptr) delta -= __ldg(p.dlse + row_offset(p.dlse_stride, b, h, own.first + row));
  }
  const int64_t dst = (static_cast<int64_t>(b) * p.nheads + h) * p.seqlen_q_rounded + row0 + row;
  p.lse_rounded[dst] = lse;
  if (p.lse_rest != nullptr) {
    p.rest_rounded[dst] = row < own.count ? __ldg(p.lse_rest + row_offset(p.lse_stride, b, h, own.first + row)) : 0.f;
  }
  p.delta[dst] = delta;
}

template <class Element, int kLanes>
cudaError_t launch_preprocess(const BwdPreprocessParams& p, cudaStream_t stream) {
  const int64_t blocks = static_cast<int64_t>(p.batch) * p.nheads * ceil_div(p.seqlen_q_rounded, kRows);
  const auto kernel =
      p.vec_out && p.vec_dout ? preprocess_kernel<Element, kLanes, true> : preprocess_kernel<Element, kLanes, false>;
  return launch(kernel, blocks, kThreads, 0, stream, p);
}

// --- schedule ------------------------------------------------------------------------------------------------------

constexpr int kScheduleThreads = 1024;

__global__ void __launch_bounds__(kScheduleThreads)
    schedule_kernel(const KeyList keys, int lists, int nheads_k, int head_ratio, int block_n, int max_work,
                    int max_tiles, int max_splits, int32_t* schedule) {
  __shared__ int warp_sums[32];
  int tiles = 0;
  for (int list0 = 0; list0 < lists; list0 += kScheduleThreads) {
    const int list = list0 + threadIdx.x;
    int list_tiles = 0;
    if (list < lists) {
      const int b = keys.batch == 1 ? 0 : list / nheads_k;
      const int head = list % nheads_k * head_ratio / keys.head_ratio;
      list_tiles = ceil_div(read_list_count(keys, static_cast<int64_t>(b) * keys.heads + head), block_n);
    }
    int pass_tiles;
    const int before = block_exclusive_scan<kScheduleThreads>(list_tiles, warp_sums, pass_tiles);
    if (list < lists) schedule[2 + list] = tiles + before;
    tiles += pass_tiles;
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    schedule[0] = tiles == 0 || tiles > max_tiles ? 1 : max(1, min(max_work / tiles, max_splits));
    schedule[1] = tiles;
    schedule[2 + lists] = tiles;
  }
}

// --- dq ------------------------------------------------------------------------------------------------------------

// Columns added to a row of the tile in shared memory, so that the eight rows of a fragment fall on different banks.
constexpr int kDqPad = 8;

// Reads the tile as the backward kernel's threads wrote it (layout.threads threads, four registers of each m16n8
// fragment at a time) and puts it, rounded, into a row-major tile.
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

template <class Element>
__global__ void __launch_bounds__(1024) convert_dq_kernel(const ConvertDqParams p) {
  extern __shared__ __align__(16) uint32_t smem[];
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
  load_dq_fragments<Element>(p, tile, smem);
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

cudaError_t bwd_preprocess(const BwdPreprocessParams& p, Dtype dtype, cudaStream_t stream) {
  return with_half_type(dtype, [&](auto element) {
    using Element = decltype(element);
    if (p.head_dim <= 64) return launch_preprocess<Element, 8>(p, stream);
    if (p.head_dim <= 128) return launch_preprocess<Element, 16>(p, stream);
    return launch_preprocess<Element, 32>(p, stream);
  });
}

cudaError_t bwd_schedule(const KeyList& keys, int batch, int nheads_k, int head_ratio, int block_n, int max_work,
                         int max_tiles, int max_splits, int32_t* schedule, cudaStream_t stream) {
  return launch(schedule_kernel, 1, kScheduleThreads, 0, stream, keys, batch * nheads_k, nheads_k, head_ratio, block_n,
                max_work, max_tiles, max_splits, schedule);
}

cudaError_t convert_dq(const ConvertDqParams& p, Dtype dtype, cudaStream_t stream) {
  const DqTileLayout& t = p.layout;
  const int64_t blocks = static_cast<int64_t>(p.batch) * p.nheads * p.dq_blocks;
  const size_t smem = static_cast<size_t>(t.block_m) * (t.head_dim_tile + kDqPad) * sizeof(uint16_t);
  return with_half_type(dtype, [&](auto element) {
    return launch(convert_dq_kernel<decltype(element)>, blocks, t.threads, smem, stream, p);
  });
}

}  // namespace dmattn
