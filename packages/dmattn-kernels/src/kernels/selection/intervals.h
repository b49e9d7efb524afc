// Lists of keys from given intervals. Architecture independent, no host synchronisation, nothing allocated.
#pragma once

#include <cuda_runtime_api.h>

#include "../selection_params.h"

namespace dmattn {

// `keys`: end is read; idx, count and full are written. block_rows may be any number above 0. Both parts of a list,
// full keys and others, are ascending, with zeros up to the next multiple of 128. A list that does not fit the
// capacity, which may be 0, is left empty. For each list the ends of the keys within reach are read; above
// kShortReach, only those of the groups of kIntervalChunk keys that may have a kept key, and one number for each
// group.
cudaError_t build_interval_lists(const IntervalParams& p, const KeyList& keys, cudaStream_t stream);

}  // namespace dmattn
