// Selection of keys, by score and by given intervals: validate, look the device up, launch.
#include "kernels/prep/select.h"

#include <algorithm>

#include "api/device.h"
#include "api/error.h"
#include "api/operands.h"
#include "api/validate.h"

namespace dmattn {
namespace {

// Stride along a dimension, 0 where there is one entry for all.
int64_t broadcast_stride(const dmattn_tensor& t, int dim) { return t.shape[dim] == 1 ? 0 : t.stride[dim]; }

SelectParams read_select(const dmattn_select_params& p, const Device& device) {
  SelectParams select;
  select.num_sms = device.num_sms;
  select.batch = static_cast<int32_t>(p.selection.idx.shape[0]);
  select.heads = static_cast<int32_t>(p.selection.idx.shape[1]);
  select.seqlen_q = static_cast<int32_t>(p.seqlen_q);
  select.seqlen_k = static_cast<int32_t>(p.scores.shape[2]);
  select.window = p.window;
  select.is_causal = p.is_causal != 0;
  select.scores = p.scores.data;
  select.dtype = static_cast<Dtype>(p.scores.dtype);
  select.score_batch_stride = broadcast_stride(p.scores, 0);
  select.score_head_stride = broadcast_stride(p.scores, 1);
  select.score_col_stride = p.scores.stride[2];
  if (is_present(p.key_mask)) {
    select.key_mask = static_cast<const uint8_t*>(p.key_mask.data);
    select.mask_batch_stride = broadcast_stride(p.key_mask, 0);
    select.mask_head_stride = broadcast_stride(p.key_mask, 1);
    select.mask_col_stride = p.key_mask.stride[2];
  }
  if (is_present(p.cu_seqlens)) {
    select.cu_seqlens = static_cast<const int32_t*>(p.cu_seqlens.data);
    select.documents = static_cast<int32_t>(p.cu_seqlens.shape[0]) - 1;
  }
  return select;
}

IntervalParams read_intervals(const dmattn_build_key_lists_params& p) {
  IntervalParams intervals;
  intervals.seqlen_q = static_cast<int32_t>(p.seqlen_q);
  const int64_t seqlen_k = p.selection.end.shape[2];
  intervals.seqlen_k = static_cast<int32_t>(seqlen_k);
  intervals.reach = static_cast<int32_t>(p.reach == 0 ? seqlen_k : std::min(p.reach, seqlen_k));
  intervals.needed = static_cast<int32_t*>(p.needed.data);
  return intervals;
}

}  // namespace
}  // namespace dmattn

extern "C" int64_t dmattn_select_capacity(int64_t window, int64_t seqlen_k, int32_t is_causal) {
  if (window < 1 || seqlen_k < 0 || seqlen_k > dmattn::kMaxSelectKeys) return 0;
  dmattn::SelectParams select;
  select.window = static_cast<int32_t>(std::min<int64_t>(window, dmattn::kMaxSelectKeys));
  select.seqlen_k = static_cast<int32_t>(seqlen_k);
  select.is_causal = is_causal != 0;
  return dmattn::select_capacity(select);
}

extern "C" dmattn_status dmattn_select_workspace_size(const dmattn_select_params* params, size_t* bytes) {
  using namespace dmattn;
  return at_boundary([&] {
    const dmattn_select_params p = read_params(params, "dmattn_select_params");
    if (bytes == nullptr) fail(DMATTN_ERROR_INVALID_VALUE, "bytes is null; wanted where to put the size");
    validate(p, Pointers::kOptional);
    *bytes = select_workspace_size(read_select(p, find_device(p.device)));
  });
}

extern "C" dmattn_status dmattn_select_keys(const dmattn_select_params* params, void* workspace, size_t bytes,
                                            void* stream) {
  using namespace dmattn;
  return at_boundary([&] {
    const dmattn_select_params p = read_params(params, "dmattn_select_params");
    validate(p, Pointers::kRequired);
    const SelectParams select = read_select(p, find_device(p.device));
    validate_workspace(workspace, bytes, select_workspace_size(select));
    const DeviceGuard guard(p.device);
    check_cuda(select_keys(select, read_lists(p.selection), workspace, static_cast<cudaStream_t>(stream)),
               "selecting keys");
  });
}

extern "C" dmattn_status dmattn_build_key_lists_workspace_size(const dmattn_build_key_lists_params* params,
                                                               size_t* bytes) {
  using namespace dmattn;
  return at_boundary([&] {
    const dmattn_build_key_lists_params p = read_params(params, "dmattn_build_key_lists_params");
    if (bytes == nullptr) fail(DMATTN_ERROR_INVALID_VALUE, "bytes is null; wanted where to put the size");
    validate(p, Pointers::kOptional);
    find_device(p.device);
    *bytes = interval_workspace_size(read_intervals(p), read_lists(p.selection));
  });
}

extern "C" dmattn_status dmattn_build_key_lists(const dmattn_build_key_lists_params* params, void* workspace,
                                                size_t bytes, void* stream) {
  using namespace dmattn;
  return at_boundary([&] {
    const dmattn_build_key_lists_params p = read_params(params, "dmattn_build_key_lists_params");
    validate(p, Pointers::kRequired);
    find_device(p.device);
    const IntervalParams intervals = read_intervals(p);
    const KeyList lists = read_lists(p.selection);
    validate_workspace(workspace, bytes, interval_workspace_size(intervals, lists));
    const DeviceGuard guard(p.device);
    check_cuda(build_interval_lists(intervals, lists, workspace, static_cast<cudaStream_t>(stream)),
               "building key lists");
  });
}
