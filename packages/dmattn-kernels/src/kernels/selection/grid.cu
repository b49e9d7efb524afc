// The best keys of a long row, found by many thread blocks: a launch for each digit of the ordered scores, which makes
// a histogram, and then a compaction in key order. Every block of a launch evaluates the histogram of the previous
// launch by itself, so that no block waits for another.
#include "compact.cuh"

namespace dmattn {
namespace prep {
namespace {

constexpr int kGridThreads = 256;
constexpr int kGridWarps = kGridThreads / 32;
constexpr int kSteps = kChunkKeys / 4 / kGridThreads;  // quads of a thread

struct GridSmem {
  alignas(16) uint32_t hist[kBins];
  int32_t warp_sums[32];
  FoundBin found;
  int32_t sums[3];
};

// The state of the search after the digits before `digit`, found from the histogram of the last of these and from the
// state before it. need = 0: nothing is selected, and no key matches the prefix.
struct GridState {
  uint32_t prefix;
  int32_t need;   // keys wanted among those with the prefix
  int32_t count;  // keys with the prefix
};
__device__ __forceinline__ GridState resolve_digit(const SelectPlan& p, int row, int digit, GridSmem& s) {
  const int previous = digit - 1;
  const int64_t base = static_cast<int64_t>(row) * kMaxDigits;
  if (threadIdx.x == 0) s.found = FoundBin{kBins - 1, 0, 0};
  BinCounts<kGridThreads> bins;
  const int total = bins.load(p.hist + (base + previous) * kBins, s.warp_sums);
  uint32_t prefix = 0;
  int need = min(p.window, total);
  if (previous > 0) {
    const uint2 state = p.digit_state[base + previous];
    prefix = state.x;
    need = static_cast<int>(state.y);
  }
  if (need > 0) bins.locate(need, &s.found);
  __syncthreads();
  return {append_digit(prefix, previous, s.found.bin), s.found.need, s.found.count};
}

__device__ __forceinline__ uint4 load_quad(const SelectPlan& p, int row, int key) {
  uint4 x = make_uint4(0, 0, 0, 0);
  if (key < p.grid_keys) {
    x = __ldg(reinterpret_cast<const uint4*>(p.ord + row * p.ord_pitch + key));
    if (key + 1 >= p.grid_keys) x.y = 0;
    if (key + 2 >= p.grid_keys) x.z = 0;
    if (key + 3 >= p.grid_keys) x.w = 0;
  }
  return x;
}

// Makes the histogram of `digit` over the keys whose earlier digits are those of the cut. For the last digit also
// finds what the compaction has to know of every chunk.
__global__ void __launch_bounds__(kGridThreads) digit_kernel(const SelectPlan p, int digit) {
  __shared__ GridSmem s;
  clear_bins<kGridThreads>(s.hist, kBins);
  if (threadIdx.x == 0) s.sums[0] = 0;
  follow_previous_kernel();
  const int row = blockIdx.x / p.chunks, chunk = blockIdx.x % p.chunks;
  uint4 x[kSteps];
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    x[i] = load_quad(p, row, chunk * kChunkKeys + 4 * (i * kGridThreads + static_cast<int>(threadIdx.x)));
  }
  const GridState state = resolve_digit(p, row, digit, s);
  if (chunk == 0 && threadIdx.x == 0) {
    p.digit_state[static_cast<int64_t>(row) * kMaxDigits + digit] =
        make_uint2(state.prefix, static_cast<uint32_t>(state.need));
  }
  int above = 0;
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const uint32_t ord[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t prefix = prefix_of(ord[j], digit);
      above += prefix > state.prefix;
      if (prefix == state.prefix) atomicAdd(&s.hist[digit_of(ord[j], digit)], 1u);
    }
  }
  above = warp_sum(above);
  if (threadIdx.x % 32 == 0) atomicAdd(&s.sums[0], above);
  __syncthreads();
  uint32_t* sums = p.hist + (static_cast<int64_t>(row) * kMaxDigits + digit) * kBins;
  for (int i = threadIdx.x; i < kBins; i += kGridThreads) {
    if (s.hist[i] != 0) atomicAdd(&sums[i], s.hist[i]);
  }
  if (digit + 1 < p.digits) return;
  const int64_t chunk_index = static_cast<int64_t>(row) * p.chunks + chunk;
  BinCounts<kGridThreads> bins;
  bins.load(s.hist, s.warp_sums);
  uint4* suffix =
      reinterpret_cast<uint4*>(p.chunk_suffix + (chunk_index + 1) * kBins) - (threadIdx.x + 1) * (bins.kPerThread / 4);
  uint32_t running[bins.kPerThread];
#pragma unroll
  for (int i = 0, sum = bins.above; i < bins.kPerThread; ++i) running[i] = sum += bins.count[i];
#pragma unroll
  for (int i = 0; i < bins.kPerThread / 4; ++i) {
    const uint32_t* src = running + bins.kPerThread - 4 * i - 4;
    suffix[i] = make_uint4(src[3], src[2], src[1], src[0]);
  }
  if (threadIdx.x == 0) p.chunk_above[chunk_index] = s.sums[0];
}

// Where the selected keys go: the final list, or the first set, which has the keys before set_origin.
struct GridOutput {
  uint32_t* ord;
  int32_t* key;
  int32_t* end;
  int32_t* count;
  int32_t* full;
  int32_t pad;  // zeros follow the list up to a multiple of this
};
__device__ __forceinline__ GridOutput grid_output(const SelectPlan& p, const KeyList& keys, int row) {
  GridOutput out{};
  if (keys.end != nullptr) out.end = const_cast<int32_t*>(keys.end) + static_cast<int64_t>(row) * p.seqlen_k;
  if (p.single_list) {
    out.key = const_cast<int32_t*>(keys.idx) + static_cast<int64_t>(row) * keys.capacity;
    out.count = const_cast<int32_t*>(keys.count) + row;
    if (p.is_causal) out.full = const_cast<int32_t*>(keys.full) + row;
    out.pad = 128;
  } else {
    const int64_t set = static_cast<int64_t>(row) * p.sets;
    out.ord = p.set_ord + set * p.set_capacity;
    out.key = p.set_key + set * p.set_capacity;
    out.count = p.set_count + set;
    out.pad = 4;
  }
  return out;
}

// Returns how many keys of the chunks before `chunk` are selected (x), and how many keys of `chunk` that equal the cut
// are not selected, as ties go to later keys (y).
__device__ __forceinline__ int2 place_chunk(const SelectPlan& p, int row, int chunk, uint32_t bin, int need,
                                            GridSmem& s) {
  int above = 0, later_equal = 0, own_equal = 0;
  const int64_t base = static_cast<int64_t>(row) * p.chunks;
  for (int i = threadIdx.x; i < p.chunks; i += kGridThreads) {
    const uint32_t* suffix = p.chunk_suffix + (base + i) * kBins + bin;
    const int better = bin + 1 < kBins ? suffix[1] : 0;
    const int equal = static_cast<int>(suffix[0]) - better;
    if (i < chunk) above += better + p.chunk_above[base + i];
    if (i == chunk) own_equal = equal;
    if (i > chunk) later_equal += equal;
  }
  above = warp_sum(above), own_equal = warp_sum(own_equal), later_equal = warp_sum(later_equal);
  if (threadIdx.x % 32 == 0) {
    atomicAdd(&s.sums[0], above);
    atomicAdd(&s.sums[1], own_equal);
    atomicAdd(&s.sums[2], later_equal);
  }
  __syncthreads();
  const int wanted = max(need - s.sums[2], 0);  // equal ones from this chunk and those before
  const int taken = min(wanted, s.sums[1]);
  return make_int2(s.sums[0] + wanted - taken, s.sums[1] - taken);
}

__global__ void __launch_bounds__(kGridThreads) grid_compact_kernel(const SelectPlan p, const KeyList keys) {
  __shared__ GridSmem s;
  __shared__ uint32_t warp_tally[kGridWarps];
  follow_previous_kernel();
  const int row = blockIdx.x / p.chunks, chunk = blockIdx.x % p.chunks;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int key0 = chunk * kChunkKeys + (warp * kSteps * 32 + lane) * 4;
  uint4 x[kSteps];
#pragma unroll
  for (int i = 0; i < kSteps; ++i) x[i] = load_quad(p, row, key0 + i * 128);
  if (threadIdx.x < 3) s.sums[threadIdx.x] = 0;
  const GridState state = resolve_digit(p, row, p.digits, s);
  const uint32_t cut = state.prefix << digit_shift(p.digits - 1);
  const int2 place = place_chunk(p, row, chunk, digit_of(cut, p.digits - 1), state.need, s);

  // Counts of keys: above the cut in the lower half of a word, equal to it in the upper half.
  uint32_t before[kSteps], sum = 0;
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const uint32_t ord[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
    uint32_t own = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) own += ord[j] > cut ? 1u : ord[j] == cut ? 1u << 16 : 0u;
    const uint32_t inclusive = warp_inclusive_scan(own);
    before[i] = sum + inclusive - own;
    sum += __shfl_sync(kFullWarp, inclusive, 31);
  }
  if (lane == 0) warp_tally[warp] = sum;
  __syncthreads();
  uint32_t warp_before = 0, chunk_sum = 0;
#pragma unroll
  for (int i = 0; i < kGridWarps; ++i) {
    if (i < warp) warp_before += warp_tally[i];
    chunk_sum += warp_tally[i];
  }

