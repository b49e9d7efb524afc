// What the host hands to the kernels that run before, after and beside attention. Plain structs as in params.h.
#pragma once

#include <cstddef>

#include "list_numbers.h"
#include "params.h"

namespace dmattn {

// --- backward ------------------------------------------------------------------------------------------------------

// The rows that gradients come from: those that keep a key and whose dout or dlse is not zero. Of all others, padded
// rows above all, every share of dq, dk, dv and dbias is 0, as long as q, k, v and out are finite.
struct UsedRows {
  // [batch][heads][2], zeros before: the last such row + 1, and seqlen_q minus the first such row. Both are 0 if
  // there is none. nullptr: not asked for.
  int32_t* found = nullptr;
  int32_t batch = 1, heads = 1, head_ratio = 1;  // as in KeyList. A row counts if any head that reads the list uses it
};

struct BwdPreprocessParams {
  const void* out = nullptr;
  const void* dout = nullptr;
  Strides3 out_stride, dout_stride;
  const float* lse = nullptr;  // [batch, nheads, seqlen_q], strides below
  Strides3 lse_stride;
  const float* dlse = nullptr;  // nullptr: none
  Strides3 dlse_stride;
  const float* lse_rest = nullptr;  // optional, strides of lse
  float lse_scale = 1.f;            // factor of lse_rounded: log2(e) if the kernel computes powers of two
  float rest_scale = 1.f;           // factor of rest_rounded
  float* lse_rounded = nullptr;     // [batch][nheads][seqlen_q_rounded]
  float* rest_rounded = nullptr;    // the same shape; written if lse_rest is given
  float* delta = nullptr;           // [batch][nheads][seqlen_q_rounded]
  int32_t batch = 0, seqlen_q = 0, seqlen_q_rounded = 0, nheads = 0, head_dim = 0;
  bool vec_out = true, vec_dout = true;  // rows start on 16 bytes
  Packing packing;                       // the results are then packed as in BwdParams
  UsedRows used_rows;                    // asked for only if vec_out and vec_dout, and if sequences are not packed
};

// How the four registers that a thread has of each fragment of dq lie in memory.
enum class DqOrder : int32_t {
  kRegisters,          // [fragment][register][thread]
  kVectors,            // [warpgroup][fragment][thread of the warpgroup][register]
  kTransposedVectors,  // the same for the transposed tile
};
// The accumulator layout of the backward kernel's dq tiles, so that the conversion reads what the kernel wrote.
struct DqTileLayout {
  int32_t block_m = 64;
  int32_t head_dim_tile = 128;
  int32_t dims = 128;  // columns in memory: BwdParams::dq_dims
  int32_t threads = 256;
  int32_t warps_m = 2;  // warps along the rows of the tile, as it lies in memory; the others along its columns
  DqOrder order = DqOrder::kRegisters;
};
struct ConvertDqParams {
  const float* dq_accum = nullptr;
  void* dq = nullptr;
  Strides3 dq_stride;
  int32_t batch = 0, seqlen_q = 0, nheads = 0, head_dim = 0;
  int32_t dq_blocks = 0;  // row blocks of a head in dq_accum
  float scale = 1.f;      // dq = dq_accum * scale
  bool vec_dq = true;
  DqTileLayout layout;
  Packing packing;
};

// The most rows of a chunk of row blocks. Where items have all rows (ChunkKeyListsParams::is_whole), the only chunk
// may have more.
constexpr int kMostChunkRows = 2048;

// The sums of a round that the launch of chunk_key_lists() clears as well. Its thread blocks that merge lists wait
// for loads most of the time, while the memory is idle. dk and dv: see BwdParams::dk_accum. nullptr: nothing is
// cleared, as the sums go on from the round before, or there are none.
struct ListSums {
  void* dq = nullptr;  // starts on 16 bytes
  size_t dq_bytes = 0;
  float* dk = nullptr;
  float* dv = nullptr;
  int32_t batch = 0, nheads_k = 0, head_ratio = 1, head_dim = 0;
};
struct ChunkKeyListsParams {
  // Lists of row blocks, or of all rows. from.heads: list heads of a batch, as they lie in memory.
  KeyList from;
  // to.keys.heads: list heads of a batch, as they lie in memory. Every head_step-th is merged.
  KeyChunks to;
  int32_t seqlen_q = 0, seqlen_k = 0;
  int32_t row_block_begin = 0, row_blocks = 0;  // the row blocks of this launch
  int32_t row_block_rows = 0;
  // `from` has lists for all rows: every row sees all keys of its list, except for causality.
  bool is_shared = false;
  bool is_causal = false;  // if is_shared: a row sees no key behind its own position
  // If is_shared: each tile of a list has all rows. The lists are not merged: `to` has those of `from` themselves,
  // which are ascending, for list_heads heads of each batch. Only tile_rows is written.
  bool is_whole = false;
  int32_t list_heads = 1;
  int32_t head_step = 1;               // 1 if is_whole
  const int32_t* used_rows = nullptr;  // if is_shared, optional: UsedRows::found of the lists of `from`
  int32_t* first_term = nullptr;       // optional, see ChunkTerms
  ListSums sums;                       // none if is_whole
  // Optional: the items of the launch, which has `blocks` thread blocks, are counted here. parts_of_list: pairs of a
  // batch and a kv head that read the same list, each with group_heads query heads.
  ListNumbers* numbers = nullptr;
  int32_t blocks = 0, parts_of_list = 0, group_heads = 0;
  // Estimated length of an item, in steps: steps_of_head for each query head, and steps_of_prologue once.
  int32_t steps_of_head = 0, steps_of_prologue = 0;
};

struct ReduceDbiasParams {
  // Source: fp32 [batch][nheads][rows][cols] contiguous, rows == 1 (column sums) ...
  const float* src = nullptr;
  int32_t batch = 0, nheads = 0, seqlen_q = 0, seqlen_k = 0;
  // ... or, for a bias that is constant along the keys, dlse: sum_j dscores_ij = dlse_i for every row that keeps a
  // key, and 0 for the others (softmax does not change when a constant is added to a row).
  const float* dlse = nullptr;  // nullptr: all zeros
  Strides3 dlse_stride;
  const float* lse_rounded = nullptr;  // [batch][nheads][seqlen_q_rounded]: +inf marks rows without keys
  int32_t seqlen_q_rounded = 0;
  // Destination: contiguous [out_batch][out_heads][out_rows][out_cols], each 1 or the full extent.
  void* dbias = nullptr;
  Dtype dtype = Dtype::kNone;
  int32_t out_batch = 1, out_heads = 1, out_rows = 1, out_cols = 1;
};

// --- cache of keys --------------------------------------------------------------------------------------------------

struct CacheAppendParams {
  const void* k_new = nullptr;  // [batch][tokens][nheads_k][head_dim], 16-bit
  const void* v_new = nullptr;
  Strides3 k_new_stride, v_new_stride;
  const void* score_new = nullptr;  // [batch][nheads_k][tokens]
  int64_t score_batch_stride = 0, score_head_stride = 0, score_token_stride = 1;
  const uint8_t* active = nullptr;  // [batch][tokens], 0: the token is skipped; nullptr: all are put in
  int64_t active_batch_stride = 0, active_token_stride = 0;
  void* k_cache = nullptr;  // [batch][capacity][nheads_k][head_dim]
  void* v_cache = nullptr;
  Strides3 k_stride, v_stride;
  void* score = nullptr;        // [batch][nheads_k][capacity]; -inf: empty
  int32_t* position = nullptr;  // [batch][nheads_k][capacity]; -1: empty
  int32_t* seen = nullptr;      // [batch]: tokens so far, the position of the next one
  Dtype score_dtype = Dtype::kFloat32;
  bool evict = true;
  int32_t batch = 0, tokens = 0, nheads_k = 0, head_dim = 0, capacity = 0;
};

// A draft of `tokens` tokens. `active` and `evict` are not read. k_cache and v_cache have at least `tokens` more rows
// than entries.
struct CacheDraftParams : CacheAppendParams {
  DraftToken* draft = nullptr;            // [batch][nheads_k][tokens]
  bool vec_new = true, vec_cache = true;  // rows start on 16 bytes
  // For cache_commit(), which does not read the new tokens: [batch], how many tokens of each sequence are put in,
  // clamped to 0 ... tokens.
  const void* count = nullptr;
  int64_t count_stride = 1;
  bool count_is_wide = false;  // int64, else int32
};

}  // namespace dmattn
