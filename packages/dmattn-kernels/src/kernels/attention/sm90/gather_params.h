// What the Hopper forward kernel over lists of keys is given.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "../../params.h"

namespace dmattn::sm90 {

// K or V, whose rows the producer's threads copy. All strides are in bytes.
struct GatheredTensor {
  const char* data;
  int64_t batch_stride, head_stride;
  uint32_t row_stride;
};
// `stride` counts elements of 16 bits.
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
  float* lse_rest;  // nullptr: not wanted
  Strides3 lse_stride;
  int32_t seqlen_q, seqlen_k, nheads, head_ratio, head_dim;
  int32_t m_blocks;  // row blocks of a head
  int32_t items;     // row blocks of all heads and batches
  // Heads are counted through all batches. The row blocks of section_heads heads are done before those of the next
  // heads begin, so that the K and V of these heads stay in L2.
  int32_t section_heads, all_heads;
  float softmax_scale;
  // With a bias for each key: 1 / softmax_scale, and the largest bias that the products can add (key_bias.cuh).
  float bias_factor, most_bias;
  bool is_causal;
  // How many items thread blocks have taken beyond their first. Zero before the launch. nullptr: there are no more
  // items than thread blocks.
  int32_t* work_counter;
};

}  // namespace dmattn::sm90
