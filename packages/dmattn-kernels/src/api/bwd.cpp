// Backward: validate, look the device up, plan, launch.
#include <initializer_list>

#include "api/error.h"
#include "api/operands.h"
#include "api/plan.h"
#include "api/units.h"
#include "api/validate.h"

namespace dmattn {
namespace {

size_t element_bytes(int32_t dtype) { return dtype == DMATTN_FLOAT32 ? 4 : 2; }

// No query or no key: nothing contributes to any gradient.
void write_zeros(const BwdPlan& plan, const dmattn_bwd_params& p, cudaStream_t stream) {
  const auto clear = [&](const dmattn_tensor& t) {
    if (!is_present(t)) return;
    check_cuda(fill_zero(t.data, read_strides(t), static_cast<int>(t.shape[0]), static_cast<int>(t.shape[1]),
                         static_cast<int>(t.shape[2]), static_cast<int>(t.shape[3]), stream),
               "clearing a gradient");
  };
  clear(p.dq);
  clear(p.dk);
  clear(p.dv);
  if (plan.dbias_elements > 0) {
    const size_t bytes = static_cast<size_t>(plan.dbias_elements) * element_bytes(p.dbias.dtype);
    check_cuda(cudaMemsetAsync(p.dbias.data, 0, bytes, stream), "clearing dbias");
  }
}

void prepare(const BwdPlan& plan, const dmattn_bwd_params& p, cudaStream_t stream) {
  const BwdParams& kernel = plan.kernel;
  check_cuda(bwd_preprocess(plan.preprocess, plan.dtype, stream), "preparing lse and delta");
  if (plan.dbias_zero_bytes > 0) {
    check_cuda(cudaMemsetAsync(p.dbias.data, 0, plan.dbias_zero_bytes, stream), "clearing dbias");
  }
  if (!plan.launches) return;
  if (plan.gathered) {
    if (!plan.selected) check_cuda(compact_keys(plan.mask, kernel.keys, stream), "listing the keys of the mask");
    // Gathered tiles write the rows of the keys that are kept.
    const bool has_sums = kernel.dk_accum != nullptr || kernel.dv_accum != nullptr;
    for (const dmattn_tensor* grad : {&p.dk, &p.dv}) {
      if (!is_present(*grad) || has_sums) continue;
      check_cuda(fill_zero(grad->data, read_strides(*grad), kernel.packing.slabs(kernel.batch),
                           kernel.packing.rows_k(kernel.seqlen_k), kernel.nheads_k, kernel.head_dim, stream),
                 "clearing dk and dv");
    }
  } else if (has_mask(plan.mask)) {
    check_cuda(pack_mask(plan.mask, kernel.mask, stream), "packing the mask");
  }
}

void clear_sums(const BwdPlan& plan, const BwdChunk& chunk, bool is_first, cudaStream_t stream) {
  const size_t begin = is_first ? 0 : plan.once_zero_bytes;
  const size_t end = plan.once_zero_bytes + plan.chunk_zero_bytes + (chunk.continues() ? 0 : plan.dkv_zero_bytes);
  if (begin == end) return;
  check_cuda(cudaMemsetAsync(static_cast<char*>(plan.scratch_zeros) + begin, 0, end - begin, stream),
             "clearing the accumulators");
}

void launch_kernel(const BwdPlan& plan, const BwdParams& p, BwdLauncher unit, cudaStream_t stream) {
  if (plan.schedule != nullptr) {
    check_cuda(bwd_schedule(bwd_schedule_lists(p), p.batch, p.nheads_k, p.head_ratio, plan.tile.block_n, plan.max_work,
                            plan.max_tiles, plan.max_splits, plan.schedule, stream),
               "scheduling the lists of keys");
  }
  check_cuda(unit(plan.family, p, stream), "launching the backward kernel");
}

void launch_kernels(const BwdPlan& plan, const BwdParams& chunk, cudaStream_t stream) {
  const BwdLauncher unit = bwd_unit(plan.dtype, plan.dim_tile, plan.gathered);
  const BwdSequence& sequence = plan.sequence;
  const int32_t batches = sequence.per_batch ? chunk.batch : 1;
  const int32_t heads_k = sequence.per_head_k ? chunk.nheads_k : 1;
  const int32_t groups_end = sequence.per_group ? chunk.group_end : chunk.group_begin + 1;
  for (int32_t b = 0; b < batches; ++b) {
    for (int32_t hk = 0; hk < heads_k; ++hk) {
      for (int32_t g = chunk.group_begin; g < groups_end; ++g) {
        launch_kernel(plan, bwd_launch_params(plan, chunk, b, hk, g), unit, stream);
      }
    }
  }
}

// dq, dk and dv of a chunk from their sums.
void round_sums(const BwdPlan& plan, const BwdChunk& chunk, const BwdParams& kernel, cudaStream_t stream) {
  const bool completes = completes_dkv(plan, chunk);
  if ((kernel.dk_slots != nullptr || kernel.dv_slots != nullptr) && completes) {
    check_cuda(reduce_dkv(kernel, plan.dtype, plan.tile.block_n, plan.dim_tile, stream), "summing dk and dv");
  }
  if ((kernel.dk_accum != nullptr || kernel.dv_accum != nullptr) && completes) {
    check_cuda(convert_dkv(kernel, plan.dtype, stream), "rounding dk and dv");
  }
  if (kernel.dq_accum != nullptr) {
    check_cuda(convert_dq(bwd_chunk_dq(plan, chunk), plan.dtype, stream), "rounding dq");
  }
}

void launch_chunks(const BwdPlan& plan, cudaStream_t stream) {
  bool is_first = true;
  for_each_chunk(plan, [&](const BwdChunk& chunk) {
    clear_sums(plan, chunk, is_first, stream);
    is_first = false;
    const BwdParams kernel = bwd_chunk_params(plan, chunk);
    launch_kernels(plan, kernel, stream);
    round_sums(plan, chunk, kernel, stream);
  });
}

void finish_dbias(const BwdPlan& plan, const dmattn_bwd_params& p, cudaStream_t stream) {
  if (plan.dbias_cols) check_cuda(reduce_dbias_cols(plan.reduce_dbias, stream), "summing dbias");
  if (plan.dbias_rows) check_cuda(reduce_dbias_rows(plan.reduce_dbias, stream), "summing dbias");
  if (plan.dbias_accum != nullptr) {
    check_cuda(
        convert_f32(plan.dbias_accum, p.dbias.data, static_cast<Dtype>(p.dbias.dtype), plan.dbias_elements, stream),
        "rounding dbias");
  }
}

void launch(const BwdPlan& plan, const dmattn_bwd_params& p, cudaStream_t stream) {
  if (plan.zeros) {
    write_zeros(plan, p, stream);
    return;
  }
  if (!plan.launches && !plan.dbias_rows) return;
  prepare(plan, p, stream);
  if (plan.launches) launch_chunks(plan, stream);
  finish_dbias(plan, p, stream);
}

}  // namespace
}  // namespace dmattn

extern "C" dmattn_status dmattn_bwd_workspace_size(const dmattn_bwd_params* params, size_t* bytes) {
  using namespace dmattn;
  return at_boundary([&] {
    const dmattn_bwd_params p = read_params(params, "dmattn_bwd_params");
    if (bytes == nullptr) fail(DMATTN_ERROR_INVALID_VALUE, "bytes is null; wanted where to put the size");
    validate(p, Pointers::kOptional);
    *bytes = plan_bwd(p, find_device(p.device), nullptr).workspace_bytes;
  });
}

extern "C" dmattn_status dmattn_bwd(const dmattn_bwd_params* params, void* workspace, size_t bytes, void* stream) {
  using namespace dmattn;
  return at_boundary([&] {
    const dmattn_bwd_params p = read_params(params, "dmattn_bwd_params");
    validate(p, Pointers::kRequired);
    const Device& device = find_device(p.device);
    const BwdPlan plan = plan_bwd(p, device, workspace);
    validate_workspace(workspace, bytes, plan.workspace_bytes);
    const DeviceGuard guard(p.device);
    launch(plan, with_batch(p), static_cast<cudaStream_t>(stream));
  });
}
