// What the host hands to the kernels that select keys. Plain structs, no CUDA header: src/host fills them, src/kernels
// reads them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "params.h"

struct int2;  // of the CUDA headers
struct uint2;

namespace dmattn {

// Query rows that share a key list.
constexpr int kSelectBlockRows = 128;
// The longest sequence (positions and lengths are rounded up in int32).
constexpr int32_t kMaxSelectKeys = INT32_MAX / 2;

// Total order of keys: higher score first, among equal scores the later key first. A key whose score is NaN or -inf, or
// that key_mask forbids, is never selected.
struct SelectParams {
  const void* scores = nullptr;   // [score_batch][score_heads][seqlen_k], strides in elements, 0 where broadcast
  Dtype dtype = Dtype::kFloat32;  // f16, bf16 or f32
  int64_t score_batch_stride = 0, score_head_stride = 0, score_col_stride = 1;
  const uint8_t* key_mask = nullptr;  // optional, nonzero = allowed
  int64_t mask_batch_stride = 0, mask_head_stride = 0, mask_col_stride = 0;
  int32_t batch = 1, heads = 1;        // of the selection: the broadcast of scores and mask
  int32_t seqlen_q = 0, seqlen_k = 0;  // seqlen_q <= seqlen_k when causal
  int32_t window = 0;                  // w >= 1
  bool is_causal = true;
  // Documents packed one after the other, the same for all batches and heads: [documents + 1], rising from 0 to
  // seqlen_k. Keys compete within their document, and only rows of the document see them. Requires is_causal and
  // seqlen_q == seqlen_k. documents == 0: all keys are one document.
  const int32_t* cu_seqlens = nullptr;
  int32_t documents = 0;
  int32_t num_sms = 0;  // of the device; 0: not known, and a long single list then takes more launches
};

// Keys that share an entry of IntervalParams::latest. A warp looks at them together.
constexpr int kIntervalChunk = 32;
// Up to this reach, looking at all keys costs less than the launch that finds `latest`.
constexpr int32_t kShortReach = 4096;

// Lists from given intervals (`end` as in KeyList, causal): sliding windows, packed documents, or a selection that
// the caller made.
struct IntervalParams {
  int32_t seqlen_q = 0, seqlen_k = 0;  // seqlen_q <= seqlen_k
  // The largest end[j] - j, or seqlen_k if that is not known. Keys that lie further before the first row of a block
  // are not looked for.
  int32_t reach = 0;
  // optional [batch][heads][blocks]: how many entries each list needs, even if they do not fit
  int32_t* needed = nullptr;
  // [batch][heads][chunks], written and read by the kernels: the largest end of every kIntervalChunk keys. nullptr if
  // `reach` is at most kShortReach: the kernels then look at every key within reach.
  int32_t* latest = nullptr;
  int32_t chunks = 0;  // ceil(seqlen_k / kIntervalChunk)
};

namespace prep {

// Keys of one thread block of a grid-wide selection.
constexpr int kChunkKeys = 4096;
// Radix digits of an ordered score: bits 31..21, 20..10, 9..0. 16-bit scores are told apart by the first two.
constexpr int kBins = 2048;
constexpr int kMaxDigits = 3;

// Segments: see SelectPlan::segment_blocks. With up to 4 blocks in a segment, 128 lists of 4096 keys took 0.069 ms on
// an H200, and with up to 8 blocks 0.104 ms; 4 lists of 131072 keys took 0.145 and 0.187 ms. segment_quads(): a
// thread holds up to that many groups of four keys if the thread block has `threads` threads.
constexpr int kMaxSegmentBlocks = 4;
constexpr int kMaxSegmentWindow = kMaxDigits * kBins;  // the keys kept take the place of the histograms
constexpr int segment_quads(int threads) { return threads == 256 ? 4 : 8; }

// A row is one (batch, head) of the selection. "Ordered score": a uint32 that grows with the score; 0 = never kept.
struct SelectPlan {
  int32_t rows = 0;
  int32_t seqlen_q = 0, seqlen_k = 0, window = 0;
  bool is_causal = true;
  int32_t offset = 0;  // position of query row 0 (causal)
  int32_t digits = 3;

  bool reads_scores = false;  // segments read the scores themselves, and `ord` is not used
  uint32_t* ord = nullptr;    // [rows][ord_pitch]
  int64_t ord_pitch = 0;      // a multiple of 128; ordered scores from seqlen_k on are 0

  int2* document = nullptr;  // [seqlen_k]: start and stop of each key's document; nullptr: all keys are one

  // The only list is that of the best of all keys: the call is not causal, or has a single query row.
  bool single_list = false;

  // Selection by the whole grid: the best keys among 0 .. grid_keys - 1 of every row. Used for a long single list,
  // and for the keys before the first query row if there are many of them.
  int32_t grid_keys = 0;     // 0: not used
  int32_t chunks = 0;        // of kChunkKeys, covering grid_keys
  bool one_launch = false;   // a single list for each row, and the thread blocks of all chunks fit on the GPU at once
  uint32_t* hist = nullptr;  // [rows][kMaxDigits][kBins], zeroed before the first kernel
  uint2* digit_state = nullptr;      // [rows][kMaxDigits]: (prefix, keys still wanted) before that digit is looked at
  int32_t* chunk_above = nullptr;    // [rows][chunks]: keys above the prefix that is known before the last digit
  uint32_t* chunk_suffix = nullptr;  // [rows][chunks][kBins]: keys that have this prefix and a last digit >= bin

  size_t zero_bytes = 0;         // bytes to zero, from hist on
  int32_t* arrived = nullptr;    // one_launch: [rows], zeroed: thread blocks that have arrived at a barrier
  int2* chunk_counts = nullptr;  // one_launch: [rows][chunks]: keys above the cut, keys equal to it

  // Sets: the best keys before certain positions, so that no thread block has to look at all keys before its own. Set
  // i belongs to position set_origin + (i + first_set) * super_keys, and to the document that contains this position.
  // Sets are found in parallel: first the best keys of each piece between two positions, then a prefix scan whose
  // operation is "the best of both". There are two buffers: a set that has taken part in n merges lies in buffer n %
  // 2.
  int32_t set_origin = 0;  // a multiple of 128, at most offset
  int32_t super_keys = 0;  // a multiple of 128
  int32_t first_set = 0;   // 1 when there is nothing before set_origin
  int32_t sets = 0;
  int32_t set_capacity = 0;      // a multiple of 4
  uint32_t* set_ord = nullptr;   // [2][rows][sets][set_capacity], zeros up to the next multiple of 4
  int32_t* set_key = nullptr;    // the same shape, ascending
  int32_t* set_count = nullptr;  // [2][rows][sets]

  // A thread block finds the lists of a segment, which has this many neighbouring blocks of rows. 0: there are no
  // segments; a thread block finds the list of one block of rows, by a kernel that takes windows of any size and
  // documents.
  int32_t segment_blocks = 0;
  int32_t segment_threads = 0;  // of those thread blocks
};

}  // namespace prep
}  // namespace dmattn
