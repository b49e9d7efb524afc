// After the backward kernel: dk and dv from sums over several blocks, launches or chunks of rows.
#include <algorithm>

#include "../attention/shared/key_source.cuh"
#include "../shared/chunk_terms.cuh"
#include "../shared/helper.cuh"
#include "../shared/row_chunks.cuh"
#include "backward.h"

namespace dmattn {
namespace {

using namespace prep;

constexpr int kThreads = kRowChunkThreads;

// dk or dv, 16-bit (batch, seqlen_k, nheads_k, head_dim), and the fp32 it is made of.
struct GradOut {
  const float* src;
  uint16_t* dst;
  Strides3 stride;
  bool vec;
};
struct GradPair {
  GradOut grad[2];
};

// Fills `outs` with dk and dv, as far as they are asked for, and returns how many they are.
int grad_outs(const BwdParams& p, const float* dk_src, const float* dv_src, GradPair& outs) {
  int n = 0;
  if (p.dk != nullptr) outs.grad[n++] = {dk_src, static_cast<uint16_t*>(p.dk), p.dk_stride, p.vec_dk};
  if (p.dv != nullptr) outs.grad[n++] = {dv_src, static_cast<uint16_t*>(p.dv), p.dv_stride, p.vec_dv};
  return n;
}

// --- sums over splits ----------------------------------------------------------------------------------------------

struct ReduceDkvParams {
  GradPair outs;
  KeyList keys;
  const int32_t* schedule;  // nullptr: tiled
  bool is_summed;           // one slot a tile; otherwise one for each of its splits
  int32_t num_outs, num_splits, batch, nheads_k, head_ratio, seqlen_k, head_dim, block_n, head_dim_tile;
};

// Where the rows of a tile of keys go.
struct DkvTile {
  int b, hk, pos0, count;  // count: positions of the whole list (tiled: keys)
  const int32_t* idx;      // position -> key; nullptr: the same
};

__device__ __forceinline__ DkvTile find_tile(const ReduceDkvParams& p, int tile) {
  if (p.schedule == nullptr) {
    const int n_blocks = ceil_div(p.seqlen_k, p.block_n);
    const int list = tile / n_blocks;
    return {list / p.nheads_k, list % p.nheads_k, tile % n_blocks * p.block_n, p.seqlen_k, nullptr};
  }
  // The last list whose first tile is not past this one; lists without tiles share their successor's first.
  const int32_t* first_tile = p.schedule + 2;
  int low = 0, high = p.batch * p.nheads_k;
  while (high - low > 1) {
    const int mid = low + (high - low) / 2;
    (__ldg(first_tile + mid) <= tile ? low : high) = mid;
  }
  const int b = low / p.nheads_k, hk = low % p.nheads_k;
  const int64_t list =
      static_cast<int64_t>(p.keys.batch == 1 ? 0 : b) * p.keys.heads + hk * p.head_ratio / p.keys.head_ratio;
  return {b, hk, (tile - __ldg(first_tile + low)) * p.block_n, read_list_count(p.keys, list),
          p.keys.idx + list * p.keys.capacity};
}

// Eight columns a thread; a block takes kThreads of a tile's chunks at a time, blocks stride over all of them (the
// number of gathered tiles is known on the device only).
template <class Element>
__global__ void __launch_bounds__(kThreads)
    reduce_dkv_kernel(const __grid_constant__ ReduceDkvParams p, int64_t work_items) {
  follow_previous_kernel();
  const int chunks_per_row = p.head_dim_tile / 8;
  const int parts = ceil_div(p.block_n * chunks_per_row, kThreads);
  int num_splits = p.num_splits;
  if (p.schedule != nullptr) {
    num_splits = __ldg(p.schedule);
    if (num_splits == 1) return;  // the attention kernel has written dk and dv
    work_items = static_cast<int64_t>(__ldg(p.schedule + 1)) * p.num_outs * parts;
  }
  if (p.is_summed) num_splits = 1;
  const int64_t slot_size = static_cast<int64_t>(p.block_n) * p.head_dim_tile;
  for (int64_t item = blockIdx.x; item < work_items; item += gridDim.x) {
    const int tile = static_cast<int>(item / parts / p.num_outs);
    const GradOut& out = p.outs.grad[item / parts % p.num_outs];
    const int chunk = static_cast<int>(item % parts) * kThreads + threadIdx.x;
    const int row = chunk / chunks_per_row, col = chunk % chunks_per_row * 8;
    if (row >= p.block_n || col >= p.head_dim) continue;
    const DkvTile t = find_tile(p, tile);
    if (t.pos0 + row >= t.count) continue;
    const float* src = out.src + static_cast<int64_t>(tile) * num_splits * slot_size + row * p.head_dim_tile + col;
    float acc[8] = {};
#pragma unroll 4
    for (int split = 0; split < num_splits; ++split) accumulate8(acc, src + split * slot_size, 1.f);
    const KeyLimits limits = {0, p.seqlen_k - 1};
    const int key = t.idx == nullptr ? t.pos0 + row : limits.position(__ldg(t.idx + t.pos0 + row));
    store_chunk(out.dst + row_offset(out.stride, t.b, t.hk, key) + col, pack_chunk<Element>(acc), out.vec);
  }
}

// --- sums of several launches --------------------------------------------------------------------------------------

template <class Element>
__global__ void __launch_bounds__(kThreads)
    convert_dkv_kernel(const __grid_constant__ GradPair outs, int num_outs, int nheads_k, int seqlen_k, int head_dim) {
  follow_previous_kernel();
  const GradOut& out = outs.grad[blockIdx.x % num_outs];
  for_each_chunk(blockIdx.x / num_outs, nheads_k, seqlen_k, head_dim, [&](int b, int hk, int row, int col) {
    const int64_t src = ((static_cast<int64_t>(b) * nheads_k + hk) * seqlen_k + row) * head_dim + col;
    float acc[8] = {};
    accumulate8(acc, out.src + src, 1.f);
    store_chunk(out.dst + row_offset(out.stride, b, hk, row) + col, pack_chunk<Element>(acc), out.vec);
  });
}

// --- sums over the chunks of listed keys ----------------------------------------------------------------------------

struct ReduceTermsParams {
  GradPair outs;
  ChunkTerms terms;
  CarriedTerms carried;
  float* dbias_cols;
  KeyList keys;  // of chunks
  TermRange range;
  int32_t blocks_of_head;
  int32_t nheads, nheads_k, head_ratio, head_dim;
};

// A key of a (batch, kv head), and the rows that see it.
struct TermKey {
  int64_t head;  // batch * nheads_k + kv head
  int64_t at;    // in arrays of all list heads
  RowsOfKey rows;

