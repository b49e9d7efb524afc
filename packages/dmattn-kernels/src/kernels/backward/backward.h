// What comes before and after the backward kernel. Each function enqueues on `stream`, allocates nothing and returns
// the launch status.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "../carried_terms.h"
#include "../helper_params.h"

namespace dmattn {

// Memory that has to be zero when the backward kernel starts: sums in the workspace, and sums that lie in the memory
// of dq. Addresses and sizes are multiples of 16.
struct ClearedRange {
  void* begin = nullptr;
  size_t bytes = 0;
};
struct Cleared {
  ClearedRange sums, in_dq;
  size_t bytes() const { return sums.bytes + in_dq.bytes; }
};

// delta = rowsum(out * dout) - dlse; lse is copied, as +inf for rows that keep nothing or lie past seqlen_q. Also
// clears `cleared`: see bwd_preprocess_clears().
cudaError_t bwd_preprocess(const BwdPreprocessParams& p, const Cleared& cleared, Dtype dtype, cudaStream_t stream);
// Whether bwd_preprocess() has enough thread blocks to clear `bytes` bytes about as fast as a memset, whose launch is
// then saved.
bool bwd_preprocess_clears(const BwdPreprocessParams& p, size_t bytes);

// Fills `schedule` (see BwdParams) for gathered lists. It takes as many splits as keep tiles * splits <= max_work, at
// least 1 and at most max_splits, but only 1 if there are more than max_tiles tiles, for which the accumulators have
// no room. even_blocks: how many thread blocks run at once, if all take the same time; fewer splits are then taken if
// they fill the GPU nearly as well, since each costs a prologue and an epilogue. 0: they take unequal times.
cudaError_t bwd_schedule(const KeyList& keys, int batch, int nheads_k, int head_ratio, int block_n, int max_work,
                         int max_tiles, int max_splits, int even_blocks, int32_t* schedule, cudaStream_t stream);

// Fills p.to from the lists of row blocks, and p.first_term if it is given, and then also carried.places if it is
// given. Also clears p.sums and counts items in p.numbers.
cudaError_t chunk_key_lists(const ChunkKeyListsParams& p, const CarriedTerms& carried, cudaStream_t stream);

// dq = dq_accum * p.scale, rounded. With DqOrder::kRegisters the scale has to be 1, as it is not applied.
cudaError_t convert_dq(const ConvertDqParams& p, Dtype dtype, cudaStream_t stream);

// dk, dv = sums over the splits of the slots that the backward kernel wrote (it has applied softmax_scale to dk).
// Tiled: there are p.num_splits splits. Gathered: their number is in p.schedule, and p.keys says which key each row
// belongs to. block_n, head_dim_tile: those of the kernel.
cudaError_t reduce_dkv(const BwdParams& p, Dtype dtype, int block_n, int head_dim_tile, cudaStream_t stream);
// dk, dv = 0 for keys that no row sees.
cudaError_t clear_unseen_dkv(const BwdParams& p, cudaStream_t stream);
// dk, dv = rounded p.dk_accum, p.dv_accum.
cudaError_t convert_dkv(const BwdParams& p, Dtype dtype, cudaStream_t stream);
// dk, dv = sums of p.terms over chunks, rounded. p.dbias_cols gets such sums too, in fp32, for the first head of each
// group that the launch has. Chunks are added in their order. For keys that rows behind the round see as well, the
// sums of dk and dv are left in `carried`. If p.dk_accum and p.dv_accum are given, all sums are added to these
// instead.
cudaError_t reduce_chunk_terms(const BwdParams& p, const CarriedTerms& carried, Dtype dtype, cudaStream_t stream);

// Key bias (out_rows == 1, out_cols == seqlen_k): dbias = src summed over what the bias was broadcast over. Fixed
// order: bitwise repeatable.
cudaError_t reduce_dbias_cols(const ReduceDbiasParams& p, cudaStream_t stream);
// Row bias (out_cols == 1, out_rows == seqlen_q).
cudaError_t reduce_dbias_rows(const ReduceDbiasParams& p, cudaStream_t stream);
// The sums of a dense dbias: `rows` rows of `keys` numbers, which start `pitch` numbers apart here and `dbias_pitch`
// numbers apart in dbias.
struct DbiasSumRows {
  const float* data;
  int64_t rows, keys, pitch, dbias_pitch;
};
// dbias = the sums, rounded.
cudaError_t round_dbias(const DbiasSumRows& sums, void* dbias, Dtype dtype, cudaStream_t stream);

}  // namespace dmattn
