// Tiles of a dense bias whose rows do not start on 16 bytes, copied by the three idle warps of the producer's
// warpgroup. They write panels of 128 bytes a row, swizzled, as TMA would, so that consumers read both in the same
// way.
//
// Copies are asynchronous: what is in flight takes no registers, of which these warps have few. They are of four
// bytes, since larger ones cannot start at every multiple of four bytes. A row of 16-bit numbers that starts in the
// middle of four bytes is copied from two bytes before its start, and moved when it has arrived.
#pragma once

#include "../shared/smem.cuh"
#include "bias_rows.h"
#include "pipeline.cuh"

namespace dmattn::sm90 {

constexpr int kBiasWarps = 3;

// What the producer asks these warps for: the tile that begins at a row and a key. There is a request for each stage
// of the bias; it may be overwritten once the tile has been used.
struct BiasRequest {
  int32_t row, key, head, batch;  // row < 0: there are no more tiles
};
template <int kStages>
struct BiasRequests {
  alignas(16) BiasRequest request[kStages];
  Barrier asked[kStages];

  __device__ __forceinline__ void init() {
    for (int i = 0; i < kStages; ++i) asked[i].init(1);
  }
  // Called by one thread, when the stage is empty.
  __device__ __forceinline__ void ask(int stage, const BiasRequest& wanted) {
    request[stage] = wanted;
    asked[stage].arrive();
  }
};

// Copies four bytes, of which the first `valid` exist; the others become zeros. If valid is 0, nothing is read.
__device__ __forceinline__ void copy_word_async(uint32_t to, const void* from, int valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(valid) : "memory");
}
__device__ __forceinline__ void copy_word_async(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

// One of the three warps. It copies every third group of four rows of a tile; a lane copies one word of each panel.
// kBatch: how many rows are moved at a time, limited by registers.
template <int kRows, int kRowBytes, int kStages, int kBatch>
struct BiasRowLoader {
  static constexpr int kPanels = kRowBytes / 128, kPanelBytes = kRows * 128, kTileBytes = kRows * kRowBytes;
  static constexpr int kFours = kRows / 4;
  // How many rows of a tile a warp has at most, and for how many of them a lane keeps the last number.
  static constexpr int kOwnRows = (kFours + kBiasWarps - 1) / kBiasWarps * 4, kLast = (kOwnRows + 31) / 32;
  static_assert(kRows % 8 == 0 && kRowBytes % 128 == 0 && kLast <= 2 && kBatch % 2 == 0);

  const BiasRows& p;
  BiasRequests<kStages>& requests;
  Barrier* full;   // one for each stage; each warp is one of the arrivals
  uint32_t tiles;  // shared address of the first stage
  const int part, lane;

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (RingPlace<kStages> place;; place.advance()) {
      requests.asked[place.stage].wait(place.phase);
      const BiasRequest wanted = requests.request[place.stage];
      if (wanted.row < 0) return;
      load(tiles + place.stage * kTileBytes, wanted);
      __syncwarp();
      if (lane == 0) full[place.stage].arrive();
    }
  }

  __device__ __forceinline__ void load(uint32_t tile, const BiasRequest& wanted) const {
    const char* const first = p.data + wanted.batch * p.batch_stride + wanted.head * p.head_stride +
                              wanted.row * p.row_stride + static_cast<int64_t>(wanted.key) * p.key_bytes;
    const int rows = p.rows - wanted.row, bytes = (p.keys - wanted.key) * p.key_bytes;  // that exist from there on
    if (rows >= kRows && bytes >= kRowBytes) {
      copy<true>(tile, first, rows, bytes);
    } else {
      copy<false>(tile, first, rows, bytes);
    }
    const bool starts_odd = reinterpret_cast<uintptr_t>(first) & 2, alternates = p.row_stride & 2;
    const uint32_t last = starts_odd || alternates ? read_last(first, rows, bytes) : 0;
    asm volatile("cp.async.wait_all;" ::: "memory");
    if (alternates) {
      move_rows(tile, starts_odd ? 0 : 1, last);
    } else if (starts_odd) {
      move_rows(tile, 0, last);
      move_rows(tile, 1, last);
    }
  }

 private:
  // The address of the lane's word of a row, in the first panel.
  __device__ __forceinline__ uint32_t word_of(uint32_t tile, uint32_t row) const {
    return tile + row * 128 + ((lane / 4 ^ row % 8) << 4) + lane % 4 * 4;
  }

  template <bool kIsWhole>
  __device__ __forceinline__ void copy(uint32_t tile, const char* first, int rows, int bytes) const {
    const char* from = first + 4 * part * p.row_stride;
#pragma unroll 1
    for (int row = 4 * part; row < kRows; row += 4 * kBiasWarps, from += (4 * kBiasWarps - 4) * p.row_stride) {
#pragma unroll
      for (int j = 0; j < 4; ++j, from += p.row_stride) {
        const uintptr_t begin = reinterpret_cast<uintptr_t>(from) & ~uintptr_t{3};
        const char* const word = reinterpret_cast<const char*>(begin) + 4 * lane;
        const uint32_t to = word_of(tile, row + j);
        // How many bytes exist from `word` on. Nothing is read before the four bytes of the row's first number, nor
        // behind its last number.
        const int valid = row + j < rows ? bytes + static_cast<int>(from - word) : 0;
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel) {
          if constexpr (kIsWhole) {
            copy_word_async(to + panel * kPanelBytes, word + panel * 128);
          } else {
            copy_word_async(to + panel * kPanelBytes, word + panel * 128, min(max(valid - panel * 128, 0), 4));
          }
        }
      }
    }
  }

  // Loads the last number of each row of the tile. In a row that was copied from two bytes before its start, there
  // was no room for it. A lane returns those of the warp's rows `lane` and `lane` + 32, 16 bits each.
  __device__ __forceinline__ uint32_t read_last(const char* first, int rows, int bytes) const {
    uint32_t last = 0;
#pragma unroll
    for (int i = 0; i < kLast; ++i) {
      const int own = 32 * i + lane, row = (own / 4 * kBiasWarps + part) * 4 + own % 4;
      if (row < min(rows, kRows) && bytes >= kRowBytes) {
        const char* const at = first + row * p.row_stride + kRowBytes - 2;
        last |= static_cast<uint32_t>(__ldg(reinterpret_cast<const uint16_t*>(at))) << 16 * i;
      }
    }
    return last;
  }

  // Corrects the rows j and j + 2 of every four rows, which were copied from two bytes before their start: each word
  // becomes its upper half and the lower half of the next word. A lane reads and writes only its own words.
  __device__ __forceinline__ void move_rows(uint32_t tile, int j, uint32_t last) const {
    constexpr int kPasses = kBatch / 2;  // groups of four rows at a time
#pragma unroll 1
    for (int pass = 0; pass < kOwnRows / 4; pass += kPasses) {
      uint32_t words[kBatch][kPanels];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int four = (pass + i / 2) * kBiasWarps + part;
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel) {
          words[i][panel] = 0;
          if (four < kFours) words[i][panel] = ld_shared(word_of(tile, 4 * four + j + i % 2 * 2) + panel * kPanelBytes);
        }
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int four = (pass + i / 2) * kBiasWarps + part, own = 4 * (pass + i / 2) + j + i % 2 * 2;
        uint32_t behind = __shfl_sync(0xffffffffu, last, own % 32) >> own / 32 * 16;
#pragma unroll
        for (int panel = kPanels - 1; panel >= 0; --panel) {
          const uint32_t next = __shfl_sync(0xffffffffu, words[i][panel], (lane + 1) % 32);
          const uint32_t moved = __byte_perm(words[i][panel], lane == 31 ? behind : next, 0x5432);
          if (four < kFours) st_shared(word_of(tile, 4 * four + j + i % 2 * 2) + panel * kPanelBytes, moved);
          behind = next;  // for lane 31 of the panel before: the first word of this panel
        }
      }
    }
  }
};

}  // namespace dmattn::sm90
