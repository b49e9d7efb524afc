// What the host hands to the kernels that move whole keys: one appends the keys of a stretch to those of a state, the
// other extracts the keys that the next stretch still sees. Plain structs as in params.h.
#pragma once

#include "divisor.h"
#include "params.h"

namespace dmattn {

// Rows of keys or values. They are copied in words, whose size is the largest power of 2 up to 16 bytes that divides
// every address and every stride of a call.
struct WordRows {
  const void* data = nullptr;
  Strides3 stride;     // in words
  Divisor head_ratio;  // heads of the result for each head of this tensor
};
// The result: every head has rows of its own.
struct WordRowsOut {
  void* data = nullptr;
  Strides3 stride;  // in words
  Divisor words;    // words of a row
};

// A number for each key and head.
struct KeyNumbers {
  const void* data = nullptr;
  int64_t batch_stride = 0, head_stride = 0, key_stride = 0;  // in elements; 0 along dimensions of one entry
  Divisor head_ratio;                                         // as in WordRows
  Dtype dtype = Dtype::kNone;                                 // used for scores only
};

// The scores of a result.
struct KeyNumbersOut {
  void* data = nullptr;
  int64_t batch_stride = 0, head_stride = 0, key_stride = 0;  // in elements
  Dtype dtype = Dtype::kFloat32;
};

struct JoinKeysParams {
  WordRows k_first, v_first, k_new, v_new;
  KeyNumbers score_first, score_new;
  KeyNumbers mask_new;  // one byte each, 0: the score becomes -inf; data == nullptr: no mask
  // [batch][heads][keys of the first stretch]: where each key lies in k_first, v_first and score_first; nullptr: in
  // this order.
  const int32_t* place_first = nullptr;
  WordRowsOut k, v;
  KeyNumbersOut score;
  int32_t word_bytes = 16;
  Divisor k_key_words, v_key_words;  // words of a key, of all heads
  int32_t batch = 0, heads = 0, seqlen = 0;
  // Entries of the result at which the stretches begin. Those before first_begin hold no key.
  int32_t first_begin = 0, new_begin = 0;
  // Thread blocks: first those that copy k, k_block_keys keys each, then those of v, then those of the scores.
  int32_t k_block_keys = 1, v_block_keys = 1;
  int32_t k_blocks = 0, v_blocks = 0, score_blocks = 0;  // k and v: of one batch; scores: of one batch and head
};

// Keys whose scores a thread block of the join kernel copies.
constexpr int kJoinScoreKeys = 1024;

struct KeepKeysParams {
  const int32_t* end = nullptr;  // a key whose end lies behind `row` is kept
  int64_t end_batch_stride = 0, end_head_stride = 0;
  Divisor end_head_ratio;
  int64_t row = 0;
  // [batch][heads][seqlen]: where each key lies in k, v, score and position; nullptr: in this order
  const int32_t* place = nullptr;
  WordRows k, v;
  KeyNumbers score;
  KeyNumbers position;  // of the first `positions` keys, in the order in which they lie in memory
  int32_t positions = 0;
  const int32_t* seen = nullptr;  // [batch]: position of the first key behind those; nullptr: 0
  WordRowsOut k_kept, v_kept;
  KeyNumbersOut score_kept;
  int32_t* position_kept = nullptr;  // [batch][heads][window]
  int32_t* seen_kept = nullptr;      // [batch], optional
  int32_t word_bytes = 16;
  int32_t batch = 0, heads = 0, seqlen = 0, window = 0;
  int32_t segments = 1, segment_keys = 0;  // thread blocks for each batch and head, and the keys of each
  bool starts_early = false;               // may run beside the kernel before it: see keep.cu
};

}  // namespace dmattn
