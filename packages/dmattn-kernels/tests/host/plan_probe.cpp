// The decisions of src/host/plan as JSON, for the tests in this folder. Compiled with src/host alone.
#include <chrono>
#include <cstring>
#include <exception>
#include <sstream>
#include <string>

#include "host/arch.h"
#include "host/checks/validate.h"
#include "host/early_start.h"
#include "host/launch_tag.h"
#include "host/operations.h"
#include "host/planned_call.h"
#include "kernels/attention/sm90/numbered_rows.h"
#include "kernels/divisor.h"

namespace dmattn {

namespace {
int32_t missing_arch = 0;  // has no units
bool has_short_units = true;
}  // namespace

// CMake generates this with the table of units; here every one that cmake/units.cmake lists is there.
bool has_unit(const Unit& unit) {
  const bool is_hopper = unit.direction == Direction::kForward || unit.direction == Direction::kBackward;
  const bool is_short = unit.direction == Direction::kShortForward || unit.direction == Direction::kShortBackward;
  if (is_short && !(has_short_units && unit.head_dim_tile == 64 && !unit.gathered)) return false;
  const bool is_listed = unit.arch == Arch{80} || is_hopper;
  return is_listed && static_cast<int32_t>(unit.arch) != missing_arch;
}

namespace {

class Json {
 public:
  template <class T>
  void put(const char* name, T value) {
    out_ << (out_.tellp() == 0 ? "{\"" : ", \"") << name << "\": " << +value;
  }
  void put_address(const char* name, const void* value) { put(name, reinterpret_cast<uintptr_t>(value)); }
  void put_strides(const std::string& name, const Strides3& s) {
    put((name + ".batch").c_str(), s.batch);
    put((name + ".head").c_str(), s.head);
    put((name + ".row").c_str(), s.row);
  }
  std::string text() const { return out_.str() + "}"; }

