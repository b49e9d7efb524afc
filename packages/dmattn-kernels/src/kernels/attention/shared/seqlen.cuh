// Where a sequence lies in the tensors, and how long it is. The only code that reads cu_seqlens.
#pragma once

#include <cuda_runtime.h>

#include "../../params.h"

namespace dmattn {

// The rows (or the keys) of one sequence among those of all sequences.
struct SeqRange {
  int32_t first, length;
};

// The range of a packed sequence. cu_seqlens is the caller's and may hold any numbers: the range is cut to the `total`
// rows of the tensor and to max_length, for which the grid, the mask and the bias have room. Wrong numbers then give
// wrong results, but no access outside the tensors and the workspace: of arrays in blocks (first_packed_block) every
// such range has enough.
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

// Whether a sequence needs no cutting.
__device__ __forceinline__ bool fits_packed_range(const int32_t* cu_seqlens, int sequence, int total, int max_length) {
  const int first = cu_seqlens[sequence], end = cu_seqlens[sequence + 1];
  return first >= 0 && first <= end && end <= total && end - first <= max_length;
}

// Whether none does, so that blocks which stand for rows or keys are those that first_packed_block() counts: for what
// would wait forever otherwise. All threads of a thread block.
__device__ __forceinline__ bool fit_packed_ranges(const Packing& packing, int max_seqlen_q, int max_seqlen_k) {
  bool fit = true;
  for (int i = threadIdx.x; i < packing.sequences; i += blockDim.x) {
    fit = fit && fits_packed_range(packing.cu_seqlens_q, i, packing.total_q, max_seqlen_q) &&
          fits_packed_range(packing.cu_seqlens_k, i, packing.total_k, max_seqlen_k);
  }
  return __syncthreads_and(fit);
}

// The rows that block `slot` of an array laid out by first_packed_block() stands for.
struct PackedRows {
  int sequence;
  int first;   // first row of the block, counted through all sequences
  int offset;  // ... counted in its sequence
  int rows;    // of the sequence from there on; 0 or less for a block that stands for none
};
__device__ __forceinline__ PackedRows find_packed_rows(const int32_t* cu_seqlens, int sequences, int total, int block,
                                                       int slot) {
  // The last sequence whose first block is not past this one. Out of order, the search still ends at some sequence.
  int low = 0, high = sequences;
  while (high - low > 1) {
    const int mid = low + (high - low) / 2;
    (first_packed_block(__ldg(cu_seqlens + mid), mid, block) <= slot ? low : high) = mid;
  }
  const SeqRange own = read_packed_range(cu_seqlens, low, total, total);
  const int offset = (slot - first_packed_block(own.first, low, block)) * block;
  return {low, own.first + offset, offset, offset < 0 ? 0 : own.length - offset};
}
// Of query rows, and of keys.
__device__ __forceinline__ PackedRows find_packed_rows(const Packing& packing, int block, int slot) {
  return find_packed_rows(packing.cu_seqlens_q, packing.sequences, packing.total_q, block, slot);
}
__device__ __forceinline__ PackedRows find_packed_keys(const Packing& packing, int block, int slot) {
  return find_packed_rows(packing.cu_seqlens_k, packing.sequences, packing.total_k, block, slot);
}

}  // namespace dmattn