  __device__ __forceinline__ TermKey(const ReduceTermsParams& p, int b, int hk, int key)
      : head(static_cast<int64_t>(b) * p.nheads_k + hk),
        at(find_at(p, b, hk, key)),
        rows(p.range, key, __ldg(p.keys.end + at)) {}
  static __device__ __forceinline__ int64_t find_at(const ReduceTermsParams& p, int b, int hk, int key) {
    const int64_t list =
        static_cast<int64_t>(p.keys.batch > 1 ? b : 0) * p.keys.heads + hk * p.head_ratio / p.keys.head_ratio;
    return list * p.range.seqlen_k + key;
  }
};

// Rows of a key's terms that are there: intervals may be the caller's and name more.
struct TermRows {
  int64_t begin, end;
};
__device__ __forceinline__ TermRows find_terms(const ReduceTermsParams& p, const TermKey& key) {
  const ChunksOfKey chunks = find_chunks_of_key(p.range, key.rows);
  const int64_t first = static_cast<int64_t>(__ldg(p.terms.first + key.at)) + chunks.first;
  const int64_t begin = min(max(first, int64_t{0}), int64_t{p.terms.capacity});
  const int64_t head = key.head * p.terms.capacity;
  return {head + begin, head + min(begin + chunks.count, int64_t{p.terms.capacity})};
}

// The rows of CarriedTerms from which a key's sums go on and to which they go; -1: none. Places that intervals of the
// caller make too large are none.
struct CarriedRows {
  bool comes_before, goes_on;
  int64_t from = -1, to = -1;

