// What the library says about itself.
#include <cuda_runtime_api.h>

#include "build_info.h"  // written by cmake/write_build_info.py
#include "dmattn/dmattn.h"
#include "host/error.h"

// Says which sources the binary was built from. It is found by searching the binary for the prefix.
extern "C" __attribute__((used, visibility("hidden"))) const char dmattn_build_id[] =
    "dmattn-source-hash:" DMATTN_SOURCE_HASH;

extern "C" int32_t dmattn_abi_version(void) { return DMATTN_ABI_VERSION; }
extern "C" const char* dmattn_version(void) { return DMATTN_VERSION; }
extern "C" int32_t dmattn_cuda_version(void) { return CUDART_VERSION; }
extern "C" const char* dmattn_architectures(void) { return DMATTN_ARCHITECTURES; }
extern "C" const char* dmattn_last_error(void) { return dmattn::last_error(); }
