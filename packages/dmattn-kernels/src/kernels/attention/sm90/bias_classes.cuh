// Tiles of a bias whose rows start on any two bytes (bias_classes.h), copied by TMA: of eight consecutive rows each is
// of another class, so that a tile comes as eight boxes, each with every eighth row. A row of a box begins up to seven
// numbers before the tile does, and ends as many too early.
#pragma once

#include "../shared/smem.cuh"
#include "bias_classes.h"
#include "bias_rows.cuh"
#include "pipeline.cuh"

namespace dmattn::sm90 {

// Where the numbers of a ring of tiles lie. Boxes have 128 bytes a row, swizzled as in other tiles: which 16 bytes of
// the 128 are exchanged follows from the address. Consumers read eight consecutive rows at a time, one of each box.
// Their addresses are a column's bytes apart, 128 more than a multiple of 1024, so that the swizzle differs in each and
// they do not meet on the banks. A column has the boxes of all stages.
template <int kRows, int kKeys, int kStages>
struct BiasBoxes {
  static constexpr int kBoxRows = kRows / kRowClasses, kBoxBytes = kBoxRows * 128;
  static constexpr int kPanels = kKeys / 64, kTileBytes = kRows * kKeys * 2, kStageBytes = kPanels * kBoxBytes;
  static constexpr int kColumnBytes = kStages * kStageBytes + 128;
  static constexpr int kBytes = kRowClasses * kColumnBytes - 128;
  static_assert(kBoxBytes % 1024 == 0 && kKeys % 64 == 0);

  // Where the box of a tile's rows `row`, `row` + 8 and so on begins, and of 64 keys.
  static __device__ __forceinline__ uint32_t box(int stage, uint32_t row, int panel) {
    return row * kColumnBytes + (stage * kPanels + panel) * kBoxBytes;
  }
  // The shared address of a row of the first stage and panel, on 128 bytes, and in its last bits where the swizzle puts
  // the first of its 16 bytes. `ring`: on 128 bytes.
  static __device__ __forceinline__ uint32_t first_chunk(uint32_t ring, uint32_t row) {
    const uint32_t begin = ring + box(0, row % kRowClasses, 0) + row / kRowClasses * 128;
    return begin + (begin / 128 % 8 << 4);
  }
};

// What a consumer's thread takes of a tile: of two rows, eight apart and so of one class, in each fragment of eight
// keys the numbers 2 * (lane % 4) and the one behind it. They are `shift` columns later in the box: half of a word and
// half of the next one, or a word.
template <class Boxes>
struct ShiftedPairs {
  static_assert(Boxes::kPanels == 2);
  static constexpr int kFragments = 16;

  uint32_t
      words[2];      // of each row in the first stage, where the swizzle puts the first 16 bytes, and in these the word
  uint32_t to_next;  // and what makes it the next word, by exclusive or
  uint32_t begin_chunk;   // 16 where the word is in the 16 bytes behind those of the fragment
  uint32_t next_chunk;    // likewise the next word
  uint32_t shifted_bits;  // by which the pair begins behind the word: 0 or 16
  const uint16_t* last;   // in memory, the pair of the first row in the last fragment of the tile of key 0

  // row: in the tile; number: of the row that key 0 begins at `keys`; column: of the pair in a fragment.
  __device__ __forceinline__ ShiftedPairs(uint32_t ring, uint32_t row, uint32_t column, uint32_t shift,
                                          const uint16_t* keys) {
    const uint32_t word = (column + shift) / 2, next = word + 1;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      words[half] = Boxes::first_chunk(ring, row + half * kRowClasses) + word % 4 * 4;
    }
    to_next = (word % 4 ^ next % 4) * 4;
    begin_chunk = word / 4 * 16;
    next_chunk = next / 4 * 16;
    shifted_bits = shift % 2 * 16;
    last = keys + (kFragments - 1) * 8 + column;
  }

  // Those of fragment `i` of each panel: first row, second row of the first panel, and of the second. Those of the last
  // fragment are not all in the box, and left out: see read_last().
  __device__ __forceinline__ void read(uint32_t (&pairs)[4], int i, int stage) const {
    const bool is_last = i == kFragments / 2 - 1;
    uint32_t at[2] = {begin_chunk + i * 16, next_chunk + i * 16}, panel[2] = {0, 0};
    if (is_last) {  // the 16 bytes behind may be those of the second panel
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        panel[j] = at[j] / 128 * Boxes::kBoxBytes;
        at[j] %= 128;
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t row = words[half] + stage * Boxes::kStageBytes;
      const uint32_t begin = (row ^ at[0]) + panel[0], next = (row ^ to_next ^ at[1]) + panel[1];
#pragma unroll
      for (int j = 0; j < (is_last ? 1 : 2); ++j) {
        pairs[2 * j + half] = __funnelshift_r(ld_shared(begin + j * Boxes::kBoxBytes),
                                              ld_shared(next + j * Boxes::kBoxBytes), shifted_bits);
      }
    }
  }

  // Of the last fragment of the tile that begins at `key`, from memory: `rows` and `keys` from the pair on exist, of
  // others come zeros. Only asked for; pack_last() waits.
  __device__ __forceinline__ void read_last(uint32_t (&numbers)[2][2], int key, int64_t row_stride, int rows,
                                            int keys) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint16_t* const from = last + key + half * kRowClasses * row_stride;
#pragma unroll
      for (int e = 0; e < 2; ++e) numbers[half][e] = half * 8 < rows && e < keys ? __ldg(from + e) : 0;
    }
  }
  static __device__ __forceinline__ uint32_t pack_last(const uint32_t (&two)[2]) { return two[0] | two[1] << 16; }
};

// What the kernels with such a bias have in shared memory, as GeneralShared. There is no room for an alignment of 1024.
template <int kBlockM, int kBlockN, int kStages>
struct BoxedBiasShared {
  using Boxes = BiasBoxes<kBlockM, kBlockN, /*kStages=*/2>;
  using Pairs = ShiftedPairs<Boxes>;

  alignas(128) char bias[Boxes::kBytes];
  Barrier bias_full[2], bias_empty[2];
  BiasRequests<2> bias_requests;
  int32_t tile[kStages];  // the keys in a stage of K: see KeyTile
};

// A thread for each panel: copies what the producer asks for. Both are arrivals of the stage's barrier.
template <class Shared>
__device__ __forceinline__ void copy_bias_boxes(const BiasClasses& classes, Shared& s, int panel) {
  using Boxes = typename Shared::Boxes;
#pragma unroll 1
  for (RingPlace<2> place;; place.advance()) {
    s.bias_requests.asked[place.stage].wait(place.phase);
    const BiasRequest wanted = s.bias_requests.request[place.stage];
    if (wanted.row < 0) return;
    const uint32_t first = classes.number(wanted.batch, wanted.head, wanted.row);
    Barrier& full = s.bias_full[place.stage];
    full.arrive_and_expect(Boxes::kTileBytes / Boxes::kPanels);
#pragma unroll
    for (uint32_t i = 0; i < kRowClasses; ++i) {
      const uint32_t row = first + i, row_class = row % kRowClasses;
      cute::SM90_TMA_LOAD_4D::copy(
          &classes.maps[row_class], &full.word, static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_FIRST),
          s.bias + Boxes::box(place.stage, i, panel), wanted.key + panel * 64, row / kRowClasses, 0, 0);
    }
  }
}

}  // namespace dmattn::sm90
