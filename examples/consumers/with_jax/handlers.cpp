// Handlers for XLA's foreign function interface (FFI) that call dmattn_fwd and dmattn_bwd. They are compiled without
// CUDA, since they only pass the stream on. attention.py registers them.
#include <cstddef>
#include <cstdint>
#include <dmattn/dmattn.hpp>
#include <optional>
#include <string>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

// The library's code for a type; 0 for types that it does not know, which its error then names.
int32_t dtype_of(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::F16:
      return DMATTN_FLOAT16;
    case ffi::DataType::BF16:
      return DMATTN_BFLOAT16;
    case ffi::DataType::F32:
      return DMATTN_FLOAT32;
    case ffi::DataType::PRED:
      return DMATTN_BOOL;
    case ffi::DataType::S32:
      return DMATTN_INT32;
    default:
      return 0;
  }
}

// XLA hands over contiguous arrays unless a layout is asked for.
dmattn_tensor view(const ffi::AnyBuffer& buffer) {
  dmattn_tensor tensor{};
  tensor.data = buffer.untyped_data();
  tensor.dtype = dtype_of(buffer.element_type());
  const auto shape = buffer.dimensions();
  tensor.ndim = static_cast<int32_t>(shape.size());
  int64_t stride = 1;
  // A tensor of more than 4 dimensions is refused by its ndim.
  for (size_t i = shape.size() < 4 ? shape.size() : 4; i-- > 0;) {
    tensor.shape[i] = shape[i];
    tensor.stride[i] = stride;
    stride *= shape[i];
  }
  return tensor;
}

// An error of the library as one of XLA's, with the same words.
ffi::Error as_xla(const dmattn::Error& error) {
  switch (error.status()) {
    case DMATTN_ERROR_INVALID_VALUE:
    case DMATTN_ERROR_INVALID_DTYPE:
      return ffi::Error(ffi::ErrorCode::kInvalidArgument, error.what());
    case DMATTN_ERROR_UNSUPPORTED:
      return ffi::Error(ffi::ErrorCode::kUnimplemented, error.what());
    case DMATTN_ERROR_NO_DEVICE:
      return ffi::Error(ffi::ErrorCode::kFailedPrecondition, error.what());
    default:
      return ffi::Error(ffi::ErrorCode::kInternal, error.what());
  }
}

// The settings of a call, under the names that attention.py gives them.
struct Settings {
  float softmax_scale, softcap;
  bool is_causal, has_mask, has_bias;
};

using Places = std::vector<dmattn_tensor*>;

// Where the arrays of a call belong, in the order in which attention.py passes them.
template <class Params>
Places operands(Params& params, const Settings& settings) {
  Places places = {&params.q, &params.k, &params.v};
  if (settings.has_mask) places.push_back(&params.mask);
  if (settings.has_bias) places.push_back(&params.bias);
  return places;
}

Places inputs(dmattn_fwd_params& params, const Settings& settings) { return operands(params, settings); }

Places results(dmattn_fwd_params& params, const Settings&) { return {&params.out, &params.softmax_lse}; }

Places inputs(dmattn_bwd_params& params, const Settings& settings) {
  Places places = operands(params, settings);
  places.insert(places.end(), {&params.out, &params.softmax_lse, &params.dout, &params.dsoftmax_lse});
  return places;
}

Places results(dmattn_bwd_params& params, const Settings& settings) {
  Places places = {&params.dq, &params.dk, &params.dv};
  if (settings.has_bias) places.push_back(&params.dbias);
  return places;
}

// The parameters of a call; throws dmattn::Error where the number of arrays is wrong.
template <class Params>
Params describe(int32_t device, const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                const Settings& settings) {
  auto params = dmattn::make_params<Params>();
  params.device = device;
  params.softmax_scale = settings.softmax_scale;
  params.softcap = settings.softcap;
  params.is_causal = settings.is_causal;
  const Places in = inputs(params, settings), out = results(params, settings);
  if (args.size() != in.size() || rets.size() != out.size()) {
    throw dmattn::Error(DMATTN_ERROR_INVALID_VALUE,
                        "got " + std::to_string(args.size()) + " arrays and " + std::to_string(rets.size()) +
                            " results; wanted " + std::to_string(in.size()) + " and " + std::to_string(out.size()));
  }
  for (size_t i = 0; i < in.size(); ++i) *in[i] = view(args.get<ffi::AnyBuffer>(i).value());
  for (size_t i = 0; i < out.size(); ++i) *out[i] = view(*rets.get<ffi::AnyBuffer>(i).value());
  return params;
}

// On CUDA: enqueues the call on XLA's stream, with scratch memory from XLA's allocator. XLA may hand out that memory
// again as soon as this returns, but only to work that comes later on the same stream.
template <class Params>
ffi::Error launch(void* stream, int32_t device, ffi::ScratchAllocator scratch, ffi::RemainingArgs args,
                  ffi::RemainingRets rets, Settings settings) try {
  const auto params = describe<Params>(device, args, rets, settings);
  const size_t bytes = dmattn::workspace_size(params);
  std::optional<void*> workspace = nullptr;
  if (bytes > 0) workspace = scratch.Allocate(bytes, 256);
  if (!workspace) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted,
                      "no " + std::to_string(bytes) + " bytes of scratch memory to be had");
  }
  dmattn::launch(params, *workspace, bytes, stream);
  return ffi::Error::Success();
} catch (const dmattn::Error& error) {
  return as_xla(error);
}

// On the CPU: checks the call as launch() does, and then returns the error that it needs a GPU.
template <class Params>
ffi::Error refuse(ffi::RemainingArgs args, ffi::RemainingRets rets, Settings settings) try {
  dmattn::workspace_size(describe<Params>(0, args, rets, settings));
  return ffi::Error(ffi::ErrorCode::kFailedPrecondition, "q is on the CPU; wanted all arrays on a CUDA GPU");
} catch (const dmattn::Error& error) {
  return as_xla(error);
}

auto on_cuda() {
  return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<void*>>().Ctx<ffi::DeviceOrdinal>().Ctx<ffi::ScratchAllocator>();
}

}  // namespace

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(Settings, ffi::StructMember<float>("softmax_scale"),
                                      ffi::StructMember<float>("softcap"), ffi::StructMember<bool>("is_causal"),
                                      ffi::StructMember<bool>("has_mask"), ffi::StructMember<bool>("has_bias"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(dmattn_jax_fwd_CUDA, launch<dmattn_fwd_params>,
                              on_cuda().RemainingArgs().RemainingRets().Attrs<Settings>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(dmattn_jax_bwd_CUDA, launch<dmattn_bwd_params>,
                              on_cuda().RemainingArgs().RemainingRets().Attrs<Settings>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(dmattn_jax_fwd_cpu, refuse<dmattn_fwd_params>,
                              ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs<Settings>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(dmattn_jax_bwd_cpu, refuse<dmattn_bwd_params>,
                              ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs<Settings>());
