// The best keys of a long list in one launch, if all its thread blocks fit the GPU at once. This is for decoding over
// a full cache, where launches cost more than the work. A block keeps its keys in registers from the first digit to
// the list; after each digit the blocks of a row wait for each other's histograms.
#include "compact.cuh"

namespace dmattn {
namespace prep {
namespace {

constexpr int kLaunchThreads = 512;
constexpr int kLaunchWarps = kLaunchThreads / 32;
constexpr int kOwnKeys = kChunkKeys / kLaunchThreads;  // of a thread, 32 apart: the keys of a warp are contiguous

struct LaunchSmem {
  alignas(16) uint32_t hist[kBins];
  int32_t warp_sums[32];
  FoundBin found;
  int2 warp_counts[kLaunchWarps];
  int32_t sums[2];
};

// Waits until every block of the row has come here for the n-th time, n from 1. As the launch is cooperative, all of
// them run.
__device__ __forceinline__ void row_barrier(const SelectPlan& p, int row, int n) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(p.arrived + row, 1);
    const volatile int32_t* arrived = p.arrived + row;
    while (*arrived < n * p.chunks) {
    }
    __threadfence();
  }
  __syncthreads();
}

// The smallest ordered score that is selected, and how many of the keys with this score are selected.
struct LaunchCut {
  uint32_t value;
  int32_t need;
};
__device__ __forceinline__ LaunchCut find_cut(const SelectPlan& p, int row, const uint32_t (&x)[kOwnKeys],
                                              LaunchSmem& s) {
  uint32_t prefix = 0;
  int need = 0;
#pragma unroll 1
  for (int digit = 0; digit < p.digits; ++digit) {
    clear_bins<kLaunchThreads>(s.hist, kBins);
    if (threadIdx.x == 0) s.found = FoundBin{kBins - 1, 0, 0};
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kOwnKeys; ++i) {
      if (x[i] != 0 && prefix_of(x[i], digit) == prefix) atomicAdd(&s.hist[digit_of(x[i], digit)], 1u);
    }
    __syncthreads();
    uint32_t* sums = p.hist + (static_cast<int64_t>(row) * kMaxDigits + digit) * kBins;
    for (int i = threadIdx.x; i < kBins; i += kLaunchThreads) {
      if (s.hist[i] != 0) atomicAdd(&sums[i], s.hist[i]);
    }
    row_barrier(p, row, digit + 1);
    BinCounts<kLaunchThreads> bins;
    const int total = bins.load(sums, s.warp_sums);
    if (digit == 0) need = min(p.window, total);
    if (need > 0) bins.locate(need, &s.found);
    __syncthreads();
    prefix = append_digit(prefix, digit, s.found.bin);
    need = s.found.need;
    __syncthreads();  // before `found` is reset for the next digit
  }
  return {prefix << digit_shift(p.digits - 1), need};
}

// Returns where the chunk's keys go. x: how many keys of earlier chunks are selected. y: how many of the chunk's keys
// that equal the cut are not selected: the earliest ones. own: how many of the chunk's keys lie above the cut (x) and
// equal it (y).
__device__ __forceinline__ int2 place_own(const SelectPlan& p, int row, int chunk, int2 own, int need, LaunchSmem& s) {
  int2* counts = p.chunk_counts + static_cast<int64_t>(row) * p.chunks;
  if (threadIdx.x == 0) counts[chunk] = own;
  if (threadIdx.x < 2) s.sums[threadIdx.x] = 0;
  row_barrier(p, row, p.digits + 1);
  int above = 0, later_equal = 0;
  for (int i = threadIdx.x; i < p.chunks; i += kLaunchThreads) {
    const int2 x = counts[i];
    if (i < chunk) above += x.x;
    if (i > chunk) later_equal += x.y;
  }
  above = warp_sum(above), later_equal = warp_sum(later_equal);
  if (threadIdx.x % 32 == 0 && (above | later_equal) != 0) {
    atomicAdd(&s.sums[0], above);
    atomicAdd(&s.sums[1], later_equal);
  }
  __syncthreads();
  const int wanted = max(need - s.sums[1], 0);  // equal ones from this chunk and those before
  const int taken = min(wanted, own.y);
  return make_int2(s.sums[0] + wanted - taken, own.y - taken);
}

