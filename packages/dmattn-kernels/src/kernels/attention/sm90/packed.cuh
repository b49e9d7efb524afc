// Tiles of packed sequences by TMA. A tile ends where its sequence ends (see kPackedOrigin): rows behind that belong
// to other sequences and may hold anything, and a probability of 0 times an infinity is NaN.
#pragma once

#include "../shared/seqlen.cuh"
#include "pipeline.cuh"
#include "tensor_map.h"

namespace dmattn::sm90 {

// Lengths of one packed sequence, named like those in the arguments of a kernel for sequences of equal lengths.
struct PackedLengths {
  int seqlen_q, seqlen_k;
  bool is_causal;
  int window = 0;
};

// As the functions in pipeline.cuh, for a packed sequence in a map of TensorMapper::map_packed(). `row` counts from
// the first row of the sequence.
__device__ __forceinline__ void load_panel(const CUtensorMap& map, Barrier& full, cute::TMA::CacheHintSm90 hint,
                                           void* panel, int col, int row, int head, const SeqRange& sequence) {
  const int origin = kPackedOrigin;
  cute::SM90_TMA_LOAD_5D::copy(&map, &full.word, static_cast<uint64_t>(hint), panel, col,
                               origin - sequence.length + row, head, origin, sequence.first + sequence.length);
}
__device__ __forceinline__ void load_panel_to(uint16_t blocks, const CUtensorMap& map, Barrier& full,
                                              cute::TMA::CacheHintSm90 hint, void* panel, int col, int row, int head,
                                              const SeqRange& sequence) {
  const int origin = kPackedOrigin;
  cute::SM90_TMA_LOAD_MULTICAST_5D::copy(&map, &full.word, blocks, static_cast<uint64_t>(hint), panel, col,
                                         origin - sequence.length + row, head, origin,
                                         sequence.first + sequence.length);
}

// Copies a tile of kRows rows, panel by panel. `where`: the batch, or the packed sequence.
template <int kRows, int kPanels, int kPanelCols, class Element, class Where>
__device__ __forceinline__ void load_tile(const CUtensorMap& map, Barrier& full, cute::TMA::CacheHintSm90 hint,
                                          Element* tile, int row, int head, const Where& where) {
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel) {
    load_panel(map, full, hint, tile + panel * kRows * kPanelCols, panel * kPanelCols, row, head, where);
  }
}

// Starts to write a panel of a tile, of a batch or of a packed sequence.
__device__ __forceinline__ void store_panel(const CUtensorMap& map, const void* panel, int col, int row, int head,
                                            int batch) {
  cute::SM90_TMA_STORE_4D::copy(&map, panel, col, row, head, batch);
}
__device__ __forceinline__ void store_panel(const CUtensorMap& map, const void* panel, int col, int row, int head,
                                            const SeqRange& sequence) {
  const int origin = kPackedOrigin;
  cute::SM90_TMA_STORE_5D::copy(&map, panel, col, origin - sequence.length + row, head, origin,
                                sequence.first + sequence.length);
}

}  // namespace dmattn::sm90