  __device__ __forceinline__ CarriedRows(const ReduceTermsParams& p, const TermKey& key)
      : comes_before(key.rows.come_before(p.range)), goes_on(key.rows.go_on(p.range)) {
    if (!comes_before && !goes_on) return;
    const uint32_t places = __ldg(p.carried.places + key.at);
    const int place_from = static_cast<int>(places & 0xffff), place_to = static_cast<int>(places >> 16);
    const int64_t first = key.head * p.carried.capacity;
    if (comes_before && place_from < p.carried.capacity) from = first + place_from;
    if (goes_on && place_to < p.carried.capacity) to = first + place_to;
  }
};

// A key that is seen for long has a row in each of many chunks: so many are on their way at once.
constexpr int kTermsAtOnce = 8;

__device__ __forceinline__ void sum_terms(float (&acc)[8], const float* src, const TermRows& rows, int head_dim) {
#pragma unroll 1
  for (int64_t row = rows.begin; row < rows.end; row += kTermsAtOnce) {
    float4 x[kTermsAtOnce][2];
#pragma unroll
    for (int i = 0; i < kTermsAtOnce; ++i) {
      const float4* const from = reinterpret_cast<const float4*>(src + (row + i) * head_dim);
      x[i][0] = x[i][1] = make_float4(0.f, 0.f, 0.f, 0.f);
      if (row + i < rows.end) x[i][0] = __ldg(from), x[i][1] = __ldg(from + 1);
    }
#pragma unroll
    for (int i = 0; i < kTermsAtOnce; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        acc[4 * half] += x[i][half].x;
        acc[4 * half + 1] += x[i][half].y;
        acc[4 * half + 2] += x[i][half].z;
        acc[4 * half + 3] += x[i][half].w;
      }
    }
  }
}

// A thread has eight columns of a key.
template <class Element>
__global__ void __launch_bounds__(kThreads) reduce_chunk_terms_kernel(const __grid_constant__ ReduceTermsParams p) {
  follow_previous_kernel();
  const bool is_first = blockIdx.x % 2 == 0;
  const GradOut& out = p.outs.grad[blockIdx.x % 2];
  const int block = static_cast<int>(blockIdx.x / 2), pair = block / p.blocks_of_head;
  const int chunks = ceil_div(p.head_dim, 8), keys = kThreads / chunks, own = static_cast<int>(threadIdx.x) / chunks;
  const int key = (block - pair * p.blocks_of_head) * keys + own;
  if (own >= keys || key >= p.range.seqlen_k) return;
  const int col = (static_cast<int>(threadIdx.x) - own * chunks) * 8, b = pair / p.nheads_k, hk = pair % p.nheads_k;
  const TermKey found(p, b, hk, key);
  if (!found.rows.belong_to(p.range)) return;
  const TermRows rows = find_terms(p, found);
  const CarriedRows carried(p, found);
  float acc[8] = {};
  if (carried.from >= 0) {
    const float* const from = is_first ? p.carried.from_dk : p.carried.from_dv;
    accumulate8(acc, from + carried.from * p.head_dim + col, 1.f);
  }
  sum_terms(acc, out.src + col, rows, p.head_dim);
  if (!carried.goes_on) {
    store_chunk(out.dst + row_offset(out.stride, b, hk, key) + col, pack_chunk<Element>(acc), out.vec);
  } else if (carried.to >= 0) {
    float4* const to =
        reinterpret_cast<float4*>((is_first ? p.carried.to_dk : p.carried.to_dv) + carried.to * p.head_dim + col);
    to[0] = make_float4(acc[0], acc[1], acc[2], acc[3]);
    to[1] = make_float4(acc[4], acc[5], acc[6], acc[7]);
  }
  if (!is_first || col != 0 || p.terms.dbias == nullptr) return;
  float* const dbias = p.dbias_cols + (static_cast<int64_t>(b) * p.nheads + hk * p.head_ratio) * p.range.seqlen_k + key;
  float sum = carried.comes_before ? *dbias : 0.f;
#pragma unroll 1
  for (int64_t row = rows.begin; row < rows.end; row += kTermsAtOnce) {
#pragma unroll
    for (int i = 0; i < kTermsAtOnce; ++i) sum += row + i < rows.end ? __ldg(p.terms.dbias + row + i) : 0.f;
  }
  *dbias = sum;
}

}  // namespace

