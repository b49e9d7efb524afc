// A dense bias that threads read, or whose gradient they write, in most cases since its rows do not start on 16 bytes
// as TMA requires.
#pragma once

#include <cstdint>

#include "../../params.h"

namespace dmattn::sm90 {

// Where threads read the bias of each row and key. The keys of a row are contiguous.
struct BiasRows {
  const char* data;                               // nullptr: TMA copies the tiles, or there is no dense bias
  int64_t batch_stride, head_stride, row_stride;  // in bytes
  int32_t rows, keys, key_bytes;

  __host__ __device__ bool exist() const { return data != nullptr; }
};

// Where threads of the backward write the gradient of the bias, or add to it. The keys of a row are contiguous.
struct DbiasRows {
  void* data;  // nullptr: the gradient goes elsewhere (BwdArguments), or is not asked for
  int64_t batch_stride, head_stride, row_stride;  // in elements
  bool is_sum;                                    // data has sums in fp32, which are added to

  __host__ __device__ bool exist() const { return data != nullptr; }
};

// Whether all rows start on 16 bytes.
inline bool has_tma_rows(const void* data, const Strides3& stride, int64_t element_bytes) {
  return ((reinterpret_cast<uintptr_t>(data) | (stride.batch | stride.head | stride.row) * element_bytes) & 15) == 0;
}

// The rows of a bias for each row and key, for threads that read them.
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
