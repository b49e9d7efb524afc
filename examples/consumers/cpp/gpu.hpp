// Device memory from the CUDA driver, which is opened at run time: this program builds without a CUDA toolkit and
// starts on machines without a GPU. A program that uses the CUDA runtime passes its own pointers and streams instead.
#ifndef CONSUMER_GPU_HPP_
#define CONSUMER_GPU_HPP_

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

class Gpu {
 public:
  // Makes the primary context of device 0, the one that the CUDA runtime uses, current. Throws std::runtime_error.
  Gpu() : driver_(dlopen("libcuda.so.1", RTLD_NOW)) {
    if (driver_ == nullptr) throw std::runtime_error("no CUDA driver: libcuda.so.1 cannot be opened");
    void* context = nullptr;
    call<unsigned>("cuInit", 0);
    call<int*, int>("cuDeviceGet", &device_, 0);
    call<void**, int>("cuDevicePrimaryCtxRetain", &context, device_);
    call<void*>("cuCtxSetCurrent", context);
  }
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;
  ~Gpu() {
    for (uint64_t address : allocated_) function<uint64_t>("cuMemFree_v2")(address);
    function<int>("cuDevicePrimaryCtxRelease_v2")(device_);
  }

  void* allocate(size_t bytes) {
    uint64_t address = 0;
    call<uint64_t*, size_t>("cuMemAlloc_v2", &address, bytes);
    allocated_.push_back(address);
    return reinterpret_cast<void*>(address);
  }

  template <class T>
  void* upload(const std::vector<T>& values) {
    void* device = allocate(values.size() * sizeof(T));
    call<uint64_t, const void*, size_t>("cuMemcpyHtoD_v2", reinterpret_cast<uint64_t>(device), values.data(),
                                        values.size() * sizeof(T));
    return device;
  }

  // Waits for the default stream, on which this program launches.
  template <class T>
  std::vector<T> download(const void* device, size_t count) {
    std::vector<T> values(count);
    call<void*>("cuStreamSynchronize", nullptr);
    call<void*, uint64_t, size_t>("cuMemcpyDtoH_v2", values.data(), reinterpret_cast<uint64_t>(device),
                                  count * sizeof(T));
    return values;
  }

 private:
  template <class... Arguments>
  using Function = int (*)(Arguments...);

  template <class... Arguments>
  Function<Arguments...> function(const char* name) {
    void* found = dlsym(driver_, name);
    if (found == nullptr) throw std::runtime_error(std::string("the CUDA driver has no function ") + name);
    return reinterpret_cast<Function<Arguments...>>(found);
  }

  template <class... Arguments>
  void call(const char* name, Arguments... arguments) {
    const int result = function<Arguments...>(name)(arguments...);
    if (result != 0) throw std::runtime_error(std::string(name) + " failed with error " + std::to_string(result));
  }

  void* driver_;
  int device_ = 0;
  std::vector<uint64_t> allocated_;
};

#endif  // CONSUMER_GPU_HPP_
