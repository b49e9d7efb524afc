// Handlers for XLA's foreign function interface around dmattn_fwd. Compiled without CUDA: the stream is passed on as it
// comes. attention.py registers them.
#include <cstddef>
#include <cstdint>
#include <dmattn/dmattn.hpp>
#include <optional>
#include <string>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

// 0, which the library refuses by name, for types that it does not know.
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

// The library's status and words as XLA's.
ffi::Error error_of(dmattn_status status) {
  switch (status) {
    case DMATTN_OK:
      return ffi::Error::Success();
    case DMATTN_ERROR_INVALID_VALUE:
    case DMATTN_ERROR_INVALID_DTYPE:
      return ffi::Error(ffi::ErrorCode::kInvalidArgument, dmattn_last_error());
    case DMATTN_ERROR_UNSUPPORTED:
      return ffi::Error(ffi::ErrorCode::kUnimplemented, dmattn_last_error());
    case DMATTN_ERROR_NO_DEVICE:
      return ffi::Error(ffi::ErrorCode::kFailedPrecondition, dmattn_last_error());
    default:
      return ffi::Error(ffi::ErrorCode::kInternal, dmattn_last_error());
  }
}

// What a call may say beside its arrays; the names are those that attention.py gives.
struct Settings {
  float softmax_scale, softcap;
  bool is_causal, has_mask, has_bias;
};

// The parameters of a call whose arrays are q, k, v, then the mask and the bias as far as they are there.
ffi::Error fill(dmattn_fwd_params& params, int32_t device, const ffi::RemainingArgs& arrays, ffi::AnyBuffer out,
                ffi::AnyBuffer lse, const Settings& settings) {
  dmattn_tensor* places[5] = {&params.q, &params.k, &params.v};
  size_t count = 3;
  if (settings.has_mask) places[count++] = &params.mask;
  if (settings.has_bias) places[count++] = &params.bias;
  if (arrays.size() != count) {
    return ffi::Error::InvalidArgument("got " + std::to_string(arrays.size()) + " arrays; wanted " +
                                       std::to_string(count));
  }
  for (size_t i = 0; i < count; ++i) {
    const auto array = arrays.get<ffi::AnyBuffer>(i);
    if (array.has_error()) return array.error();
    *places[i] = view(*array);
  }
  params.out = view(out);
  params.softmax_lse = view(lse);
  params.device = device;
  params.softmax_scale = settings.softmax_scale;
  params.softcap = settings.softcap;
  params.is_causal = settings.is_causal;
  return ffi::Error::Success();
}

// On CUDA: enqueues the forward on XLA's stream, with scratch memory from XLA's allocator. XLA may hand out that memory
// again as soon as this returns, but only to work that comes later on the same stream.
ffi::Error forward(void* stream, int32_t device, ffi::ScratchAllocator scratch, ffi::RemainingArgs arrays,
                   ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> lse, Settings settings) {
  auto params = dmattn::make_params<dmattn_fwd_params>();
  ffi::Error error = fill(params, device, arrays, *out, *lse, settings);
  if (error.failure()) return error;
  size_t bytes = 0;
  const dmattn_status status = dmattn_fwd_workspace_size(&params, &bytes);
  if (status != DMATTN_OK) return error_of(status);
  std::optional<void*> workspace = nullptr;
  if (bytes > 0) workspace = scratch.Allocate(bytes, 256);
  if (!workspace) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted,
                      "no " + std::to_string(bytes) + " bytes of scratch memory to be had");
  }
  return error_of(dmattn_fwd(&params, *workspace, bytes, stream));
}

// On the CPU: checks the call as the other does, and then says that it cannot be done here.
ffi::Error refuse(ffi::RemainingArgs arrays, ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> lse,
                  Settings settings) {
  auto params = dmattn::make_params<dmattn_fwd_params>();
  ffi::Error error = fill(params, 0, arrays, *out, *lse, settings);
  if (error.failure()) return error;
  size_t bytes = 0;
  const dmattn_status status = dmattn_fwd_workspace_size(&params, &bytes);
  if (status != DMATTN_OK) return error_of(status);
  return ffi::Error(ffi::ErrorCode::kFailedPrecondition, "q is on the CPU; wanted all arrays on a CUDA GPU");
}

}  // namespace

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(Settings, ffi::StructMember<float>("softmax_scale"),
                                      ffi::StructMember<float>("softcap"), ffi::StructMember<bool>("is_causal"),
                                      ffi::StructMember<bool>("has_mask"), ffi::StructMember<bool>("has_bias"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(dmattn_jax_fwd, forward,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<void*>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ctx<ffi::ScratchAllocator>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attrs<Settings>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    dmattn_jax_refuse, refuse,
    ffi::Ffi::Bind().RemainingArgs().Ret<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>().Attrs<Settings>());
