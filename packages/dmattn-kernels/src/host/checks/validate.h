// Checks on the caller's parameters. They all come before the device is looked up.
#pragma once

#include <cstring>

#include "dmattn/dmattn.h"
#include "host/error.h"

namespace dmattn {

// Whether data pointers have to be set and aligned. They need not be when only the size of the workspace is asked
// for; `complete` then says whether they already are, so that the launch need not check the same parameters again.
struct PointerCheck {
  bool required;
  bool complete = true;
};

// Fail with DMATTN_ERROR_INVALID_VALUE, _INVALID_DTYPE or _UNSUPPORTED.
void validate(const dmattn_fwd_params& p, PointerCheck& pointers);
void validate(const dmattn_bwd_params& p, PointerCheck& pointers);
void validate(const dmattn_select_params& p, PointerCheck& pointers);
void validate(const dmattn_build_key_lists_params& p, PointerCheck& pointers);
void validate(const dmattn_cache_append_params& p, PointerCheck& pointers);
void validate(const dmattn_cache_draft_params& p, PointerCheck& pointers);
void validate(const dmattn_cache_commit_params& p, PointerCheck& pointers);
void validate(const dmattn_join_keys_params& p, PointerCheck& pointers);
void validate(const dmattn_keep_keys_params& p, PointerCheck& pointers);
void validate_workspace(const void* workspace, size_t bytes, size_t wanted);

inline bool is_present(const dmattn_tensor& t) { return t.ndim > 0; }
inline bool has_selection(const dmattn_key_selection& s) { return is_present(s.idx); }

// Copies the caller's struct, as far as it is known, over the `known` zeroed bytes of `to`: see read_params.
void copy_params(const void* given, size_t known, const char* type, void* to);

// The parameters in the form that this library knows. Fields that the caller's older header does not have become
// zero; fields of a newer header that this library does not know must be zero.
template <class Params>
Params read_params(const Params* given, const char* type) {
  Params p;
  std::memset(&p, 0, sizeof(p));
  copy_params(given, sizeof(p), type, &p);
  return p;
}

}  // namespace dmattn