 private:
  std::ostringstream out_;
};

void put_bias(Json& json, const BiasParams& bias) {
  json.put("bias.kind", static_cast<int>(bias.kind));
  json.put("bias.head_ratio", bias.head_ratio);
  json.put("bias.batch_stride", bias.batch_stride);
  json.put("bias.head_stride", bias.head_stride);
  json.put("bias.row_stride", bias.row_stride);
  json.put("bias.col_stride", bias.col_stride);
  json.put_address("bias.ptr", bias.ptr);
}

template <class Kernel>
void put_kernel(Json& json, const Kernel& p) {
  json.put("batch", p.batch);
  json.put("seqlen_q", p.seqlen_q);
  json.put("nheads", p.nheads);
  json.put("nheads_k", p.nheads_k);
  json.put("head_ratio", p.head_ratio);
  json.put("num_splits", p.num_splits);
  json.put("is_causal", p.is_causal);
  json.put("window", p.window);
  json.put("vec_q", p.vec_q);
  json.put("vec_k", p.vec_k);
  json.put("mask.head_ratio", p.mask.head_ratio);
  json.put("mask.batch", p.mask.batch);
  json.put("keys.heads", p.keys.heads);
  json.put("keys.batch", p.keys.batch);
  json.put("keys.head_ratio", p.keys.head_ratio);
  json.put("keys.block_rows", p.keys.block_rows);
  json.put_address("mask.bits", p.mask.bits);
  json.put_address("keys.idx", p.keys.idx);
  json.put_address("keys.full", p.keys.full);
  json.put_address("keys.end", p.keys.end);
  json.put_address("lse_rest", p.lse_rest);
  json.put("seqlen_k", p.seqlen_k);
  json.put("packing.sequences", p.packing.sequences);
  json.put("packing.total_q", p.packing.total_q);
  json.put("packing.total_k", p.packing.total_k);
  json.put("packing.m_blocks", p.packing.m_blocks);
  json.put("packing.bias_col_stride", p.packing.bias_col_stride);
  json.put_address("packing.cu_seqlens_k", p.packing.cu_seqlens_k);
  json.put("keys.capacity", p.keys.capacity);
  json.put_address("q", p.q);
  json.put_address("k", p.k);
  json.put_strides("q_stride", p.q_stride);
  put_bias(json, p.bias);
}

Device device_of(const char* kernels, int num_sms) {
  Device device;
  device.kernels = find_kernel_set(kernels);
  device.num_sms = num_sms;
  return device;
}

// What the kernels for few keys are given, in place of all else.
template <class Plan>
void put_short(Json& json, const Plan& plan) {
  const auto& p = plan.short_kernel;
  json.put("short", 1);
  json.put("arch", static_cast<int>(plan.unit.arch));
  json.put("dim_tile", plan.unit.head_dim_tile);
  json.put("tiles", static_cast<int>(plan.choice.tiles));
  json.put("level", static_cast<int>(plan.choice.level));
  json.put("blocks", plan.choice.blocks);
  json.put("slices", p.batch_slices);
  json.put("workspace_bytes", plan.workspace_bytes);
  json.put("batch", p.batch);
  json.put("seqlen_q", p.seqlen_q);
  json.put("seqlen_k", p.seqlen_k);
  json.put("nheads", p.nheads);
  json.put("nheads_k", p.nheads_k);
  json.put("head_dim", p.head_dim);
  json.put("head_ratio", p.head_ratio);
  json.put("softmax_scale", p.softmax_scale);
  json.put("is_causal", p.is_causal);
  json.put_address("q", p.q);
  json.put_address("k", p.k);
  json.put_address("v", p.v);
  json.put_address("out", p.out);
  json.put_address("lse", p.lse);
  json.put_address("lse_rest", p.lse_rest);
  json.put_strides("q_stride", p.q_stride);
  json.put_strides("k_stride", p.k_stride);
  json.put_strides("v_stride", p.v_stride);
  json.put_strides("out_stride", p.out_stride);
  json.put_strides("lse_stride", p.lse_stride);
  put_bias(json, p.bias);
  json.put_address("mask.ptr", p.mask.ptr);
  json.put("mask.batch_stride", p.mask.batch_stride);
  json.put("mask.head_stride", p.mask.head_stride);
  json.put("mask.row_stride", p.mask.row_stride);
  json.put("mask.col_stride", p.mask.col_stride);
  json.put("mask.head_ratio", p.mask_head_ratio);
}

template <class Plan>
void put_kernel_choice(Json& json, const Plan& plan) {
  json.put("block_m", plan.tile.block_m);
  json.put("block_n", plan.tile.block_n);
  json.put("dim_tile", plan.unit.head_dim_tile);
  json.put("arch", static_cast<int>(plan.unit.arch));
  json.put("level", static_cast<int>(plan.choice.level));
  json.put("walk", static_cast<int>(plan.walk));
  json.put("gathered", plan.unit.gathered);
  json.put("workspace_bytes", plan.workspace_bytes);
}

std::string describe(const FwdPlan& plan) {
  Json json;
  if (plan.is_short()) {
    put_short(json, plan);
    return json.text();
  }
  json.put("short", 0);
  put_kernel_choice(json, plan);
  json.put("blocks", plan.choice.blocks);
  json.put("is_empty", plan.is_empty);
  json.put("no_keys", plan.no_keys);
  json.put("decode", plan.is_decode());
  const TokenRows& rows = plan.kernel.token_rows;
  json.put("token_rows.count", rows.count);
  json.put("token_rows.group", rows.group.value);
  json.put("token_rows.q_token", rows.q_token);
  json.put("token_rows.out_token", rows.out_token);
  json.put("token_rows.lse_token", rows.lse_token);
  put_kernel(json, plan.kernel);
  json.put_strides("out_stride", plan.kernel.out_stride);
  json.put_strides("lse_stride", plan.kernel.lse_stride);
  json.put_address("out_accum", plan.kernel.out_accum);
  json.put_address("lse_accum", plan.kernel.lse_accum);
  json.put_address("arrivals", plan.arrivals);
  return json.text();
}

std::string describe_short(const BwdPlan& plan) {
  const ShortBwdParams& p = plan.short_kernel;
  Json json;
  put_short(json, plan);
  json.put_address("dout", p.dout);
  json.put_address("dlse", p.dlse);
  json.put_address("dq", p.dq);
  json.put_address("dk", p.dk);
  json.put_address("dv", p.dv);
  json.put_strides("dout_stride", p.dout_stride);
  json.put_strides("dlse_stride", p.dlse_stride);
  json.put_strides("dq_stride", p.dq_stride);
  json.put_strides("dk_stride", p.dk_stride);
  json.put_strides("dv_stride", p.dv_stride);
  json.put("dbias_kind", static_cast<int>(p.dbias_kind));
  json.put_address("dbias", p.dbias);
  json.put("dbias_batch_stride", p.dbias_batch_stride);
  json.put("dbias_head_stride", p.dbias_head_stride);
  json.put("dbias_row_stride", p.dbias_row_stride);
  json.put("dbias_elements", plan.dbias_elements);
  json.put("dbias_zero_bytes", plan.dbias_zero_bytes);
  json.put("scratch_zero_bytes",
           plan.once_zero_bytes + plan.counter_zero_bytes + plan.dq_zero_bytes + plan.dkv_zero_bytes);
  json.put_address("scratch_zeros", plan.scratch_zeros);
  json.put_address("dbias_accum", plan.dbias_accum);
  json.put("dbias_cols_reduced", plan.dbias_cols);
  json.put("dbias_rows_reduced", plan.dbias_rows);
  return json.text();
}

std::string describe(const BwdPlan& plan, const BwdRound& round, const BwdParams& p) {
  Json json;
  json.put("short", 0);
  int rounds = 0;
  for_each_round(plan, [&](const BwdRound&) { ++rounds; });
  json.put("rounds", rounds);
  json.put("round.batch", round.batch);
  json.put("round.batches", round.batches);
  json.put("round.head_k", round.head_k);
  json.put("round.heads_k", round.heads_k);
  json.put("round.group", round.group);
  json.put("round.groups", round.groups);
  json.put("round.row_block", round.row_block);
  json.put("round.row_blocks", round.row_blocks);
  json.put("completes_dkv", completes_dkv(plan, round));
  const ConvertDqParams dq = bwd_round_dq(plan, round);
  json.put_address("dq.dq", dq.dq);
  json.put("dq.batch", dq.batch);
  json.put("dq.nheads", dq.nheads);
  json.put("dq.seqlen_q", dq.seqlen_q);
  json.put("dq.dq_blocks", dq.dq_blocks);
  put_kernel_choice(json, plan);
  json.put("blocks", plan.launches ? bwd_blocks(plan, p) : 0);
  json.put("zeros", plan.zeros);
  json.put("launches", plan.launches);
  json.put("per_batch", plan.sequence.per_batch);
  json.put("per_head_k", plan.sequence.per_head_k);
  json.put("per_group", plan.sequence.per_group);
  json.put("max_work", plan.max_work);
  json.put("max_tiles", plan.max_tiles);
  json.put("max_splits", plan.max_splits);
  json.put("once_zero_bytes", plan.once_zero_bytes);
  json.put("counter_zero_bytes", plan.counter_zero_bytes);
  json.put("dq_zero_bytes", plan.dq_zero_bytes);
  json.put("dkv_zero_bytes", plan.dkv_zero_bytes);
  json.put("dq_slot_bytes", plan.dq_slot_bytes);
  json.put_address("scratch_zeros", plan.scratch_zeros);
  json.put("dbias_cols_reduced", plan.dbias_cols);
  json.put("dbias_rows_reduced", plan.dbias_rows);
  json.put("dbias_elements", plan.dbias_elements);
  json.put("dbias_zero_bytes", plan.dbias_zero_bytes);
  put_kernel(json, p);
  json.put("deterministic", p.deterministic);
  json.put("group_begin", p.group_begin);
  json.put("group_end", p.group_end);
  json.put("max_work_items", p.max_work_items);
  json.put("seqlen_q_rounded", p.seqlen_q_rounded);
  json.put("dbias_kind", static_cast<int>(p.dbias_kind));
  json.put("bias_pairs", static_cast<int>(p.bias_pairs));
  json.put("mirrors_items", p.mirrors_items);
  json.put_address("dbias_accum", plan.dbias_accum);
  json.put("dbias_batch_stride", p.dbias_batch_stride);
  json.put("dbias_head_stride", p.dbias_head_stride);
  json.put("dbias_row_stride", p.dbias_row_stride);
  json.put_address("lse", p.lse);
  json.put_address("delta", p.delta);
  json.put_address("dq_accum", p.dq_accum);
  json.put_address("dq", p.dq);
  json.put("dq_blocks", p.dq_blocks);
  json.put("dq_dims", p.dq_dims);
  json.put("row_block_begin", p.row_block_begin);
  json.put("row_blocks", p.row_blocks);
  json.put_address("dk", p.dk);
  json.put_address("dv", p.dv);
  json.put_strides("dk_stride", p.dk_stride);
  json.put_strides("dv_stride", p.dv_stride);
  json.put("spares.dq", plan.spares.dq);
  json.put("spares.dk", plan.spares.dk);
  json.put("spares.dv", plan.spares.dv);
  json.put_address("dq_semaphore", p.dq_semaphore);
  json.put_address("dbias_semaphore", p.dbias_semaphore);
  json.put_address("dkv_semaphore", p.dkv_semaphore);
  json.put_address("work_counter", p.work_counter);
  json.put_address("dk_slots", p.dk_slots);
  json.put_address("dv_slots", p.dv_slots);
  json.put_address("dk_accum", p.dk_accum);
  json.put_address("dv_accum", p.dv_accum);
  json.put_address("dbias_cols", p.dbias_cols);
  json.put_address("dbias", p.dbias);
  json.put_address("schedule", p.schedule);
  json.put_address("keys.count", plan.launches && plan.unit.gathered ? bwd_schedule_lists(p).count : nullptr);
  json.put("chunk_blocks", plan.chunk_blocks);
  json.put("has_whole_items", plan.has_whole_items);
  json.put("has_sole_chunk", plan.has_sole_chunk);
  json.put_address("used_rows", plan.used_rows);
  json.put("keeps_terms", plan.keeps_terms);
  BwdParams chunked = p;
  if (plan.chunk_blocks > 0) bwd_chunk_params(plan, chunked);
  const KeyList& chunks = chunked.chunks.keys;
  json.put("chunks.batch", chunks.batch);
  json.put("chunks.heads", chunks.heads);
  json.put("chunks.head_ratio", chunks.head_ratio);
  json.put("chunks.blocks", chunks.blocks);
  json.put("chunks.block_rows", chunks.block_rows);
  json.put("chunks.capacity", chunks.capacity);
  json.put_address("chunks.idx", chunks.idx);
  json.put_address("chunks.count", chunks.count);
  json.put_address("chunks.end", chunks.end);
  json.put_address("chunks.tile_rows", chunked.chunks.tile_rows);
  json.put_address("terms.first", p.terms.first);
  json.put_address("terms.dk", p.terms.dk);
  json.put_address("terms.dv", p.terms.dv);
  json.put_address("terms.dbias", p.terms.dbias);
  json.put("terms.capacity", p.terms.capacity);
  const CarriedTerms carried = plan.launches ? bwd_carried_terms(plan, p) : CarriedTerms{};
  json.put_address("carried.places", carried.places);
  json.put_address("carried.from_dk", carried.from_dk);
  json.put_address("carried.from_dv", carried.from_dv);
  json.put_address("carried.to_dk", carried.to_dk);
  json.put_address("carried.to_dv", carried.to_dv);
  json.put("carried.capacity", carried.capacity);
  json.put("carried.keys", carried.keys);
  json.put("lse_scale", plan.preprocess.lse_scale);
  json.put("rest_scale", plan.preprocess.rest_scale);
  return json.text();
}

// Writes the text and returns the status.
template <class Body>
int answer(char* to, size_t size, Body&& body) {
  std::string text;
  dmattn_status status = DMATTN_OK;
  try {
    text = body();
  } catch (const Failure& failure) {
    status = failure.status;
    text = last_error();
  }
  std::strncpy(to, text.c_str(), size - 1);
  to[size - 1] = '\0';
  return status;
}

// The plan in a workspace at `base`, after it has been in another: where it lay before leaves nothing behind.
template <class Params>
typename Operation<Params>::Plan placed_plan(const Params* given, const Device& device, void* base) {
  const Params p = read_params(given, Operation<Params>::kParams);
  PointerCheck pointers{/*required=*/true};
  validate(p, pointers);
  typename Operation<Params>::Plan plan = Operation<Params>::plan(p, device);
  place(plan, static_cast<char*>(base) + (size_t{1} << 42));
  place(plan, base);
  return plan;
}

}  // namespace
}  // namespace dmattn

