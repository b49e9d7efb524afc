// A dense bias whose rows do not start on 16 bytes, and its gradient: TMA takes neither, and threads copy them.
#pragma once

#include <cstdint>

#include "../../params.h"

namespace dmattn::sm90 {

// Where threads find the bias of each row and key. Keys lie next to each other.
struct BiasRows {
  const char* data;                               // nullptr: TMA copies the tiles
  int64_t batch_stride, head_stride, row_stride;  // in bytes
  int32_t rows, keys, key_bytes;

  __host__ __device__ bool exist() const { return data != nullptr; }
};

// Where threads of the backward write the gradient of the bias, or add to it. Keys lie next to each other.
struct DbiasRows {
  void* data;                                     // nullptr: it leaves otherwise
  int64_t batch_stride, head_stride, row_stride;  // in elements
  bool is_sum;                                    // in fp32: entries are added to

  __host__ __device__ bool exist() const { return data != nullptr; }
};

// Whether all rows start on 16 bytes.
inline bool has_tma_rows(const void* data, const Strides3& stride, int64_t element_bytes) {
  return ((reinterpret_cast<uintptr_t>(data) | (stride.batch | stride.head | stride.row) * element_bytes) & 15) == 0;
}

// Of a bias that TMA does not take.
inline BiasRows bias_rows_of(const BiasParams& bias, int32_t seqlen_q, int32_t seqlen_k) {
  const int32_t bytes = bias.dtype == Dtype::kFloat32 ? 4 : 2;
  return {static_cast<const char*>(bias.ptr),
          bias.batch_stride * bytes,
          bias.head_stride * bytes,
          bias.row_stride * bytes,
          seqlen_q,
          seqlen_k,
          bytes};
}

}  // namespace dmattn::sm90
