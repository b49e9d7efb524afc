// Which chunks of rows see a key, where each row sees the keys of an interval: what decides how many ChunkTerms a key has.
#pragma once

#include <cuda_runtime.h>

#include "../attention/shared/work_index.cuh"

namespace dmattn {

// The chunks first, ..., first + count - 1.
struct ChunksOfKey {
  int first, count;
};

// `end` may be the caller's and any number.
__device__ __forceinline__ ChunksOfKey find_chunks_of_key(int key, int end, int seqlen_q, int seqlen_k,
                                                          const Divisor& chunk_rows) {
  const int offset = seqlen_k - seqlen_q;
  const int first_row = max(key - offset, 0), row_after = min(max(end, 0), seqlen_k) - offset;
  uint32_t first = first_row, last = max(row_after - 1, 0);
  take(first, chunk_rows);
  take(last, chunk_rows);
  return {static_cast<int>(first), first_row < row_after ? static_cast<int>(last - first) + 1 : 0};
}

}  // namespace dmattn
