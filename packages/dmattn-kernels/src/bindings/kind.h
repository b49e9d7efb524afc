// The kinds of a call's tensors as bytes, by which the Python packages recognise calls that they have checked before.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

#include "exchange.h"

namespace dmattn {

constexpr int32_t kMostDims = 8, kMostTensors = 8;

// kind_of(types, *tensors): shape, strides, dtype and device of each tensor, or that it is None, as bytes. Two lists
// of tensors have the same bytes exactly if they agree in all of that. The result is None if a tensor's type is not
// exactly one of `types` (a subclass is not), if its framework cannot describe it, or if it is a view with its sign
// flipped (is_neg).
inline PyObject* kind_of(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (count < 1 || count > 1 + kMostTensors || !PyTuple_Check(given[0])) {
    PyErr_SetString(PyExc_TypeError, "wanted a tuple of types, and up to 8 tensors or None");
    return nullptr;
  }
  static PyObject* const is_neg = PyUnicode_InternFromString("is_neg");
  PyObject* const types = given[0];
  int64_t words[kMostTensors * (3 + 2 * kMostDims)];
  int64_t* next = words;
  for (Py_ssize_t i = 1; i < count; ++i) {
    PyObject* const tensor = given[i];
    if (tensor == Py_None) {
      *next++ = -1;
      continue;
    }
    bool is_known = false;
    for (Py_ssize_t j = 0; j < PyTuple_GET_SIZE(types); ++j) {
      is_known |= PyTuple_GET_ITEM(types, j) == reinterpret_cast<PyObject*>(Py_TYPE(tensor));
    }
    const exchange::Api* api = is_known ? exchange::find_api(Py_TYPE(tensor)) : nullptr;
    exchange::DlTensor found{};
    if (api == nullptr || api->describe(tensor, &found) != 0 || found.ndim > kMostDims || found.strides == nullptr) {
      PyErr_Clear();
      Py_RETURN_NONE;
    }
    PyObject* const negative = PyObject_CallMethodNoArgs(tensor, is_neg);
    if (negative == nullptr) return nullptr;
    Py_DECREF(negative);
    if (negative != Py_False) Py_RETURN_NONE;
    *next++ = found.ndim;
    *next++ = found.dtype.code | found.dtype.bits << 8 | found.dtype.lanes << 16;
    *next++ = static_cast<int64_t>(found.device.type) << 32 | static_cast<uint32_t>(found.device.id);
    for (int32_t j = 0; j < found.ndim; ++j) *next++ = found.shape[j];
    for (int32_t j = 0; j < found.ndim; ++j) *next++ = found.strides[j];
  }
  return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(words),
                                   static_cast<Py_ssize_t>((next - words) * sizeof(int64_t)));
}

}  // namespace dmattn
