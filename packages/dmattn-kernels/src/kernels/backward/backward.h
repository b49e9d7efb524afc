// What comes before and after the backward kernel. Each function enqueues on `stream`, allocates nothing and returns
// the launch status.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "../carried_terms.h"
#include "../helper_params.h"

namespace dmattn {

// Memory that starts as zeros: sums in the workspace, and those in the memory of dq. All numbers are multiples of 16.
struct ClearedRange {
  void* begin = nullptr;
  size_t bytes = 0;
};
struct Cleared {
  ClearedRange sums, in_dq;
  size_t bytes() const { return sums.bytes + in_dq.bytes; }
};

// delta = rowsum(out * dout) - dlse; lse copied with +inf for rows that keep nothing or lie past seqlen_q. `cleared` is
// written as well: see bwd_preprocess_clears().
cudaError_t bwd_preprocess(const BwdPreprocessParams& p, const Cleared& cleared, Dtype dtype, cudaStream_t stream);
// Whether it has the thread blocks to clear so much about as fast as a memset, whose launch is then saved.
bool bwd_preprocess_clears(const BwdPreprocessParams& p, size_t bytes);

// Fills `schedule` (see BwdParams) for gathered lists: as many splits as keep tiles * splits <= max_work, at least 1,
// at most max_splits, and only 1 when there are more than max_tiles tiles (accumulators). even_blocks: how many thread
// blocks work at once, where all take the same time; fewer splits are then taken if they fill the GPU as well, since
// each costs a prologue and an epilogue. 0: they take unequal times.
cudaError_t bwd_schedule(const KeyList& keys, int batch, int nheads_k, int head_ratio, int block_n, int max_work,
                         int max_tiles, int max_splits, int even_blocks, int32_t* schedule, cudaStream_t stream);

// Fills p.to from lists of row blocks, and p.first_term and carried.places if they are given, the latter only beside
// the former.
cudaError_t chunk_key_lists(const ChunkKeyListsParams& p, const CarriedTerms& carried, cudaStream_t stream);

// dq = dq_accum * p.scale rounded.
cudaError_t convert_dq(const ConvertDqParams& p, Dtype dtype, cudaStream_t stream);

// dk, dv = sums over the splits of the slots that the backward kernel wrote (the kernel has applied softmax_scale to
// dk). Tiled: p.num_splits; gathered: from p.schedule, rows scattered by p.keys. block_n, head_dim_tile: the kernel's.
cudaError_t reduce_dkv(const BwdParams& p, Dtype dtype, int block_n, int head_dim_tile, cudaStream_t stream);
// dk, dv = 0 of keys that no row sees.
cudaError_t clear_unseen_dkv(const BwdParams& p, cudaStream_t stream);
// dk, dv = rounded p.dk_accum, p.dv_accum.
cudaError_t convert_dkv(const BwdParams& p, Dtype dtype, cudaStream_t stream);
// dk, dv = sums of p.terms, rounded; p.dbias_cols likewise, in fp32, of the launch's first head of each group. The order
// of the chunks is the order of the sums. Of the keys that rows behind the round see as well dk and dv are left in
// `carried`. Where there are sums by key, p.dk_accum and p.dv_accum, all is added to these instead.
cudaError_t reduce_chunk_terms(const BwdParams& p, const CarriedTerms& carried, Dtype dtype, cudaStream_t stream);

// Key bias (out_rows == 1, out_cols == seqlen_k): dbias = src summed over what the bias was broadcast over. Fixed
// order: bitwise repeatable.
cudaError_t reduce_dbias_cols(const ReduceDbiasParams& p, cudaStream_t stream);
// Row bias (out_cols == 1, out_rows == seqlen_q).
cudaError_t reduce_dbias_rows(const ReduceDbiasParams& p, cudaStream_t stream);
// Sums of a dense dbias: rows of so many keys, which start `pitch` numbers apart, in dbias itself `dbias_pitch`.
struct DbiasSumRows {
  const float* data;
  int64_t rows, keys, pitch, dbias_pitch;
};
// dbias = the sums, rounded.
cudaError_t round_dbias(const DbiasSumRows& sums, void* dbias, Dtype dtype, cudaStream_t stream);

}  // namespace dmattn