template <class Score>
__global__ void __launch_bounds__(kLaunchThreads)
    select_launch_kernel(const SelectParams params, const SelectPlan p, const KeyList keys) {
  __shared__ LaunchSmem s;
  const int row = blockIdx.x / p.chunks, chunk = blockIdx.x % p.chunks;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int key0 = chunk * kChunkKeys + warp * 32 * kOwnKeys + lane;
  const ScoreRow<Score> scores(params, row);
  uint32_t x[kOwnKeys];
#pragma unroll
  for (int i = 0; i < kOwnKeys; ++i) x[i] = key0 + 32 * i < p.grid_keys ? scores.load(key0 + 32 * i) : 0u;
#pragma unroll
  for (int i = 0; i < kOwnKeys; ++i) {
    if (key0 + 32 * i < p.grid_keys && !scores.allows(key0 + 32 * i)) x[i] = 0;
  }
  const LaunchCut cut = find_cut(p, row, x, s);

  int2 warp_own = make_int2(0, 0);
#pragma unroll
  for (int i = 0; i < kOwnKeys; ++i) {
    warp_own.x += __popc(__ballot_sync(kFullWarp, x[i] > cut.value));
    warp_own.y += __popc(__ballot_sync(kFullWarp, x[i] == cut.value));
  }
  if (lane == 0) s.warp_counts[warp] = warp_own;
  __syncthreads();
  Tally before{0, 0}, all{0, 0};
#pragma unroll
  for (int w = 0; w < kLaunchWarps; ++w) {
    const int2 c = s.warp_counts[w];
    if (w < warp) before.above += c.x, before.equal += c.y;
    all.above += c.x, all.equal += c.y;
  }
  const int2 place = place_own(p, row, chunk, make_int2(all.above, all.equal), cut.need, s);

  const Cut bound{cut.value, place.y};
  int32_t* idx = const_cast<int32_t*>(keys.idx) + static_cast<int64_t>(row) * keys.capacity;
  int32_t* end =
      keys.end == nullptr ? nullptr : const_cast<int32_t*>(keys.end) + static_cast<int64_t>(row) * p.seqlen_k;
  const uint32_t lower_lanes = (1u << lane) - 1;
#pragma unroll
  for (int i = 0; i < kOwnKeys; ++i) {
    const uint32_t above = __ballot_sync(kFullWarp, x[i] > cut.value);
    const uint32_t equal = __ballot_sync(kFullWarp, x[i] == cut.value);
    const Tally at{before.above + __popc(above & lower_lanes), before.equal + __popc(equal & lower_lanes)};
    const int key = key0 + 32 * i;
    const bool taken = at.takes(x[i], bound);
    if (taken) idx[place.x + at.taken(bound)] = key;
    if (end != nullptr && key < p.grid_keys) end[key] = taken ? p.seqlen_k : p.is_causal ? key : 0;
    before.above += __popc(above);
    before.equal += __popc(equal);
  }
  if (chunk + 1 < p.chunks) return;
  const int count = place.x + all.taken(bound);
  finish_list(keys, row, count, count);
}

}  // namespace

cudaError_t select_in_one_launch(const SelectParams& params, const SelectPlan& plan, const KeyList& keys,
                                 cudaStream_t stream) {
  const auto run = [&](auto kernel) {
    cudaLaunchAttribute together;
    together.id = cudaLaunchAttributeCooperative;
    together.val.cooperative = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(plan.rows * plan.chunks));
    config.blockDim = dim3(kLaunchThreads);
    config.stream = stream;
    config.attrs = &together;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, kernel, params, plan, keys);
  };
  if (params.dtype == Dtype::kFloat32) return run(select_launch_kernel<float>);
  if (params.dtype == Dtype::kFloat16) return run(select_launch_kernel<__half>);
  if (params.dtype == Dtype::kBFloat16) return run(select_launch_kernel<__nv_bfloat16>);
  return cudaErrorInvalidValue;
}

}  // namespace prep
}  // namespace dmattn
