// What the Hopper forward kernel over lists of keys is given.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "../../params.h"

namespace dmattn::sm90 {

// K or V, whose rows the threads of the producer read themselves. In bytes.
struct GatheredTensor {
  const char* data;
  int64_t batch_stride, head_stride;
  uint32_t row_stride;
};
// Of 16-bit elements.
inline GatheredTensor gathered_tensor(const void* data, const Strides3& stride) {
  return {static_cast<const char*>(data), 2 * stride.batch, 2 * stride.head, static_cast<uint32_t>(2 * stride.row)};
}

// The output, which threads write themselves. Strides in 16-bit elements.
struct RowsOfOut {
  void* data;
  Strides3 stride;
};

struct GatherArguments {
  CUtensorMap q, out;  // dimensions (head_dim, seqlen, heads, batch)
  RowsOfOut out_rows;  // the output, where it is written from registers
  GatheredTensor k, v;
  KeyList keys;
  BiasParams bias;  // kNone or kKey
  float* lse;
  float* lse_rest;  // nullptr: not asked for
  Strides3 lse_stride;
  int32_t seqlen_q, seqlen_k, nheads, head_ratio, head_dim;
  int32_t m_blocks;  // row blocks of a head
  int32_t items;     // row blocks of all heads and batches
  // Heads (of all batches) whose row blocks are done before the next heads begin, so that their K and V stay in L2.
  int32_t section_heads, all_heads;
  float softmax_scale;
  // With a bias for each key, 1 / softmax_scale, and the largest bias that comes with the products (key_bias.cuh).
  float bias_factor, most_bias;
  bool is_causal;
  // Number of items that thread blocks have taken beyond their first; zero before the launch. nullptr: there are no
  // more items than thread blocks.
  int32_t* work_counter;
};

}  // namespace dmattn::sm90
