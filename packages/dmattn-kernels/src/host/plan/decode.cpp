#include "host/plan/decode.h"

#include <algorithm>

#include "host/plan/cache_params.h"
#include "host/plan/fwd.h"
#include "kernels/decode_level.h"

namespace dmattn {
namespace {

// A turn is one step of every warp of a thread block. A split with fewer turns would not even fill the stages of the
// warps' rings.
constexpr int32_t kMinTurnsPerSplit = 2;
// The most shared memory that a thread block takes beside its rings: static arrays (see DecodeTraits), and 1 KB that
// the system keeps.
constexpr int32_t kBlockOverhead = (3 + 1) * 1024;

CacheAppendParams read_append(const dmattn_cache_append_params& p) {
  CacheAppendParams append;
  read_cache(append, p);
  read_tokens(append, p);
  append.tokens = static_cast<int32_t>(p.k_new.shape[1]);
  append.evict = p.evict != 0;
  if (is_present(p.active)) {
    append.active = static_cast<const uint8_t*>(p.active.data);
    append.active_batch_stride = p.active.stride[0];
    append.active_token_stride = p.active.stride[1];
  }
  return append;
}

// Whether the keys and values of the tokens start on 16 bytes.
bool has_vec_tokens(const CacheAppendParams& p, Dtype dtype) {
  return is_vec16(p.k_new, p.k_new_stride, dtype) && is_vec16(p.v_new, p.v_new_stride, dtype);
}

// `count` elements of this type further on; nullptr stays nullptr.
const void* advance(const void* base, int64_t count, Dtype dtype) {
  return base == nullptr ? nullptr : static_cast<const char*>(base) + count * element_bytes(dtype);
}

}  // namespace

void pack_group_as_rows(FwdParams& p) {
  const int32_t group = p.head_ratio;
  const auto pack = [group](Strides3& s) {
    s.row = s.head;
    s.head *= group;
  };
  pack(p.q_stride);
  pack(p.out_stride);
  pack(p.lse_stride);
  if (p.bias.kind != BiasKind::kNone) {
    const bool per_query_head = p.bias.head_ratio == 1;
    p.bias.row_stride = per_query_head ? p.bias.head_stride : 0;
    if (per_query_head) p.bias.head_stride *= group;
    p.bias.head_ratio = per_query_head ? 1 : p.bias.head_ratio / group;
  }
  p.seqlen_q = group;
  p.nheads = p.nheads_k;
  p.head_ratio = 1;
}

TokenRows pack_tokens_as_rows(FwdParams& p, int32_t tokens) {
  TokenRows rows{tokens, Divisor(p.head_ratio), p.q_stride.row, p.out_stride.row, p.lse_stride.row};
  pack_group_as_rows(p);
  p.seqlen_q *= tokens;
  return rows;
}

void place_partials(FwdParams& p, Workspace& workspace) {
  const int64_t rows = static_cast<int64_t>(p.num_splits) * p.batch * p.nheads * p.seqlen_q;
  p.out_accum = workspace.take<float>(rows * p.head_dim);
  p.lse_accum = workspace.take<float>(2 * rows);
}

int32_t choose_decode_splits(const FwdParams& p, int32_t keys, int32_t dim_tile, int32_t wanted, const Device& device,
                             int32_t block_rows) {
  const int32_t turns = std::max(1, ceil_div(keys, kDecodeKeys * decode_tile(dim_tile).warps));
  if (wanted > 0) return std::min(wanted, turns);
  const int64_t blocks = static_cast<int64_t>(p.batch) * p.nheads * ceil_div(p.seqlen_q, block_rows);
  const int64_t per_sm = std::max(1, device.smem_per_sm / (decode_smem_bytes(dim_tile) + kBlockOverhead));
  return choose_num_splits(blocks, device.num_sms * per_sm, turns, kMinTurnsPerSplit);
}

Level decode_level(const FwdParams& p, int32_t dim_tile, bool from_cache) {
  const bool has_plain_bias = p.bias.kind == BiasKind::kNone || p.bias.kind == BiasKind::kKey;
  const bool is_plain = p.num_splits <= plain_decode_splits(from_cache) && p.softcap == 0.f && has_plain_bias &&
                        p.vec_q && p.vec_k && p.vec_v && p.vec_out;
  if (!is_plain) return Level::kGeneral;
  if (p.head_dim == dim_tile) return Level::kPlain;
  return has_cut_decoding(dim_tile) ? Level::kCut : Level::kGeneral;
}

int64_t decode_blocks(const FwdParams& p, int32_t block_rows) {
  return int64_t{ceil_div(p.seqlen_q, block_rows)} * p.num_splits * p.nheads * p.batch;
}

CachePlan plan_cache_append(const dmattn_cache_append_params& p, const Device& device) {
  CachePlan plan;
  plan.append = read_append(p);
  plan.attends = is_present(p.q) && plan.append.batch > 0 && plan.append.tokens > 0;
  if (!plan.attends) return plan;
  plan.unit.direction = Direction::kDecode;
  plan.unit.dtype = static_cast<Dtype>(p.q.dtype);
  plan.unit.head_dim_tile = head_dim_tile(plan.append.head_dim);
  plan.choice.tiles = resolve_unit(*device.kernels, plan.unit).tiles;
  DecodeParams& d = plan.decode;
  set_entries(d, plan.append, static_cast<Dtype>(p.k_cache.dtype), static_cast<int32_t>(p.q.shape[2]));
  set_queries(d, p);
  plan.q_token = d.q_stride.row;
  plan.out_token = d.out_stride.row;
  if (d.head_ratio > 1) {
    pack_group_as_rows(d);
  } else {
    d.q_stride.row = d.out_stride.row = 0;
  }
  d.num_splits = choose_decode_splits(d, d.seqlen_k, plan.unit.head_dim_tile, 0, device);
  plan.choice.blocks = decode_blocks(d);
  plan.choice.level = has_vec_tokens(plan.append, plan.unit.dtype)
                          ? decode_level(d, plan.unit.head_dim_tile, /*from_cache=*/true)
                          : Level::kGeneral;
  place(plan, nullptr);
  return plan;
}

void place(CachePlan& plan, void* base) {
  if (!plan.attends) return;
  DecodeParams& d = plan.decode;
  Workspace workspace(base);
  d.arrivals = workspace.take<uint64_t>(int64_t{d.batch} * d.nheads + d.batch);
  place_partials(d, workspace);
  const int64_t heads = int64_t{d.batch} * d.nheads, parts = heads * d.num_splits;
  d.lowest.entry = workspace.take<uint32_t>(4 * parts);
  d.lowest.v = workspace.take<uint16_t>(parts * d.head_dim);
  d.lowest.logit = workspace.take<float>((parts + heads) * d.seqlen_q);
  plan.workspace_bytes = workspace.bytes();
}

DecodeParams token_params(const CachePlan& plan, int32_t t) {
  const CacheAppendParams& a = plan.append;
  const Dtype dtype = plan.unit.dtype;
  DecodeParams d = plan.decode;
  d.q = advance(d.q, t * plan.q_token, dtype);
  d.out = const_cast<void*>(advance(d.out, t * plan.out_token, dtype));
  CacheToken& token = d.token;
  token.k = advance(a.k_new, t * a.k_new_stride.row, dtype);
  token.v = advance(a.v_new, t * a.v_new_stride.row, dtype);
  token.k_stride = a.k_new_stride;
  token.v_stride = a.v_new_stride;
  token.vec = has_vec_tokens(a, dtype);
  token.score = advance(a.score_new, t * a.score_token_stride, a.score_dtype);
  token.score_batch_stride = a.score_batch_stride;
  token.score_head_stride = a.score_head_stride;
  token.seen = a.seen;
  token.active = a.active == nullptr ? nullptr : a.active + t * a.active_token_stride;
  token.active_stride = a.active_batch_stride;
  token.entry_position = a.position;
  token.k_cache = a.k_cache;
  token.v_cache = a.v_cache;
  token.entry_score = a.score;
  return d;
}

}  // namespace dmattn
