// What moving keys will do: how they are copied, and by how many thread blocks.
#pragma once

#include <cstddef>

#include "dmattn/dmattn.h"
#include "kernels/keys_params.h"

namespace dmattn {

struct JoinKeysPlan {
  JoinKeysParams params;
  size_t workspace_bytes = 0;
};
JoinKeysPlan plan_join_keys(const dmattn_join_keys_params& p);
inline void place(JoinKeysPlan&, void*) {}  // needs no workspace

struct KeepKeysPlan {
  KeepKeysParams params;
  size_t workspace_bytes = 0;
};
KeepKeysPlan plan_keep_keys(const dmattn_keep_keys_params& p, int32_t num_sms);
inline void place(KeepKeysPlan&, void*) {}

}  // namespace dmattn
