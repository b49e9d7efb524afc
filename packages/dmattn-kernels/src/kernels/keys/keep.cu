// Extracts from all keys of a stretch those that later rows may still attend to.
//
// A thread block has a segment of the keys of one (batch, head). It counts the kept keys of the whole head, which
// tells it where its own kept keys go. That each block reads every `end` costs less than a launch that counts first.
//
// With `starts_early` the kernel waits for the previous one only at its end, an exception to the rule in
// shared/early_start.cuh. The previous kernel is attention with these keys, and neither of the two writes anything
// that the other reads or writes. All earlier kernels have ended, since attention lets this one start only after a
// wait of its own.
#include "keys.h"
#include "numbers.cuh"

namespace dmattn {
namespace {

using namespace prep;

constexpr int kThreads = 256;

struct KeptCounts {
  int before = 0, from = 0;  // before the segment, and from its beginning on
};

// Reads four ends at a time, from the first address that is a multiple of 16 bytes. A thread has eight such loads in
// flight, so that a thread block reads the ends of 8192 keys together.
__device__ __forceinline__ KeptCounts count_kept(const int32_t* end, int64_t row, int seqlen, int begin) {
  KeptCounts found;
  const auto count = [&](int j, int32_t its_end) {
    const int is_kept = its_end > row;
    found.before += j < begin ? is_kept : 0;
    found.from += j < begin ? 0 : is_kept;
  };
  const int misplaced = static_cast<int>(reinterpret_cast<uintptr_t>(end) / sizeof(int32_t) % 4);
  const int head = min(misplaced == 0 ? 0 : 4 - misplaced, seqlen), quads = (seqlen - head) / 4;
#pragma unroll 8
  for (int i = threadIdx.x; i < quads; i += kThreads) {
    const int4 ends = __ldg(reinterpret_cast<const int4*>(end + head) + i);
    const int j = head + 4 * i;
    count(j, ends.x), count(j + 1, ends.y), count(j + 2, ends.z), count(j + 3, ends.w);
  }
  const int others = seqlen - 4 * quads;  // fewer than eight: those before and behind the groups of four
  if (threadIdx.x < others) {
    const int j = threadIdx.x < head ? threadIdx.x : 4 * quads + threadIdx.x;
    count(j, __ldg(end + j));
  }
  return found;
}

// Copies `rows` rows of keys or values to the entries from `entry` on. source(i): the key that the i-th of these gets.
template <class Word, class Source>
__device__ __forceinline__ void copy_rows(const WordRows& from, const WordRowsOut& to, int b, int h, int entry,
                                          int rows, Source&& source) {
  const uint32_t words = static_cast<uint32_t>(rows) * to.words.value;
  const auto from_word = [&](uint32_t i) {
    const int row = static_cast<int>(quotient(i, to.words)), word = static_cast<int>(i - row * to.words.value);
    return static_cast<const Word*>(from.data) + word_offset(from, b, h, source(row)) + word;
  };
  const auto to_word = [&](uint32_t i) {
    const int row = static_cast<int>(quotient(i, to.words)), word = static_cast<int>(i - row * to.words.value);
    return static_cast<Word*>(to.data) + row_offset(to.stride, b, h, entry + row) + word;
  };
  copy_words<Word, kThreads>(words, from_word, to_word);
}

template <class Word>
__device__ __forceinline__ void clear_rows(const WordRowsOut& to, int b, int h, int first, int step, int stop) {
#pragma unroll 1
  for (int entry = first; entry < stop; entry += step) {
    for (int word = threadIdx.x; word < static_cast<int>(to.words.value); word += kThreads) {
      static_cast<Word*>(to.data)[row_offset(to.stride, b, h, entry) + word] = Word{};
    }
  }
}

// Clears the first `empty` entries, which get no key. The blocks of a (batch, head) divide them between them.
template <class Word>
__device__ __forceinline__ void clear_entries(const KeepKeysParams& p, int b, int h, int32_t* positions, int segment,
                                              int empty) {
  clear_rows<Word>(p.k_kept, b, h, segment, p.segments, empty);
  clear_rows<Word>(p.v_kept, b, h, segment, p.segments, empty);
  for (int64_t entry = segment + int64_t{threadIdx.x} * p.segments; entry < empty;
       entry += kThreads * int64_t{p.segments}) {
    store_score(p.score_kept, b, h, static_cast<int>(entry), lowest_score_bits(p.score_kept.dtype));
    positions[entry] = -1;
  }
}

__device__ __forceinline__ int position_of(const KeepKeysParams& p, int b, int h, int key, int seen) {
  if (key >= p.positions)
    return static_cast<int>(static_cast<uint32_t>(seen) + static_cast<uint32_t>(key - p.positions));
  return static_cast<const int32_t*>(p.position.data)[number_offset(p.position, b, h, key)];
}

template <class Word>
__global__ void __launch_bounds__(kThreads) keep_keys_kernel(const KeepKeysParams p) {
  __shared__ int kept[kThreads];  // where the kept keys of a tile lie
  __shared__ int sums[3][32];
  if (!p.starts_early) follow_previous_kernel();
  const int segment = blockIdx.x % p.segments, line = blockIdx.x / p.segments;
  const int b = line / p.heads, h = line % p.heads;
  int32_t* positions = p.position_kept + static_cast<int64_t>(line) * p.window;
  const int begin = static_cast<int>(min(int64_t{segment} * p.segment_keys, int64_t{p.seqlen}));
  const int stop = static_cast<int>(min(int64_t{begin} + p.segment_keys, int64_t{p.seqlen}));
  const int32_t* end = p.end + b * p.end_batch_stride + quotient(h, p.end_head_ratio) * p.end_head_stride;
  const int seen = p.seen == nullptr ? 0 : p.seen[b];

  const KeptCounts mine = count_kept(end, p.row, p.seqlen, begin);
  int before, from;
  block_exclusive_scan<kThreads>(mine.before, sums[0], before);
  block_exclusive_scan<kThreads>(mine.from, sums[1], from);
  clear_entries<Word>(p, b, h, positions, segment, p.window - min(p.window, before + from));

  int entry = p.window - from;  // of the next kept key; negative where more are kept than there are entries
  for (int tile = begin; tile < stop; tile += kThreads) {
    const int j = tile + threadIdx.x;
    const bool is_kept = j < stop && __ldg(end + j) > p.row;
    int found;
    const int slot = block_exclusive_scan<kThreads>(is_kept, sums[2], found);
    const int skip = min(max(-entry, 0), found);
    if (is_kept && slot >= skip) {
      int key = j;
      if (p.place != nullptr) {
        key = min(max(__ldg(p.place + static_cast<int64_t>(line) * p.seqlen + j), 0), p.seqlen - 1);
      }
      kept[slot - skip] = key;
      const int to = entry + slot;
      store_score(p.score_kept, b, h, to, score_bits(p.score, number_offset(p.score, b, h, key), p.score_kept.dtype));
      positions[to] = position_of(p, b, h, key, seen);
    }
    __syncthreads();
    const auto source = [&](int row) { return kept[row]; };
    copy_rows<Word>(p.k, p.k_kept, b, h, entry + skip, found - skip, source);
    copy_rows<Word>(p.v, p.v_kept, b, h, entry + skip, found - skip, source);
    entry += found;
    __syncthreads();  // the next tile writes `kept` and `sums`
  }
  if (p.seen_kept != nullptr && segment == 0 && h == 0 && threadIdx.x == 0) {
    p.seen_kept[b] = static_cast<int>(static_cast<uint32_t>(seen) + static_cast<uint32_t>(p.seqlen - p.positions));
  }
  if (p.starts_early) follow_previous_kernel();  // so that all kernels before have ended when this one ends
}

}  // namespace

cudaError_t keep_keys(const KeepKeysParams& p, cudaStream_t stream) {
  return with_word_type(p.word_bytes, [&](auto word) {
    return launch(keep_keys_kernel<decltype(word)>, int64_t{p.batch} * p.heads * p.segments, kThreads, 0, stream, p);
  });
}

}  // namespace dmattn
