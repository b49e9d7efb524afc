// How one selection is carried out: what is known on the host before anything runs, and where its intermediate arrays
// lie in the workspace. Every kernel of the selection takes this struct.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../params.h"
#include "select.h"

namespace dmattn {
namespace prep {

// Keys of one thread block of a grid-wide selection.
constexpr int kChunkKeys = 4096;
// Radix digits of an ordered score: bits 31..21, 20..10, 9..0. 16-bit scores are told apart by the first two.
constexpr int kBins = 2048;
constexpr int kMaxDigits = 3;

// A row is one (batch, head) of the selection. "Ordered score": a uint32 that grows with the score; 0 = never kept.
struct SelectPlan {
  int32_t rows = 0;
  int32_t seqlen_q = 0, seqlen_k = 0, window = 0;
  bool is_causal = true;
  int32_t offset = 0;  // position of query row 0 (causal)
  int32_t digits = 3;

  uint32_t* ord = nullptr;  // [rows][ord_pitch]
  int64_t ord_pitch = 0;    // a multiple of 128; ordered scores from seqlen_k on are 0

  int2* document = nullptr;  // [seqlen_k]: start and stop of each key's document; nullptr: all keys are one

  // One list of the best of all keys is all that is wanted: not causal, or a single query row.
  bool single_list = false;

  // Selection by the whole grid: the best keys among 0 .. grid_keys - 1 of every row. Used for a long single list, and
  // for the keys in front of the first row when there are many of them.
  int32_t grid_keys = 0;             // 0: not used
  int32_t chunks = 0;                // of kChunkKeys, covering grid_keys
  bool one_launch = false;           // a single list, and all its chunks fit the GPU at once
  uint32_t* hist = nullptr;          // [rows][kMaxDigits][kBins], zeroed before the first kernel
  uint2* digit_state = nullptr;      // [rows][kMaxDigits]: (prefix, keys still wanted) before that digit is looked at
  int32_t* chunk_above = nullptr;    // [rows][chunks]: keys whose prefix lies above that of the last digit
  uint32_t* chunk_suffix = nullptr;  // [rows][chunks][kBins]: keys of the prefix with last digit >= bin

  size_t zero_bytes = 0;         // from hist on
  int32_t* arrived = nullptr;    // one_launch: [rows], zeroed: blocks that have come to a barrier
  int2* chunk_counts = nullptr;  // one_launch: [rows][chunks]: keys above the cut, keys equal to it

  // Sets: the best keys in front of certain positions, so that no block has to look at all keys before it. Set i is
  // that of position set_origin + (i + first_set) * super_keys, and of the document that this position lies in. Sets
  // are found in parallel: first the best of each piece between positions, then a prefix scan whose operation is "the
  // best of both". Ping-pong buffers: a set that has taken part in n merges lies in buffer n % 2.
  int32_t set_origin = 0;  // a multiple of 128, at most offset
  int32_t super_keys = 0;  // a multiple of 128
  int32_t first_set = 0;   // 1 when there is nothing before set_origin
  int32_t sets = 0;
  int32_t set_capacity = 0;      // a multiple of 4
  uint32_t* set_ord = nullptr;   // [2][rows][sets][set_capacity], zeros up to the next multiple of 4
  int32_t* set_key = nullptr;    // the same shape, ascending
  int32_t* set_count = nullptr;  // [2][rows][sets]
};

// The steps. Ordered scores first; then either the single list, by a block for each row or by the grid, or the lists of
// all blocks, after the keys in front of the first row (by the grid) and the sets, where the plan has them.
cudaError_t select_order(const SelectParams& p, const SelectPlan& plan, int32_t* end, cudaStream_t stream);
cudaError_t select_single(const SelectPlan& plan, const KeyList& keys, cudaStream_t stream);
cudaError_t select_in_one_launch(const SelectParams& p, const SelectPlan& plan, const KeyList& keys,
                                 cudaStream_t stream);
cudaError_t select_by_grid(const SelectPlan& plan, const KeyList& keys, cudaStream_t stream);
cudaError_t select_sets(const SelectPlan& plan, cudaStream_t stream);
cudaError_t select_blocks(const SelectPlan& plan, const KeyList& keys, cudaStream_t stream);

}  // namespace prep
}  // namespace dmattn