extern "C" int probe_fwd(const dmattn_fwd_params* params, const char* kernels, int num_sms, void* base, char* to,
                         size_t size) {
  using namespace dmattn;
  return answer(to, size, [&] { return describe(placed_plan(params, device_of(kernels, num_sms), base)); });
}

// What a caller is told whose tensors have no memory as yet.
extern "C" int probe_bwd_size(const dmattn_bwd_params* params, const char* kernels, int num_sms, char* to,
                              size_t size) {
  using namespace dmattn;
  return answer(to, size, [&] {
    const dmattn_bwd_params p = read_params(params, Operation<dmattn_bwd_params>::kParams);
    PointerCheck pointers{/*required=*/false};
    validate(p, pointers);
    Json json;
    json.put("workspace_bytes", plan_bwd(p, device_of(kernels, num_sms)).workspace_bytes);
    return json.text();
  });
}

// Of round number `round`, the launch for its batch b, kv head hk, head g of its group.
extern "C" int probe_bwd(const dmattn_bwd_params* params, const char* kernels, int num_sms, void* base, int round,
                         int b, int hk, int g, char* to, size_t size) {
  using namespace dmattn;
  return answer(to, size, [&] {
    const BwdPlan plan = placed_plan(params, device_of(kernels, num_sms), base);
    if (plan.is_short()) return describe_short(plan);
    if (!plan.launches) return describe(plan, {}, plan.kernel);
    BwdRound chosen;
    int i = 0;
    for_each_round(plan, [&](const BwdRound& each) {
      if (i++ == round) chosen = each;
    });
    return describe(plan, chosen, bwd_launch_params(plan, bwd_round_params(plan, chosen), b, hk, g));
  });
}

