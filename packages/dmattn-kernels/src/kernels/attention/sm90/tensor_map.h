// Descriptors of tensors for TMA, made on the host.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>
#include <cutlass/numeric_types.h>

#include <cstdint>
#include <type_traits>

#include "../../params.h"

namespace dmattn::sm90 {

struct TensorExtents {
  int32_t batch, seqlen, heads, head_dim;
};

template <class Element>
constexpr CUtensorMapDataType tensor_map_dtype() {
  return std::is_same_v<Element, cutlass::half_t> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
}

// A function of the driver, which the library is not linked with. nullptr if the driver does not have it.
inline auto tensor_map_encoder() {
  static const auto found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    const cudaError_t status =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
    if (status != cudaSuccess || result != cudaDriverEntryPointSuccess) function = nullptr;
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  return found;
}

// For packed sequences. TMA leaves out what is past the extent of a dimension, but a sequence ends in the middle of
// the tensor. So the map has a dimension of kPackedOrigin rows, of which a sequence gets the last coordinates: its
// row r of n has the coordinate kPackedOrigin - n + r, and the row behind the last one is past the extent. Two more
// dimensions correct the address. One has the coordinate kPackedOrigin, and a stride of kPackedWrap bytes less those
// of a row: it subtracts kPackedOrigin rows, since kPackedOrigin * kPackedWrap is 2^64, which is 0 in an address. The
// other has the stride of a row, and its coordinate is the row of the tensor at which the sequence ends.
constexpr int32_t kPackedOrigin = 1 << 30;
constexpr int64_t kPackedWrap = int64_t{1} << 34;

// Makes maps for tiles of 16-bit or 32-bit elements that are copied `panel_cols` columns at a time. The rows of such
// a panel have 128 or 64 bytes and are swizzled, or they have 16 bytes and are not.
class TensorMapper {
 public:
  TensorMapper(CUtensorMapDataType dtype, int panel_cols)
      : dtype_(dtype), panel_cols_(panel_cols), bytes_(is_wide(dtype) ? 4 : 2) {}

  // A box is `rows` rows of one head. What lies outside the tensor is read as 0 and not written.
  cudaError_t map(CUtensorMap& to, const void* tensor, const Strides3& stride, const TensorExtents& extents,
                  int rows) const {
    const cuuint64_t sizes[] = {size(extents.head_dim), size(extents.seqlen), size(extents.heads), size(extents.batch)};
    const cuuint64_t strides[] = {step(stride.row), step(stride.head), step(stride.batch)};
    return encode(to, tensor, 4, sizes, strides, rows);
  }

  // For packed sequences, of which a copy takes one (see kPackedOrigin): what lies behind its rows is read as 0 and
  // not written. Dimensions (head_dim, row, heads, wrap, end).
  cudaError_t map_packed(CUtensorMap& to, const void* tensor, const Strides3& stride, int32_t heads, int32_t head_dim,
                         int rows) const {
    const cuuint64_t any = INT32_MAX;
    const cuuint64_t sizes[] = {size(head_dim), size(kPackedOrigin), size(heads), any, any};
    const cuuint64_t row = step(stride.row);
    const cuuint64_t strides[] = {row, step(stride.head), kPackedWrap - row, row};
    return encode(to, tensor, 5, sizes, strides, rows);
  }

 private:
  static cuuint64_t size(int32_t extent) { return static_cast<cuuint64_t>(extent); }
  // A stride in bytes. That of a dimension with one entry is never used, but TMA requires a valid one.
  cuuint64_t step(int64_t elements) const { return static_cast<cuuint64_t>(elements == 0 ? 16 : bytes_ * elements); }
  cudaError_t encode(CUtensorMap& to, const void* tensor, cuuint32_t rank, const cuuint64_t* sizes,
                     const cuuint64_t* strides, int rows) const {
    const auto encoder = tensor_map_encoder();
    if (encoder == nullptr) return cudaErrorNotSupported;
    const cuuint32_t box[] = {static_cast<cuuint32_t>(panel_cols_), static_cast<cuuint32_t>(rows), 1, 1, 1};
    const cuuint32_t every[] = {1, 1, 1, 1, 1};
    const auto run = [&] {
      return encoder(&to, dtype_, rank, const_cast<void*>(tensor), sizes, strides, box, every,
                     CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle(), CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                     CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    };
    CUresult result = run();
    if (result == CUDA_ERROR_INVALID_CONTEXT) {
      // This is the first call of the thread: the runtime makes the device's context current only with the first
      // launch.
      int device = 0;
      cudaError_t status = cudaGetDevice(&device);
      if (status == cudaSuccess) status = cudaSetDevice(device);
      if (status != cudaSuccess) return status;
      result = run();
    }
    return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
  }

  static bool is_wide(CUtensorMapDataType dtype) {
    return dtype == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 || dtype == CU_TENSOR_MAP_DATA_TYPE_INT32;
  }
  CUtensorMapSwizzle swizzle() const {
    const int row_bytes = panel_cols_ * bytes_;
    return row_bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
           : row_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                             : CU_TENSOR_MAP_SWIZZLE_NONE;
  }

  CUtensorMapDataType dtype_;
  int panel_cols_;
  int bytes_;  // of an element
};

}  // namespace dmattn::sm90
