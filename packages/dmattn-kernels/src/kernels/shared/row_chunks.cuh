// Kernels that go through the rows of a (batch, seqlen, heads, head_dim) tensor, eight columns a thread.
#pragma once

#include "helper.cuh"

namespace dmattn {
namespace prep {

constexpr int kRowChunkThreads = 256;
constexpr int kRowChunkRows = 64;  // rows of one (batch, head) a block

// Calls f(b, h, row, first column) for every chunk of eight columns of the block's rows.
template <class F>
__device__ __forceinline__ void for_each_chunk(int64_t tile, int nheads, int seqlen, int head_dim, F&& f) {
  const int tiles = ceil_div(seqlen, kRowChunkRows);
  const int h = static_cast<int>(tile % nheads);
  const int row0 = static_cast<int>(tile / nheads % tiles) * kRowChunkRows;
  const int b = static_cast<int>(tile / nheads / tiles);
  const int chunks = ceil_div(head_dim, 8);
  const int work = min(kRowChunkRows, seqlen - row0) * chunks;
  for (int i = threadIdx.x; i < work; i += kRowChunkThreads) f(b, h, row0 + i / chunks, i % chunks * 8);
}
inline int64_t row_tiles(int batch, int nheads, int seqlen) {
  return static_cast<int64_t>(batch) * nheads * ceil_div(seqlen, kRowChunkRows);
}

}  // namespace prep
}  // namespace dmattn
