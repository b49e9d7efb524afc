#include "api/device.h"

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdlib>
#include <mutex>

#include "api/operation.h"

namespace dmattn {
namespace {

constexpr int kMaxDevices = 64;
#ifdef DMATTN_ALL_TILES
constexpr bool kHasAllTiles = true;
#else
constexpr bool kHasAllTiles = false;
#endif

// Name of the kernel set that DMATTN_ARCH asks for, on all devices; nullptr: each device gets its own.
const char* forced_kernels() {
  static const char* const value = std::getenv("DMATTN_ARCH");
  return value != nullptr && value[0] != '\0' ? value : nullptr;
}

int attribute(cudaDeviceAttr which, int32_t device) {
  int value = 0;
  check_cuda(cudaDeviceGetAttribute(&value, which, device), "reading the properties of the device");
  return value;
}

Device inspect(int32_t device) {
  Chip chip;
  chip.device = device;
  chip.capability =
      10 * attribute(cudaDevAttrComputeCapabilityMajor, device) + attribute(cudaDevAttrComputeCapabilityMinor, device);
  chip.smem_per_block = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  Device found;
  found.kernels = &choose_kernel_set(chip, forced_kernels(), dmattn_architectures(), kHasAllTiles);
  found.num_sms = attribute(cudaDevAttrMultiProcessorCount, device);
  found.smem_per_sm = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  return found;
}

void check_exists(int32_t device) {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0) {
    (void)cudaGetLastError();  // clears the runtime's record of the error, which is reported below
    // If there is no driver, the runtime reports an insufficient one.
    const char* why = error == cudaErrorInsufficientDriver
                          ? "there is no NVIDIA driver, or it is too old for this build"
                      : error == cudaSuccess ? cudaGetErrorString(cudaErrorNoDevice)
                                             : cudaGetErrorString(error);
    fail(DMATTN_ERROR_NO_DEVICE, "device is %d, but no NVIDIA GPU can be used here: %s", device, why);
  }
  if (device < 0 || device >= count || device >= kMaxDevices) {
    fail(DMATTN_ERROR_NO_DEVICE, "device is %d; wanted a number below %d, the number of GPUs", device, count);
  }
}

}  // namespace

const Device& find_device(int32_t device) {
  static std::atomic<bool> ready[kMaxDevices];
  static Device devices[kMaxDevices];
  static std::mutex mutex;
  const bool in_range = device >= 0 && device < kMaxDevices;
  if (in_range && ready[device].load(std::memory_order_acquire)) return devices[device];
  const std::lock_guard<std::mutex> lock(mutex);
  check_exists(device);
  if (!ready[device].load(std::memory_order_relaxed)) {
    devices[device] = inspect(device);
    ready[device].store(true, std::memory_order_release);
  }
  return devices[device];
}

DeviceGuard::DeviceGuard(int32_t device) : former_(device), switched_(false) {
  check_cuda(cudaGetDevice(&former_), "reading the current device");
  if (former_ == device) return;
  check_cuda(cudaSetDevice(device), "making the device current");
  switched_ = true;
}

DeviceGuard::~DeviceGuard() {
  if (switched_) (void)cudaSetDevice(former_);
}

}  // namespace dmattn

extern "C" dmattn_status dmattn_device_architecture(int32_t device, const char** name) {
  return dmattn::at_boundary([&] {
    if (name == nullptr) dmattn::fail(DMATTN_ERROR_INVALID_VALUE, "name is null; wanted where to put the name");
    *name = dmattn::find_device(device).kernels->name;
  });
}
