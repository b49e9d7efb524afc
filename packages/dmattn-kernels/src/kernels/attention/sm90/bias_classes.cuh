// Copies tiles of a bias whose rows start on any two bytes (bias_classes.h) by TMA. Eight consecutive rows are in
// eight classes, so a tile comes as eight boxes, each with every eighth row of the tile. A row of a box begins up to
// seven numbers before the first key of the tile, and ends as many numbers before its last key.
#pragma once

#include "../shared/smem.cuh"
#include "bias_classes.h"
#include "bias_rows.cuh"
#include "pipeline.cuh"

namespace dmattn::sm90 {

// The layout of a ring of tiles in shared memory. Boxes have rows of 128 bytes, swizzled as in other tiles: the
// address of a row decides which 16 bytes of it are exchanged. Consumers read eight consecutive rows of a tile at a
// time, one from each of its eight boxes. Boxes with the same rows modulo 8 form a column, which has all stages and
// panels. Columns begin a multiple of 1024 plus 128 bytes apart, so that the eight rows are swizzled in eight ways
// and hardly any of their reads share a bank.
template <int kRows, int kKeys, int kStages>
struct BiasBoxes {
  static constexpr int kBoxRows = kRows / kRowClasses, kBoxBytes = kBoxRows * 128;
  static constexpr int kPanels = kKeys / 64, kTileBytes = kRows * kKeys * 2, kStageBytes = kPanels * kBoxBytes;
  static constexpr int kColumnBytes = kStages * kStageBytes + 128;
  static constexpr int kBytes = kRowClasses * kColumnBytes - 128;
  static_assert(kBoxBytes % 1024 == 0 && kKeys % 64 == 0);

  // Offset in the ring of the box that has the rows `row`, `row` + 8 and so on of a tile (row < 8) and the 64 keys of
  // a panel.
  static __device__ __forceinline__ uint32_t box(int stage, uint32_t row, int panel) {
    return row * kColumnBytes + (stage * kPanels + panel) * kBoxBytes;
  }
  // The shared address at which the swizzle puts the first 16 bytes of a row, in the first stage and panel. `ring` is
  // a multiple of 128.
  static __device__ __forceinline__ uint32_t first_chunk(uint32_t ring, uint32_t row) {
    const uint32_t begin = ring + box(0, row % kRowClasses, 0) + row / kRowClasses * 128;
    return begin + (begin / 128 % 8 << 4);
  }
};

// What a consumer's thread reads of a tile. It has two rows, which are eight apart and therefore in one class. In
// each fragment of eight keys it needs a pair of numbers, of key 2 * (lane % 4) and of the next one. In the box the
// pair is `shift` columns further on: it is one word, or half of a word and half of the next one.
template <class Boxes>
struct ShiftedPairs {
  static_assert(Boxes::kPanels == 2);
  static constexpr int kFragments = 16;

  // For each row, in the first stage: the address of the word in which the pair of fragment 0 begins, as if that word
  // were in the first 16 bytes of the row. The place of other 16 bytes is found by exclusive or.
  uint32_t words[2];
  uint32_t to_next;       // by exclusive or, turns the address of that word into the address of the next word
  uint32_t begin_chunk;   // 16 if that word is in the 16 bytes behind those of its fragment, otherwise 0
  uint32_t next_chunk;    // the same for the next word
  uint32_t shifted_bits;  // where the pair begins in the word: 0 or 16
  const uint16_t* last;   // in global memory: the first row's pair in the last fragment of the tile of key 0

  // row: in the tile. column: of the pair in a fragment. keys: where key 0 of the first row lies in global memory.
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

  // Reads the pairs of fragment `i` of each panel: first row and second row of the first panel, then of the second
  // one. The pairs of the tile's last fragment are left out, as the box may not have all of them: see read_last().
  __device__ __forceinline__ void read(uint32_t (&pairs)[4], int i, int stage) const {
    const bool is_last = i == kFragments / 2 - 1;
    uint32_t at[2] = {begin_chunk + i * 16, next_chunk + i * 16}, panel[2] = {0, 0};
    if (is_last) {  // the next 16 bytes may be in the second panel
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

  // Loads the pairs of the last fragment of the tile that begins at `key` from global memory. rows, keys: how many
  // exist from the pair on; other numbers become zeros. Nothing waits for the loads before pack_last().
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

// Shared memory of the kernels with such a bias, instead of GeneralShared. There is no room to align the ring to 1024
// bytes.
template <int kBlockM, int kBlockN, int kStages>
struct BoxedBiasShared {
  using Boxes = BiasBoxes<kBlockM, kBlockN, /*kStages=*/2>;
  using Pairs = ShiftedPairs<Boxes>;

  alignas(128) char bias[Boxes::kBytes];
  Barrier bias_full[2], bias_empty[2];
  BiasRequests<2> bias_requests;
  int32_t tile[kStages];  // which keys are in a stage of K: see KeyTile
};

// Copies what the producer asks for. One thread for each panel runs this; a stage is full when all of them have
// arrived and their copies are there.
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
