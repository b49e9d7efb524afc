// The steps of a selection of keys by score, in the order in which src/api/select.cpp enqueues them.
#pragma once

#include <cuda_runtime_api.h>

#include "../selection_params.h"

namespace dmattn {
namespace prep {

// What the steps write.
// Causal: row i, at position r = i + seqlen_k - seqlen_q, keeps the min(r + 1, w) best keys among 0..r (fewer if keys
// are forbidden). end[j]: first position > j at which key j is no longer kept; j if no query row ever sees it; the end
// of its document, or seqlen_k, if it stays to the end. The lists: see KeyList with block_rows = kSelectBlockRows and
// blocks = ceil(seqlen_q / block_rows). Order of a list: the keys that no row of the block (or segment) can lose to a
// better one, ascending; the others that all its rows keep, ascending; the rest, ascending.
// Not causal: one list (block_rows 0) of the w best keys, ascending; end[j] = seqlen_k for those and 0 for the others.
// seqlen_q is not looked at.
// `keys`: idx, count, full and end are written for batch x heads of `p`, but full only if causal, and end only if it
// is not null. The capacity has to be at least select_capacity() (host/plan/select.h). Entries of idx from count up to
// the next multiple of 128 are 0; later ones are left as they were. Results are bitwise the same in every run.
// Whatever cu_seqlens holds, nothing is read or written out of bounds.
//
// The steps. If the plan has a single list in one launch, select_in_one_launch() does everything. Otherwise
// select_order() writes the ordered scores, if the plan has them. A single list is then found by select_by_grid() or,
// with one thread block for each row of the selection, by select_single(). For the lists of all blocks of rows,
// select_by_grid() first finds the best keys before the first row, and select_sets() the sets, if the plan has these.
cudaError_t select_order(const SelectParams& p, const SelectPlan& plan, int32_t* end, cudaStream_t stream);
cudaError_t select_single(const SelectPlan& plan, const KeyList& keys, cudaStream_t stream);
cudaError_t select_in_one_launch(const SelectParams& p, const SelectPlan& plan, const KeyList& keys,
                                 cudaStream_t stream);
cudaError_t select_by_grid(const SelectPlan& plan, const KeyList& keys, cudaStream_t stream);
cudaError_t select_sets(const SelectPlan& plan, cudaStream_t stream);
// The lists of all blocks of rows, by one of these two: by segments if the plan has them. Segments may read the scores
// themselves.
cudaError_t select_blocks(const SelectPlan& plan, const KeyList& keys, cudaStream_t stream);
cudaError_t select_segments(const SelectParams& p, const SelectPlan& plan, const KeyList& keys, cudaStream_t stream);

}  // namespace prep
}  // namespace dmattn
