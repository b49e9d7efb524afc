// Which tiles of a dense mask are empty, partial or full, from the states of 64 x 64 cells that pack_mask wrote.
#pragma once

#include "../../params.h"

namespace dmattn {

enum class TileState { kEmpty, kPartial, kFull };

// The states of the tiles of one block of kBlockFixed rows (or keys), which is fixed. Its tiles are the blocks of
// kBlockScan keys (or rows) along it. The forward fixes rows; the backward fixes keys and uses the transposed bitmaps.
template <int kBlockFixed, int kBlockScan>
struct MaskTiles {
  const uint32_t* any = nullptr;  // bitmaps of the first band of the fixed block; nullptr: no mask, every tile is full
  const uint32_t* all = nullptr;
  int words = 0;
  int bands = 1;  // bands of the fixed block that exist

  __device__ __forceinline__ MaskTiles() {}
  __device__ __forceinline__ MaskTiles(const uint32_t* any_map, const uint32_t* all_map, int words_, int bands_total,
                                       int fixed_block)
      : words(words_) {
    const int band0 = fixed_block * kBlockFixed / kMaskBand;
    constexpr int kBands = kBlockFixed > kMaskBand ? kBlockFixed / kMaskBand : 1;
    bands = min(kBands, bands_total - band0);
    any = any_map + static_cast<int64_t>(band0) * words;
    all = all_map + static_cast<int64_t>(band0) * words;
  }

  __device__ __forceinline__ TileState state(int scan_block) const {
    if (any == nullptr) return TileState::kFull;
    constexpr int kCells = kBlockScan > kMaskBand ? kBlockScan / kMaskBand : 1;
    static_assert(kCells <= 2);
    const int cell = scan_block * kBlockScan / kMaskBand;
    const int shift = cell & 31;  // even when kCells == 2: both cells share a word
    constexpr uint32_t kPick = (1u << kCells) - 1;
    uint32_t some = 0, every = kPick;
    for (int i = 0; i < bands; ++i) {
      const int64_t word = static_cast<int64_t>(i) * words + cell / 32;
      some |= __ldg(any + word) >> shift;
      every &= __ldg(all + word) >> shift;
    }
    if ((some & kPick) == 0) return TileState::kEmpty;
    // A cell past the edge of the mask is marked neither as kept nor as full, so that the last tile counts as
    // partial. That is always correct; a full tile would only be faster.
    return (every & kPick) == kPick ? TileState::kFull : TileState::kPartial;
  }

  // The largest block <= `block` that is not empty, or a value below `lowest`. Skips up to 32 empty cells at a time.
  __device__ __forceinline__ int last_nonempty(int block, int lowest) const {
    if (any == nullptr) return block;
    while (block >= lowest) {
      const int cell_hi = ((block + 1) * kBlockScan - 1) / kMaskBand;
      const int word = cell_hi / 32;
      uint32_t some = 0;
      for (int i = 0; i < bands; ++i) some |= __ldg(any + static_cast<int64_t>(i) * words + word);
      some &= 0xffffffffu >> (31 - (cell_hi & 31));
      if (some != 0) {
        const int cell = word * 32 + 31 - __clz(some);
        // The highest block that overlaps the cell, but none above `block`.
        return min(block, (cell * kMaskBand + kMaskBand - 1) / kBlockScan);
      }
      block = (word * 32 * kMaskBand) / kBlockScan - 1;
    }
    return block;
  }
};

// The same tiles, visited from the last to the first by one thread that has little time and few registers: the words
// of the bitmaps that were read last, which hold 32 cells of each band, are kept for the following tiles. Tiles
// consist of whole cells.
template <int kBlockFixed, int kBlockScan>
struct MaskTileWalk {
  static constexpr int kBands = kBlockFixed / kMaskBand, kCells = kBlockScan / kMaskBand;
  static_assert(kBlockFixed % kMaskBand == 0 && kBlockScan % kMaskBand == 0 && (kCells & (kCells - 1)) == 0);

  struct Tile {
    int n;  // -1: there is none
    bool is_partial;
  };

  const uint32_t* any;  // bitmaps of the first band of the fixed block; nullptr: no mask, every tile is full
  const uint32_t* all;
  int words, bands;  // words of a band; bands of the fixed block that exist
  int first = 0;     // tiles before this one are left out
  int word = -1;     // number of the word that was read last; in all bands together it is:
  uint32_t some = 0, every = 0;

  // The largest non-empty tile below `end`.
  __device__ __forceinline__ Tile before(int end) {
    if (any == nullptr) return {end > first ? end - 1 : -1, false};
    for (int cell = end * kCells - 1; cell >= 0; cell = word * 32 - 1) {
      if (cell / 32 != word) read(cell / 32);
      const uint32_t left = some & (0xffffffffu >> (31 - cell % 32));
      if (left == 0) continue;
      const int n = (word * 32 + 31 - __clz(left)) / kCells;
      if (n < first) break;
      // As in MaskTiles::state(): the last tile may count as partial because of cells past the edge of the mask.
      constexpr uint32_t kPick = (1u << kCells) - 1;
      return {n, (every >> (n * kCells % 32) & kPick) != kPick};
    }
    return {-1, false};
  }

  __device__ __forceinline__ void read(int next) {
    word = next;
    some = 0, every = 0xffffffffu;
#pragma unroll
    for (int i = 0; i < kBands; ++i) {
      const int64_t at = static_cast<int64_t>(min(i, bands - 1)) * words + word;
      some |= __ldg(any + at);
      every &= __ldg(all + at);
    }
  }
};

}  // namespace dmattn
