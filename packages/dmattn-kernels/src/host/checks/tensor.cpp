#include "host/checks/tensor.h"

#include <cmath>

#include "host/dtype.h"
#include "host/error.h"

namespace dmattn {
namespace {

// Extents are at most 2^30, so that an extent rounded up to a tile is an int32, and products at most 2^46, so that
// sizes in bytes are far from overflowing 64 bits.
constexpr int64_t kMaxExtent = int64_t{1} << 30;
constexpr int64_t kMaxElements = int64_t{1} << 46;
constexpr int64_t kMaxHeadDim = 256;

int64_t num_elements(const dmattn_tensor& t) {
  int64_t n = 1;
  for (int i = 0; i < t.ndim; ++i) n *= t.shape[i];
  return n;
}

}  // namespace

std::string text(const int64_t* values, int n) {
  std::string s = "(";
  for (int i = 0; i < n; ++i) s += (i > 0 ? ", " : "") + std::to_string(values[i]);
  return s + ")";
}

void check_rank(const char* name, const dmattn_tensor& t, int ndim) {
  if (!is_present(t)) fail(DMATTN_ERROR_INVALID_VALUE, "%s is absent; wanted a tensor of %d dimensions", name, ndim);
  if (t.ndim != ndim) fail(DMATTN_ERROR_INVALID_VALUE, "%s has %d dimensions; wanted %d", name, t.ndim, ndim);
  double elements = 1;
  for (int i = 0; i < ndim; ++i) {
    if (t.shape[i] < 0 || t.shape[i] > kMaxExtent) {
      fail(DMATTN_ERROR_INVALID_VALUE, "%s has shape %s; wanted extents from 0 to %lld", name,
           text(t.shape, ndim).c_str(), static_cast<long long>(kMaxExtent));
    }
    elements *= static_cast<double>(t.shape[i]);
  }
  if (elements > static_cast<double>(kMaxElements)) {
    fail(DMATTN_ERROR_INVALID_VALUE, "%s has shape %s; wanted at most 2^46 elements", name,
         text(t.shape, ndim).c_str());
  }
}

void check_dtype(const char* name, const dmattn_tensor& t, std::initializer_list<int32_t> allowed) {
  for (int32_t dtype : allowed) {
    if (t.dtype == dtype) return;
  }
  std::string wanted;
  for (int32_t dtype : allowed) {
    if (wanted.find(dtype_name(dtype)) == std::string::npos) {
      wanted += (wanted.empty() ? "" : " or ") + std::string(dtype_name(dtype));
    }
  }
  fail(DMATTN_ERROR_INVALID_DTYPE, "%s has dtype %s (%d); wanted %s", name, dtype_name(t.dtype), t.dtype,
       wanted.c_str());
}

void check_shape(const char* name, const dmattn_tensor& t, std::initializer_list<int64_t> shape, const char* meaning) {
  const int ndim = static_cast<int>(shape.size());
  check_rank(name, t, ndim);
  for (int i = 0; i < ndim; ++i) {
    if (t.shape[i] != shape.begin()[i]) {
      fail(DMATTN_ERROR_INVALID_VALUE, "%s has shape %s; wanted %s, %s", name, text(t.shape, ndim).c_str(),
           text(shape.begin(), ndim).c_str(), meaning);
    }
  }
}

void check_unit_last_stride(const char* name, const dmattn_tensor& t) {
  if (num_elements(t) == 0) return;
  const int last = t.ndim - 1;
  if (t.shape[last] > 1 && t.stride[last] != 1) {
    fail(DMATTN_ERROR_INVALID_VALUE, "%s has strides %s; wanted 1 along its last dimension", name,
         text(t.stride, t.ndim).c_str());
  }
}

void check_writable(const char* name, const dmattn_tensor& t) {
  if (num_elements(t) == 0) return;
  for (int i = 0; i < t.ndim; ++i) {
    if (t.shape[i] > 1 && t.stride[i] == 0) {
      fail(DMATTN_ERROR_INVALID_VALUE, "%s has strides %s for shape %s; wanted no 0, because it is written", name,
           text(t.stride, t.ndim).c_str(), text(t.shape, t.ndim).c_str());
    }
  }
}

namespace {

// Whether the strides are those of a contiguous tensor whose last extent is `row`.
bool has_dense_strides(const dmattn_tensor& t, int64_t row) {
  int64_t stride = 1;
  for (int i = t.ndim - 1; i >= 0; --i) {
    if (t.shape[i] > 1 && t.stride[i] != stride) return false;
    stride *= i == t.ndim - 1 ? row : t.shape[i];
  }
  return true;
}

}  // namespace

void check_contiguous(const char* name, const dmattn_tensor& t) {
  if (num_elements(t) == 0 || has_dense_strides(t, t.shape[t.ndim - 1])) return;
  fail(DMATTN_ERROR_INVALID_VALUE, "%s has strides %s for shape %s; wanted a contiguous tensor", name,
       text(t.stride, t.ndim).c_str(), text(t.shape, t.ndim).c_str());
}

int64_t row_pitch(const dmattn_tensor& t) {
  const int64_t keys = t.shape[t.ndim - 1];
  if (t.shape[t.ndim - 2] > 1) return t.stride[t.ndim - 2];
  return keys;
}

void check_rows_apart(const char* name, const dmattn_tensor& t) {
  const int64_t pitch = row_pitch(t), elements = num_elements(t), keys = t.shape[t.ndim - 1];
  if (elements == 0) return;
  const bool is_countable = pitch >= keys && pitch <= kMaxElements / (elements / keys);
  if (is_countable && has_dense_strides(t, pitch)) return;
  fail(DMATTN_ERROR_INVALID_VALUE, "%s has strides %s for shape %s; wanted a contiguous tensor, or one of padded rows",
       name, text(t.stride, t.ndim).c_str(), text(t.shape, t.ndim).c_str());
}

void check_pointer(const char* name, const dmattn_tensor& t, PointerCheck& pointers) {
  if (!is_present(t) || num_elements(t) == 0) return;
  const auto low_bits = static_cast<uintptr_t>(element_bytes(t.dtype)) - 1;
  const bool is_set = t.data != nullptr && (reinterpret_cast<uintptr_t>(t.data) & low_bits) == 0;
  pointers.complete = pointers.complete && is_set;
  if (is_set || !pointers.required) return;
  if (t.data == nullptr) {
    fail(DMATTN_ERROR_INVALID_VALUE, "%s has a null data pointer; wanted device memory for shape %s", name,
         text(t.shape, t.ndim).c_str());
  }
  fail(DMATTN_ERROR_INVALID_VALUE, "%s has data pointer %p; wanted a multiple of its element size, %d", name, t.data,
       static_cast<int>(element_bytes(t.dtype)));
}

void check_head_dim(const char* name, int64_t head_dim) {
  const auto got = static_cast<long long>(head_dim);
  if (head_dim < 1) fail(DMATTN_ERROR_INVALID_VALUE, "%s has head_dim %lld; wanted a multiple of 8", name, got);
  if (head_dim > kMaxHeadDim) {
    fail(DMATTN_ERROR_UNSUPPORTED, "%s has head_dim %lld; wanted at most %lld", name, got,
         static_cast<long long>(kMaxHeadDim));
  }
  if (head_dim % 8 != 0) fail(DMATTN_ERROR_UNSUPPORTED, "%s has head_dim %lld; wanted a multiple of 8", name, got);
}

void check_finite(const char* name, float value) {
  if (!std::isfinite(value)) fail(DMATTN_ERROR_INVALID_VALUE, "%s is %g; wanted a finite number", name, value);
}

void check_flag(const char* name, int32_t value) {
  if (value != 0 && value != 1) fail(DMATTN_ERROR_INVALID_VALUE, "%s is %d; wanted 0 or 1", name, value);
}

void check_device_number(int32_t device) {
  if (device < 0) fail(DMATTN_ERROR_INVALID_VALUE, "device is %d; wanted a device number from 0", device);
}

void check_reserved(int32_t value, const char* name) {
  if (value != 0) fail(DMATTN_ERROR_INVALID_VALUE, "%s is %d; wanted 0", name, value);
}

}  // namespace dmattn
