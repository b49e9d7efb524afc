// Selection of keys by score: the plan, ordered scores, and the order of the launches.
#include <algorithm>

#include "select.h"
#include "select_common.cuh"

namespace dmattn {
namespace prep {
namespace {

// Up to here one thread block finds the best keys of a prefix by itself; the grid would spend longer on its launches.
constexpr int kOneBlockKeys = 32768;
// Keys between the positions of two sets (or `window`, when that is more): what a block reads on top of a set.
constexpr int kSuperKeys = 8192;

// --- ordered scores ------------------------------------------------------------------------------------------------

// The document of a key: the last boundary at or before it, and the next one. Keys behind the last boundary are one
// more document.
__device__ __forceinline__ int2 find_document(const SelectParams& p, int key) {
  if (p.documents == 0) return make_int2(0, p.seqlen_k);
  int before = 0, behind = p.documents + 1;  // boundaries before `before` are <= key, those from `behind` on > key
  while (before < behind) {
    const int middle = (before + behind) / 2;
    if (__ldg(p.cu_seqlens + middle) <= key) {
      before = middle + 1;
    } else {
      behind = middle;
    }
  }
  const int start = before > 0 ? __ldg(p.cu_seqlens + before - 1) : 0;
  const int stop = before <= p.documents ? __ldg(p.cu_seqlens + before) : p.seqlen_k;
  return make_int2(max(start, 0), min(stop, p.seqlen_k));
}

constexpr int kOrderThreads = 512;

// Ordered scores, the documents, the starting values of end, and the histogram of the first digit of the keys that the
// grid selects from. One block a chunk of kChunkKeys.
template <class Score>
__global__ void __launch_bounds__(kOrderThreads)
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
  uint32_t x[kPerThread];
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int key = chunk0 + i * kOrderThreads + threadIdx.x;
    x[i] = key < p.seqlen_k ? scores.load(key) : 0u;
  }
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int key = chunk0 + i * kOrderThreads + threadIdx.x;
    if (key < p.seqlen_k && !scores.allows(key)) x[i] = 0;
  }
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int key = chunk0 + i * kOrderThreads + threadIdx.x;
    if (key < plan.ord_pitch) plan.ord[row * plan.ord_pitch + key] = x[i];
    if (key < p.seqlen_k && end != nullptr) {
      const int2 document = find_document(p, key);
      end[static_cast<int64_t>(row) * p.seqlen_k + key] = p.seqlen_q > 0 ? document.y : key;
      if (plan.document != nullptr && row == 0) plan.document[key] = document;
    }
    if (key < plan.grid_keys && x[i] != 0) atomicAdd(&hist[x[i] >> digit_shift(0)], 1u);
  }
  if (!counted) return;
  __syncthreads();
  uint32_t* sums = plan.hist + static_cast<int64_t>(row) * kMaxDigits * kBins;
  for (int i = threadIdx.x; i < kBins; i += kOrderThreads) {
    if (hist[i] != 0) atomicAdd(&sums[i], hist[i]);
  }
}

// --- plan ----------------------------------------------------------------------------------------------------------

// Hands out consecutive 16-byte aligned arrays; with a null base only the size comes out.
class Arena {
 public:
  explicit Arena(void* base) : base_(static_cast<char*>(base)) {}
  template <class T>
  void take(T*& array, int64_t n) {
    if (base_ != nullptr) array = reinterpret_cast<T*>(base_ + bytes_);
    bytes_ += round_up(static_cast<size_t>(n) * sizeof(T), size_t{16});
  }
  size_t bytes() const { return bytes_; }

 private:
  char* base_;
  size_t bytes_ = 0;
};

// Which keys the grid selects from, and where the sets lie.
void plan_work(SelectPlan& plan, int num_sms) {
  plan.first_set = 1;
  plan.super_keys = round_up(INT32_MAX / 2, 128);
  plan.single_list = !plan.is_causal || plan.seqlen_q == 1;
  if (plan.single_list) {
    if (plan.seqlen_k > kOneBlockKeys) plan.grid_keys = plan.seqlen_k;
    plan.one_launch =
        plan.grid_keys > 0 && static_cast<int64_t>(plan.rows) * ceil_div(plan.grid_keys, kChunkKeys) <= num_sms;
    return;
  }
  if (plan.seqlen_q == 0 || plan.seqlen_k <= kOneBlockKeys) return;
  const int super_keys = std::max(kSuperKeys, round_up(std::min(plan.window, plan.seqlen_k), 128));
  if (plan.offset >= kSuperKeys) {
    plan.set_origin = plan.offset / 128 * 128;
    plan.grid_keys = plan.set_origin;
    plan.first_set = 0;
    plan.sets = 1;
  }
  if (plan.seqlen_k - plan.set_origin > kOneBlockKeys) {
    plan.super_keys = super_keys;
    const int last_row0 = plan.offset + (plan.seqlen_q - 1) / kSelectBlockRows * kSelectBlockRows;
    plan.sets = (last_row0 - plan.set_origin) / super_keys + 1 - plan.first_set;
  }
}

