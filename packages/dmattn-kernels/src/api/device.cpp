#include "api/device.h"

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "api/error.h"
#include "dmattn/dmattn.h"

namespace dmattn {
namespace {

constexpr int kMaxDevices = 64;
constexpr int kSharedMemorySm80 = 163 * 1024;  // what the largest tiles of each family take of it, at most
constexpr int kSharedMemorySm89 = 99 * 1024;

// Whether the binary holds the sm89 tile shapes for a chip: those compiled from compute_89 (see cmake/cuda.cmake), and
// every chip in test builds.
bool has_sm89_tiles(int major, int minor) {
#ifdef DMATTN_ALL_TILES
  (void)major, (void)minor;
  return true;
#else
  if (major * 10 + minor != 89 && major != 12) return false;
  char name[16];
  std::snprintf(name, sizeof(name), "sm_%d%d", major, minor);
  return std::strstr(dmattn_architectures(), name) != nullptr;
#endif
}

const char* forced_family() {
  static const char* const value = std::getenv("DMATTN_ARCH");
  return value != nullptr && value[0] != '\0' ? value : nullptr;
}

Family choose_family(int shared_memory) {
  const char* forced = forced_family();
  if (forced == nullptr) return shared_memory >= kSharedMemorySm80 ? Family::kSm80 : Family::kSm89;
  if (std::strcmp(forced, "sm80") == 0) return Family::kSm80;
  if (std::strcmp(forced, "sm89") == 0) return Family::kSm89;
  fail(DMATTN_ERROR_INVALID_VALUE, "DMATTN_ARCH in the environment is '%s'; wanted sm80 or sm89", forced);
}

int attribute(cudaDeviceAttr which, int32_t device) {
  int value = 0;
  check_cuda(cudaDeviceGetAttribute(&value, which, device), "reading the properties of the device");
  return value;
}

Device inspect(int32_t device) {
  const int major = attribute(cudaDevAttrComputeCapabilityMajor, device);
  const int minor = attribute(cudaDevAttrComputeCapabilityMinor, device);
  if (major < 8) {
    fail(DMATTN_ERROR_UNSUPPORTED, "device %d has compute capability %d.%d; wanted at least 8.0", device, major, minor);
  }
  const int shared_memory = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  Device found;
  found.num_sms = attribute(cudaDevAttrMultiProcessorCount, device);
  found.smem_per_sm = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  found.family = choose_family(shared_memory);
  const bool is_sm89 = found.family == Family::kSm89;
  if (is_sm89 && !has_sm89_tiles(major, minor)) {
    fail(DMATTN_ERROR_UNSUPPORTED,
         "device %d has compute capability %d.%d; this build (%s) lacks the sm89 kernels for it, which fit %d bytes of "
         "shared memory a block",
         device, major, minor, dmattn_architectures(), kSharedMemorySm89);
  }
  const int wanted = is_sm89 ? kSharedMemorySm89 : kSharedMemorySm80;
  if (shared_memory < wanted) {
    fail(DMATTN_ERROR_UNSUPPORTED, "device %d has %d bytes of shared memory a block; wanted %d for the %s kernels",
         device, shared_memory, wanted, family_name(found.family));
  }
  return found;
}

void check_exists(int32_t device) {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0) {
    (void)cudaGetLastError();  // said here, and not by whatever asks next
    // The runtime calls a driver that is not there an insufficient one.
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

const char* family_name(Family family) { return family == Family::kSm89 ? "sm89" : "sm80"; }

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
    *name = dmattn::family_name(dmattn::find_device(device).family);
  });
}
