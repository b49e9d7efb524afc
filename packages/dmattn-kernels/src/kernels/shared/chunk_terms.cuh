// Which chunks of rows see a key, if the rows that see it are an interval. This decides how many rows of ChunkTerms a
// key has.
#pragma once

#include <cuda_runtime.h>

#include "../attention/shared/work_index.cuh"

namespace dmattn {

// The rows of a round, among all rows of the call, and the number of rows of a chunk.
struct TermRange {
  Divisor chunk_rows;
  int32_t row_begin, row_end;
  int32_t seqlen_q, seqlen_k;
};
// The number of keys that rows of the round or earlier ones may see. Later keys are seen only by rows behind the
// round, if by any.
inline int32_t keys_up_to(const TermRange& t) {
  const int64_t after = int64_t{t.row_end} + t.seqlen_k - t.seqlen_q;
  return after < 0 ? 0 : after < t.seqlen_k ? static_cast<int32_t>(after) : t.seqlen_k;
}
inline TermRange term_range(int32_t chunk_rows, int32_t row_begin, int32_t rows, int32_t seqlen_q, int32_t seqlen_k) {
  const int64_t row_end = int64_t{row_begin} + rows;
  return {Divisor(chunk_rows), row_begin, row_end < seqlen_q ? static_cast<int32_t>(row_end) : seqlen_q, seqlen_q,
          seqlen_k};
}

// The rows first, ..., after - 1 that see a key, in whichever rounds they are. No row sees it where first >= after.
struct RowsOfKey {
  int first, after;

  // `end` may come from the caller and be any number.
  __device__ __forceinline__ RowsOfKey(const TermRange& t, int key, int end) {
    const int offset = t.seqlen_k - t.seqlen_q;
    first = max(key - offset, 0);
    after = min(max(end, 0), t.seqlen_k) - offset;
  }
  __device__ __forceinline__ bool exist() const { return first < after; }
  __device__ __forceinline__ bool are_in(const TermRange& t) const {
    return max(first, t.row_begin) < min(after, t.row_end);
  }
  // Whether the round writes or adds to the key's sums. The last round also writes those of keys that no row sees.
  __device__ __forceinline__ bool belong_to(const TermRange& t) const {
    return are_in(t) || (!exist() && t.row_end == t.seqlen_q);
  }
  __device__ __forceinline__ bool come_before(const TermRange& t) const {
    return first < t.row_begin && after > t.row_begin;
  }
  __device__ __forceinline__ bool go_on(const TermRange& t) const { return first < t.row_end && after > t.row_end; }
};

// The chunks first, ..., first + count - 1, counted from the first chunk of the round.
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
