// What goes from one round of row blocks to the next where the sums over lists of keys are in a fixed order.
#pragma once

#include <cstdint>

namespace dmattn {

// Each round adds up the ChunkTerms of its own chunks. Of a key that rows of the next round see as well it leaves the
// sums in fp32, from which the next round goes on: the order of all chunks is the order of the sums.
struct CarriedTerms {
  // [list batch][list heads][keys], written by chunk_key_lists(): of a key that rows before the round see as well, in
  // the lower half, the place of its sums in `from`; of one that rows behind the round see, in the upper half, that in
  // `to`. nullptr: the round has all rows.
  uint32_t* places = nullptr;
  int32_t keys = 0;  // those that rows before the last round may see
  // fp32 [batch][nheads_k][capacity][head_dim]. The gradient of a bias needs none: its sums are in fp32 in their place.
  const float* from_dk = nullptr;
  const float* from_dv = nullptr;
  float* to_dk = nullptr;
  float* to_dv = nullptr;
  int32_t capacity = 0;  // no more than a half of a word can number
};
constexpr int32_t kMostCarriedTerms = UINT16_MAX;

}  // namespace dmattn
