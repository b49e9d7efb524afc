// Sizes and names of element types.
#pragma once

#include <cstdint>

#include "dmattn/dmattn.h"
#include "kernels/params.h"

namespace dmattn {

constexpr int64_t element_bytes(int32_t dtype) {
  return dtype == DMATTN_INT64                              ? 8
         : dtype == DMATTN_FLOAT32 || dtype == DMATTN_INT32 ? 4
         : dtype == DMATTN_BOOL                             ? 1
                                                            : 2;
}
constexpr int64_t element_bytes(Dtype dtype) { return element_bytes(static_cast<int32_t>(dtype)); }

constexpr const char* dtype_name(int32_t dtype) {
  switch (dtype) {
    case DMATTN_FLOAT16:
      return "float16";
    case DMATTN_BFLOAT16:
      return "bfloat16";
    case DMATTN_FLOAT32:
      return "float32";
    case DMATTN_BOOL:
      return "bool";
    case DMATTN_INT32:
      return "int32";
    case DMATTN_INT64:
      return "int64";
    default:
      return "unknown";
  }
}
constexpr const char* dtype_name(Dtype dtype) { return dtype_name(static_cast<int32_t>(dtype)); }

}  // namespace dmattn
