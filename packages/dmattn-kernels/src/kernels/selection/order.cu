// Selection of keys by score, first step: ordered scores.
#include <algorithm>

#include "radix.cuh"

namespace dmattn {
namespace prep {
namespace {

// --- ordered scores ------------------------------------------------------------------------------------------------

// The document of a key, from the last boundary at or before the key to the next one. Keys after the last boundary are
// one more document. cu_seqlens may hold any numbers: the search compares them with the key alone, so that the start is
// at most `key` and the stop above it, even where they are out of order.
__device__ __forceinline__ int2 find_document(const SelectParams& p, int key) {
  if (p.documents == 0) return make_int2(0, p.seqlen_k);
  int before = 0, after = p.documents + 1;  // boundaries before `before` are <= key, those from `after` on are not
  while (before < after) {
    const int middle = (before + after) / 2;
    if (__ldg(p.cu_seqlens + middle) <= key) {
      before = middle + 1;
    } else {
      after = middle;
    }
  }
  const int start = before > 0 ? __ldg(p.cu_seqlens + before - 1) : 0;
  const int stop = before <= p.documents ? __ldg(p.cu_seqlens + before) : p.seqlen_k;
  return make_int2(max(start, 0), min(stop, p.seqlen_k));
}

constexpr int kOrderThreads = 512;

// Writes the ends of keys as if none were displaced: a key is kept to the end of its document.
__device__ __forceinline__ void start_ends(const SelectParams& p, const SelectPlan& plan, int row, int chunk0,
                                           int32_t* end) {
  const int last = min(chunk0 + kChunkKeys, p.seqlen_k);
  // Not unrolled: the search would be repeated in the code, and fetching that would take longer than running it.
#pragma unroll 1
  for (int key = chunk0 + threadIdx.x; key < last; key += kOrderThreads) {
    const int2 document = find_document(p, key);
    end[static_cast<int64_t>(row) * p.seqlen_k + key] = p.seqlen_q > 0 ? document.y : key;
    if (plan.document != nullptr && row == 0) plan.document[key] = document;
  }
}

// Writes the ordered scores, the documents, the first values of end, and the histogram of the first digit of the keys
// that the grid selects from. One block for each chunk of kChunkKeys keys.
template <class Score>
__global__ void __launch_bounds__(kOrderThreads, 2)
    order_kernel(const SelectParams p, const SelectPlan plan, int chunks, int32_t* end) {
  constexpr int kPerThread = kChunkKeys / kOrderThreads;
  __shared__ __align__(16) uint32_t hist[kBins];
  const int row = blockIdx.x / chunks;
  const int chunk0 = blockIdx.x % chunks * kChunkKeys;
  const ScoreRow<Score> scores(p, row);
  const bool counted = chunk0 < plan.grid_keys;
  if (counted) {
    clear_bins<kOrderThreads>(hist, kBins);
    __syncthreads();
  }
  follow_previous_kernel();
  uint32_t x[kPerThread];
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int key = chunk0 + i * kOrderThreads + threadIdx.x;
    x[i] = key < p.seqlen_k ? scores.load(key) : 0u;
  }
  if (end != nullptr) start_ends(p, plan, row, chunk0, end);
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int key = chunk0 + i * kOrderThreads + threadIdx.x;
    if (key < p.seqlen_k && !scores.allows(key)) x[i] = 0;
  }
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int key = chunk0 + i * kOrderThreads + threadIdx.x;
    if (key < plan.ord_pitch) plan.ord[row * plan.ord_pitch + key] = x[i];
    if (key < plan.grid_keys && x[i] != 0) atomicAdd(&hist[x[i] >> digit_shift(0)], 1u);
  }
  if (!counted) return;
  __syncthreads();
  uint32_t* sums = plan.hist + static_cast<int64_t>(row) * kMaxDigits * kBins;
  for (int i = threadIdx.x; i < kBins; i += kOrderThreads) {
    if (hist[i] != 0) atomicAdd(&sums[i], hist[i]);
  }
}

}  // namespace

cudaError_t select_order(const SelectParams& p, const SelectPlan& plan, int32_t* end, cudaStream_t stream) {
  const int chunks = std::max(1, ceil_div(p.seqlen_k, kChunkKeys));
  const int64_t blocks = static_cast<int64_t>(plan.rows) * chunks;
  int32_t* start = plan.single_list ? nullptr : end;
  const auto run = [&](auto kernel) {
    return launch(kernel, blocks, kOrderThreads, 0, stream, p, plan, chunks, start);
  };
  if (p.dtype == Dtype::kFloat32) return run(order_kernel<float>);
  if (p.dtype == Dtype::kFloat16) return run(order_kernel<__half>);
  if (p.dtype == Dtype::kBFloat16) return run(order_kernel<__nv_bfloat16>);
  return cudaErrorInvalidValue;
}

}  // namespace prep
}  // namespace dmattn
