// Before the backward kernel: delta, and lse in the form that it reads.
#include "../attention/shared/seqlen.cuh"
#include "../attention/shared/work_index.cuh"
#include "../shared/helper.cuh"
#include "backward.h"

namespace dmattn {
namespace {

using namespace prep;

constexpr int kThreads = 256;
constexpr int kRows = 64;  // rows of one (batch, head) a block
// The most that a block clears. In most calls the larger part of that is the sums of dq of its rows: 64 KB at head_dim
// 256.
constexpr int64_t kMostClearedBytes = int64_t{128} << 10;

// The rows of the tensors that belong to the results from row0 on. Results behind the first `count` are padding.
struct Rows {
  int first, count;
};
__device__ __forceinline__ Rows find_rows(const BwdPreprocessParams& p, int row0) {
  if (!p.packing.is_active()) return {row0, p.seqlen_q - row0};
  const PackedRows found = find_packed_rows(p.packing, kRowPitch, row0 / kRowPitch);
  const int skipped = row0 % kRowPitch;
  return {found.first + skipped, found.rows - skipped};
}

// Clears a range with all blocks of the grid; neighbouring blocks write neighbouring memory.
__device__ __forceinline__ void clear(const ClearedRange& cleared) {
  uint4* const words = static_cast<uint4*>(cleared.begin);
  const int64_t count = static_cast<int64_t>(cleared.bytes / sizeof(uint4));
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count; i += step) {
    words[i] = make_uint4(0, 0, 0, 0);
  }
}

__device__ __forceinline__ float read_dlse(const BwdPreprocessParams& p, int b, int h, int64_t row) {
  return __ldg(p.dlse + row_offset(p.dlse_stride, b, h, row));
}

// Whether any of eight 16-bit numbers is neither 0 nor -0.
__device__ __forceinline__ bool has_nonzero(uint4 chunk) {
  return ((chunk.x | chunk.y | chunk.z | chunk.w) & 0x7fff7fffu) != 0;
}

// Adds to UsedRows the row row0 + threadIdx.x of each lane, if it is `used`. Called by the first two warps as a whole.
__device__ __forceinline__ void find_used_rows(const BwdPreprocessParams& p, int b, int h, int row0, bool used) {
  const uint32_t rows = __ballot_sync(kFullWarp, used);
  if (rows == 0 || threadIdx.x % 32 != 0) return;
  const UsedRows& to = p.used_rows;
  const int64_t list = static_cast<int64_t>(to.batch > 1 ? b : 0) * to.heads + h / to.head_ratio;
  const int first = row0 + threadIdx.x;
  const int values[2] = {first + 32 - __clz(rows), p.seqlen_q - (first + __ffs(rows) - 1)};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    // A read first saves most of the atomics: where heads and batches share a list, others have mostly stored as much.
    int* const found = to.found + 2 * list + i;
    if (*static_cast<volatile int*>(found) < values[i]) atomicMax(found, values[i]);
  }
}

// kLanes lanes hold a row, eight columns each. Heads are the fastest block index: in the usual (b, s, h, d) layout the
// blocks in flight together then read one contiguous range. kFindsRows: finds UsedRows. Calls without these have
// kernels of their own, which have more loads in flight.
template <class Element, int kLanes, bool kVec, bool kFindsRows>
__global__ void __launch_bounds__(kThreads) preprocess_kernel(const BwdPreprocessParams p, const Cleared cleared) {
  follow_previous_kernel();
  constexpr int kRowsPerPass = kThreads / kLanes;
  constexpr int kPasses = kRows / kRowsPerPass;
  constexpr int kBatch = kPasses < 4 ? kPasses : 4;  // loads in flight: 2 * kBatch * 16 bytes a thread
  __shared__ float dots[kRows];
  __shared__ bool has_dout[kFindsRows ? kRows : 1];
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
      const int row = (pass0 + i) * kRowsPerPass + group;
      if (lane == 0) dots[row] = dot;
      if constexpr (kFindsRows) {
        const uint32_t nonzero = __ballot_sync(kFullWarp, has_nonzero(dx[i]));
        const uint32_t of_row = nonzero >> (threadIdx.x % 32 - lane) << (32 - kLanes);
        if (lane == 0) has_dout[row] = of_row != 0;
      }
    }
  }
  clear(cleared.sums);
  clear(cleared.in_dq);
  __syncthreads();
  const int row = threadIdx.x;
  if (row >= kRows) return;
  if constexpr (kFindsRows) {
    bool used = false;
    if (row < own.count) {
      const int64_t at = row_offset(p.lse_stride, b, h, own.first + row);
      used = __ldg(p.lse + at) != -INFINITY &&
             (has_dout[row] || (p.dlse != nullptr && read_dlse(p, b, h, own.first + row) != 0.f));
    }
    find_used_rows(p, b, h, row0, used);
  }
  if (row0 + row >= p.seqlen_q_rounded) return;
  float lse = -INFINITY;
  if (row < own.count) lse = __ldg(p.lse + row_offset(p.lse_stride, b, h, own.first + row));
  float delta = 0.f;
  if (lse == -INFINITY) {  // a row that keeps nothing: exp(score - inf) is 0
    lse = INFINITY;
  } else {
    delta = dots[row];
    if (p.dlse != nullptr) delta -= read_dlse(p, b, h, own.first + row);
  }
  const int64_t dst = (static_cast<int64_t>(b) * p.nheads + h) * p.seqlen_q_rounded + row0 + row;
  p.lse_rounded[dst] = lse * p.lse_scale;
  if (p.lse_rest != nullptr) {
    const float rest = row < own.count ? __ldg(p.lse_rest + row_offset(p.lse_stride, b, h, own.first + row)) : 0.f;
    p.rest_rounded[dst] = rest * p.rest_scale;
  }
  p.delta[dst] = delta;
}

int64_t blocks_of(const BwdPreprocessParams& p) {
  return static_cast<int64_t>(p.batch) * p.nheads * ceil_div(p.seqlen_q_rounded, kRows);
}

template <class Element, int kLanes>
cudaError_t launch_preprocess(const BwdPreprocessParams& p, const Cleared& cleared, cudaStream_t stream) {
  const auto kernel = p.used_rows.found != nullptr ? preprocess_kernel<Element, kLanes, true, true>
                      : p.vec_out && p.vec_dout    ? preprocess_kernel<Element, kLanes, true, false>
                                                   : preprocess_kernel<Element, kLanes, false, false>;
  return launch(kernel, blocks_of(p), kThreads, 0, stream, p, cleared);
}

}  // namespace

bool bwd_preprocess_clears(const BwdPreprocessParams& p, size_t bytes) {
  return static_cast<int64_t>(bytes) <= kMostClearedBytes * blocks_of(p);
}

cudaError_t bwd_preprocess(const BwdPreprocessParams& p, const Cleared& cleared, Dtype dtype, cudaStream_t stream) {
  return with_half_type(dtype, [&](auto element) {
    using Element = decltype(element);
    if (p.head_dim <= 64) return launch_preprocess<Element, 8>(p, cleared, stream);
    if (p.head_dim <= 128) return launch_preprocess<Element, 16>(p, cleared, stream);
    return launch_preprocess<Element, 32>(p, cleared, stream);
  });
}

}  // namespace dmattn
