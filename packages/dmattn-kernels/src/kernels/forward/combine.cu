// After the forward: partial results of a split key range put together, and the results of an empty one.
#include "../shared/fill.h"
#include "combine.cuh"
#include "forward.h"

namespace dmattn {
namespace {

using namespace prep;

constexpr int kThreads = 128;

template <class Element, int kLanes>
__global__ void __launch_bounds__(kCombineThreads) combine_kernel(const FwdParams p, int parts) {
  combine_rows<Element, kLanes>(p, parts, blockIdx.x);
}

__global__ void __launch_bounds__(kThreads)
    fill_lse_kernel(float* lse, Strides3 stride, int64_t rows, int seqlen_q, int nheads) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (row >= rows) return;
  const int64_t bh = row / seqlen_q;
  lse[row_offset(stride, static_cast<int>(bh / nheads), static_cast<int>(bh % nheads), row % seqlen_q)] = -INFINITY;
}

}  // namespace

cudaError_t combine_splits(const FwdParams& p, Dtype dtype, cudaStream_t stream) {
  return with_half_type(dtype, [&](auto element) {
    return with_combine_lanes(p.head_dim, [&](auto lanes) {
      const CombineGrid grid = combine_grid<lanes>(p);
      return launch(combine_kernel<decltype(element), lanes>, grid.blocks, kCombineThreads, 0, stream, p, grid.parts);
    });
  });
}

// Zero has the same bits in every 16-bit type.
cudaError_t fill_empty_fwd(const FwdParams& p, cudaStream_t stream) {
  const int32_t batch = p.packing.slabs(p.batch), seqlen_q = p.packing.rows_q(p.seqlen_q);
  const cudaError_t status = fill_zero(p.out, p.out_stride, batch, seqlen_q, p.nheads, p.head_dim, stream);
  if (status != cudaSuccess || p.lse == nullptr) return status;
  const int64_t rows = static_cast<int64_t>(batch) * p.nheads * seqlen_q;
  return launch(fill_lse_kernel, ceil_div<int64_t>(rows, kThreads), kThreads, 0, stream, p.lse, p.lse_stride, rows,
                seqlen_q, p.nheads);
}

}  // namespace dmattn
