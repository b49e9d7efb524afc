// A compiled variant of the Hopper backward kernel, as the driver sees it. Each is a translation unit of its own.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

#include "kernels/params.h"

struct Variant {
  const char* name;
  int head_dim, block_m, block_n, consumers;
  bool is_bf16, deterministic, softcap;
  int smem_bytes, registers, local_bytes;
  cudaError_t (*launch)(int64_t blocks, const dmattn::BwdParams& p, int64_t section_bytes, cudaStream_t stream);
  cudaError_t (*convert)(const dmattn::BwdParams& p, void* dq, const dmattn::Strides3& stride, cudaStream_t stream);
};

inline std::vector<Variant (*)()>& variants() {
  static std::vector<Variant (*)()> all;
  return all;
}
