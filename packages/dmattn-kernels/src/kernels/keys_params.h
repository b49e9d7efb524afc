// What the host hands to the kernels that move whole keys: those of a stretch behind those of a state, and those that
// the next stretch still sees. Plain structs as in params.h.
#pragma once

#include "divisor.h"
#include "params.h"

namespace dmattn {

// Rows of keys or values. Copies move words: the largest power of 2 of up to 16 bytes that every address and every
// stride of a call is a multiple of.
struct WordRows {
  const void* data = nullptr;
  Strides3 stride;     // in words
  Divisor head_ratio;  // heads of the result for each head that is here
};
// The result: every head has rows of its own.
struct WordRowsOut {
  void* data = nullptr;
  Strides3 stride;  // in words
  Divisor words;    // of a row
};

// A number for each key and head.
struct KeyNumbers {
  const void* data = nullptr;
  int64_t batch_stride = 0, head_stride = 0, key_stride = 0;  // in elements; 0 where all batches share theirs
  Divisor head_ratio;                                         // as in WordRows
  Dtype dtype = Dtype::kNone;                                 // of scores
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
  KeyNumbers mask_new;  // bytes, 0: the score is taken as -inf; nullptr: none
  const int32_t* place_first =
      nullptr;  // [batch][heads][keys of the first stretch]: where each lies; nullptr: in order
  WordRowsOut k, v;
  KeyNumbersOut score;
  int32_t word_bytes = 16;
  Divisor k_key_words, v_key_words;  // of a key, all heads
  int32_t batch = 0, heads = 0, seqlen = 0;
  int32_t first_begin = 0, new_begin = 0;  // where each stretch begins; what is before the first one holds no key
  // Thread blocks: those of k, of so many keys each, then those of v, then those of the scores.
  int32_t k_block_keys = 1, v_block_keys = 1;
  int32_t k_blocks = 0, v_blocks = 0, score_blocks = 0;  // of one batch; of one batch and head
};

// Keys whose scores a thread block of the join kernel copies.
constexpr int kJoinScoreKeys = 1024;

struct KeepKeysParams {
  const int32_t* end = nullptr;  // a key whose end lies behind `row` is kept
  int64_t end_batch_stride = 0, end_head_stride = 0;
  Divisor end_head_ratio;
  int64_t row = 0;
  const int32_t* place = nullptr;  // [batch][heads][seqlen]: where each key lies; nullptr: where it stands
  WordRows k, v;
  KeyNumbers score;
  KeyNumbers position;  // of the first `positions` keys as they lie
  int32_t positions = 0;
  const int32_t* seen = nullptr;  // [batch]: position of the key that lies behind those; nullptr: 0
  WordRowsOut k_kept, v_kept;
  KeyNumbersOut score_kept;
  int32_t* position_kept = nullptr;  // [batch][heads][window]
  int32_t* seen_kept = nullptr;      // [batch], optional
  int32_t word_bytes = 16;
  int32_t batch = 0, heads = 0, seqlen = 0, window = 0;
  int32_t segments = 1, segment_keys = 0;  // thread blocks of a batch and head, keys of each
  bool starts_early = false;               // beside the kernel before: see keep.cu
};

}  // namespace dmattn
