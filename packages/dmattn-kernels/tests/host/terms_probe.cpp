// Which chunks and rounds a key's sums fall into, for test_chunk_terms.py: the device functions, compiled for the host.
#include "kernels/shared/chunk_terms.cuh"

// Of each key, from where its interval ends: the first chunk of the round and how many there are, whether the round has
// a part in its sums, whether rows before the round and rows behind it see the key. Returns up to where keys are asked
// about.
extern "C" int32_t probe_terms(int32_t chunk_rows, int32_t row_begin, int32_t rows, int32_t seqlen_q, int32_t seqlen_k,
                               const int32_t* end, int32_t* to) {
  using namespace dmattn;
  const TermRange range = term_range(chunk_rows, row_begin, rows, seqlen_q, seqlen_k);
  for (int32_t key = 0; key < seqlen_k; ++key) {
    const RowsOfKey found(range, key, end[key]);
    const ChunksOfKey chunks = find_chunks_of_key(range, found);
    *to++ = chunks.first;
    *to++ = chunks.count;
    *to++ = found.belong_to(range);
    *to++ = found.come_before(range);
    *to++ = found.go_on(range);
  }
  return keys_up_to(range);
}
