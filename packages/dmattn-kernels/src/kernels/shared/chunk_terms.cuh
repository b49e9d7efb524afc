// Which chunks of rows see a key, where each row sees the keys of an interval: what decides how many ChunkTerms a key
// has.
#pragma once

#include <cuda_runtime.h>

#include "../attention/shared/work_index.cuh"

namespace dmattn {

// The rows of a round, and of all; how many of them a chunk has.
struct TermRange {
  Divisor chunk_rows;
  int32_t row_begin, row_end;
  int32_t seqlen_q, seqlen_k;
};
// Keys from here on are seen by rows behind the round alone, if at all.
inline int32_t keys_up_to(const TermRange& t) {
  const int64_t after = int64_t{t.row_end} + t.seqlen_k - t.seqlen_q;
  return after < 0 ? 0 : after < t.seqlen_k ? static_cast<int32_t>(after) : t.seqlen_k;
}
inline TermRange term_range(int32_t chunk_rows, int32_t row_begin, int32_t rows, int32_t seqlen_q, int32_t seqlen_k) {
  const int64_t row_end = int64_t{row_begin} + rows;
  return {Divisor(chunk_rows), row_begin, row_end < seqlen_q ? static_cast<int32_t>(row_end) : seqlen_q, seqlen_q,
          seqlen_k};
}

// The rows first, ..., after - 1 that see a key: those of all rounds. None where these are not in order.
struct RowsOfKey {
  int first, after;

  // `end` may be the caller's and any number.
  __device__ __forceinline__ RowsOfKey(const TermRange& t, int key, int end) {
    const int offset = t.seqlen_k - t.seqlen_q;
    first = max(key - offset, 0);
    after = min(max(end, 0), t.seqlen_k) - offset;
  }
  __device__ __forceinline__ bool exist() const { return first < after; }
  __device__ __forceinline__ bool are_in(const TermRange& t) const {
    return max(first, t.row_begin) < min(after, t.row_end);
  }
  // Whether the round has a part in the key's sums: also the last round, of a key that no row sees.
  __device__ __forceinline__ bool belong_to(const TermRange& t) const {
    return are_in(t) || (!exist() && t.row_end == t.seqlen_q);
  }
  __device__ __forceinline__ bool come_before(const TermRange& t) const {
    return first < t.row_begin && after > t.row_begin;
  }
  __device__ __forceinline__ bool go_on(const TermRange& t) const { return first < t.row_end && after > t.row_end; }
};

// The chunks first, ..., first + count - 1 of a round.
struct ChunksOfKey {
  int first, count;
};
__device__ __forceinline__ ChunksOfKey find_chunks_of_key(const TermRange& t, const RowsOfKey& rows) {
  uint32_t first = max(rows.first, t.row_begin) - t.row_begin;
  uint32_t last = max(min(rows.after, t.row_end) - t.row_begin - 1, 0);
  take(first, t.chunk_rows);
  take(last, t.chunk_rows);
  return {static_cast<int>(first), rows.are_in(t) ? static_cast<int>(last - first) + 1 : 0};
}

}  // namespace dmattn
