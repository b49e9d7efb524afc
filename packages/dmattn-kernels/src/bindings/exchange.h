// Tensors of Python frameworks that offer DLPack's C exchange interface (torch from 2.10 on), read in place.
//
// Such a type of tensors has an attribute __dlpack_c_exchange_api__, a capsule with a table of functions. One of them
// describes a tensor without making Python objects. That takes a twentieth of the time that it takes Python code to
// ask for the address, shape and strides. The types below are those of version 1 of DLPack
// (https://dmlc.github.io/dlpack).
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "dmattn/dmattn.h"

namespace dmattn::exchange {

struct DlDevice {
  int32_t type;
  int32_t id;
};

struct DlDtype {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

struct DlTensor {
  void* data;
  DlDevice device;
  int32_t ndim;
  DlDtype dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

struct DlManaged {
  uint32_t major, minor;
  void* context;
  void (*deleter)(DlManaged* self);
  uint64_t flags;
  DlTensor tensor;
};

using SetError = void (*)(void* context, const char* kind, const char* message);

struct Api {
  uint32_t major, minor;
  Api* older;  // the table of another major version, or null
  // Allocates from the framework's own memory, for its current stream. If the result is not 0, it has called
  // set_error.
  int (*allocate)(DlTensor* prototype, DlManaged** out, void* error_context, SetError set_error);
  void (*export_tensor)();
  void (*import_tensor)();
  int (*describe)(void* object, DlTensor* out);  // not 0: it has set a Python exception. May be null
  void (*current_stream)();
};

constexpr int32_t kCpu = 1, kCuda = 2, kCudaManaged = 13;
constexpr uint8_t kInt = 0, kUint = 1, kFloat = 2, kBfloat = 4, kBool = 6;

// The most types whose tables are remembered. These types are kept alive, so that their number is limited: a program
// may create types again and again. Other types are asked each time.
constexpr size_t kMostTypes = 64;

// The table of a type of tensors; null if it has none that this code can use. Called with the GIL held.
inline const Api* find_api(PyTypeObject* type) {
  static std::vector<std::pair<PyTypeObject*, const Api*>> known;
  for (const auto& [known_type, api] : known) {
    if (known_type == type) return api;
  }
  const Api* found = nullptr;
  PyObject* capsule = PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__");
  if (capsule != nullptr) {
    found = static_cast<const Api*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
    while (found != nullptr && found->major != 1) found = found->older;
    if (found != nullptr && found->describe == nullptr) found = nullptr;
    Py_DECREF(capsule);
  }
  PyErr_Clear();
  if (found != nullptr && known.size() < kMostTypes) {
    Py_INCREF(type);  // so that no other type gets its address
    known.emplace_back(type, found);
  }
  return found;
}

inline int32_t dtype_of(const DlDtype& dtype, const char* name) {
  if (dtype.lanes == 1) {
    if (dtype.code == kFloat && dtype.bits == 16) return DMATTN_FLOAT16;
    if (dtype.code == kBfloat && dtype.bits == 16) return DMATTN_BFLOAT16;
    if (dtype.code == kFloat && dtype.bits == 32) return DMATTN_FLOAT32;
    if (dtype.code == kBool && dtype.bits == 8) return DMATTN_BOOL;
    if (dtype.code == kInt && dtype.bits == 32) return DMATTN_INT32;
    if (dtype.code == kInt && dtype.bits == 64) return DMATTN_INT64;
  }
  throw pybind11::type_error(std::string(name) + " has the DLPack dtype (" + std::to_string(dtype.code) + ", " +
                             std::to_string(dtype.bits) +
                             "); wanted float16, bfloat16, float32, bool, int32 or "
                             "int64");
}

// Fills `tensor` from an object of a type that has a table.
inline void read(const Api& api, PyObject* object, int32_t device, dmattn_tensor& tensor, const char* name) {
  DlTensor from{};
  if (api.describe(object, &from) != 0) {
    if (PyErr_Occurred() != nullptr) throw pybind11::error_already_set();
    throw pybind11::value_error(std::string(name) + " cannot be described by its framework");
  }
  const bool on_gpu = from.device.type == kCuda || from.device.type == kCudaManaged;
  // The CPU is device number -1, as in torch. -2: any other device.
  const int32_t found = on_gpu ? from.device.id : from.device.type == kCpu ? -1 : -2;
  if (found != device) {
    throw pybind11::value_error(std::string(name) + " is on a device of DLPack type " +
                                std::to_string(from.device.type) + " and number " + std::to_string(from.device.id) +
                                "; wanted CUDA device " + std::to_string(device));
  }
  if (from.ndim < 1 || from.ndim > 4) {
    throw pybind11::value_error(std::string(name) + " has " + std::to_string(from.ndim) + " dimensions; wanted 1 to 4");
  }
  tensor.data = static_cast<char*>(from.data) + from.byte_offset;
  tensor.dtype = dtype_of(from.dtype, name);
  tensor.ndim = from.ndim;
  int64_t contiguous = 1;
  for (int32_t i = from.ndim - 1; i >= 0; --i) {
    tensor.shape[i] = from.shape[i];
    tensor.stride[i] = from.strides != nullptr ? from.strides[i] : contiguous;
    contiguous *= from.shape[i];
  }
}

// Device memory from the framework that has this table, freed at the end of the scope.
class Scratch {
 public:
  // data() is null if the framework offers no memory or has none left.
  Scratch(const Api* api, int32_t device, size_t bytes) {
    if (api == nullptr || api->allocate == nullptr) return;
    int64_t extent = static_cast<int64_t>(bytes);
    DlTensor prototype{};
    prototype.device = device >= 0 ? DlDevice{kCuda, device} : DlDevice{kCpu, 0};
    prototype.ndim = 1;
    prototype.dtype = {kUint, 8, 1};
    prototype.shape = &extent;
    const auto ignore = [](void*, const char*, const char*) {};
    if (api->allocate(&prototype, &managed_, nullptr, ignore) != 0) managed_ = nullptr;
  }
  ~Scratch() {
    if (managed_ != nullptr && managed_->deleter != nullptr) managed_->deleter(managed_);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  void* data() const {
    return managed_ == nullptr ? nullptr : static_cast<char*>(managed_->tensor.data) + managed_->tensor.byte_offset;
  }

 private:
  DlManaged* managed_ = nullptr;
};

}  // namespace dmattn::exchange
