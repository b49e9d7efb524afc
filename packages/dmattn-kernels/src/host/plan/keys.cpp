#include "host/plan/keys.h"

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "host/arithmetic.h"
#include "host/checks/validate.h"
#include "host/dtype.h"

namespace dmattn {
namespace {

// Words that a thread block of the join kernel copies. With so many, each of its 256 threads has several loads in
// flight.
constexpr int64_t kJoinBlockWords = 2048;
// Keys that a thread block of the keep kernel looks at in one go.
constexpr int32_t kKeepTileKeys = 256;
// Thread blocks of the keep kernel on each SM, as far as there are tiles for so many. Each reads all interval ends of
// its batch entry and head.
constexpr int32_t kKeepBlocksPerSm = 4;
// And of each batch entry and head: with more of them, each would spend more time on reading all interval ends than
// it saves by having fewer tiles. Computed from 5 TB/s for the ends and 1.5 us for a tile, for the 4 heads of one
// batch.
constexpr int32_t kKeepBlocksPerRow = 48;

int32_t extent(int64_t x) { return static_cast<int32_t>(x); }

// Heads of the result for each head of an operand with `few` heads.
Divisor head_ratio(int64_t heads, int64_t few) {
  return Divisor(extent(std::max<int64_t>(1, heads / std::max<int64_t>(few, 1))));
}

// Bytes of the largest word, up to 16, of which all addresses, strides and row lengths of these tensors are
// multiples.
int32_t common_word_bytes(std::initializer_list<const dmattn_tensor*> tensors) {
  uint64_t all = 16;
  for (const dmattn_tensor* t : tensors) {
    const uint64_t element = static_cast<uint64_t>(element_bytes(t->dtype));
    all |= reinterpret_cast<uintptr_t>(t->data) | static_cast<uint64_t>(t->shape[3]) * element;
    for (int i = 0; i < 3; ++i) {
      if (t->shape[i] > 1) all |= static_cast<uint64_t>(t->stride[i]) * element;
    }
  }
  return static_cast<int32_t>(all & (~all + 1));  // the lowest bit of `all`
}

// Strides in words; 0 in dimensions with one entry.
Strides3 word_strides(const dmattn_tensor& t, int32_t word_bytes) {
  const int64_t element = element_bytes(t.dtype);
  const auto stride = [&](int dim) { return t.shape[dim] > 1 ? t.stride[dim] * element / word_bytes : 0; };
  return {stride(0), stride(2), stride(1)};
}
WordRows read_rows(const dmattn_tensor& t, int64_t heads, int32_t word_bytes) {
  WordRows rows;
  rows.data = t.data;
  rows.stride = word_strides(t, word_bytes);
  rows.head_ratio = head_ratio(heads, t.shape[2]);
  return rows;
}
WordRowsOut read_rows_out(const dmattn_tensor& t, int32_t word_bytes) {
  WordRowsOut rows;
  rows.data = t.data;
  rows.stride = word_strides(t, word_bytes);
  rows.words = Divisor(extent(t.shape[3] * element_bytes(t.dtype) / word_bytes));
  return rows;
}

// Reads a tensor of shape (batch or 1, heads or a divisor of it, seqlen).
KeyNumbers read_numbers(const dmattn_tensor& t, int64_t heads) {
  KeyNumbers numbers;
  if (!is_present(t)) return numbers;
  const auto stride = [&](int dim) { return t.shape[dim] > 1 ? t.stride[dim] : 0; };
  numbers.data = t.data;
  numbers.batch_stride = stride(0);
  numbers.head_stride = stride(1);
  numbers.key_stride = stride(2);
  numbers.head_ratio = head_ratio(heads, t.shape[1]);
  numbers.dtype = static_cast<Dtype>(t.dtype);
  return numbers;
}

KeyNumbersOut read_numbers_out(const dmattn_tensor& t) {
  return {t.data, t.stride[0], t.stride[1], t.stride[2], static_cast<Dtype>(t.dtype)};
}

int32_t keys_of_block(const Divisor& key_words) {
  return extent(std::max<int64_t>(1, kJoinBlockWords / key_words.value));
}

}  // namespace

JoinKeysPlan plan_join_keys(const dmattn_join_keys_params& p) {
  JoinKeysPlan plan;
  JoinKeysParams& join = plan.params;
  const int64_t heads = p.k.shape[2];
  const int32_t word = common_word_bytes({&p.k_first, &p.v_first, &p.k_new, &p.v_new, &p.k, &p.v});
  join.word_bytes = word;
  join.k_first = read_rows(p.k_first, heads, word);
  join.v_first = read_rows(p.v_first, heads, word);
  join.k_new = read_rows(p.k_new, heads, word);
  join.v_new = read_rows(p.v_new, heads, word);
  join.score_first = read_numbers(p.score_first, heads);
  join.score_new = read_numbers(p.score_new, heads);
  join.mask_new = read_numbers(p.mask_new, heads);
  join.place_first = static_cast<const int32_t*>(p.place_first.data);
  join.k = read_rows_out(p.k, word);
  join.v = read_rows_out(p.v, word);
  join.score = read_numbers_out(p.score);
  join.batch = extent(p.k.shape[0]);
  join.heads = extent(heads);
  join.seqlen = extent(p.k.shape[1]);
  join.new_begin = extent(p.k.shape[1] - p.k_new.shape[1]);
  join.first_begin = extent(join.new_begin - p.k_first.shape[1]);
  if (heads == 0) return plan;  // nothing to launch
  join.k_key_words = Divisor(extent(heads * join.k.words.value));
  join.v_key_words = Divisor(extent(heads * join.v.words.value));
  join.k_block_keys = keys_of_block(join.k_key_words);
  join.v_block_keys = keys_of_block(join.v_key_words);
  join.k_blocks = ceil_div(join.seqlen, join.k_block_keys);
  join.v_blocks = ceil_div(join.seqlen, join.v_block_keys);
  join.score_blocks = ceil_div(join.seqlen, kJoinScoreKeys);
  return plan;
}

KeepKeysPlan plan_keep_keys(const dmattn_keep_keys_params& p, int32_t num_sms) {
  KeepKeysPlan plan;
  KeepKeysParams& keep = plan.params;
  const int64_t heads = p.k_kept.shape[2];
  const int32_t word = common_word_bytes({&p.k, &p.v, &p.k_kept, &p.v_kept});
  keep.word_bytes = word;
  const KeyNumbers end = read_numbers(p.end, heads);
  keep.end = static_cast<const int32_t*>(end.data);
  keep.end_batch_stride = end.batch_stride;
  keep.end_head_stride = end.head_stride;
  keep.end_head_ratio = end.head_ratio;
  keep.row = p.row;
  keep.place = static_cast<const int32_t*>(p.place.data);
  keep.k = read_rows(p.k, heads, word);
  keep.v = read_rows(p.v, heads, word);
  keep.score = read_numbers(p.score, heads);
  keep.position = read_numbers(p.position, heads);
  keep.positions = is_present(p.position) ? extent(p.position.shape[2]) : 0;
  keep.seen = static_cast<const int32_t*>(p.seen.data);
  keep.k_kept = read_rows_out(p.k_kept, word);
  keep.v_kept = read_rows_out(p.v_kept, word);
  keep.score_kept = read_numbers_out(p.score_kept);
  keep.position_kept = static_cast<int32_t*>(p.position_kept.data);
  keep.seen_kept = static_cast<int32_t*>(p.seen_kept.data);
  keep.batch = extent(p.k_kept.shape[0]);
  keep.heads = extent(heads);
  keep.seqlen = extent(p.k.shape[1]);
  keep.window = extent(p.k_kept.shape[1]);
  const int64_t lines = std::max<int64_t>(1, int64_t{keep.batch} * heads);
  const int64_t places =
      std::min<int64_t>(ceil_div<int64_t>(int64_t{num_sms} * kKeepBlocksPerSm, lines), kKeepBlocksPerRow);
  const int64_t tiles = std::max<int64_t>(1, ceil_div<int64_t>(keep.seqlen, kKeepTileKeys));
  const int64_t tiles_each = ceil_div(tiles, std::clamp<int64_t>(places, 1, tiles));
  keep.starts_early = p.starts_early != 0;
  keep.segments = extent(ceil_div(tiles, tiles_each));
  keep.segment_keys = extent(std::min<int64_t>(tiles_each * kKeepTileKeys, INT32_MAX));
  return plan;
}

}  // namespace dmattn
