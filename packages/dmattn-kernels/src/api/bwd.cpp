// The backward.
#include "api/operation.h"
#include "kernels/backward/backward.h"
#include "kernels/masks/masks.h"
#include "kernels/shared/fill.h"
#include "kernels/units.h"

namespace dmattn {
namespace {

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
    check_cuda(cudaMemsetAsync(plan.dbias, 0, plan.dbias_bytes(), stream), "clearing dbias");
  }
}

// Kernels over lists write dk and dv of listed keys only. The rows of all other keys are cleared here, unless dk and
// dv come from sums by key, or a sole chunk clears them after the round.
void clear_dkv(const BwdPlan& plan, cudaStream_t stream) {
  const BwdParams& kernel = plan.kernel;
  const bool has_sums = kernel.dk_accum != nullptr || kernel.dv_accum != nullptr || kernel.terms.first != nullptr;
  if (plan.has_sole_chunk || has_sums) return;
  const auto clear = [&](void* grad, const Strides3& stride) {
    if (grad == nullptr) return;
    check_cuda(fill_zero(grad, stride, kernel.packing.slabs(kernel.batch), kernel.packing.rows_k(kernel.seqlen_k),
                         kernel.nheads_k, kernel.head_dim, stream),
               "clearing dk and dv");
  };
  clear(kernel.dk, kernel.dk_stride);
  clear(kernel.dv, kernel.dv_stride);
}

// The memory to clear before a round, which is before its lists are made. It begins with the sums that all rounds add
// to, which are cleared for the first round only.
Cleared zeros_of(const BwdPlan& plan, const BwdRound& round, bool is_first) {
  const size_t begin = is_first ? 0 : plan.once_zero_bytes;
  size_t end = plan.once_zero_bytes + plan.counter_zero_bytes;
  if (!clears_beside_lists(plan)) end += plan.dq_zero_bytes + (round.continues() ? 0 : plan.dkv_zero_bytes);
  return {{static_cast<char*>(plan.scratch_zeros) + begin, end - begin}, {plan.convert_dq.dq, plan.dq_slot_bytes}};
}

void clear_dbias(const BwdPlan& plan, cudaStream_t stream) {
  if (plan.dbias_zero_bytes == 0) return;
  check_cuda(clear_bytes(plan.dbias, plan.dbias_zero_bytes, stream), "clearing dbias");
}

// Returns whether the sums of the first round have been cleared, too. In small calls that saves a launch.
bool prepare(const BwdPlan& plan, cudaStream_t stream) {
  if (plan.launches && plan.walk == KeyWalk::kMaskList) {
    // This also clears used_rows, which bwd_preprocess() then fills.
    check_cuda(compact_keys(plan.mask, plan.kernel.keys, plan.used_rows, stream), "listing the keys of the mask");
  }
  Cleared cleared;
  if (plan.launches) {
    const Cleared first = zeros_of(plan, BwdRound{}, /*is_first=*/true);
    if (bwd_preprocess_clears(plan.preprocess, first.bytes())) cleared = first;
  }
  check_cuda(bwd_preprocess(plan.preprocess, cleared, plan.unit.dtype, stream), "preparing lse and delta");
  clear_dbias(plan, stream);
  if (!plan.launches) return false;
  if (has_mask(plan.mask) && plan.walk != KeyWalk::kMaskList) {
    check_cuda(pack_mask(plan.mask, plan.kernel.mask, stream), "packing the mask");
  }
  if (is_gathered(plan.walk)) clear_dkv(plan, stream);
  return cleared.bytes() > 0;
}

void clear_sums(const Cleared& zeros, cudaStream_t stream) {
  for (const ClearedRange& range : {zeros.sums, zeros.in_dq}) {
    if (range.bytes > 0) check_cuda(clear_bytes(range.begin, range.bytes, stream), "clearing the accumulators");
  }
}

void launch_kernel(const BwdPlan& plan, BwdParams p, BwdLauncher unit, cudaStream_t stream) {
  if (plan.chunk_blocks > 0) {
    const ChunkKeyListsParams chunks = bwd_chunk_params(plan, p);
    check_cuda(chunk_key_lists(chunks, bwd_carried_terms(plan, p), stream), "putting lists of keys together");
  }
  if (plan.schedule != nullptr) {
    check_cuda(bwd_schedule(bwd_schedule_lists(p), p.batch, p.nheads_k, p.head_ratio, plan.tile.block_n, plan.max_work,
                            plan.max_tiles, plan.max_splits, plan.even_blocks, plan.schedule, stream),
               "scheduling the lists of keys");
  }
  KernelChoice choice = plan.choice;
  choice.blocks = bwd_blocks(plan, p);
  check_cuda(unit(choice, p, stream), "launching the backward kernel");
  if (plan.keeps_terms) {
    check_cuda(reduce_chunk_terms(p, bwd_carried_terms(plan, p), plan.unit.dtype, stream),
               "summing dk and dv over chunks");
  }
}

