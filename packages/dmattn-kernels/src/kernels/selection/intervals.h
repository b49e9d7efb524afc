// Lists of keys from given intervals. Architecture independent, no host synchronisation, nothing allocated.
#pragma once

#include <cuda_runtime_api.h>

#include "../selection_params.h"

namespace dmattn {

// `keys`: end is read; idx, count and full are written. A list that does not fit the capacity (0 is one) is left
// empty. Any block_rows > 0. Both sections ascending, zeros as above. Time: the keys within reach; where that is far,
// the runs of 32 keys of which one is kept, and a number for each of the others.
cudaError_t build_interval_lists(const IntervalParams& p, const KeyList& keys, cudaStream_t stream);

}  // namespace dmattn
