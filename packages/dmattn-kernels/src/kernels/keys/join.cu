// Puts the keys of a stretch behind those of a state, so that attention finds both in one tensor.
#include "keys.h"
#include "numbers.cuh"

namespace dmattn {
namespace {

using namespace prep;

constexpr int kThreads = 256;

// Where key `i` of the state lies.
__device__ __forceinline__ int first_place(const JoinKeysParams& p, int b, int h, int i) {
  if (p.place_first == nullptr) return i;
  const int held = p.new_begin - p.first_begin;
  return min(max(__ldg(p.place_first + (static_cast<int64_t>(b) * p.heads + h) * held + i), 0), held - 1);
}

// Copies keys begin, ..., stop - 1 of one batch entry, all heads.
template <class Word>
__device__ __forceinline__ void join_rows(const JoinKeysParams& p, const WordRows& first, const WordRows& fresh,
                                          const WordRowsOut& to, const Divisor& key_words, int b, int begin, int stop) {
  const uint32_t words = static_cast<uint32_t>(stop - begin) * key_words.value;
  const auto source = [&](uint32_t i) -> const Word* {
    const uint32_t of_block = quotient(i, key_words), of_key = i - of_block * key_words.value;
    const int key = begin + static_cast<int>(of_block), h = static_cast<int>(quotient(of_key, to.words));
    const int word = static_cast<int>(of_key - h * to.words.value);
    const bool is_new = key >= p.new_begin;
    const WordRows& from = is_new ? fresh : first;
    if (key < p.first_begin) return nullptr;
    const int lies = is_new ? key - p.new_begin : first_place(p, b, h, key - p.first_begin);
    return static_cast<const Word*>(from.data) + word_offset(from, b, h, lies) + word;
  };
  const auto target = [&](uint32_t i) {
    const uint32_t of_block = quotient(i, key_words), of_key = i - of_block * key_words.value;
    const int key = begin + static_cast<int>(of_block), h = static_cast<int>(quotient(of_key, to.words));
    return static_cast<Word*>(to.data) + row_offset(to.stride, b, h, key) + (of_key - h * to.words.value);
  };
  copy_words<Word, kThreads>(words, source, target);
}

__device__ __forceinline__ uint32_t joined_score(const JoinKeysParams& p, int b, int h, int key) {
  if (key >= p.new_begin) {
    const int fresh = key - p.new_begin;
    const bool is_masked = p.mask_new.data != nullptr &&
                           static_cast<const uint8_t*>(p.mask_new.data)[number_offset(p.mask_new, b, h, fresh)] == 0;
    if (!is_masked) return score_bits(p.score_new, number_offset(p.score_new, b, h, fresh), p.score.dtype);
  } else if (key >= p.first_begin) {
    const int lies = first_place(p, b, h, key - p.first_begin);
    return score_bits(p.score_first, number_offset(p.score_first, b, h, lies), p.score.dtype);
  }
  return lowest_score_bits(p.score.dtype);
}

template <class Word>
__global__ void __launch_bounds__(kThreads) join_keys_kernel(const JoinKeysParams p) {
  follow_previous_kernel();
  uint32_t block = blockIdx.x;
  const auto rows_of = [&](uint32_t blocks, int block_keys, auto&& join) {
    const int b = block / blocks, begin = block % blocks * block_keys;
    join(b, begin, min(begin + block_keys, p.seqlen));
  };
  const uint32_t all_k = static_cast<uint32_t>(p.batch) * p.k_blocks,
                 all_v = static_cast<uint32_t>(p.batch) * p.v_blocks;
  if (block < all_k) {
    rows_of(p.k_blocks, p.k_block_keys, [&](int b, int begin, int stop) {
      join_rows<Word>(p, p.k_first, p.k_new, p.k, p.k_key_words, b, begin, stop);
    });
    return;
  }
  block -= all_k;
  if (block < all_v) {
    rows_of(p.v_blocks, p.v_block_keys, [&](int b, int begin, int stop) {
      join_rows<Word>(p, p.v_first, p.v_new, p.v, p.v_key_words, b, begin, stop);
    });
    return;
  }
  block -= all_v;
  const uint32_t row = block / p.score_blocks;
  const int b = row / p.heads, h = row % p.heads, begin = block % p.score_blocks * kJoinScoreKeys;
  const int stop = min(begin + kJoinScoreKeys, p.seqlen);
#pragma unroll 1
  for (int key = begin + threadIdx.x; key < stop; key += kThreads) {
    store_score(p.score, b, h, key, joined_score(p, b, h, key));
  }
}

}  // namespace

cudaError_t join_keys(const JoinKeysParams& p, cudaStream_t stream) {
  const int64_t blocks = int64_t{p.batch} * (int64_t{p.k_blocks} + p.v_blocks + int64_t{p.heads} * p.score_blocks);
  return with_word_type(p.word_bytes, [&](auto word) {
    return launch(join_keys_kernel<decltype(word)>, blocks, kThreads, 0, stream, p);
  });
}

}  // namespace dmattn
