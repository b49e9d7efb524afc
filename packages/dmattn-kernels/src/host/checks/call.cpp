// Checks on what every call is given besides tensors: the parameter struct itself, and the workspace.
#include <cstdint>

#include "host/checks/validate.h"

namespace dmattn {

void validate_workspace(const void* workspace, size_t bytes, size_t wanted) {
  if (bytes < wanted) {
    fail(DMATTN_ERROR_INVALID_VALUE, "workspace has %zu bytes; wanted at least %zu", bytes, wanted);
  }
  if (wanted > 0 && (workspace == nullptr || reinterpret_cast<uintptr_t>(workspace) % 256 != 0)) {
    fail(DMATTN_ERROR_INVALID_VALUE, "workspace is at %p; wanted device memory that starts on 256 bytes", workspace);
  }
}

void copy_params(const void* given, size_t known, const char* type, void* to) {
  if (given == nullptr) fail(DMATTN_ERROR_INVALID_VALUE, "params is null; wanted a %s", type);
  size_t size;
  std::memcpy(&size, given, sizeof(size));
  if (size < sizeof(size)) {
    fail(DMATTN_ERROR_INVALID_VALUE, "struct_size is %zu; wanted sizeof(%s), %zu", size, type, known);
  }
  const auto* bytes = static_cast<const unsigned char*>(given);
  for (size_t i = known; i < size; ++i) {
    if (bytes[i] != 0) {
      fail(DMATTN_ERROR_INVALID_VALUE,
           "struct_size is %zu and byte %zu of the %s is set; this library knows the first %zu bytes, wanted zeros "
           "after them",
           size, i, type, known);
    }
  }
  std::memcpy(to, given, size < known ? size : known);
}

}  // namespace dmattn
