// Sums that a round of row blocks hands on to the next one, in deterministic calls over lists of keys.
#pragma once

#include <cstdint>

namespace dmattn {

// Each round adds up the ChunkTerms of its own chunks. If rows of the next round see a key as well, its sums are left
// in fp32, and the next round adds to them. So the sums are formed in the order of all chunks.
struct CarriedTerms {
  // [list batch][list heads][keys], written by chunk_key_lists(). Lower half of a word: the place of the key's sums
  // in `from`, if rows before the round see the key as well. Upper half: their place in `to`, if rows behind the
  // round do. nullptr: one round has all rows.
  uint32_t* places = nullptr;
  int32_t keys = 0;  // the keys that rows before the last round may see
  // fp32 [batch][nheads_k][capacity][head_dim]. The gradient of a bias needs no such buffer: it is summed in fp32
  // where it stays.
  const float* from_dk = nullptr;
  const float* from_dv = nullptr;
  float* to_dk = nullptr;
  float* to_dv = nullptr;
  int32_t capacity = 0;  // at most kMostCarriedTerms, so that half a word can number the places
};
constexpr int32_t kMostCarriedTerms = UINT16_MAX;

}  // namespace dmattn