SelectPlan make_plan(const SelectParams& p, void* workspace, size_t* bytes) {
  SelectPlan plan;
  plan.rows = p.batch * p.heads;
  plan.seqlen_q = p.seqlen_q;
  plan.seqlen_k = p.seqlen_k;
  plan.window = p.window;
  plan.is_causal = p.is_causal;
  plan.offset = p.is_causal ? p.seqlen_k - p.seqlen_q : 0;
  plan.digits = p.dtype == Dtype::kFloat32 ? 3 : 2;
  plan.ord_pitch = round_up(static_cast<int64_t>(p.seqlen_k), int64_t{128});
  plan_work(plan, p.num_sms);
  plan.chunks = ceil_div(plan.grid_keys, kChunkKeys);
  if (plan.sets > 0) plan.set_capacity = round_up(std::min(p.window, p.seqlen_k), 4);

  Arena arena(workspace);
  const int64_t rows = plan.rows, chunks = plan.chunks, sets = plan.sets;
  if (plan.one_launch) {
    arena.take(plan.hist, rows * kMaxDigits * kBins);
    arena.take(plan.arrived, rows);
    plan.zero_bytes = arena.bytes();
    arena.take(plan.chunk_counts, rows * chunks);
    *bytes = arena.bytes();
    return plan;
  }
  arena.take(plan.ord, rows * plan.ord_pitch);
  if (p.documents > 0) arena.take(plan.document, p.seqlen_k);
  if (plan.chunks > 0) {
    const size_t before = arena.bytes();
    arena.take(plan.hist, rows * kMaxDigits * kBins);
    plan.zero_bytes = arena.bytes() - before;
    arena.take(plan.digit_state, rows * kMaxDigits);
    arena.take(plan.chunk_above, rows * chunks);
    arena.take(plan.chunk_suffix, rows * chunks * kBins);
  }
  arena.take(plan.set_ord, 2 * rows * sets * plan.set_capacity);
  arena.take(plan.set_key, 2 * rows * sets * plan.set_capacity);
  arena.take(plan.set_count, 2 * rows * sets);
  *bytes = arena.bytes();
  return plan;
}

bool is_valid(const SelectParams& p, const KeyList& keys) {
  if (p.batch < 0 || p.heads < 0 || p.seqlen_q < 0 || p.seqlen_k < 0 || p.seqlen_k > kMaxSelectKeys) return false;
  if (static_cast<int64_t>(p.batch) * p.heads > INT32_MAX || p.window < 1) return false;
  if (keys.capacity < select_capacity(p)) return false;
  if (p.documents != 0 && (p.documents < 0 || !p.is_causal || p.seqlen_q != p.seqlen_k)) return false;
  if (!p.is_causal) return true;
  return p.seqlen_q <= p.seqlen_k && keys.block_rows == kSelectBlockRows &&
         keys.blocks == ceil_div(p.seqlen_q, kSelectBlockRows);
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

using namespace prep;

int32_t select_capacity(const SelectParams& p) {
  const int64_t most = static_cast<int64_t>(p.window) + (p.is_causal ? kSelectBlockRows : 0);
  return static_cast<int32_t>(round_up(std::min<int64_t>(most, p.seqlen_k), int64_t{128}));
}

size_t select_workspace_size(const SelectParams& p) {
  size_t bytes;
  make_plan(p, nullptr, &bytes);
  return bytes;
}

cudaError_t select_keys(const SelectParams& p, const KeyList& keys, void* workspace, cudaStream_t stream) {
  if (!is_valid(p, keys)) return cudaErrorInvalidValue;
  if (p.batch == 0 || p.heads == 0) return cudaSuccess;
  size_t bytes;
  const SelectPlan plan = make_plan(p, workspace, &bytes);
  int32_t* end = const_cast<int32_t*>(keys.end);
  cudaError_t status = cudaSuccess;
  if (plan.zero_bytes > 0) status = cudaMemsetAsync(plan.hist, 0, plan.zero_bytes, stream);
  if (plan.one_launch) return status == cudaSuccess ? select_in_one_launch(p, plan, keys, stream) : status;
  if (status == cudaSuccess) status = select_order(p, plan, end, stream);
  if (status == cudaSuccess && plan.chunks > 0) status = select_by_grid(plan, keys, stream);
  if (plan.single_list) {
    return status == cudaSuccess && plan.chunks == 0 ? select_single(plan, keys, stream) : status;
  }
  if (status == cudaSuccess) status = select_sets(plan, stream);
  if (status == cudaSuccess) status = select_blocks(plan, keys, stream);
  return status;
}

}  // namespace dmattn
