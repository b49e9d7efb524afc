// Where a packed sequence lies in the tensors, and how long it is. Attention kernels and those for masks clamp by
// these functions what they read of cu_seqlens.
#pragma once

#include <cuda_runtime.h>

#include "../../params.h"

namespace dmattn {

// The rows (or the keys) of one sequence, counted through all sequences.
struct SeqRange {
  int32_t first, length;
};

// The range of a packed sequence. cu_seqlens is the caller's and may hold any numbers: the range is clamped to the
// `total` rows of the tensor and to max_length, for which the grid, the mask and the bias have room. Wrong numbers
// then give wrong results, but no access outside the tensors and the workspace: arrays laid out in blocks by
// first_packed_block() have enough blocks for every such range.
__device__ __forceinline__ SeqRange read_packed_range(const int32_t* cu_seqlens, int sequence, int total,
                                                      int max_length) {
  const int first = min(max(cu_seqlens[sequence], 0), total);
  const int end = min(max(cu_seqlens[sequence + 1], first), total);
  return {first, min(end - first, max_length)};
}

// Rows and keys of a packed sequence.
struct SeqlenInfo {
  int32_t first_row, seqlen_q;
  int32_t first_key, seqlen_k;
};
__device__ __forceinline__ SeqlenInfo read_packed_seqlens(const Packing& packing, int sequence, int max_seqlen_q,
                                                          int max_seqlen_k) {
  const SeqRange q = read_packed_range(packing.cu_seqlens_q, sequence, packing.total_q, max_seqlen_q);
  const SeqRange k = read_packed_range(packing.cu_seqlens_k, sequence, packing.total_k, max_seqlen_k);
  return {q.first, q.length, k.first, k.length};
}

// Whether the range of a sequence is valid as it is, so that clamping would not change it.
__device__ __forceinline__ bool fits_packed_range(const int32_t* cu_seqlens, int sequence, int total, int max_length) {
  const int first = cu_seqlens[sequence], end = cu_seqlens[sequence + 1];
  return first >= 0 && first <= end && end <= total && end - first <= max_length;
}

// Whether the ranges of all sequences are valid. Then the blocks that stand for rows or keys are exactly those that
// first_packed_block() counts. Code that waits for other blocks has to know that: it would wait forever for a block
// that nobody computes. Called by all threads of a thread block.
__device__ __forceinline__ bool fit_packed_ranges(const Packing& packing, int max_seqlen_q, int max_seqlen_k) {
  bool fit = true;
  for (int i = threadIdx.x; i < packing.sequences; i += blockDim.x) {
    fit = fit && fits_packed_range(packing.cu_seqlens_q, i, packing.total_q, max_seqlen_q) &&
          fits_packed_range(packing.cu_seqlens_k, i, packing.total_k, max_seqlen_k);
  }
  return __syncthreads_and(fit);
}

// The rows that a block of an array laid out by first_packed_block() stands for.
struct PackedRows {
  int sequence;
  int first;   // first row of the block, counted through all sequences
  int offset;  // the same row, counted in its sequence
  int rows;    // rows of the sequence from there on; 0 or less if the block stands for no rows
};
__device__ __forceinline__ PackedRows find_packed_rows(const int32_t* cu_seqlens, int sequences, int total, int block,
                                                       int slot) {
  // The last sequence whose first block is not past `slot`. If cu_seqlens do not ascend, the search still ends at
  // some sequence.
  int low = 0, high = sequences;
  while (high - low > 1) {
    const int mid = low + (high - low) / 2;
    (first_packed_block(__ldg(cu_seqlens + mid), mid, block) <= slot ? low : high) = mid;
  }
  const SeqRange own = read_packed_range(cu_seqlens, low, total, total);
  const int offset = (slot - first_packed_block(own.first, low, block)) * block;
  return {low, own.first + offset, offset, offset < 0 ? 0 : own.length - offset};
}
// The same for blocks of query rows, and for blocks of keys.
__device__ __forceinline__ PackedRows find_packed_rows(const Packing& packing, int block, int slot) {
  return find_packed_rows(packing.cu_seqlens_q, packing.sequences, packing.total_q, block, slot);
}
__device__ __forceinline__ PackedRows find_packed_keys(const Packing& packing, int block, int slot) {
  return find_packed_rows(packing.cu_seqlens_k, packing.sequences, packing.total_k, block, slot);
}

}  // namespace dmattn
