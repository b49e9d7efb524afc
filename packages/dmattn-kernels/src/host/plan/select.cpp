#include "host/plan/select.h"

#include <algorithm>

#include "host/arithmetic.h"
#include "host/problem.h"

namespace dmattn {
namespace {

using prep::kBins;
using prep::kChunkKeys;
using prep::kMaxDigits;
using prep::SelectPlan;

// Up to this many keys, one thread block finds the best keys of a prefix by itself: the grid would spend longer on
// its launches.
constexpr int kOneBlockKeys = 32768;
// From this many keys on, a single list is found sooner by the grid in one launch: in 24 instead of 26 us for 8192
// keys, and in 24 instead of 48 for 32768.
constexpr int kOneLaunchKeys = 8192;
// Keys between the positions of two sets (or `window`, if that is more). Beside a set, a thread block reads up to
// this many keys.
constexpr int kSuperKeys = 8192;

// Stride along a dimension, 0 where there is one entry for all.
int64_t broadcast_stride(const dmattn_tensor& t, int dim) { return t.shape[dim] == 1 ? 0 : t.stride[dim]; }

SelectParams read_select(const dmattn_select_params& p, int32_t num_sms) {
  SelectParams select;
  select.num_sms = num_sms;
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

// Which keys the grid selects from, and where the sets lie.
void plan_work(SelectPlan& plan, int num_sms) {
  plan.first_set = 1;
  plan.super_keys = round_up(INT32_MAX / 2, 128);
  plan.single_list = !plan.is_causal || plan.seqlen_q == 1;
  if (plan.single_list) {
    plan.one_launch =
        plan.seqlen_k >= kOneLaunchKeys && int64_t{plan.rows} * ceil_div(plan.seqlen_k, kChunkKeys) <= num_sms;
    if (plan.one_launch || plan.seqlen_k > kOneBlockKeys) plan.grid_keys = plan.seqlen_k;
    return;
  }
  if (plan.seqlen_q == 0 || plan.seqlen_k <= kOneBlockKeys) return;
  const int super_keys = std::max(kSuperKeys, round_up(std::min(plan.window, plan.seqlen_k), 128));
  if (plan.offset >= kSuperKeys) {
    plan.set_origin = plan.offset / 128 * 128;
    plan.grid_keys = plan.set_origin;
    plan.first_set = 0;
    plan.sets = 1;
  }
  if (plan.seqlen_k - plan.set_origin > kOneBlockKeys) {
    plan.super_keys = super_keys;
    const int last_row0 = plan.offset + (plan.seqlen_q - 1) / kSelectBlockRows * kSelectBlockRows;
    plan.sets = (last_row0 - plan.set_origin) / super_keys + 1 - plan.first_set;
  }
}

// Whether a segment that looks at `quads` groups of four keys fits this many threads.
bool fits_segment(int threads, int quads) { return quads <= threads * prep::segment_quads(threads); }

// The number of threads for each of `thread_blocks` segments, which have to fit 1024. On an H200, 512 threads took
// 0.85 of the time of 1024 for segments that look at 4096 keys, and 1.0 from 8192 keys on. Compared with 256 threads,
// 512 took 0.8 of the time with two thread blocks for each SM, and 1.3 with more.
int threads_of_segment(int64_t thread_blocks, int quads, int num_sms) {
  constexpr int kFewQuads = 1024;
  if (!fits_segment(512, quads)) return 1024;
  if (thread_blocks <= num_sms) return quads <= kFewQuads ? 512 : 1024;
  return thread_blocks > 2 * int64_t{num_sms} && fits_segment(256, quads) ? 256 : 512;
}

// Decides whether segments find the lists of row blocks, and how long the segments are. Called after plan_work().
void plan_segments(SelectPlan& plan, int blocks, int num_sms) {
  const int window = std::min(plan.window, plan.seqlen_k);
  if (plan.single_list || blocks == 0 || window > prep::kMaxSegmentWindow) return;
  // Long segments share a search between more rows; short ones let more SMs take part. A segment has the fewest row
  // blocks with which there is at most one segment for each SM or, if even kMaxSegmentBlocks are too few for that, at
  // most two. If they are too few for that as well, it has kMaxSegmentBlocks.
  int per_segment = 1;
  const auto thread_blocks = [&](int length) { return int64_t{plan.rows} * ceil_div(blocks, length); };
  for (const int each : {1, 2}) {
    per_segment = 1;
    while (per_segment < prep::kMaxSegmentBlocks && thread_blocks(per_segment) > int64_t{each} * num_sms) ++per_segment;
    if (thread_blocks(per_segment) <= int64_t{each} * num_sms) break;
  }
  // Groups of four keys that the last segment, or one just before a set, has to look at.
  const int last_row0 = plan.offset + (ceil_div(blocks, per_segment) - 1) * per_segment * kSelectBlockRows;
  const int range = std::min(plan.super_keys, last_row0 - plan.set_origin);
  const int quads = (plan.sets > 0 ? ceil_div(window, 4) : 0) + ceil_div(range, 4);
  if (!fits_segment(1024, quads)) return;
  plan.segment_blocks = per_segment;
  plan.segment_threads = threads_of_segment(thread_blocks(per_segment), quads, num_sms);
}

// An array of CUDA's int2 or uint2, whose size this file does not know.
template <class Pair>
Pair* take_pairs(Workspace& workspace, int64_t count) {
  return static_cast<Pair*>(workspace.take_bytes(static_cast<size_t>(count) * 2 * sizeof(int32_t)));
}

}  // namespace

int64_t select_capacity(int64_t window, int64_t seqlen_k, bool is_causal) {
  if (window < 1 || seqlen_k < 0 || seqlen_k > kMaxSelectKeys) return 0;
  const int64_t most = std::min<int64_t>(window, kMaxSelectKeys) + (is_causal ? kSelectBlockRows : 0);
  return round_up<int64_t>(std::min(most, seqlen_k), kListBlock);
}

SelectionPlan plan_select(const dmattn_select_params& p, int32_t num_sms) {
  SelectionPlan plan;
  plan.params = read_select(p, num_sms);
  plan.lists = read_lists(p.selection);
  const SelectParams& select = plan.params;
  SelectPlan& steps = plan.steps;
  steps.rows = select.batch * select.heads;
  steps.seqlen_q = select.seqlen_q;
  steps.seqlen_k = select.seqlen_k;
  steps.window = select.window;
  steps.is_causal = select.is_causal;
  steps.offset = select.is_causal ? select.seqlen_k - select.seqlen_q : 0;
  steps.digits = select.dtype == Dtype::kFloat32 ? 3 : 2;
  steps.ord_pitch = round_up<int64_t>(select.seqlen_k, 128);
  plan_work(steps, num_sms);
  if (select.documents == 0) plan_segments(steps, ceil_div(select.seqlen_q, kSelectBlockRows), num_sms);
  // Segments may read scores instead of ordered integers where scores are neighbours in memory and there is no mask:
  // each segment reads all keys before it, and would read a mask as often.
  steps.reads_scores = steps.segment_blocks > 0 && steps.sets == 0 && steps.grid_keys == 0 &&
                       select.key_mask == nullptr && select.score_col_stride == 1;
  steps.chunks = ceil_div(steps.grid_keys, kChunkKeys);
  if (steps.sets > 0) steps.set_capacity = round_up(std::min(select.window, select.seqlen_k), 4);
  place(plan, nullptr);
  return plan;
}

void place(SelectionPlan& plan, void* base) {
  SelectPlan& steps = plan.steps;
  Workspace workspace(base);
  const int64_t rows = steps.rows, chunks = steps.chunks, sets = steps.sets;
  if (steps.one_launch) {
    steps.hist = workspace.take<uint32_t>(rows * kMaxDigits * kBins);
    steps.arrived = workspace.take<int32_t>(rows);
    steps.zero_bytes = workspace.bytes();
    steps.chunk_counts = take_pairs<int2>(workspace, rows * chunks);
    plan.workspace_bytes = workspace.bytes();
    return;
  }
  if (!steps.reads_scores) steps.ord = workspace.take<uint32_t>(rows * steps.ord_pitch);
  if (plan.params.documents > 0) steps.document = take_pairs<int2>(workspace, steps.seqlen_k);
  if (steps.chunks > 0) {
    const size_t before = workspace.bytes();
    steps.hist = workspace.take<uint32_t>(rows * kMaxDigits * kBins);
    steps.zero_bytes = workspace.bytes() - before;
    steps.digit_state = take_pairs<uint2>(workspace, rows * kMaxDigits);
    steps.chunk_above = workspace.take<int32_t>(rows * chunks);
    steps.chunk_suffix = workspace.take<uint32_t>(rows * chunks * kBins);
  }
  steps.set_ord = workspace.take<uint32_t>(2 * rows * sets * steps.set_capacity);
  steps.set_key = workspace.take<int32_t>(2 * rows * sets * steps.set_capacity);
  steps.set_count = workspace.take<int32_t>(2 * rows * sets);
  plan.workspace_bytes = workspace.bytes();
}

KeyListsPlan plan_build_key_lists(const dmattn_build_key_lists_params& p) {
  KeyListsPlan plan;
  plan.lists = read_lists(p.selection);
  IntervalParams& intervals = plan.params;
  intervals.seqlen_q = static_cast<int32_t>(p.seqlen_q);
  const int64_t seqlen_k = p.selection.end.shape[2];
  intervals.seqlen_k = static_cast<int32_t>(seqlen_k);
  intervals.reach = static_cast<int32_t>(p.reach == 0 ? seqlen_k : std::min(p.reach, seqlen_k));
  intervals.needed = static_cast<int32_t*>(p.needed.data);
  intervals.chunks = ceil_div(intervals.seqlen_k, kIntervalChunk);
  place(plan, nullptr);
  return plan;
}

void place(KeyListsPlan& plan, void* base) {
  Workspace workspace(base);
  const IntervalParams& p = plan.params;
  const bool is_short = p.reach <= kShortReach || p.seqlen_k <= kShortReach;
  if (!is_short) {
    plan.params.latest = workspace.take<int32_t>(int64_t{plan.lists.batch} * plan.lists.heads * p.chunks);
  }
  plan.workspace_bytes = workspace.bytes();
}

}  // namespace dmattn
