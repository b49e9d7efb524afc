// Host-callable launchers of the helper kernels around attention: mask packing and compaction before it, reductions
// and conversions after it. Each enqueues on `stream`, allocates nothing and returns the launch status.
#pragma once

#include <cuda_runtime_api.h>

#include "../params.h"

namespace dmattn {

// --- masks ---------------------------------------------------------------------------------------------------------

// Bytes of the buffers of a packed mask, and the struct whose pointers lie in `base` (may be null when only the size
// matters). head_ratio is left for the caller to set.
MaskBits layout_mask_bits(const MaskSource& mask, void* base, size_t* bytes);
// Reads the mask once and fills every array of `bits`.
cudaError_t pack_mask(const MaskSource& mask, const MaskBits& bits, cudaStream_t stream);

KeyList layout_key_list(const MaskSource& mask, void* base, size_t* bytes);
// Row 0 of the mask is read. Ascending order, deterministic.
cudaError_t compact_keys(const MaskSource& mask, const KeyList& keys, cudaStream_t stream);

// --- forward -------------------------------------------------------------------------------------------------------

// out and lse from the partial results of num_splits parts (p.out_accum, p.lse_accum).
cudaError_t combine_splits(const FwdParams& p, Dtype dtype, cudaStream_t stream);
// seqlen_k == 0: out = 0, lse = -inf.
cudaError_t fill_empty_fwd(const FwdParams& p, Dtype dtype, cudaStream_t stream);

// --- backward ------------------------------------------------------------------------------------------------------

struct BwdPreprocessParams {
  const void* out = nullptr;
  const void* dout = nullptr;
  Strides3 out_stride, dout_stride;
  const float* lse = nullptr;  // [batch, nheads, seqlen_q], strides below
  Strides3 lse_stride;
  const float* dlse = nullptr;  // nullptr: none
  Strides3 dlse_stride;
  const float* lse_rest = nullptr;  // optional, strides of lse
  float* lse_rounded = nullptr;     // [batch][nheads][seqlen_q_rounded]
  float* rest_rounded = nullptr;    // likewise; written when lse_rest is given
  float* delta = nullptr;           // [batch][nheads][seqlen_q_rounded]
  int32_t batch = 0, seqlen_q = 0, seqlen_q_rounded = 0, nheads = 0, head_dim = 0;
  bool vec_out = true, vec_dout = true;  // rows start on 16 bytes
  Packing packing;                       // results as in BwdParams
};
// delta = rowsum(out * dout) - dlse; lse copied with +inf for rows that keep nothing or lie past seqlen_q.
cudaError_t bwd_preprocess(const BwdPreprocessParams& p, Dtype dtype, cudaStream_t stream);

// Fills `schedule` (see BwdParams) for gathered lists: as many splits as keep tiles * splits <= max_work, at least 1,
// at most max_splits, and only 1 when there are more than max_tiles tiles (accumulators).
cudaError_t bwd_schedule(const KeyList& keys, int batch, int nheads_k, int head_ratio, int block_n, int max_work,
                         int max_tiles, int max_splits, int32_t* schedule, cudaStream_t stream);

// The accumulator layout of the backward kernel's dq tiles, so that the conversion reads what the kernel wrote.
struct DqTileLayout {
  int32_t block_m = 64;
  int32_t head_dim_tile = 128;
  int32_t threads = 256;
  int32_t warps_m = 2;  // warps along the rows of the tile; the others along head_dim
};
struct ConvertDqParams {
  const float* dq_accum = nullptr;
  void* dq = nullptr;
  Strides3 dq_stride;
  int32_t batch = 0, seqlen_q = 0, nheads = 0, head_dim = 0;
  int32_t dq_blocks = 0;  // row blocks a head in dq_accum
  bool vec_dq = true;
  DqTileLayout layout;
  Packing packing;
};
// dq = dq_accum rounded (the kernel has applied softmax_scale).
cudaError_t convert_dq(const ConvertDqParams& p, Dtype dtype, cudaStream_t stream);

// dk, dv = sums over the splits of the slots that the backward kernel wrote (the kernel has applied softmax_scale to
// dk). Tiled: p.num_splits; gathered: from p.schedule, rows scattered by p.keys. block_n, head_dim_tile: the kernel's.
cudaError_t reduce_dkv(const BwdParams& p, Dtype dtype, int block_n, int head_dim_tile, cudaStream_t stream);
// dk, dv = rounded p.dk_accum, p.dv_accum.
cudaError_t convert_dkv(const BwdParams& p, Dtype dtype, cudaStream_t stream);
// Zeros in a strided (batch, seqlen, heads, head_dim) tensor of 16-bit elements.
cudaError_t fill_zero(void* ptr, Strides3 stride, int batch, int seqlen, int nheads, int head_dim, cudaStream_t stream);

struct ReduceDbiasParams {
  // Source: fp32 [batch][nheads][rows][cols] contiguous, rows == 1 (column sums) ...
  const float* src = nullptr;
  int32_t batch = 0, nheads = 0, seqlen_q = 0, seqlen_k = 0;
  // ... or, for a bias that is constant along the keys, dlse: sum_j dscores_ij = dlse_i for every row that keeps a
  // key, 0 for the others (softmax does not change when a constant is added to a row).
  const float* dlse = nullptr;  // nullptr: all zeros
  Strides3 dlse_stride;
  const float* lse_rounded = nullptr;  // [batch][nheads][seqlen_q_rounded]: +inf marks rows without keys
  int32_t seqlen_q_rounded = 0;
  // Destination: contiguous [out_batch][out_heads][out_rows][out_cols], each 1 or the full extent.
  void* dbias = nullptr;
  Dtype dtype = Dtype::kNone;
  int32_t out_batch = 1, out_heads = 1, out_rows = 1, out_cols = 1;
};
// Key bias (out_rows == 1, out_cols == seqlen_k): dbias = src summed over what the bias was broadcast over. Fixed
// order: bitwise repeatable.
cudaError_t reduce_dbias_cols(const ReduceDbiasParams& p, cudaStream_t stream);
// Row bias (out_cols == 1, out_rows == seqlen_q).
cudaError_t reduce_dbias_rows(const ReduceDbiasParams& p, cudaStream_t stream);
// dst[i] = src[i] rounded to dtype, n contiguous elements.
cudaError_t convert_f32(const float* src, void* dst, Dtype dtype, int64_t n, cudaStream_t stream);

}  // namespace dmattn
