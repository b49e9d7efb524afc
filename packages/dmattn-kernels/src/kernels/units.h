// The compiled kernel units, as the host finds them. CMake generates a translation unit for each entry of its list
// (architecture x direction x dtype x head-dim tile x {tiled, gathered}) and the table behind these functions. Which
// entries there are is in host/units.h.
#pragma once

#include <cuda_runtime_api.h>

#include "host/units.h"
#include "params.h"
#include "short_params.h"
#include "tiles.h"

namespace dmattn {

// Enqueues the kernel; sets the shared-memory limit of its function for the current device when needed.
using FwdLauncher = cudaError_t (*)(const KernelChoice& choice, const FwdParams& p, cudaStream_t stream);
using BwdLauncher = cudaError_t (*)(const KernelChoice& choice, const BwdParams& p, cudaStream_t stream);
using DecodeLauncher = cudaError_t (*)(const KernelChoice& choice, const DecodeParams& p, cudaStream_t stream);
using ShortFwdLauncher = cudaError_t (*)(const KernelChoice& choice, const ShortFwdParams& p, cudaStream_t stream);
using ShortBwdLauncher = cudaError_t (*)(const KernelChoice& choice, const ShortBwdParams& p, cudaStream_t stream);

// nullptr when there is no such unit; unit.direction is that of the function.
FwdLauncher find_fwd_unit(const Unit& unit);
BwdLauncher find_bwd_unit(const Unit& unit);
DecodeLauncher find_decode_unit(const Unit& unit);
ShortFwdLauncher find_short_fwd_unit(const Unit& unit);
ShortBwdLauncher find_short_bwd_unit(const Unit& unit);

}  // namespace dmattn
