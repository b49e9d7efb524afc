// The compiled kernel units, as the host finds them. CMake generates one translation unit per entry of its list
// (direction x dtype x head-dim tile x {tiled, gathered}) and the table behind these functions.
#pragma once

#include <cuda_runtime_api.h>

#include "params.h"
#include "tiles.h"

namespace dmattn {

// Enqueues the kernel; sets the shared-memory limit of its function for the current device when needed.
using FwdLauncher = cudaError_t (*)(Family family, const FwdParams& p, cudaStream_t stream);
// Gathered launches read p.schedule and take p.max_work_items blocks, an upper bound on tiles * splits.
using BwdLauncher = cudaError_t (*)(Family family, const BwdParams& p, cudaStream_t stream);
using DecodeLauncher = cudaError_t (*)(Family family, const DecodeParams& p, cudaStream_t stream);

// nullptr when there is no such unit. head_dim_tile is one of kHeadDimTiles.
FwdLauncher find_fwd_unit(Dtype dtype, int head_dim_tile, bool gathered);
BwdLauncher find_bwd_unit(Dtype dtype, int head_dim_tile, bool gathered);
DecodeLauncher find_decode_unit(Dtype dtype, int head_dim_tile, bool gathered);

}  // namespace dmattn
