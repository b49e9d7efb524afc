// The GPU that a call names, looked up on first use: loading the library touches no driver. The only place that reads a
// device; what chips get is in host/arch.cpp.
#pragma once

#include <cstdint>

#include "host/arch.h"

namespace dmattn {

// Fails with DMATTN_ERROR_NO_DEVICE (no driver, no GPU, no such number) or DMATTN_ERROR_UNSUPPORTED (no kernels for
// it). The result, and the value of DMATTN_ARCH, are kept for the life of the process.
const Device& find_device(int32_t device);

// Makes a device current for the life of this object, then the former one again.
class DeviceGuard {
 public:
  explicit DeviceGuard(int32_t device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int former_;
  bool switched_;
};

}  // namespace dmattn
