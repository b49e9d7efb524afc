// Lays out arrays in the caller's workspace; no other code does. With a null base the same calls only count the
// bytes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "host/arithmetic.h"

namespace dmattn {

class Workspace {
 public:
  explicit Workspace(void* base) : base_(static_cast<char*>(base)) {}

  // Memory for `count` elements, starting at a multiple of 256 bytes; nullptr if there is no base.
  template <class T>
  T* take(int64_t count) {
    return static_cast<T*>(take_bytes(static_cast<size_t>(count) * sizeof(T)));
  }
  void* take_bytes(size_t bytes) {
    void* at = here();
    bytes_ += round_up(bytes, kAlignment);
    return at;
  }
  // Where the next array will start.
  void* here() const { return base_ == nullptr ? nullptr : base_ + bytes_; }
  size_t bytes() const { return bytes_; }

 private:
  static constexpr size_t kAlignment = 256;
  char* base_;
  size_t bytes_ = 0;
};

}  // namespace dmattn
