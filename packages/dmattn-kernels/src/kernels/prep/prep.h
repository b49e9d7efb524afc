// Host-callable launchers of the helper kernels around attention: mask packing and compaction before it, reductions
// and conversions after it. Each enqueues on `stream`, allocates nothing and returns the launch status.
#pragma once

#include <cuda_runtime_api.h>

#include "../helper_params.h"

namespace dmattn {

// --- masks ---------------------------------------------------------------------------------------------------------

// Reads the mask once and fills every array of `bits`.
cudaError_t pack_mask(const MaskSource& mask, const MaskBits& bits, cudaStream_t stream);

// Row 0 of the mask is read. Ascending order, deterministic.
cudaError_t compact_keys(const MaskSource& mask, const KeyList& keys, cudaStream_t stream);

// --- forward -------------------------------------------------------------------------------------------------------

// out and lse from the partial results of num_splits parts (p.out_accum, p.lse_accum).
cudaError_t combine_splits(const FwdParams& p, Dtype dtype, cudaStream_t stream);
// seqlen_k == 0: out = 0, lse = -inf.
cudaError_t fill_empty_fwd(const FwdParams& p, Dtype dtype, cudaStream_t stream);

// --- backward ------------------------------------------------------------------------------------------------------

// delta = rowsum(out * dout) - dlse; lse copied with +inf for rows that keep nothing or lie past seqlen_q.
cudaError_t bwd_preprocess(const BwdPreprocessParams& p, Dtype dtype, cudaStream_t stream);

// Fills `schedule` (see BwdParams) for gathered lists: as many splits as keep tiles * splits <= max_work, at least 1,
// at most max_splits, and only 1 when there are more than max_tiles tiles (accumulators).
cudaError_t bwd_schedule(const KeyList& keys, int batch, int nheads_k, int head_ratio, int block_n, int max_work,
                         int max_tiles, int max_splits, int32_t* schedule, cudaStream_t stream);

// dq = dq_accum rounded (the kernel has applied softmax_scale).
cudaError_t convert_dq(const ConvertDqParams& p, Dtype dtype, cudaStream_t stream);

// dk, dv = sums over the splits of the slots that the backward kernel wrote (the kernel has applied softmax_scale to
// dk). Tiled: p.num_splits; gathered: from p.schedule, rows scattered by p.keys. block_n, head_dim_tile: the kernel's.
cudaError_t reduce_dkv(const BwdParams& p, Dtype dtype, int block_n, int head_dim_tile, cudaStream_t stream);
// dk, dv = rounded p.dk_accum, p.dv_accum.
cudaError_t convert_dkv(const BwdParams& p, Dtype dtype, cudaStream_t stream);
// Zeros in a strided (batch, seqlen, heads, head_dim) tensor of 16-bit elements.
cudaError_t fill_zero(void* ptr, Strides3 stride, int batch, int seqlen, int nheads, int head_dim, cudaStream_t stream);

// Key bias (out_rows == 1, out_cols == seqlen_k): dbias = src summed over what the bias was broadcast over. Fixed
// order: bitwise repeatable.
cudaError_t reduce_dbias_cols(const ReduceDbiasParams& p, cudaStream_t stream);
// Row bias (out_cols == 1, out_rows == seqlen_q).
cudaError_t reduce_dbias_rows(const ReduceDbiasParams& p, cudaStream_t stream);
// dst[i] = src[i] rounded to dtype, n contiguous elements.
cudaError_t convert_f32(const float* src, void* dst, Dtype dtype, int64_t n, cudaStream_t stream);

}  // namespace dmattn
