// After the forward: combines the partial results of splits. Also writes the results of a call without keys.
#include <type_traits>

#include "../attention/shared/work_index.cuh"
#include "../shared/fill.h"
#include "../shared/helper.cuh"
#include "forward.h"

namespace dmattn {
namespace {

using namespace prep;

constexpr int kThreads = 128;

// kLanes lanes hold a row, eight columns each. Where there are many splits (and then few rows), `parts` groups of
// lanes share a row: group `part` sums splits part, part + parts, ...
struct CombineGrid {
  int parts;
  int64_t blocks;
};
template <int kLanes>
CombineGrid combine_grid(const FwdParams& p) {
  constexpr int kGroups = kThreads / kLanes;
  int parts = 1;
  while (parts < kGroups && 4 * parts < p.num_splits) parts *= 2;
  const int64_t rows = static_cast<int64_t>(p.batch) * p.nheads * p.seqlen_q;
  return {parts, ceil_div<int64_t>(rows, kGroups / parts)};
}

template <class Element, int kLanes>
__global__ void __launch_bounds__(kThreads) combine_kernel(const FwdParams p, int parts) {
  follow_previous_kernel();
  constexpr int kGroups = kThreads / kLanes;
  __shared__ __align__(16) float partial[kThreads][8];
  const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;
  const int part = group % parts;
  const int rows_per_block = kGroups / parts;
  const int64_t rows = static_cast<int64_t>(p.batch) * p.nheads * p.seqlen_q;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * rows_per_block + group / parts;
  const bool row_valid = row < rows, valid = row_valid && lane * 8 < p.head_dim;

  // The log-sum-exp of a split is lse + rest: rounding lse to fp32 may have dropped the logarithm of the sum (see
  // FwdParams::lse_rest).
  const float* lse_accum = p.lse_accum + (row_valid ? row : 0);
  const float* rest_accum = lse_accum + p.num_splits * rows;
  float max = -INFINITY;
  for (int s = lane; s < p.num_splits; s += kLanes) max = fmaxf(max, __ldg(lse_accum + s * rows));
  max = lanes_max<kLanes>(max);
  if (max == -INFINITY) max = 0.f;  // no split keeps a key: all weights are then exp(-inf) = 0
  float sum = 0.f;
  for (int s = lane; s < p.num_splits; s += kLanes) {
    sum += expf(__ldg(lse_accum + s * rows) - max + __ldg(rest_accum + s * rows));
  }
  sum = lanes_sum<kLanes>(sum);
  const float scale = sum == 0.f ? 0.f : 1.f / sum;

  float acc[8] = {};
  if (valid) {
    const float* src = p.out_accum + row * p.head_dim + lane * 8;
#pragma unroll 4
    for (int s = part; s < p.num_splits; s += parts) {
      const float weight = expf(__ldg(lse_accum + s * rows) - max + __ldg(rest_accum + s * rows)) * scale;
      accumulate8(acc, src + s * rows * p.head_dim, weight);
    }
  }
  if (parts > 1) {
#pragma unroll
    for (int i = 0; i < 8; ++i) partial[threadIdx.x][i] = acc[i];
    __syncthreads();
    if (part != 0) return;
    for (int other = 1; other < parts; ++other) {
#pragma unroll
      for (int i = 0; i < 8; ++i) acc[i] += partial[threadIdx.x + other * kLanes][i];
    }
  }
  if (!valid) return;
  const int m = static_cast<int>(row % p.seqlen_q);
  const int h = static_cast<int>(row / p.seqlen_q % p.nheads);
  const int b = static_cast<int>(row / p.seqlen_q / p.nheads);
  // The offset of the row. The rows of TokenRows are those of several tokens, which lie `token` elements apart.
  const auto place_of = [&](const Strides3& s, int64_t token) {
    const bool has_groups = p.token_rows.count > 1;
    const int64_t place = has_groups ? token_row_offset(p.token_rows.group, token, s.row, m) : m * s.row;
    return row_offset(s, b, h, 0) + place;
  };
  uint16_t* out = static_cast<uint16_t*>(p.out) + place_of(p.out_stride, p.token_rows.out_token) + lane * 8;
  store_chunk(out, pack_chunk<Element>(acc), p.vec_out);
  if (lane != 0 || p.lse == nullptr) return;
  const float log_sum = logf(sum), lse = max + log_sum;
  const int64_t place = place_of(p.lse_stride, p.token_rows.lse_token);
  p.lse[place] = lse;
  if (p.lse_rest != nullptr) {
    p.lse_rest[place] = sum == 0.f ? 0.f : (max - lse) + log_sum;
  }
}

// Calls f(std::integral_constant<int, lanes of a row>{}).
template <class F>
cudaError_t with_combine_lanes(int head_dim, F&& f) {
  if (head_dim <= 64) return f(std::integral_constant<int, 8>{});
  if (head_dim <= 128) return f(std::integral_constant<int, 16>{});
  return f(std::integral_constant<int, 32>{});
}

__global__ void __launch_bounds__(kThreads)
    fill_lse_kernel(float* lse, float* lse_rest, Strides3 stride, int64_t rows, int seqlen_q, int nheads) {
  follow_previous_kernel();
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (row >= rows) return;
  const int64_t bh = row / seqlen_q;
  const int64_t at = row_offset(stride, static_cast<int>(bh / nheads), static_cast<int>(bh % nheads), row % seqlen_q);
  lse[at] = -INFINITY;
  if (lse_rest != nullptr) lse_rest[at] = 0.f;
}

}  // namespace

cudaError_t combine_splits(const FwdParams& p, Dtype dtype, cudaStream_t stream) {
  return with_half_type(dtype, [&](auto element) {
    return with_combine_lanes(p.head_dim, [&](auto lanes) {
      const CombineGrid grid = combine_grid<lanes>(p);
      return launch(combine_kernel<decltype(element), lanes>, grid.blocks, kThreads, 0, stream, p, grid.parts);
    });
  });
}

// Needs no dtype: zero has the same bits in every 16-bit type.
cudaError_t fill_empty_fwd(const FwdParams& p, cudaStream_t stream) {
  const int32_t batch = p.packing.slabs(p.batch), seqlen_q = p.packing.rows_q(p.seqlen_q);
  const cudaError_t status = fill_zero(p.out, p.out_stride, batch, seqlen_q, p.nheads, p.head_dim, stream);
  if (status != cudaSuccess || p.lse == nullptr) return status;
  const int64_t rows = static_cast<int64_t>(batch) * p.nheads * seqlen_q;
  return launch(fill_lse_kernel, ceil_div<int64_t>(rows, kThreads), kThreads, 0, stream, p.lse, p.lse_rest,
                p.lse_stride, rows, seqlen_q, p.nheads);
}

}  // namespace dmattn