namespace dmattn {
namespace {

std::string describe(const SelectionPlan& plan) {
  const prep::SelectPlan& steps = plan.steps;
  Json json;
  json.put("workspace_bytes", plan.workspace_bytes);
  json.put("rows", steps.rows);
  json.put("offset", steps.offset);
  json.put("digits", steps.digits);
  json.put("single_list", steps.single_list);
  json.put("one_launch", steps.one_launch);
  json.put("grid_keys", steps.grid_keys);
  json.put("chunks", steps.chunks);
  json.put("sets", steps.sets);
  json.put("first_set", steps.first_set);
  json.put("set_origin", steps.set_origin);
  json.put("super_keys", steps.super_keys);
  json.put("set_capacity", steps.set_capacity);
  json.put("segment_blocks", steps.segment_blocks);
  json.put("segment_threads", steps.segment_threads);
  json.put("ord_pitch", steps.ord_pitch);
  json.put("zero_bytes", steps.zero_bytes);
  json.put("reads_scores", steps.reads_scores);
  json.put_address("ord", steps.ord);
  json.put_address("document", steps.document);
  json.put_address("hist", steps.hist);
  json.put_address("arrived", steps.arrived);
  json.put_address("digit_state", steps.digit_state);
  json.put_address("chunk_above", steps.chunk_above);
  json.put_address("chunk_suffix", steps.chunk_suffix);
  json.put_address("chunk_counts", steps.chunk_counts);
  json.put_address("set_ord", steps.set_ord);
  json.put_address("set_key", steps.set_key);
  json.put_address("set_count", steps.set_count);
  return json.text();
}

std::string describe(const KeyListsPlan& plan) {
  Json json;
  json.put("workspace_bytes", plan.workspace_bytes);
  json.put("reach", plan.params.reach);
  json.put("chunks", plan.params.chunks);
  json.put_address("latest", plan.params.latest);
  return json.text();
}

}  // namespace
}  // namespace dmattn

