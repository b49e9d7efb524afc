// What the planning code names of the CUDA runtime, so that it compiles where there is no CUDA.
#pragma once

#include <cstddef>

enum cudaError_t { cudaSuccess = 0, cudaErrorUnknown = 999 };
typedef struct CUstream_st* cudaStream_t;
inline const char* cudaGetErrorString(cudaError_t) { return "no CUDA here"; }
