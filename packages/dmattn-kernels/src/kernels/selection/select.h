// The steps of a selection of keys by score, in the order in which src/api/select.cpp enqueues them.
#pragma once

#include <cuda_runtime_api.h>

#include "../selection_params.h"

namespace dmattn {
namespace prep {

// What the steps write.
// Causal: row i, at position r = i + seqlen_k - seqlen_q, keeps the min(r + 1, w) best keys among 0..r (fewer when keys
// are forbidden). end[j]: first position > j at which key j is no longer kept; j when no query row ever sees it;
// the end of its document, or seqlen_k, when it stays to the end. The lists: see KeyList with block_rows =
// kSelectBlockRows and blocks = ceil(seqlen_q / block_rows). Order of a list: the keys that no row of the block (or
// segment) can lose to a better one, ascending; the others that all its rows keep, ascending; the rest, ascending.
// Not causal: one list (block_rows 0) of the w best keys, ascending; end[j] = seqlen_k for those and 0 for the others.
// seqlen_q is not looked at.
// `keys`: idx, count, full and end are written (full not when !is_causal; end not when it is null), for batch x heads
// of `p`. capacity at least select_capacity(), see host/plan/select.h. Entries of idx
// from count up to the next multiple of 128 are 0; later ones are left as they were. The result is the same bit by bit
// in every run.
// Whatever cu_seqlens holds, nothing is read or written out of bounds.
//
// The steps. Ordered scores first, if the plan has them; then either the single list, by a block for each row or by the
// grid, or the lists of all blocks. Before these, where the plan has them, the best keys before the first row (by the
// grid) and the sets.
cudaError_t select_order(const SelectParams& p, const SelectPlan& plan, int32_t* end, cudaStream_t stream);
cudaError_t select_single(const SelectPlan& plan, const KeyList& keys, cudaStream_t stream);
cudaError_t select_in_one_launch(const SelectParams& p, const SelectPlan& plan, const KeyList& keys,
                                 cudaStream_t stream);
cudaError_t select_by_grid(const SelectPlan& plan, const KeyList& keys, cudaStream_t stream);
cudaError_t select_sets(const SelectPlan& plan, cudaStream_t stream);
// One of these two: by segments where the plan has them. They may read the scores themselves.
cudaError_t select_blocks(const SelectPlan& plan, const KeyList& keys, cudaStream_t stream);
cudaError_t select_segments(const SelectParams& p, const SelectPlan& plan, const KeyList& keys, cudaStream_t stream);

}  // namespace prep
}  // namespace dmattn