extern "C" int probe_select(const dmattn_select_params* params, const char* kernels, int num_sms, void* base, char* to,
                            size_t size) {
  using namespace dmattn;
  return answer(to, size, [&] { return describe(placed_plan(params, device_of(kernels, num_sms), base)); });
}

extern "C" int probe_key_lists(const dmattn_build_key_lists_params* params, const char* kernels, int num_sms,
                               void* base, char* to, size_t size) {
  using namespace dmattn;
  return answer(to, size, [&] { return describe(placed_plan(params, device_of(kernels, num_sms), base)); });
}

// Where arrays of a cache's attention lie; all 0 where nothing attends.
extern "C" int probe_cache(const dmattn_cache_append_params* params, const char* kernels, int num_sms, void* base,
                           char* to, size_t size) {
  using namespace dmattn;
  return answer(to, size, [&] {
    const CachePlan plan = placed_plan(params, device_of(kernels, num_sms), base);
    Json json;
    json.put("workspace_bytes", plan.workspace_bytes);
    json.put("num_splits", plan.decode.num_splits);
    json.put("blocks", plan.choice.blocks);
    json.put("level", static_cast<int>(plan.choice.level));
    json.put_address("arrivals", plan.decode.arrivals);
    json.put_address("out_accum", plan.decode.out_accum);
    json.put_address("lse_accum", plan.decode.lse_accum);
    json.put_address("lowest_entry", plan.decode.lowest.entry);
    json.put_address("lowest_v", plan.decode.lowest.v);
    json.put_address("lowest_logit", plan.decode.lowest.logit);
    return json.text();
  });
}

