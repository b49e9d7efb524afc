// Functions for Python that do a whole call of the library: they read the parameters, get the workspace and launch.
//
// The arguments are those of the constructor of the parameter struct, all of them by position, followed by the
// stream. They are converted here because pybind11 would take longer for twenty of them than the launch takes.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <exception>
#include <string>
#include <utility>

#include "exchange.h"

namespace dmattn::at_once {

namespace py = pybind11;

template <class T>
struct As;
template <>
struct As<py::handle> {
  static py::handle read(PyObject* object) { return object; }
};
template <>
struct As<int64_t> {
  static int64_t read(PyObject* object) {
    const long long value = PyLong_AsLongLong(object);
    if (value == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
    return value;
  }
};
template <>
struct As<int32_t> {
  static int32_t read(PyObject* object) {
    const int64_t value = As<int64_t>::read(object);
    if (value != static_cast<int32_t>(value)) throw py::value_error(std::to_string(value) + " does not fit 32 bits");
    return static_cast<int32_t>(value);
  }
};
template <>
struct As<float> {
  static float read(PyObject* object) {
    const double value = PyFloat_AsDouble(object);
    if (value == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
    return static_cast<float>(value);
  }
};
template <>
struct As<bool> {
  static bool read(PyObject* object) {
    if (object != Py_True && object != Py_False) {
      throw py::type_error(std::string("got a ") + Py_TYPE(object)->tp_name + "; wanted True or False");
    }
    return object == Py_True;
  }
};

// Runs the body of a function of Python's C API. An exception becomes a Python exception and a null result.
template <class F>
PyObject* at_boundary(F&& body) {
  try {
    return body();
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const py::builtin_exception& error) {
    error.set_error();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

template <class Params, class... Args, size_t... I>
Params read_params(Params (*make)(Args...), PyObject* const* given, std::index_sequence<I...>) {
  return make(As<Args>::read(given[I])...);
}

// Returns 0 if the call has been launched. Otherwise nothing has been launched, and the result is the size of the
// workspace in bytes, for which the framework of the first tensor gave no memory. The caller then makes the parameter
// struct, and finds memory or raises the error that says that there is none.
template <class Params, class... Args, class Enqueue, class Launch>
PyObject* run(Params (*make)(Args...), PyObject* const* given, Py_ssize_t count, Enqueue&& enqueue, Launch&& launch) {
  constexpr size_t kArguments = sizeof...(Args);
  return at_boundary([&]() -> PyObject* {
    if (count != static_cast<Py_ssize_t>(kArguments) + 1) {
      throw py::type_error("got " + std::to_string(count) + " arguments; wanted " + std::to_string(kArguments + 1) +
                           ", those of the constructor and the stream");
    }
    const Params params = read_params(make, given, std::index_sequence_for<Args...>());
    const auto stream = static_cast<uintptr_t>(As<int64_t>::read(given[kArguments]));
    size_t bytes = enqueue(params, stream);
    if (bytes > 0) {
      // May be freed while the kernels run: the framework uses the memory again only for later work on the same
      // stream.
      const exchange::Scratch scratch(exchange::find_api(Py_TYPE(given[1])), params.device, bytes);
      if (scratch.data() != nullptr) {
        launch(params, reinterpret_cast<uintptr_t>(scratch.data()), bytes, stream);
        bytes = 0;
      }
    }
    return PyLong_FromSize_t(bytes);
  });
}

}  // namespace dmattn::at_once
