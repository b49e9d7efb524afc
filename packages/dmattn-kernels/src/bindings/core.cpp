// The Python module dmattn_kernels._core: parameter structs filled from plain tuples, and launches.
//
// A tensor arrives as (data_ptr, dtype, shape, stride), as an object of a framework that exchange.h can read, or as
// None. The tuples are taken apart with the raw C API: a generic conversion costs several microseconds a call, more
// than the launch.
#include <pybind11/pybind11.h>

#include <sstream>
#include <string>

#include "at_once.h"
#include "dmattn/dmattn.hpp"
#include "exchange.h"
#include "kind.h"

namespace py = pybind11;

namespace {

// --- from Python ---------------------------------------------------------------------------------------------------

int64_t to_int64(PyObject* object) {
  const long long value = PyLong_AsLongLong(object);
  if (value == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return value;
}

// Shape or stride; torch.Size is a tuple too.
void read_extents(PyObject* extents, int64_t (&to)[4], int32_t ndim, const char* name, const char* what) {
  if (!PyTuple_Check(extents) || PyTuple_GET_SIZE(extents) != ndim) {
    throw py::type_error(std::string(name) + ": " + what + " must be a tuple of " + std::to_string(ndim) + " integers");
  }
  for (int32_t i = 0; i < ndim; ++i) to[i] = to_int64(PyTuple_GET_ITEM(extents, i));
}

void read_tensor(py::handle handle, int32_t device, dmattn_tensor& tensor, const char* name) {
  PyObject* object = handle.ptr();
  if (object == Py_None) return;  // params start zeroed: absent
  if (!PyTuple_Check(object)) {
    if (const auto* api = dmattn::exchange::find_api(Py_TYPE(object))) {
      return dmattn::exchange::read(*api, object, device, tensor, name);
    }
  }
  if (!PyTuple_Check(object) || PyTuple_GET_SIZE(object) != 4 || !PyTuple_Check(PyTuple_GET_ITEM(object, 2))) {
    throw py::type_error(std::string(name) + " is a " + Py_TYPE(object)->tp_name +
                         "; wanted None or a tuple (data_ptr, dtype, shape, stride)");
  }
  PyObject* shape = PyTuple_GET_ITEM(object, 2);
  const Py_ssize_t ndim = PyTuple_GET_SIZE(shape);
  if (ndim < 1 || ndim > 4) {
    throw py::value_error(std::string(name) + " has " + std::to_string(ndim) + " dimensions; wanted 1 to 4");
  }
  tensor.data = PyLong_AsVoidPtr(PyTuple_GET_ITEM(object, 0));
  if (tensor.data == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
  tensor.dtype = static_cast<int32_t>(to_int64(PyTuple_GET_ITEM(object, 1)));
  tensor.ndim = static_cast<int32_t>(ndim);
  read_extents(shape, tensor.shape, tensor.ndim, name, "shape");
  read_extents(PyTuple_GET_ITEM(object, 3), tensor.stride, tensor.ndim, name, "stride");
}

// A selection arrives as (end, idx, count, full or None), or None.
void read_selection(py::handle handle, int32_t device, dmattn_key_selection& selection) {
  PyObject* object = handle.ptr();
  if (object == Py_None) return;
  if (!PyTuple_Check(object) || PyTuple_GET_SIZE(object) != 4) {
    throw py::type_error(std::string("selection is a ") + Py_TYPE(object)->tp_name +
                         "; wanted None or a tuple (end, idx, count, full)");
  }
  read_tensor(PyTuple_GET_ITEM(object, 0), device, selection.end, "selection.end");
  read_tensor(PyTuple_GET_ITEM(object, 1), device, selection.idx, "selection.idx");
  read_tensor(PyTuple_GET_ITEM(object, 2), device, selection.count, "selection.count");
  read_tensor(PyTuple_GET_ITEM(object, 3), device, selection.full, "selection.full");
}

// --- errors --------------------------------------------------------------------------------------------------------

// Runs f with the GIL released. A dmattn::Error becomes the Python exception that matches its status.
template <class F>
auto without_gil(F&& f) {
  try {
    const py::gil_scoped_release release;
    return f();
  } catch (const dmattn::Error& error) {
    if (error.status() == DMATTN_ERROR_INVALID_VALUE) throw py::value_error(error.what());
    if (error.status() == DMATTN_ERROR_INVALID_DTYPE) throw py::type_error(error.what());
    throw;  // a std::runtime_error
  }
}

// --- parameters ----------------------------------------------------------------------------------------------------

template <class Params>
void read_packing(Params& p, py::handle cu_seqlens_q, py::handle cu_seqlens_k, int32_t max_seqlen_q,
                  int32_t max_seqlen_k) {
  read_tensor(cu_seqlens_q, p.device, p.cu_seqlens_q, "cu_seqlens_q");
  read_tensor(cu_seqlens_k, p.device, p.cu_seqlens_k, "cu_seqlens_k");
  p.max_seqlen_q = max_seqlen_q;
  p.max_seqlen_k = max_seqlen_k;
}

dmattn_fwd_params make_fwd(int32_t device, py::handle q, py::handle k, py::handle v, py::handle mask, py::handle bias,
                           py::handle out, py::handle lse, float softmax_scale, float softcap, bool is_causal,
                           int32_t num_splits, py::handle selection, py::handle lse_rest, py::handle cu_seqlens_q,
                           py::handle cu_seqlens_k, int32_t max_seqlen_q, int32_t max_seqlen_k, int32_t window) {
  auto p = dmattn::make_params<dmattn_fwd_params>();
  p.device = device;
  read_tensor(q, p.device, p.q, "q");
  read_tensor(k, p.device, p.k, "k");
  read_tensor(v, p.device, p.v, "v");
  read_tensor(mask, p.device, p.mask, "mask");
  read_tensor(bias, p.device, p.bias, "bias");
  read_tensor(out, p.device, p.out, "out");
  read_tensor(lse, p.device, p.softmax_lse, "softmax_lse");
  p.softmax_scale = softmax_scale;
  p.softcap = softcap;
  p.is_causal = is_causal ? 1 : 0;
  p.num_splits = num_splits;
  read_selection(selection, p.device, p.selection);
  read_tensor(lse_rest, p.device, p.softmax_lse_rest, "softmax_lse_rest");
  read_packing(p, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k);
  p.window = window;
  return p;
}

dmattn_bwd_params make_bwd(int32_t device, py::handle q, py::handle k, py::handle v, py::handle mask, py::handle bias,
                           py::handle out, py::handle lse, py::handle dout, py::handle dlse, py::handle dq,
                           py::handle dk, py::handle dv, py::handle dbias, float softmax_scale, float softcap,
                           bool is_causal, bool deterministic, py::handle selection, py::handle lse_rest,
                           py::handle cu_seqlens_q, py::handle cu_seqlens_k, int32_t max_seqlen_q, int32_t max_seqlen_k,
                           int32_t window, int64_t keys_written) {
  auto p = dmattn::make_params<dmattn_bwd_params>();
  p.device = device;
  read_tensor(q, p.device, p.q, "q");
  read_tensor(k, p.device, p.k, "k");
  read_tensor(v, p.device, p.v, "v");
  read_tensor(mask, p.device, p.mask, "mask");
  read_tensor(bias, p.device, p.bias, "bias");
  read_tensor(out, p.device, p.out, "out");
  read_tensor(lse, p.device, p.softmax_lse, "softmax_lse");
  read_tensor(dout, p.device, p.dout, "dout");
  read_tensor(dlse, p.device, p.dsoftmax_lse, "dsoftmax_lse");
  read_tensor(dq, p.device, p.dq, "dq");
  read_tensor(dk, p.device, p.dk, "dk");
  read_tensor(dv, p.device, p.dv, "dv");
  read_tensor(dbias, p.device, p.dbias, "dbias");
  p.softmax_scale = softmax_scale;
  p.softcap = softcap;
  p.is_causal = is_causal ? 1 : 0;
  p.deterministic = deterministic ? 1 : 0;
  read_selection(selection, p.device, p.selection);
  read_tensor(lse_rest, p.device, p.softmax_lse_rest, "softmax_lse_rest");
  read_packing(p, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k);
  p.window = window;
  p.keys_written = reinterpret_cast<void*>(static_cast<uintptr_t>(keys_written));
  return p;
}

dmattn_select_params make_select(int32_t device, py::handle scores, py::handle key_mask, py::handle selection,
                                 int32_t window, int64_t seqlen_q, bool is_causal, py::handle cu_seqlens) {
  auto p = dmattn::make_params<dmattn_select_params>();
  p.device = device;
  read_tensor(scores, p.device, p.scores, "scores");
  read_tensor(key_mask, p.device, p.key_mask, "key_mask");
  read_selection(selection, p.device, p.selection);
  p.window = window;
  p.seqlen_q = seqlen_q;
  p.is_causal = is_causal ? 1 : 0;
  read_tensor(cu_seqlens, p.device, p.cu_seqlens, "cu_seqlens");
  return p;
}

dmattn_build_key_lists_params make_build_key_lists(int32_t device, py::handle selection, int64_t seqlen_q,
                                                   int64_t reach, py::handle needed) {
  auto p = dmattn::make_params<dmattn_build_key_lists_params>();
  p.device = device;
  read_selection(selection, p.device, p.selection);
  p.seqlen_q = seqlen_q;
  p.reach = reach;
  read_tensor(needed, p.device, p.needed, "needed");
  return p;
}

dmattn_cache_append_params make_cache_append(int32_t device, py::handle k_new, py::handle v_new, py::handle score_new,
                                             py::handle active, py::handle k_cache, py::handle v_cache,
                                             py::handle score, py::handle position, py::handle seen, bool evict,
                                             py::handle q, py::handle out, float softmax_scale, float softcap) {
  auto p = dmattn::make_params<dmattn_cache_append_params>();
  p.device = device;
  p.evict = evict ? 1 : 0;
  p.softmax_scale = softmax_scale;
  p.softcap = softcap;
  read_tensor(k_new, p.device, p.k_new, "k_new");
  read_tensor(v_new, p.device, p.v_new, "v_new");
  read_tensor(score_new, p.device, p.score_new, "score_new");
  read_tensor(active, p.device, p.active, "active");
  read_tensor(k_cache, p.device, p.k_cache, "k_cache");
  read_tensor(v_cache, p.device, p.v_cache, "v_cache");
  read_tensor(score, p.device, p.score, "score");
  read_tensor(position, p.device, p.position, "position");
  read_tensor(seen, p.device, p.seen, "seen");
  read_tensor(q, p.device, p.q, "q");
  read_tensor(out, p.device, p.out, "out");
  return p;
}

dmattn_cache_draft_params make_cache_draft(int32_t device, py::handle q, py::handle k_new, py::handle v_new,
                                           py::handle score_new, py::handle k_cache, py::handle v_cache,
                                           py::handle score, py::handle position, py::handle seen, py::handle draft,
                                           py::handle out, float softmax_scale, float softcap) {
  auto p = dmattn::make_params<dmattn_cache_draft_params>();
  p.device = device;
  p.softmax_scale = softmax_scale;
  p.softcap = softcap;
  read_tensor(q, p.device, p.q, "q");
  read_tensor(k_new, p.device, p.k_new, "k_new");
  read_tensor(v_new, p.device, p.v_new, "v_new");
  read_tensor(score_new, p.device, p.score_new, "score_new");
  read_tensor(k_cache, p.device, p.k_cache, "k_cache");
  read_tensor(v_cache, p.device, p.v_cache, "v_cache");
  read_tensor(score, p.device, p.score, "score");
  read_tensor(position, p.device, p.position, "position");
  read_tensor(seen, p.device, p.seen, "seen");
  read_tensor(draft, p.device, p.draft, "draft");
  read_tensor(out, p.device, p.out, "out");
  return p;
}

dmattn_cache_commit_params make_cache_commit(int32_t device, py::handle draft, py::handle count, py::handle k_cache,
                                             py::handle v_cache, py::handle score, py::handle position,
                                             py::handle seen) {
  auto p = dmattn::make_params<dmattn_cache_commit_params>();
  p.device = device;
  read_tensor(draft, p.device, p.draft, "draft");
  read_tensor(count, p.device, p.count, "count");
  read_tensor(k_cache, p.device, p.k_cache, "k_cache");
  read_tensor(v_cache, p.device, p.v_cache, "v_cache");
  read_tensor(score, p.device, p.score, "score");
  read_tensor(position, p.device, p.position, "position");
  read_tensor(seen, p.device, p.seen, "seen");
  return p;
}

dmattn_join_keys_params make_join_keys(int32_t device, py::handle k_first, py::handle v_first, py::handle score_first,
                                       py::handle k_new, py::handle v_new, py::handle score_new, py::handle mask_new,
                                       py::handle k, py::handle v, py::handle score, py::handle place_first) {
  auto p = dmattn::make_params<dmattn_join_keys_params>();
  p.device = device;
  read_tensor(k_first, p.device, p.k_first, "k_first");
  read_tensor(v_first, p.device, p.v_first, "v_first");
  read_tensor(score_first, p.device, p.score_first, "score_first");
  read_tensor(k_new, p.device, p.k_new, "k_new");
  read_tensor(v_new, p.device, p.v_new, "v_new");
  read_tensor(score_new, p.device, p.score_new, "score_new");
  read_tensor(mask_new, p.device, p.mask_new, "mask_new");
  read_tensor(place_first, p.device, p.place_first, "place_first");
  read_tensor(k, p.device, p.k, "k");
  read_tensor(v, p.device, p.v, "v");
  read_tensor(score, p.device, p.score, "score");
  return p;
}

dmattn_keep_keys_params make_keep_keys(int32_t device, int64_t row, py::handle end, py::handle place, py::handle k,
                                       py::handle v, py::handle score, py::handle position, py::handle seen,
                                       py::handle k_kept, py::handle v_kept, py::handle score_kept,
                                       py::handle position_kept, py::handle seen_kept, bool starts_early) {
  auto p = dmattn::make_params<dmattn_keep_keys_params>();
  p.device = device;
  p.starts_early = starts_early ? 1 : 0;
  p.row = row;
  read_tensor(end, p.device, p.end, "end");
  read_tensor(place, p.device, p.place, "place");
  read_tensor(k, p.device, p.k, "k");
  read_tensor(v, p.device, p.v, "v");
  read_tensor(score, p.device, p.score, "score");
  read_tensor(position, p.device, p.position, "position");
  read_tensor(seen, p.device, p.seen, "seen");
  read_tensor(k_kept, p.device, p.k_kept, "k_kept");
  read_tensor(v_kept, p.device, p.v_kept, "v_kept");
  read_tensor(score_kept, p.device, p.score_kept, "score_kept");
  read_tensor(position_kept, p.device, p.position_kept, "position_kept");
  read_tensor(seen_kept, p.device, p.seen_kept, "seen_kept");
  return p;
}

// --- calls ----------------------------------------------------------------------------------------------------------

template <class Params>
size_t workspace_size(const Params& p) {
  return without_gil([&] { return dmattn::workspace_size(p); });
}

template <class Params>
void launch(const Params& p, uintptr_t workspace, size_t bytes, uintptr_t stream) {
  without_gil([&] { dmattn::launch(p, reinterpret_cast<void*>(workspace), bytes, reinterpret_cast<void*>(stream)); });
}

// Launches the call if it needs no workspace. Returns the bytes of workspace that it needs; unless that is 0, nothing
// has been launched. This saves Python code a call. The library plans a call only once anyway (see
// host/planned_call.h).
template <class Params>
size_t enqueue(const Params& p, uintptr_t stream) {
  return without_gil([&] {
    const size_t bytes = dmattn::workspace_size(p);
    if (bytes == 0) dmattn::launch(p, nullptr, 0, reinterpret_cast<void*>(stream));
    return bytes;
  });
}

// The functions enqueue_fwd and so on, which do the same and also get the workspace: see at_once.h.
template <auto make>
PyObject* enqueue_at_once(PyObject*, PyObject* const* given, Py_ssize_t count) {
  const auto first = [](const auto& p, uintptr_t stream) { return enqueue(p, stream); };
  const auto then = [](const auto& p, uintptr_t workspace, size_t bytes, uintptr_t stream) {
    launch(p, workspace, bytes, stream);
  };
  return dmattn::at_once::run(make, given, count, first, then);
}

PyCFunction as_function(PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

template <auto make>
PyMethodDef at_once(const char* name, const char* doc) {
  return {name, as_function(&enqueue_at_once<make>), METH_FASTCALL, doc};
}

PyMethodDef plain_functions[] = {
    at_once<&make_fwd>("enqueue_fwd",
                       "enqueue_fwd(*arguments) -> int\n\nTakes the arguments of FwdParams, then the stream."),
    at_once<&make_bwd>("enqueue_bwd",
                       "enqueue_bwd(*arguments) -> int\n\nTakes the arguments of BwdParams, then the stream."),
    at_once<&make_select>("enqueue_select",
                          "enqueue_select(*arguments) -> int\n\nTakes the arguments of SelectParams, then the stream."),
    at_once<&make_build_key_lists>(
        "enqueue_build_key_lists",
        "enqueue_build_key_lists(*arguments) -> int\n\nTakes the arguments of BuildKeyListsParams, then the stream."),
    at_once<&make_cache_append>(
        "enqueue_cache_append",
        "enqueue_cache_append(*arguments) -> int\n\nTakes the arguments of CacheAppendParams, then the stream."),
    at_once<&make_cache_draft>(
        "enqueue_cache_draft",
        "enqueue_cache_draft(*arguments) -> int\n\nTakes the arguments of CacheDraftParams, then the stream."),
    at_once<&make_cache_commit>(
        "enqueue_cache_commit",
        "enqueue_cache_commit(*arguments) -> int\n\nTakes the arguments of CacheCommitParams, then the stream."),
    at_once<&make_join_keys>(
        "enqueue_join_keys",
        "enqueue_join_keys(*arguments) -> int\n\nTakes the arguments of JoinKeysParams, then the stream."),
    at_once<&make_keep_keys>(
        "enqueue_keep_keys",
        "enqueue_keep_keys(*arguments) -> int\n\nTakes the arguments of KeepKeysParams, then the stream."),
    {"kind_of", as_function(&dmattn::kind_of), METH_FASTCALL,
     "kind_of(types, *tensors) -> bytes | None\n\nThe kind of the tensors; None if one is not of these types."},
    {nullptr, nullptr, 0, nullptr},
};

// --- information ---------------------------------------------------------------------------------------------------

bool reads(py::handle type) {
  return PyType_Check(type.ptr()) && dmattn::exchange::find_api(reinterpret_cast<PyTypeObject*>(type.ptr())) != nullptr;
}

py::list architectures() {
  py::list names;
  std::istringstream all(dmattn_architectures());
  for (std::string name; std::getline(all, name, ',');) names.append(py::str(name));
  return names;
}

std::string device_architecture(int32_t device) {
  return without_gil([&] {
    const char* name = nullptr;
    dmattn::check(dmattn_device_architecture(device, &name));
    return std::string(name);
  });
}

}  // namespace

PYBIND11_MODULE(_core, m) {
  using namespace pybind11::literals;
  m.doc() = "Masked and biased attention on CUDA: parameters and launches.";
  m.attr("FLOAT16") = static_cast<int>(DMATTN_FLOAT16);
  m.attr("BFLOAT16") = static_cast<int>(DMATTN_BFLOAT16);
  m.attr("FLOAT32") = static_cast<int>(DMATTN_FLOAT32);
  m.attr("BOOL") = static_cast<int>(DMATTN_BOOL);
  m.attr("INT32") = static_cast<int>(DMATTN_INT32);
  m.attr("INT64") = static_cast<int>(DMATTN_INT64);
  m.attr("HEADER_ABI_VERSION") = DMATTN_ABI_VERSION;

  py::class_<dmattn_fwd_params>(m, "FwdParams")
      .def(py::init(&make_fwd), "device"_a, "q"_a, "k"_a, "v"_a, "mask"_a, "bias"_a, "out"_a, "lse"_a,
           "softmax_scale"_a, "softcap"_a, "is_causal"_a, "num_splits"_a = 0, "selection"_a = py::none(),
           "lse_rest"_a = py::none(), "cu_seqlens_q"_a = py::none(), "cu_seqlens_k"_a = py::none(),
           "max_seqlen_q"_a = 0, "max_seqlen_k"_a = 0, "window"_a = 0)
      .def("workspace_size", &workspace_size<dmattn_fwd_params>)
      .def("enqueue", &enqueue<dmattn_fwd_params>, "stream"_a)
      .def("launch", &launch<dmattn_fwd_params>, "workspace"_a, "bytes"_a, "stream"_a);
  py::class_<dmattn_bwd_params>(m, "BwdParams")
      .def(py::init(&make_bwd), "device"_a, "q"_a, "k"_a, "v"_a, "mask"_a, "bias"_a, "out"_a, "lse"_a, "dout"_a,
           "dlse"_a, "dq"_a, "dk"_a, "dv"_a, "dbias"_a, "softmax_scale"_a, "softcap"_a, "is_causal"_a,
           "deterministic"_a, "selection"_a = py::none(), "lse_rest"_a = py::none(), "cu_seqlens_q"_a = py::none(),
           "cu_seqlens_k"_a = py::none(), "max_seqlen_q"_a = 0, "max_seqlen_k"_a = 0, "window"_a = 0,
           "keys_written"_a = 0)
      .def("workspace_size", &workspace_size<dmattn_bwd_params>)
      .def("enqueue", &enqueue<dmattn_bwd_params>, "stream"_a)
      .def("launch", &launch<dmattn_bwd_params>, "workspace"_a, "bytes"_a, "stream"_a);

  py::class_<dmattn_select_params>(m, "SelectParams")
      .def(py::init(&make_select), "device"_a, "scores"_a, "key_mask"_a, "selection"_a, "window"_a, "seqlen_q"_a,
           "is_causal"_a, "cu_seqlens"_a = py::none())
      .def("workspace_size", &workspace_size<dmattn_select_params>)
      .def("enqueue", &enqueue<dmattn_select_params>, "stream"_a)
      .def("launch", &launch<dmattn_select_params>, "workspace"_a, "bytes"_a, "stream"_a);
  py::class_<dmattn_build_key_lists_params>(m, "BuildKeyListsParams")
      .def(py::init(&make_build_key_lists), "device"_a, "selection"_a, "seqlen_q"_a, "reach"_a = 0,
           "needed"_a = py::none())
      .def("workspace_size", &workspace_size<dmattn_build_key_lists_params>)
      .def("enqueue", &enqueue<dmattn_build_key_lists_params>, "stream"_a)
      .def("launch", &launch<dmattn_build_key_lists_params>, "workspace"_a, "bytes"_a, "stream"_a);
  py::class_<dmattn_cache_append_params>(m, "CacheAppendParams")
      .def(py::init(&make_cache_append), "device"_a, "k_new"_a, "v_new"_a, "score_new"_a, "active"_a, "k_cache"_a,
           "v_cache"_a, "score"_a, "position"_a, "seen"_a, "evict"_a, "q"_a = py::none(), "out"_a = py::none(),
           "softmax_scale"_a = 1.f, "softcap"_a = 0.f)
      .def("workspace_size", &workspace_size<dmattn_cache_append_params>)
      .def("enqueue", &enqueue<dmattn_cache_append_params>, "stream"_a)
      .def("launch", &launch<dmattn_cache_append_params>, "workspace"_a, "bytes"_a, "stream"_a);
  py::class_<dmattn_cache_draft_params>(m, "CacheDraftParams")
      .def(py::init(&make_cache_draft), "device"_a, "q"_a, "k_new"_a, "v_new"_a, "score_new"_a, "k_cache"_a,
           "v_cache"_a, "score"_a, "position"_a, "seen"_a, "draft"_a, "out"_a, "softmax_scale"_a = 1.f,
           "softcap"_a = 0.f)
      .def("workspace_size", &workspace_size<dmattn_cache_draft_params>)
      .def("enqueue", &enqueue<dmattn_cache_draft_params>, "stream"_a)
      .def("launch", &launch<dmattn_cache_draft_params>, "workspace"_a, "bytes"_a, "stream"_a);
  py::class_<dmattn_cache_commit_params>(m, "CacheCommitParams")
      .def(py::init(&make_cache_commit), "device"_a, "draft"_a, "count"_a, "k_cache"_a, "v_cache"_a, "score"_a,
           "position"_a, "seen"_a)
      .def("workspace_size", &workspace_size<dmattn_cache_commit_params>)
      .def("enqueue", &enqueue<dmattn_cache_commit_params>, "stream"_a)
      .def("launch", &launch<dmattn_cache_commit_params>, "workspace"_a, "bytes"_a, "stream"_a);
  py::class_<dmattn_join_keys_params>(m, "JoinKeysParams")
      .def(py::init(&make_join_keys), "device"_a, "k_first"_a, "v_first"_a, "score_first"_a, "k_new"_a, "v_new"_a,
           "score_new"_a, "mask_new"_a, "k"_a, "v"_a, "score"_a, "place_first"_a = py::none())
      .def("workspace_size", &workspace_size<dmattn_join_keys_params>)
      .def("enqueue", &enqueue<dmattn_join_keys_params>, "stream"_a)
      .def("launch", &launch<dmattn_join_keys_params>, "workspace"_a, "bytes"_a, "stream"_a);
  py::class_<dmattn_keep_keys_params>(m, "KeepKeysParams")
      .def(py::init(&make_keep_keys), "device"_a, "row"_a, "end"_a, "place"_a, "k"_a, "v"_a, "score"_a, "position"_a,
           "seen"_a, "k_kept"_a, "v_kept"_a, "score_kept"_a, "position_kept"_a, "seen_kept"_a = py::none(),
           "starts_early"_a = false)
      .def("workspace_size", &workspace_size<dmattn_keep_keys_params>)
      .def("enqueue", &enqueue<dmattn_keep_keys_params>, "stream"_a)
      .def("launch", &launch<dmattn_keep_keys_params>, "workspace"_a, "bytes"_a, "stream"_a);

  if (PyModule_AddFunctions(m.ptr(), plain_functions) != 0) throw py::error_already_set();
  m.def("reads", &reads, "type"_a);
  m.def("select_capacity", &dmattn_select_capacity, "window"_a, "seqlen_k"_a, "is_causal"_a);
  m.def("abi_version", &dmattn_abi_version);
  m.def("version", &dmattn_version);
  m.def("cuda_version", &dmattn_cuda_version);
  m.def("architectures", &architectures);
  m.def("device_architecture", &device_architecture, "device"_a);
}
