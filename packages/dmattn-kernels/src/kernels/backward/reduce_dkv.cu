// After the backward kernel: dk and dv from sums over several blocks, launches or chunks of rows.
#include <algorithm>

#include "../attention/shared/key_source.cuh"
#include "../shared/chunk_terms.cuh"
#include "../shared/helper.cuh"
#include "../shared/row_chunks.cuh"
#include "../shared/seen_keys.cuh"
#include "backward.h"

namespace dmattn {
namespace {

using namespace prep;

constexpr int kThreads = kRowChunkThreads;

// dk or dv, 16-bit (batch, seqlen_k, nheads_k, head_dim), and the fp32 sums that it is rounded from.
struct GradOut {
  const float* src;
  uint16_t* dst;
  Strides3 stride;
  bool vec;
};
struct GradPair {
  GradOut grad[2];
};

// Fills `outs` with dk and dv, if they are asked for, and returns how many of the two are.
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
  bool is_summed;           // a tile has one slot, to which its splits were added; otherwise one for each split
  int32_t num_outs, num_splits, batch, nheads_k, head_ratio, seqlen_k, head_dim, block_n, head_dim_tile;
};

// Where the rows of a tile of keys go.
struct DkvTile {
  int b, hk, pos0, count;  // count: positions of the whole list (tiled: of all keys)
  const int32_t* idx;      // position -> key; nullptr: the same
};

__device__ __forceinline__ DkvTile find_tile(const ReduceDkvParams& p, int tile) {
  if (p.schedule == nullptr) {
    const int n_blocks = ceil_div(p.seqlen_k, p.block_n);
    const int list = tile / n_blocks;
    return {list / p.nheads_k, list % p.nheads_k, tile % n_blocks * p.block_n, p.seqlen_k, nullptr};
  }
  // The last list whose first tile is not past this one. A list without tiles has the same first tile as the next
  // list.
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

// A thread sums eight columns, a chunk. A block takes kThreads of a tile's chunks at a time and strides over all
// tiles, since the number of gathered tiles is known on the device only.
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
    convert_dkv_kernel(const __grid_constant__ GradPair outs, const __grid_constant__ SeenKeys seen, int num_outs,
                       int nheads_k, int seqlen_k, int head_dim) {
  follow_previous_kernel();
  const GradOut& out = outs.grad[blockIdx.x % num_outs];
  for_each_chunk(blockIdx.x / num_outs, nheads_k, seqlen_k, head_dim, [&](int b, int hk, int row, int col) {
    const int64_t src = ((static_cast<int64_t>(b) * nheads_k + hk) * seqlen_k + row) * head_dim + col;
    float acc[8] = {};
    if (seen.contain(b, hk, row)) accumulate8(acc, out.src + src, 1.f);
    store_chunk(out.dst + row_offset(out.stride, b, hk, row) + col, pack_chunk<Element>(acc), out.vec);
  });
}

__global__ void __launch_bounds__(kThreads)
    clear_unseen_dkv_kernel(const __grid_constant__ GradPair outs, const __grid_constant__ SeenKeys seen, int num_outs,
                            int nheads_k, int seqlen_k, int head_dim) {
  follow_previous_kernel();
  for_each_chunk(blockIdx.x, nheads_k, seqlen_k, head_dim, [&](int b, int hk, int row, int col) {
    if (seen.contain(b, hk, row)) return;
    for (int i = 0; i < num_outs; ++i) {
      const GradOut& out = outs.grad[i];
      store_chunk(out.dst + row_offset(out.stride, b, hk, row) + col, make_uint4(0, 0, 0, 0), out.vec);
    }
  });
}

// --- sums over the chunks of listed keys ----------------------------------------------------------------------------

struct ReduceTermsParams {
  GradPair outs;
  float*
      sums[2];  // fp32 [batch][nheads_k][seqlen_k][head_dim] of dk and dv, added to in place of `outs`; nullptr: none
  ChunkTerms terms;
  CarriedTerms carried;
  float* dbias_cols;
  KeyList keys;  // of chunks
  TermRange range;
  int32_t keys_of_block, blocks_of_head;
  int32_t nheads, nheads_k, head_ratio, head_dim;
  int32_t group_begin;  // the query head of each group to whose sums of dbias this round's are added
};

// A key to whose sums the round contributes. Its interval may come from the caller and be wrong: rows and places that
// do not exist are left out.
struct TermKey {
  int64_t begin, end;  // its rows of ChunkTerms: begin, ..., end - 1
  int64_t from, to;    // its rows of CarriedTerms; kNone: it has none; kLost: the row does not exist
  int32_t key;
  static constexpr int64_t kNone = -1, kLost = -2;

  // `pair`: batch * nheads_k + kv head. `list`: list batch * list heads + list head.
  __device__ __forceinline__ void find(const ReduceTermsParams& p, const RowsOfKey& rows, int64_t pair, int64_t list) {
    const ChunksOfKey chunks = find_chunks_of_key(p.range, rows);
    const int64_t first = static_cast<int64_t>(__ldg(p.terms.first + list * p.range.seqlen_k + key)) + chunks.first;
    begin = min(max(first, int64_t{0}), int64_t{p.terms.capacity});
    end = min(begin + chunks.count, int64_t{p.terms.capacity});
    begin += pair * p.terms.capacity;
    end += pair * p.terms.capacity;
    from = to = kNone;
    if (p.carried.places == nullptr) return;
    if (!rows.come_before(p.range) && !rows.go_on(p.range)) return;
    const uint32_t places = __ldg(p.carried.places + list * p.carried.keys + key);
    if (rows.come_before(p.range)) from = carried_row(p, pair, places & 0xffff);
    if (rows.go_on(p.range)) to = carried_row(p, pair, places >> 16);
  }
  static __device__ __forceinline__ int64_t carried_row(const ReduceTermsParams& p, int64_t pair, uint32_t place) {
    const int32_t capacity = p.carried.capacity;
    return place < static_cast<uint32_t>(capacity) ? pair * capacity + place : kLost;
  }
};

// Keys of a block. A block waits several times for the rows of its keys, so all blocks should run at once. With up to
// kKeysOfManyBlocks keys of all heads together they do, even if each block has only kFewestKeysOfBlock keys.
constexpr int kFewestKeysOfBlock = 64, kMostKeysOfBlock = 128, kKeysOfManyBlocks = 1 << 15;
static_assert(kMostKeysOfBlock <= kThreads);

// Finds those keys of a block to whose sums the round contributes; in long sequences they are few. Returns their
// number.
__device__ __forceinline__ int find_term_keys(const ReduceTermsParams& p, int b, int hk, int first_key,
                                              TermKey (&found)[kMostKeysOfBlock], int (&warp_sums)[32]) {
  const int key = first_key + static_cast<int>(threadIdx.x);
  const bool exists = static_cast<int>(threadIdx.x) < p.keys_of_block && key < p.range.seqlen_k;
  const int64_t list =
      static_cast<int64_t>(p.keys.batch > 1 ? b : 0) * p.keys.heads + hk * p.head_ratio / p.keys.head_ratio;
  const RowsOfKey rows(p.range, key, exists ? __ldg(p.keys.end + list * p.range.seqlen_k + key) : 0);
  const bool belongs = exists && rows.belong_to(p.range);
  int count;
  const int place = block_exclusive_scan<kThreads>(belongs ? 1 : 0, warp_sums, count);
  if (belongs) {
    found[place].key = key;
    found[place].find(p, rows, static_cast<int64_t>(b) * p.nheads_k + hk, list);
  }
  __syncthreads();
  return count;
}

// A key that is seen for long has a row in each of many chunks. A thread sums four columns of them and has the loads
// of kTermsAtOnce rows in flight. The blocks for each SM are given because ptxas would otherwise save registers by
// letting each load wait for an earlier one.
constexpr int kTermsAtOnce = 8, kTermColumns = 4, kTermBlocksPerSm = 4;

__device__ __forceinline__ void sum_terms(float4& acc, const float* from, int rows, int head_dim) {
#pragma unroll 1
  for (; rows > 0; rows -= kTermsAtOnce, from += int64_t{kTermsAtOnce} * head_dim) {
    float4 x[kTermsAtOnce];
#pragma unroll
    for (int i = 0; i < kTermsAtOnce; ++i) {
      x[i] = make_float4(0.f, 0.f, 0.f, 0.f);
      if (i < rows) x[i] = __ldg(reinterpret_cast<const float4*>(from + int64_t{i} * head_dim));
    }
#pragma unroll
    for (int i = 0; i < kTermsAtOnce; ++i) {
      acc.x += x[i].x;
      acc.y += x[i].y;
      acc.z += x[i].z;
      acc.w += x[i].w;
    }
  }
}
// Stores four columns, rounded. `vec`: rows start on 16 bytes.
template <class Element>
__device__ __forceinline__ void store_columns(uint16_t* dst, const float4& x, bool vec) {
  const uint2 packed = make_uint2(Half2<Element>::pack(x.x, x.y), Half2<Element>::pack(x.z, x.w));
  if (vec) {
    *reinterpret_cast<uint2*>(dst) = packed;
    return;
  }
  dst[0] = static_cast<uint16_t>(packed.x);
  dst[1] = static_cast<uint16_t>(packed.x >> 16);
  dst[2] = static_cast<uint16_t>(packed.y);
  dst[3] = static_cast<uint16_t>(packed.y >> 16);
}

// Sums kTermColumns columns of dk or dv of a key, from column `col` on.
template <class Element>
__device__ __forceinline__ void sum_columns(const ReduceTermsParams& p, const TermKey& key, int b, int hk, bool is_dk,
                                            int col) {
  const GradOut& out = p.outs.grad[is_dk ? 0 : 1];
  float4 acc = make_float4(0.f, 0.f, 0.f, 0.f);
  if (key.from >= 0) {
    const float* const from = (is_dk ? p.carried.from_dk : p.carried.from_dv) + key.from * p.head_dim + col;
    acc = __ldg(reinterpret_cast<const float4*>(from));
  }
  sum_terms(acc, out.src + key.begin * p.head_dim + col, static_cast<int>(key.end - key.begin), p.head_dim);
  float* const sums = p.sums[is_dk ? 0 : 1];
  if (sums != nullptr) {
    const int64_t row = (static_cast<int64_t>(b) * p.nheads_k + hk) * p.range.seqlen_k + key.key;
    float4* const to = reinterpret_cast<float4*>(sums + row * p.head_dim + col);
    const float4 before = *to;
    *to = make_float4(before.x + acc.x, before.y + acc.y, before.z + acc.z, before.w + acc.w);
    return;
  }
  if (key.to == TermKey::kNone) {
    store_columns<Element>(out.dst + row_offset(out.stride, b, hk, key.key) + col, acc, out.vec);
  } else if (key.to >= 0) {
    *reinterpret_cast<float4*>((is_dk ? p.carried.to_dk : p.carried.to_dv) + key.to * p.head_dim + col) = acc;
  }
}
__device__ __forceinline__ void sum_dbias(const ReduceTermsParams& p, const TermKey& key, int b, int hk) {
  const int64_t head = static_cast<int64_t>(b) * p.nheads + hk * p.head_ratio + p.group_begin;
  float* const to = p.dbias_cols + head * p.range.seqlen_k + key.key;
  float sum = key.from == TermKey::kNone && p.sums[0] == nullptr ? 0.f : *to;
#pragma unroll 1
  for (int64_t row = key.begin; row < key.end; row += kTermsAtOnce) {
#pragma unroll
    for (int i = 0; i < kTermsAtOnce; ++i) sum += row + i < key.end ? __ldg(p.terms.dbias + row + i) : 0.f;
  }
  *to = sum;
}

// A block has neighbouring keys of a (batch, kv head). Its threads divide the columns of those that find_term_keys()
// finds.
template <class Element>
__global__ void __launch_bounds__(kThreads, kTermBlocksPerSm)
    reduce_chunk_terms_kernel(const __grid_constant__ ReduceTermsParams p) {
  __shared__ TermKey found[kMostKeysOfBlock];
  __shared__ int warp_sums[32];
  follow_previous_kernel();
  const int block = static_cast<int>(blockIdx.x), pair = block / p.blocks_of_head;
  const int b = pair / p.nheads_k, hk = pair % p.nheads_k;
  const int first_key = (block - pair * p.blocks_of_head) * p.keys_of_block;
  const int keys = find_term_keys(p, b, hk, first_key, found, warp_sums);
  const int parts = p.head_dim / kTermColumns, columns = 2 * parts * keys;
  const int work = columns + (p.terms.dbias != nullptr ? keys : 0);
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < work; i += kThreads) {
    if (i < columns) {
      const int row = i / parts;  // dk of the first key, its dv, dk of the second, ...
      sum_columns<Element>(p, found[row / 2], b, hk, row % 2 == 0, (i - row * parts) * kTermColumns);
    } else {
      sum_dbias(p, found[i - columns], b, hk);
    }
  }
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
  // Gathered tiles are usually far fewer than `tiles`, so a few waves of blocks are enough, which stride over the
  // tiles.
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
  const SeenKeys seen(p.keys, p.packing, p.head_ratio, p.seqlen_q, p.seqlen_k);
  return with_half_type(dtype, [&](auto element) {
    return launch(convert_dkv_kernel<decltype(element)>, blocks, kThreads, 0, stream, outs, seen, num_outs, p.nheads_k,
                  seqlen_k, p.head_dim);
  });
}

cudaError_t clear_unseen_dkv(const BwdParams& p, cudaStream_t stream) {
  GradPair outs = {};
  const int num_outs = grad_outs(p, nullptr, nullptr, outs);
  const SeenKeys seen(p.keys, p.packing, p.head_ratio, p.seqlen_q, p.seqlen_k);
  return launch(clear_unseen_dkv_kernel, row_tiles(p.batch, p.nheads_k, p.seqlen_k), kThreads, 0, stream, outs, seen,
                num_outs, p.nheads_k, p.seqlen_k, p.head_dim);
}

cudaError_t reduce_chunk_terms(const BwdParams& p, const CarriedTerms& carried, Dtype dtype, cudaStream_t stream) {
  ReduceTermsParams r = {};
  grad_outs(p, p.terms.dk, p.terms.dv, r.outs);
  r.terms = p.terms;
  r.carried = carried;
  r.sums[0] = p.dk_accum;
  r.sums[1] = p.dv_accum;
  r.dbias_cols = p.dbias_cols;
  r.group_begin = p.group_begin;
  r.keys = p.chunks.keys;
  const int32_t block_rows = p.keys.block_rows;
  r.range = term_range(p.chunks.keys.block_rows, p.row_block_begin * block_rows, p.row_blocks * block_rows, p.seqlen_q,
                       p.seqlen_k);
  const int32_t keys = keys_up_to(r.range);
  if (keys == 0) return cudaSuccess;
  r.keys_of_block = int64_t{p.batch} * p.nheads_k * keys > kKeysOfManyBlocks ? kMostKeysOfBlock : kFewestKeysOfBlock;
  r.blocks_of_head = ceil_div(keys, r.keys_of_block);
  r.nheads = p.nheads;
  r.nheads_k = p.nheads_k;
  r.head_ratio = p.head_ratio;
  r.head_dim = p.head_dim;
  const int64_t blocks = int64_t{p.batch} * p.nheads_k * r.blocks_of_head;
  return with_half_type(dtype, [&](auto element) {
    return launch(reduce_chunk_terms_kernel<decltype(element)>, blocks, kThreads, 0, stream, r);
  });
}

}  // namespace dmattn