void launch_kernels(const BwdPlan& plan, const BwdParams& round, cudaStream_t stream) {
  const BwdLauncher unit = find_bwd_unit(plan.unit);
  const BwdSequence& sequence = plan.sequence;
  const int32_t batches = sequence.per_batch ? round.batch : 1;
  const int32_t heads_k = sequence.per_head_k ? round.nheads_k : 1;
  const int32_t groups_end = sequence.per_group ? round.group_end : round.group_begin + 1;
  for (int32_t b = 0; b < batches; ++b) {
    for (int32_t hk = 0; hk < heads_k; ++hk) {
      for (int32_t g = round.group_begin; g < groups_end; ++g) {
        launch_kernel(plan, bwd_launch_params(plan, round, b, hk, g), unit, stream);
      }
    }
  }
}

// Writes dk and dv of a round from their sums.
void finish_keys(const BwdPlan& plan, const BwdRound& round, const BwdParams& kernel, cudaStream_t stream) {
  const bool completes = completes_dkv(plan, round);
  if ((kernel.dk_slots != nullptr || kernel.dv_slots != nullptr) && completes) {
    check_cuda(reduce_dkv(kernel, plan.unit.dtype, plan.tile.block_n, plan.unit.head_dim_tile, stream),
               "summing dk and dv");
  }
  if ((kernel.dk_accum != nullptr || kernel.dv_accum != nullptr) && completes) {
    check_cuda(convert_dkv(kernel, plan.unit.dtype, stream), "rounding dk and dv");
  }
  if (plan.has_sole_chunk) check_cuda(clear_unseen_dkv(kernel, stream), "clearing dk and dv");
}

void finish_dbias(const BwdPlan& plan, cudaStream_t stream) {
  if (plan.dbias_cols) check_cuda(reduce_dbias_cols(plan.reduce_dbias, stream), "summing dbias");
  if (plan.dbias_rows) check_cuda(reduce_dbias_rows(plan.reduce_dbias, stream), "summing dbias");
  if (plan.dbias_accum != nullptr) {
    const DbiasSumRows sums = {plan.dbias_accum, plan.dbias_elements / plan.dbias_keys, plan.dbias_keys,
                               plan.kernel.dbias_row_stride, plan.dbias_pitch};
    check_cuda(round_dbias(sums, plan.dbias, plan.dbias_dtype, stream), "rounding dbias");
  }
}

void tell_keys_are_written(const dmattn_bwd_params& p, cudaStream_t stream) {
  if (p.keys_written == nullptr) return;
  check_cuda(cudaEventRecord(static_cast<cudaEvent_t>(p.keys_written), stream), "recording keys_written");
}

// Computes all gradients. dq of the last round comes last, so that whoever waits for keys_written need not wait for
// it. is_cleared: the sums of the first round are zeros already.
void launch_rounds(const BwdPlan& plan, const dmattn_bwd_params& p, bool is_cleared, cudaStream_t stream) {
  bool is_first = true;
  for_each_round(plan, [&](const BwdRound& round) {
    if (!(is_first && is_cleared)) clear_sums(zeros_of(plan, round, is_first), stream);
    is_first = false;
    const BwdParams kernel = bwd_round_params(plan, round);
    launch_kernels(plan, kernel, stream);
    finish_keys(plan, round, kernel, stream);
    if (is_last_round(plan, round)) {
      finish_dbias(plan, stream);
      tell_keys_are_written(p, stream);
    }
    if (kernel.dq_accum != nullptr && !plan.spares.dq) {
      check_cuda(convert_dq(bwd_round_dq(plan, round), plan.unit.dtype, stream), "rounding dq");
    }
  });
}

// Few keys: one launch, and what comes before and after it if dbias is a sum.
void launch_short(const BwdPlan& plan, cudaStream_t stream) {
  clear_dbias(plan, stream);
  clear_sums(zeros_of(plan, BwdRound{}, /*is_first=*/true), stream);
  check_cuda(find_short_bwd_unit(plan.unit)(plan.choice, plan.short_kernel, stream),
             "launching the backward kernel for few keys");
  finish_dbias(plan, stream);
}

void launch(const BwdPlan& plan, const dmattn_bwd_params& p, cudaStream_t stream) {
  if (plan.zeros) {
    in_batched_form(p, [&](const dmattn_bwd_params& batched, PerKey) { write_zeros(plan, batched, stream); });
  } else if (plan.is_short()) {
    launch_short(plan, stream);
  } else if (!plan.is_empty()) {
    const bool is_cleared = prepare(plan, stream);
    if (plan.launches) return launch_rounds(plan, p, is_cleared, stream);
    finish_dbias(plan, stream);
  }
  tell_keys_are_written(p, stream);
}

}  // namespace
}  // namespace dmattn

extern "C" dmattn_status dmattn_bwd_workspace_size(const dmattn_bwd_params* params, size_t* bytes) {
  return dmattn::report_workspace_size(params, bytes);
}

extern "C" dmattn_status dmattn_bwd(const dmattn_bwd_params* params, void* workspace, size_t bytes, void* stream) {
  return dmattn::run(params, workspace, bytes, stream,
                     [](const auto& call, cudaStream_t s) { dmattn::launch(call.plan, call.params, s); });
}
