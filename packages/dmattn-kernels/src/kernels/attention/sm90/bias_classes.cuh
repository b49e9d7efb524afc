// Tiles of a bias whose rows start on any two bytes (bias_classes.h), copied by TMA: of eight consecutive rows each is of
// another class, so that a tile comes as eight boxes, each with every eighth row.
#pragma once

#include "bias_classes.h"
#include "bias_rows.cuh"
#include "pipeline.cuh"

namespace dmattn::sm90 {

// Where the numbers of a ring of tiles lie. Boxes have 128 bytes a row, swizzled as in other tiles: which 16 bytes of the
// 128 are exchanged follows from the address. Consumers read eight consecutive rows at a time, one of each box. Their
// addresses are a column's bytes apart, 128 more than a multiple of 1024, so that the swizzle differs in each and they do
// not meet on the banks. A column has the boxes of all stages.
template <int kRows, int kKeys, int kStages>
struct BiasBoxes {
  static constexpr int kBoxRows = kRows / kRowClasses, kBoxBytes = kBoxRows * 128;
  static constexpr int kPanels = kKeys / 64, kTileBytes = kRows * kKeys * 2;
  static constexpr int kColumnBytes = kStages * kPanels * kBoxBytes + 128;
  static constexpr int kBytes = kRowClasses * kColumnBytes - 128;
  static_assert(kBoxBytes % 1024 == 0 && kKeys % 64 == 0);

  // Where the box of a tile's rows `row`, `row` + 8 and so on begins, and of 64 keys.
  static __device__ __forceinline__ uint32_t box(int stage, uint32_t row, int panel) {
    return row * kColumnBytes + (stage * kPanels + panel) * kBoxBytes;
  }
  // The shared address of a row's 16 bytes with the number `chunk` of the first panel. `ring`: on 128 bytes.
  static __device__ __forceinline__ uint32_t chunk(uint32_t ring, int stage, uint32_t row, uint32_t chunk) {
    const uint32_t begin = ring + box(stage, row % kRowClasses, 0) + row / kRowClasses * 128;
    return begin + ((chunk ^ begin / 128 % 8) << 4);
  }
};

// What the kernels with such a bias have in shared memory, as GeneralShared. There is no room for an alignment of 1024.
template <int kBlockM, int kBlockN, int kStages>
struct BoxedBiasShared {
  using Boxes = BiasBoxes<kBlockM, kBlockN, /*kStages=*/2>;

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
    const uint32_t first = wanted.batch * classes.batch_rows + wanted.head * classes.head_rows + wanted.row;
    Barrier& full = s.bias_full[place.stage];
    full.arrive_and_expect(Boxes::kTileBytes / Boxes::kPanels);
#pragma unroll
    for (uint32_t i = 0; i < kRowClasses; ++i) {
      const uint32_t row = first + i, row_class = row % kRowClasses;
      cute::SM90_TMA_LOAD_4D::copy(&classes.maps[row_class], &full.word,
                                   static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_FIRST),
                                   s.bias + Boxes::box(place.stage, i, panel),
                                   wanted.key + panel * 64 + classes.shift(row_class), row / kRowClasses, 0, 0);
    }
  }
}

}  // namespace dmattn::sm90
