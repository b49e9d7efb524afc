// What tells calls apart that need not be checked twice: the kind of each tensor, as bytes.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

#include "exchange.h"

namespace dmattn {

constexpr int32_t kMostDims = 8, kMostTensors = 8;

// Room for the words of kMostTensors tensors.
struct Words {
  int64_t at[kMostTensors * (3 + 2 * kMostDims)];
  int64_t* end = at;
};

// Adds what tells a tensor apart. 1, or 0: it is not of one of `types`, its framework cannot describe it, or it is a view
// with another sign. -1: with a Python exception.
inline int add_kind(Words& words, PyObject* types, PyObject* tensor, exchange::DlTensor& found) {
  static PyObject* const is_neg = PyUnicode_InternFromString("is_neg");
  bool is_known = false;
  for (Py_ssize_t j = 0; j < PyTuple_GET_SIZE(types); ++j) {
    is_known |= PyTuple_GET_ITEM(types, j) == reinterpret_cast<PyObject*>(Py_TYPE(tensor));
  }
  const exchange::Api* api = is_known ? exchange::find_api(Py_TYPE(tensor)) : nullptr;
  if (api == nullptr || api->describe(tensor, &found) != 0 || found.ndim > kMostDims || found.strides == nullptr) {
    PyErr_Clear();
    return 0;
  }
  PyObject* const negative = PyObject_CallMethodNoArgs(tensor, is_neg);
  if (negative == nullptr) return -1;
  Py_DECREF(negative);
  if (negative != Py_False) return 0;
  *words.end++ = found.ndim;
  *words.end++ = found.dtype.code | found.dtype.bits << 8 | found.dtype.lanes << 16;
  *words.end++ = static_cast<int64_t>(found.device.type) << 32 | static_cast<uint32_t>(found.device.id);
  for (int32_t j = 0; j < found.ndim; ++j) *words.end++ = found.shape[j];
  for (int32_t j = 0; j < found.ndim; ++j) *words.end++ = found.strides[j];
  return 1;
}

// See kind_of(). None: is_served(device) is false for one of them, too.
template <class IsServed>
PyObject* kind_of_those(PyObject* const* given, Py_ssize_t count, IsServed&& is_served) {
  if (count < 1 || count > 1 + kMostTensors || !PyTuple_Check(given[0])) {
    PyErr_SetString(PyExc_TypeError, "wanted a tuple of types, and up to 8 tensors or None");
    return nullptr;
  }
  Words words;
  for (Py_ssize_t i = 1; i < count; ++i) {
    if (given[i] == Py_None) {
      *words.end++ = -1;
      continue;
    }
    exchange::DlTensor found{};
    const int added = add_kind(words, given[0], given[i], found);
    if (added < 0) return nullptr;
    if (added == 0 || !is_served(found.device)) Py_RETURN_NONE;
  }
  return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(words.at),
                                   static_cast<Py_ssize_t>((words.end - words.at) * sizeof(int64_t)));
}

// kind_of(types, *tensors): shape, strides, dtype and device of each tensor, or that it is None, as bytes. Two lists of
// tensors have the same bytes exactly if they agree in all of that. None: one of them is not of one of `types` (its
// subclasses are others), its framework cannot describe it, or it is a view with another sign.
inline PyObject* kind_of(PyObject*, PyObject* const* given, Py_ssize_t count) {
  return kind_of_those(given, count, [](const exchange::DlDevice&) { return true; });
}

// Whether each function of a tuple (function, value, function, value, ...) returns its value. -1: with an exception.
inline int all_return(PyObject* pairs) {
  for (Py_ssize_t i = 0; i + 1 < PyTuple_GET_SIZE(pairs); i += 2) {
    PyObject* const found = PyObject_CallNoArgs(PyTuple_GET_ITEM(pairs, i));
    if (found == nullptr) return -1;
    const int same = PyObject_RichCompareBool(found, PyTuple_GET_ITEM(pairs, i + 1), Py_EQ);
    Py_DECREF(found);
    if (same != 1) return same;
  }
  return 1;
}

// kind_of_direct(quiet, types, *tensors): the same for calls that leave the dispatcher of torch out. Also None where a
// function of the pairs `quiet` returns another value than it says, by which the caller knows that somebody intercepts
// calls, and for tensors on other devices than CPUs and GPUs of CUDA.
inline PyObject* kind_of_direct(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (count < 2 || !PyTuple_Check(given[0]) || PyTuple_GET_SIZE(given[0]) % 2 != 0) {
    PyErr_SetString(PyExc_TypeError, "wanted a tuple of functions and values, and the arguments of kind_of");
    return nullptr;
  }
  const int quiet = all_return(given[0]);
  if (quiet < 0) return nullptr;
  if (quiet == 0) Py_RETURN_NONE;
  return kind_of_those(given + 1, count - 1, [](const exchange::DlDevice& device) {
    return device.type == exchange::kCpu || device.type == exchange::kCuda;
  });
}

}  // namespace dmattn
