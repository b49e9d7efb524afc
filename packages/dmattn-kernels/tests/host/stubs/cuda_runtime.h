// As much of CUDA as headers of src/kernels need whose device functions are plain arithmetic, for tests on the host.
#pragma once

#include <algorithm>
#include <cstdint>

#define __device__
#define __forceinline__ inline

using std::max;
using std::min;

inline uint32_t __umulhi(uint32_t a, uint32_t b) { return static_cast<uint32_t>((uint64_t{a} * b) >> 32); }
