// What a thread block of any attention kernel knows of the problem: its sequence, and where its lists, mask and bias
// are. The thread blocks of the forward, the backward and decoding derive from it.
#pragma once

#include "key_source.cuh"
#include "seqlen.cuh"

namespace dmattn {

// T says at compile time: kPacked (sequences are always packed), kMayBePacked (decided at run time), kGathered, and
// kKeepsSeqlens (of packed sequences, a SeqlenInfo lies at kSeqlens in shared memory).
template <class T, class Params>
struct AttentionBlock {
  const Params& p;
  char* smem;
  int warp, lane;
  int batch;  // number of the batch, or of the packed sequence

  __device__ __forceinline__ AttentionBlock(const Params& params, char* smem_)
      : p(params), smem(smem_), warp(threadIdx.x / 32), lane(threadIdx.x & 31) {}

  // --- the sequence --------------------------------------------------------------------------------------------------

  __device__ __forceinline__ bool is_packed() const { return T::kPacked || (T::kMayBePacked && p.packing.is_active()); }
  // Every thread calls this once, as soon as `batch` is known and before any of the functions below. If it returns
  // false, the thread block must not compute anything for this sequence.
  __device__ __forceinline__ bool find_sequence() {
    if (!is_packed()) return true;
    if constexpr (T::kKeepsSeqlens) {
      if (threadIdx.x == 0) *kept_seqlens() = read_packed_seqlens(p.packing, batch, p.seqlen_q, p.seqlen_k);
      __syncthreads();
      return true;
    } else {
      return fits_packed_range(p.packing.cu_seqlens_q, batch, p.packing.total_q, p.seqlen_q) &&
             fits_packed_range(p.packing.cu_seqlens_k, batch, p.packing.total_k, p.seqlen_k);
    }
  }
  // Lengths of packed sequences are read again where they are used: kept in registers through the loop, they made the
  // compiler spill others. Where shared memory has no room for them, cu_seqlens itself is read again, and sequences
  // that do not fit the tensors are left out: clamping them at each use would take hundreds of instructions.
  __device__ __forceinline__ SeqlenInfo* kept_seqlens() const {
    return reinterpret_cast<SeqlenInfo*>(smem + T::kSeqlens);
  }
  // The rows and the keys that the sequences before this one have, and its own lengths. Without packing there are
  // none before it, and the lengths are those of the problem.
  __device__ __forceinline__ int first_row() const {
    if (!is_packed()) return 0;
    return T::kKeepsSeqlens ? kept_seqlens()->first_row : p.packing.cu_seqlens_q[batch];
  }
  __device__ __forceinline__ int keys_before() const {
    if (!is_packed()) return 0;
    return T::kKeepsSeqlens ? kept_seqlens()->first_key : p.packing.cu_seqlens_k[batch];
  }
  __device__ __forceinline__ int seqlen_q() const {
    if (!is_packed()) return p.seqlen_q;
    return T::kKeepsSeqlens ? kept_seqlens()->seqlen_q : p.packing.cu_seqlens_q[batch + 1] - first_row();
  }
  __device__ __forceinline__ int seqlen_k() const {
    if (!is_packed()) return p.seqlen_k;
    return T::kKeepsSeqlens ? kept_seqlens()->seqlen_k : p.packing.cu_seqlens_k[batch + 1] - keys_before();
  }
  // The key from which the key numbers of a tile count: the first key of the sequence, or key 0 of all sequences if
  // keys are listed.
  __device__ __forceinline__ int first_key() const { return T::kGathered ? 0 : keys_before(); }
  // Row i sees the keys up to number i + causal_offset(), numbered as in tiles (see first_key()).
  __device__ __forceinline__ int causal_offset() const {
    return (T::kGathered ? keys_before() : 0) + seqlen_k() - seqlen_q();
  }
  // The positions that the entries of a list may name: those of the keys of this sequence.
  __device__ __forceinline__ KeyLimits key_limits() const { return {keys_before(), keys_before() + seqlen_k() - 1}; }

  // --- operands ------------------------------------------------------------------------------------------------------

  template <class Element>
  __device__ __forceinline__ const Element* head_ptr(const void* base, const Strides3& s, int head) const {
    return static_cast<const Element*>(base) + batch * s.batch + head * s.head;
  }
  // Number of the list of a query head. Where each row block has a list, those of the head start at list number
  // list_index() * p.keys.blocks.
  __device__ __forceinline__ int64_t list_index(int head) const {
    return static_cast<int64_t>(p.keys.batch > 1 ? batch : 0) * p.keys.heads + head / p.keys.head_ratio;
  }
  __device__ __forceinline__ bool has_intervals() const { return T::kGathered && p.keys.block_rows > 0; }
  // First entry of list i. The lists of packed sequences share the space of their head: then it is the first entry of
  // this sequence's part.
  __device__ __forceinline__ const int32_t* list_of(int head, int64_t i) const {
    if (!is_packed()) return p.keys.idx + i * p.keys.capacity;
    return p.keys.idx + static_cast<int64_t>(head / p.keys.head_ratio) * p.keys.capacity +
           static_cast<int64_t>(first_packed_block(keys_before(), batch, kListBlock)) * kListBlock;
  }
  __device__ __forceinline__ int64_t mask_index(int head) const {
    return static_cast<int64_t>(p.mask.batch > 1 ? batch : 0) * p.mask.heads + head / p.mask.head_ratio;
  }
  // Offset of the bias of row 0 of the sequence and key 0, numbered as in tiles (see first_key()).
  __device__ __forceinline__ int64_t bias_base(int head) const {
    return batch * p.bias.batch_stride + (head / p.bias.head_ratio) * p.bias.head_stride +
           first_row() * p.bias.row_stride + keys_before() * p.packing.bias_col_stride;
  }
};

}  // namespace dmattn
