// Appending to a cache of the best keys: validate, look the device up, launch.
#include "kernels/prep/cache.h"

#include "api/device.h"
#include "api/error.h"
#include "api/operands.h"
#include "api/validate.h"

namespace dmattn {
namespace {

CacheAppendParams read_append(const dmattn_cache_append_params& p) {
  CacheAppendParams append;
  append.k_new = p.k_new.data;
  append.v_new = p.v_new.data;
  append.k_new_stride = read_strides(p.k_new);
  append.v_new_stride = read_strides(p.v_new);
  append.score_new = p.score_new.data;
  append.score_batch_stride = p.score_new.stride[0];
  append.score_head_stride = p.score_new.stride[1];
  append.score_token_stride = p.score_new.stride[2];
  append.position_new = static_cast<const int32_t*>(p.position_new.data);
  append.position_batch_stride = p.position_new.stride[0];
  append.position_token_stride = p.position_new.stride[1];
  append.k_cache = p.k_cache.data;
  append.v_cache = p.v_cache.data;
  append.k_stride = read_strides(p.k_cache);
  append.v_stride = read_strides(p.v_cache);
  append.score = p.score.data;
  append.position = static_cast<int32_t*>(p.position.data);
  append.score_dtype = static_cast<Dtype>(p.score.dtype);
  append.batch = static_cast<int32_t>(p.k_new.shape[0]);
  append.tokens = static_cast<int32_t>(p.k_new.shape[1]);
  append.nheads_k = static_cast<int32_t>(p.k_new.shape[2]);
  append.head_dim = static_cast<int32_t>(p.k_new.shape[3]);
  append.capacity = static_cast<int32_t>(p.k_cache.shape[1]);
  return append;
}

}  // namespace
}  // namespace dmattn

extern "C" dmattn_status dmattn_cache_append_workspace_size(const dmattn_cache_append_params* params, size_t* bytes) {
  using namespace dmattn;
  return at_boundary([&] {
    const dmattn_cache_append_params p = read_params(params, "dmattn_cache_append_params");
    if (bytes == nullptr) fail(DMATTN_ERROR_INVALID_VALUE, "bytes is null; wanted where to put the size");
    validate(p, Pointers::kOptional);
    find_device(p.device);
    *bytes = 0;
  });
}

extern "C" dmattn_status dmattn_cache_append(const dmattn_cache_append_params* params, void*, size_t, void* stream) {
  using namespace dmattn;
  return at_boundary([&] {
    const dmattn_cache_append_params p = read_params(params, "dmattn_cache_append_params");
    validate(p, Pointers::kRequired);
    find_device(p.device);
    const DeviceGuard guard(p.device);
    check_cuda(cache_append(read_append(p), static_cast<cudaStream_t>(stream)), "appending to the cache of keys");
  });
}
