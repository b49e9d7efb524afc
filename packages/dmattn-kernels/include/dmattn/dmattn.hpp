// A thin C++ layer over the C interface: errors become exceptions, and parameters start zeroed. Header only.
#ifndef DMATTN_DMATTN_HPP_
#define DMATTN_DMATTN_HPP_

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>

#include "dmattn/dmattn.h"

namespace dmattn {

class Error : public std::runtime_error {
 public:
  Error(dmattn_status status, const std::string& message) : std::runtime_error(message), status_(status) {}
  dmattn_status status() const noexcept { return status_; }

 private:
  dmattn_status status_;
};

// Throws Error with the calling thread's last message unless status is DMATTN_OK.
inline void check(dmattn_status status) {
  if (status != DMATTN_OK) throw Error(status, dmattn_last_error());
}

// Parameters with every field zero (every tensor absent) and their size set.
template <class Params>
Params make_params() {
  Params params{};
  params.struct_size = sizeof(Params);
  return params;
}

// A view of device memory; shape and stride in elements, equally long, at most 4 entries each.
inline dmattn_tensor make_tensor(void* data, dmattn_dtype dtype, std::initializer_list<int64_t> shape,
                                 std::initializer_list<int64_t> stride) {
  if (shape.size() > 4 || shape.size() != stride.size()) {
    throw Error(DMATTN_ERROR_INVALID_VALUE, "shape has " + std::to_string(shape.size()) + " and stride " +
                                                std::to_string(stride.size()) +
                                                " entries; wanted equally many, up to 4");
  }
  dmattn_tensor tensor{};
  tensor.data = data;
  tensor.dtype = dtype;
  tensor.ndim = static_cast<int32_t>(shape.size());
  for (size_t i = 0; i < shape.size(); ++i) {
    tensor.shape[i] = shape.begin()[i];
    tensor.stride[i] = stride.begin()[i];
  }
  return tensor;
}

// A view of contiguous device memory.
inline dmattn_tensor make_tensor(void* data, dmattn_dtype dtype, std::initializer_list<int64_t> shape) {
  if (shape.size() > 4) {
    throw Error(DMATTN_ERROR_INVALID_VALUE, "shape has " + std::to_string(shape.size()) + " entries; wanted up to 4");
  }
  dmattn_tensor tensor{};
  tensor.data = data;
  tensor.dtype = dtype;
  tensor.ndim = static_cast<int32_t>(shape.size());
  int64_t stride = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    tensor.shape[i] = shape.begin()[i];
    tensor.stride[i] = stride;
    stride *= tensor.shape[i];
  }
  return tensor;
}

namespace detail {

// The two functions of each operation.
template <class Params>
struct Functions {
  dmattn_status (*workspace_size)(const Params*, size_t*);
  dmattn_status (*launch)(const Params*, void*, size_t, void*);
};
inline Functions<dmattn_fwd_params> functions(const dmattn_fwd_params&) {
  return {dmattn_fwd_workspace_size, dmattn_fwd};
}
inline Functions<dmattn_bwd_params> functions(const dmattn_bwd_params&) {
  return {dmattn_bwd_workspace_size, dmattn_bwd};
}
inline Functions<dmattn_select_params> functions(const dmattn_select_params&) {
  return {dmattn_select_workspace_size, dmattn_select_keys};
}
inline Functions<dmattn_build_key_lists_params> functions(const dmattn_build_key_lists_params&) {
  return {dmattn_build_key_lists_workspace_size, dmattn_build_key_lists};
}
inline Functions<dmattn_cache_append_params> functions(const dmattn_cache_append_params&) {
  return {dmattn_cache_append_workspace_size, dmattn_cache_append};
}
inline Functions<dmattn_cache_draft_params> functions(const dmattn_cache_draft_params&) {
  return {dmattn_cache_draft_workspace_size, dmattn_cache_draft};
}
inline Functions<dmattn_cache_commit_params> functions(const dmattn_cache_commit_params&) {
  return {dmattn_cache_commit_workspace_size, dmattn_cache_commit};
}
inline Functions<dmattn_join_keys_params> functions(const dmattn_join_keys_params&) {
  return {dmattn_join_keys_workspace_size, dmattn_join_keys};
}
inline Functions<dmattn_keep_keys_params> functions(const dmattn_keep_keys_params&) {
  return {dmattn_keep_keys_workspace_size, dmattn_keep_keys};
}

}  // namespace detail

// Bytes of device scratch that launch() with these parameters needs.
template <class Params>
size_t workspace_size(const Params& params) {
  size_t bytes = 0;
  check(detail::functions(params).workspace_size(&params, &bytes));
  return bytes;
}

// Enqueues the operation on stream, a cudaStream_t.
template <class Params>
void launch(const Params& params, void* workspace, size_t bytes, void* stream) {
  check(detail::functions(params).launch(&params, workspace, bytes, stream));
}

}  // namespace dmattn

#endif  // DMATTN_DMATTN_HPP_
