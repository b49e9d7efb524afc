// The decisions of src/api/plan_*.cpp as JSON, for test_wheel_plan.py. Compiled with the host sources alone.
#include <cstring>
#include <sstream>
#include <string>

#include "api/plan.h"
#include "api/validate.h"

namespace dmattn {

// The layouts belong to the kernels around attention; here any size and any place inside it will do.
MaskBits layout_mask_bits(const MaskSource& mask, void* base, size_t* bytes) {
  MaskBits bits;
  bits.words_per_row = (mask.seqlen_k + 127) / 128 * 4;
  bits.rows = mask.seqlen_q;
  bits.batch = mask.batch;
  bits.heads = mask.heads;
  bits.bands_q = (mask.seqlen_q + kMaskBand - 1) / kMaskBand;
  bits.bands_k = (mask.seqlen_k + kMaskBand - 1) / kMaskBand;
  bits.words_q = bits.words_k = 1;
  if (mask.packing.is_active()) {
    bits.words_q = packed_blocks(mask.seqlen_q, mask.packing.sequences, kMaskWordRows);
    bits.bands_q = 32 * bits.words_q;
  }
  bits.bits = bits.any_rows = bits.all_rows = bits.any_cols = bits.all_cols = static_cast<const uint32_t*>(base);
  *bytes = size_t{4} * mask.batch * mask.heads * mask.seqlen_q * bits.words_per_row;
  return bits;
}

KeyList layout_key_list(const MaskSource& mask, void* base, size_t* bytes) {
  KeyList keys;
  keys.capacity = (mask.seqlen_k + 127) / 128 * 128;
  keys.batch = mask.batch;
  keys.heads = mask.heads;
  keys.idx = keys.count = static_cast<const int32_t*>(base);
  if (mask.packing.is_active()) {
    keys.batch = mask.packing.sequences;
    keys.capacity = packed_blocks(mask.packing.total_k, keys.batch, kListBlock) * kListBlock;
    *bytes = size_t{4} * mask.heads * (keys.capacity + keys.batch);
    return keys;
  }
  *bytes = size_t{4} * mask.batch * mask.heads * (keys.capacity + 1);
  return keys;
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

Device device_of(int family, int num_sms) {
  Device device;
  device.family = static_cast<Family>(family);
  device.num_sms = num_sms;
  return device;
}

std::string describe(const FwdPlan& plan) {
  Json json;
  const FwdTile tile = fwd_tile(plan.family, plan.dim_tile);
  json.put("block_m", tile.block_m);
  json.put("block_n", tile.block_n);
  json.put("dim_tile", plan.dim_tile);
  json.put("is_empty", plan.is_empty);
  json.put("no_keys", plan.no_keys);
  json.put("gathered", plan.gathered);
  json.put("selected", plan.selected);
  json.put("decode", plan.decode);
  json.put("workspace_bytes", plan.workspace_bytes);
  put_kernel(json, plan.kernel);
  json.put_strides("out_stride", plan.kernel.out_stride);
  json.put_strides("lse_stride", plan.kernel.lse_stride);
  json.put_address("out_accum", plan.kernel.out_accum);
  json.put_address("lse_accum", plan.kernel.lse_accum);
  return json.text();
}

std::string describe(const BwdPlan& plan, const BwdChunk& chunk, const BwdParams& p) {
  Json json;
  int chunks = 0;
  for_each_chunk(plan, [&](const BwdChunk&) { ++chunks; });
  json.put("chunks", chunks);
  json.put("chunk.batch", chunk.batch);
  json.put("chunk.batches", chunk.batches);
  json.put("chunk.head_k", chunk.head_k);
  json.put("chunk.heads_k", chunk.heads_k);
  json.put("chunk.group", chunk.group);
  json.put("chunk.groups", chunk.groups);
  json.put("chunk.row_block", chunk.row_block);
  json.put("chunk.row_blocks", chunk.row_blocks);
  json.put("completes_dkv", completes_dkv(plan, chunk));
  const ConvertDqParams dq = bwd_chunk_dq(plan, chunk);
  json.put_address("dq.dq", dq.dq);
  json.put("dq.batch", dq.batch);
  json.put("dq.nheads", dq.nheads);
  json.put("dq.seqlen_q", dq.seqlen_q);
  json.put("dq.dq_blocks", dq.dq_blocks);
  json.put("block_m", plan.tile.block_m);
  json.put("block_n", plan.tile.block_n);
  json.put("dim_tile", plan.dim_tile);
  json.put("zeros", plan.zeros);
  json.put("launches", plan.launches);
  json.put("gathered", plan.gathered);
  json.put("selected", plan.selected);
  json.put("intervals", plan.intervals);
  json.put("per_batch", plan.sequence.per_batch);
  json.put("per_head_k", plan.sequence.per_head_k);
  json.put("per_group", plan.sequence.per_group);
  json.put("max_work", plan.max_work);
  json.put("max_tiles", plan.max_tiles);
  json.put("max_splits", plan.max_splits);
  json.put("workspace_bytes", plan.workspace_bytes);
  json.put("once_zero_bytes", plan.once_zero_bytes);
  json.put("chunk_zero_bytes", plan.chunk_zero_bytes);
  json.put("dkv_zero_bytes", plan.dkv_zero_bytes);
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
  json.put("dbias_batch_stride", p.dbias_batch_stride);
  json.put("dbias_head_stride", p.dbias_head_stride);
  json.put("dbias_row_stride", p.dbias_row_stride);
  json.put_address("lse", p.lse);
  json.put_address("delta", p.delta);
  json.put_address("dq_accum", p.dq_accum);
  json.put("dq_blocks", p.dq_blocks);
  json.put("row_block_begin", p.row_block_begin);
  json.put("row_blocks", p.row_blocks);
  json.put_address("dk", p.dk);
  json.put_address("dq_semaphore", p.dq_semaphore);
  json.put_address("dkv_semaphore", p.dkv_semaphore);
  json.put_address("dk_slots", p.dk_slots);
  json.put_address("dv_slots", p.dv_slots);
  json.put_address("dk_accum", p.dk_accum);
  json.put_address("dv_accum", p.dv_accum);
  json.put_address("dbias_cols", p.dbias_cols);
  json.put_address("dbias", p.dbias);
  json.put_address("schedule", p.schedule);
  json.put_address("keys.count", plan.gathered ? bwd_schedule_lists(p).count : nullptr);
  return json.text();
}

// Writes the text and returns the status.
template <class Body>
int answer(char* to, size_t size, Body&& body) {
  std::string text;
  const dmattn_status status = at_boundary([&] { text = body(); });
  std::strncpy(to, status == DMATTN_OK ? text.c_str() : last_error(), size - 1);
  to[size - 1] = '\0';
  return status;
}

}  // namespace
}  // namespace dmattn