// What a draft launches, as far as that is the attention.
extern "C" int probe_draft(const dmattn_cache_draft_params* params, const char* kernels, int num_sms, void* base,
                           char* to, size_t size) {
  using namespace dmattn;
  return answer(to, size, [&] {
    const DraftPlan plan = placed_plan(params, device_of(kernels, num_sms), base);
    const DecodeParams& d = plan.decode;
    Json json;
    json.put("workspace_bytes", plan.workspace_bytes);
    json.put("is_empty", plan.is_empty);
    json.put("num_splits", d.num_splits);
    json.put("blocks", plan.choice.blocks);
    json.put("level", static_cast<int>(plan.choice.level));
    json.put("seqlen_q", d.seqlen_q);
    json.put("seqlen_k", d.seqlen_k);
    json.put("heads", d.nheads);
    json.put("row_stride", d.q_stride.row);
    json.put("head_stride", d.q_stride.head);
    json.put("token_stride", d.token_rows.q_token);
    json.put("entries", d.draft.entries);
    json.put("group", d.token_rows.group.value);
    json.put_address("arrivals", d.arrivals);
    json.put_address("out_accum", d.out_accum);
    return json.text();
  });
}
extern "C" int probe_commit(const dmattn_cache_commit_params* params, const char* kernels, int num_sms, void* base,
                            char* to, size_t size) {
  using namespace dmattn;
  return answer(to, size, [&] {
    const CommitPlan plan = placed_plan(params, device_of(kernels, num_sms), base);
    Json json;
    json.put("workspace_bytes", plan.workspace_bytes);
    json.put("tokens", plan.draft.tokens);
    json.put("capacity", plan.draft.capacity);
    json.put("count_stride", plan.draft.count_stride);
    json.put("count_is_wide", plan.draft.count_is_wide);
    return json.text();
  });
}

extern "C" int probe_join_keys(const dmattn_join_keys_params* params, const char* kernels, int num_sms, void* base,
                               char* to, size_t size) {
  using namespace dmattn;
  return answer(to, size, [&] {
    const JoinKeysParams p = placed_plan(params, device_of(kernels, num_sms), base).params;
    Json json;
    json.put("word_bytes", p.word_bytes);
    json.put("k_words", p.k.words.value);
    json.put("v_words", p.v.words.value);
    json.put("k_ratio", p.k_new.head_ratio.value);
    json.put("score_ratio", p.score_new.head_ratio.value);
    json.put("score_batch_stride", p.score_new.batch_stride);
    json.put("first_begin", p.first_begin);
    json.put("new_begin", p.new_begin);
    json.put("seqlen", p.seqlen);
    json.put("k_keys", int64_t{p.k_blocks} * p.k_block_keys);
    json.put("k_blocks", p.k_blocks);
    json.put("v_blocks", p.v_blocks);
    json.put("score_blocks", p.score_blocks);
    return json.text();
  });
}