  const GridOutput out = grid_output(p, keys, row);
  const Cut bound{cut, place.y};
  const auto rank_of = [&](uint32_t tally) {
    return place.x + Tally{static_cast<int>(tally & 0xffff), static_cast<int>(tally >> 16)}.taken(bound);
  };
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const uint32_t ord[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
    uint32_t at = warp_before + before[i];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int key = key0 + i * 128 + j;
      const bool above = ord[j] > cut, equal = ord[j] == cut;
      const bool taken = above || (equal && static_cast<int>(at >> 16) >= bound.skip);
      if (taken) {
        const int rank = rank_of(at);
        out.key[rank] = key;
        if (out.ord != nullptr) out.ord[rank] = ord[j];
      }
      if (out.end != nullptr && key < p.grid_keys) out.end[key] = taken ? p.seqlen_k : p.is_causal ? key : 0;
      at += above ? 1u : equal ? 1u << 16 : 0u;
    }
  }
  if (chunk + 1 < p.chunks) return;
  const int count = rank_of(chunk_sum);
  const int pad = round_up(count, out.pad) - count;
  if (threadIdx.x < pad) {
    out.key[count + threadIdx.x] = 0;
    if (out.ord != nullptr) out.ord[count + threadIdx.x] = 0;
  }
  if (threadIdx.x == 0) {
    *out.count = count;
    if (out.full != nullptr) *out.full = count;
  }
}

}  // namespace

cudaError_t select_by_grid(const SelectPlan& plan, const KeyList& keys, cudaStream_t stream) {
  const int64_t blocks = static_cast<int64_t>(plan.rows) * plan.chunks;
  cudaError_t status = cudaSuccess;
  for (int digit = 1; status == cudaSuccess && digit < plan.digits; ++digit) {
    status = launch(digit_kernel, blocks, kGridThreads, 0, stream, plan, digit);
  }
  if (status == cudaSuccess) status = launch(grid_compact_kernel, blocks, kGridThreads, 0, stream, plan, keys);
  return status;
}

}  // namespace prep
}  // namespace dmattn
