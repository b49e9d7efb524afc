// A compiled variant of the Hopper forward kernel over lists, as the driver sees it. Each is a translation unit of its
// own.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

#include "kernels/params.h"

struct Variant {
  const char* name;
  int head_dim, block_n;
  bool is_bf16, has_bias;
  int smem_bytes, registers, local_bytes;
  cudaError_t (*launch)(int64_t blocks, const dmattn::FwdParams& p, int64_t section_bytes, cudaStream_t stream);
};

inline std::vector<Variant (*)()>& variants() {
  static std::vector<Variant (*)()> all;
  return all;
}