extern "C" int probe_keep_keys(const dmattn_keep_keys_params* params, const char* kernels, int num_sms, void* base,
                               char* to, size_t size) {
  using namespace dmattn;
  return answer(to, size, [&] {
    const KeepKeysParams p = placed_plan(params, device_of(kernels, num_sms), base).params;
    Json json;
    json.put("word_bytes", p.word_bytes);
    json.put("segments", p.segments);
    json.put("segment_keys", p.segment_keys);
    json.put("positions", p.positions);
    json.put("end_ratio", p.end_head_ratio.value);
    json.put("starts_early", p.starts_early ? 1 : 0);
    return json.text();
  });
}

extern "C" uint64_t probe_launch_tag() { return dmattn::next_launch_tag(); }

// n divided as the decode kernel does: take() in attention/shared/work_index.cuh.
extern "C" uint32_t probe_quotient(uint32_t n, int32_t value) {
  const dmattn::Divisor by(value);
  return by.value == 1 ? n : static_cast<uint32_t>(uint64_t{n} * by.multiplier >> 32) >> by.shift;
}

// Rows of a bias on Hopper that TMA takes by classes: how many there are, from one head to the next, and between
// batches.
extern "C" void probe_number_rows(const int64_t* strides, int batch, int heads, int rows, int keys, int64_t* found) {
  dmattn::BiasParams bias;
  bias.batch_stride = strides[0];
  bias.head_stride = strides[1];
  bias.row_stride = strides[2];
  const auto numbered = dmattn::sm90::number_rows(bias, batch, heads, rows, keys);
  found[0] = numbered.count;
  found[1] = numbered.head_rows;
  found[2] = numbered.batch_rows;
}

extern "C" int64_t probe_select_capacity(int64_t window, int64_t seqlen_k, int is_causal) {
  return dmattn::select_capacity(window, seqlen_k, is_causal != 0);
}

extern "C" int probe_num_splits(int64_t blocks, int64_t resident, int key_tiles) {
  return dmattn::choose_num_splits(blocks, resident, key_tiles, /*min_tiles=*/4);
}

extern "C" int probe_first_packed_block(int before, int b, int block) {
  return dmattn::first_packed_block(before, b, block);
}
extern "C" int probe_packed_blocks(int total, int sequences, int block) {
  return dmattn::packed_blocks(total, sequences, block);
}

namespace dmattn {
namespace {

// How often a plan was made, on any thread.
int plans_made = 0;

const Device& counted_device(int32_t) {
  static const Device device = device_of("sm80", 132);
  ++plans_made;
  return device;
}

}  // namespace
}  // namespace dmattn

// A question for the workspace of a forward call, or its launch as far as there is none to launch on: the status, and
// what has become of the number of plans.
extern "C" int probe_planned_call(const dmattn_fwd_params* params, int for_launch, int* plans, char* to, size_t size) {
  using namespace dmattn;
  const int status = answer(to, size, [&] {
    return std::to_string(planned_call(params, for_launch != 0, counted_device).plan.workspace_bytes);
  });
  *plans = plans_made;
  return status;
}

// Nanoseconds that a launch spends on finding its plan and placing it, after the question for the workspace.
extern "C" double probe_planned_nanoseconds(const dmattn_bwd_params* params, void* base, int calls) {
  using namespace dmattn;
  planned_call(params, /*for_launch=*/true, counted_device);
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < calls; ++i) place(planned_call(params, /*for_launch=*/true, counted_device).plan, base);
  return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - start).count() / calls;
}

// Name of the set of kernels that a chip gets.
extern "C" int probe_kernel_set(int capability, int smem_per_block, const char* forced, const char* built_for,
                                int has_all_tiles, char* to, size_t size) {
  using namespace dmattn;
  return answer(to, size, [&] {
    return std::string(choose_kernel_set({0, capability, smem_per_block}, forced, built_for, has_all_tiles != 0).name);
  });
}

extern "C" int probe_may_start_early(int compiled_for, int driver, const char* setting) {
  return dmattn::may_start_early(compiled_for, driver, setting) ? 1 : 0;
}

// Leaves the units of an architecture out; 0: none.
extern "C" void probe_leave_out_units(int arch) { dmattn::missing_arch = arch; }
// Whether there are units for few keys.
extern "C" void probe_hold_short_units(int held) { dmattn::has_short_units = held != 0; }