cudaError_t reduce_dkv(const BwdParams& p, Dtype dtype, int block_n, int head_dim_tile, cudaStream_t stream) {
  ReduceDkvParams r = {};
  r.num_outs = grad_outs(p, p.dk_slots, p.dv_slots, r.outs);
  r.keys = p.keys;
  r.schedule = p.schedule;
  r.num_splits = p.num_splits;
  r.is_summed = !p.has_split_slots;
  r.batch = p.batch;
  r.nheads_k = p.nheads_k;
  r.head_ratio = p.head_ratio;
  r.seqlen_k = p.seqlen_k;
  r.head_dim = p.head_dim;
  r.block_n = block_n;
  r.head_dim_tile = head_dim_tile;
  const int64_t tiles = static_cast<int64_t>(p.batch) * p.nheads_k * ceil_div(p.seqlen_k, block_n);
  const int64_t items = tiles * r.num_outs * ceil_div(block_n * head_dim_tile / 8, kThreads);
  // Gathered tiles are usually far fewer than `tiles`: no more blocks than a few waves, which stride.
  const int64_t blocks = p.schedule != nullptr ? std::min<int64_t>(items, 2048) : std::min<int64_t>(items, INT32_MAX);
  return with_half_type(dtype, [&](auto element) {
    return launch(reduce_dkv_kernel<decltype(element)>, blocks, kThreads, 0, stream, r, items);
  });
}

cudaError_t convert_dkv(const BwdParams& p, Dtype dtype, cudaStream_t stream) {
  GradPair outs = {};
  const int num_outs = grad_outs(p, p.dk_accum, p.dv_accum, outs);
  const int32_t batch = p.packing.slabs(p.batch), seqlen_k = p.packing.rows_k(p.seqlen_k);
  const int64_t blocks = row_tiles(batch, p.nheads_k, seqlen_k) * num_outs;
  return with_half_type(dtype, [&](auto element) {
    return launch(convert_dkv_kernel<decltype(element)>, blocks, kThreads, 0, stream, outs, num_outs, p.nheads_k,
                  seqlen_k, p.head_dim);
  });
}

cudaError_t reduce_chunk_terms(const BwdParams& p, const CarriedTerms& carried, Dtype dtype, cudaStream_t stream) {
  ReduceTermsParams r = {};
  grad_outs(p, p.terms.dk, p.terms.dv, r.outs);
  r.terms = p.terms;
  r.carried = carried;
  r.dbias_cols = p.dbias_cols;
  r.keys = p.chunks.keys;
  const int32_t block_rows = p.keys.block_rows;
  r.range = term_range(p.chunks.keys.block_rows, p.row_block_begin * block_rows, p.row_blocks * block_rows, p.seqlen_q,
                       p.seqlen_k);
  r.blocks_of_head = ceil_div(keys_up_to(r.range), kThreads / ceil_div(p.head_dim, 8));
  if (r.blocks_of_head == 0) return cudaSuccess;
  r.nheads = p.nheads;
  r.nheads_k = p.nheads_k;
  r.head_ratio = p.head_ratio;
  r.head_dim = p.head_dim;
  const int64_t blocks = int64_t{2} * p.batch * p.nheads_k * r.blocks_of_head;
  return with_half_type(dtype, [&](auto element) {
    return launch(reduce_chunk_terms_kernel<decltype(element)>, blocks, kThreads, 0, stream, r);
  });
}

}  // namespace dmattn