extern "C" int probe_fwd(const dmattn_fwd_params* params, int family, int num_sms, void* base, char* to, size_t size) {
  using namespace dmattn;
  return answer(to, size, [&] {
    const dmattn_fwd_params p = read_params(params, "dmattn_fwd_params");
    validate(p, Pointers::kRequired);
    return describe(plan_fwd(p, device_of(family, num_sms), base));
  });
}

// Of chunk number `chunk`, the launch for its batch b, kv head hk, head g of its group.
extern "C" int probe_bwd(const dmattn_bwd_params* params, int family, int num_sms, void* base, int chunk, int b, int hk,
                         int g, char* to, size_t size) {
  using namespace dmattn;
  return answer(to, size, [&] {
    const dmattn_bwd_params p = read_params(params, "dmattn_bwd_params");
    validate(p, Pointers::kRequired);
    const BwdPlan plan = plan_bwd(p, device_of(family, num_sms), base);
    BwdChunk chosen;
    int i = 0;
    for_each_chunk(plan, [&](const BwdChunk& each) {
      if (i++ == chunk) chosen = each;
    });
    return describe(plan, chosen, bwd_launch_params(plan, bwd_chunk_params(plan, chosen), b, hk, g));
  });
}

extern "C" int probe_num_splits(int64_t blocks, int64_t resident, int key_tiles) {
  return dmattn::choose_num_splits(blocks, resident, key_tiles);
}

extern "C" int probe_first_packed_block(int before, int b, int block) {
  return dmattn::first_packed_block(before, b, block);
}
extern "C" int probe_packed_blocks(int total, int sequences, int block) {
  return dmattn::packed_blocks(total, sequences, block);
}
