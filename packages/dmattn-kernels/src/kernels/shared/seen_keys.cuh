// Which keys of a backward over lists are seen by any row. Under running top-w, most keys of a long sequence are seen
// by none: their sums of dk and dv are neither cleared nor read, and their gradients are zeros.
#pragma once

#include <cuda_runtime.h>

#include "../params.h"
#include "chunk_terms.cuh"

namespace dmattn {

struct SeenKeys {
  const int32_t* end = nullptr;  // [batch][heads][seqlen_k], as in KeyList; nullptr: all keys count as seen
  int32_t batch = 1, heads = 1;
  Divisor kv_heads;  // kv heads for each list head
  TermRange range = {};

  // All keys count as seen where the query heads of a kv head read several lists, and in packed sequences.
  SeenKeys(const KeyList& keys, const Packing& packing, int32_t head_ratio, int32_t seqlen_q, int32_t seqlen_k)
      : batch(keys.batch), heads(keys.heads), range(term_range(1, 0, seqlen_q, seqlen_q, seqlen_k)) {
    if (packing.is_active() || keys.head_ratio % head_ratio != 0) return;
    end = keys.end;
    kv_heads = Divisor(keys.head_ratio / head_ratio);
  }

  __device__ __forceinline__ bool contain(int b, int hk, int key) const {
    if (end == nullptr) return true;
    uint32_t head = hk;
    take(head, kv_heads);
    const int64_t list = static_cast<int64_t>(batch > 1 ? b : 0) * heads + head;
    return RowsOfKey(range, key, __ldg(end + list * range.seqlen_k + key)).exist();
  }
};

}  // namespace dmattn
