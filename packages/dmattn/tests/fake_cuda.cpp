// Lets torch's autograd take tensors that claim to be on CUDA, with a torch that has no CUDA:
// a GPU with one stream, on which everything is already done. See fake_cuda.py.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

constexpr auto kPlace = static_cast<size_t>(DeviceType::CUDA);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return getDevice(); }
  Device getDevice() const override { return Device(DeviceType::CUDA, 0); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const override { return Stream(Stream::DEFAULT, getDevice()); }
  Stream getDefaultStream(Device device) const override { return getStream(device); }
  Stream exchangeStream(Stream stream) const override { return stream; }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
};

struct Hooks : at::CUDAHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
};

Guard guard;
Hooks hooks;
const c10::impl::DeviceGuardImplInterface* guard_before = nullptr;
void* functions_before = nullptr;

// Torch has made its object for hooks long before. It keeps no data, so that the functions of the
// one above can take the place of its own.
void** functions_of_hooks() {
  const auto& found = at::detail::getCUDAHooks();
  return reinterpret_cast<void**>(const_cast<at::CUDAHooksInterface*>(&found));
}

}  // namespace

extern "C" void install() {
  functions_before = *functions_of_hooks();
  *functions_of_hooks() = *reinterpret_cast<void**>(&hooks);
  guard_before = c10::impl::device_guard_impl_registry[kPlace].exchange(&guard);
}

extern "C" void uninstall() {
  *functions_of_hooks() = functions_before;
  c10::impl::device_guard_impl_registry[kPlace].store(guard_before);
}
