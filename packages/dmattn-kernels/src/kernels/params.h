// What the host hands to the kernels. Plain structs, no CUDA types beyond pointers, so that the host library
// (src/host) and the device code (src/kernels) read one description. All strides are in elements.
#pragma once

#include <cstdint>

#include "divisor.h"

namespace dmattn {

enum class Dtype : int32_t { kNone = 0, kFloat16 = 1, kBFloat16 = 2, kFloat32 = 3 };

// (batch, seqlen, heads, head_dim) tensors: the last stride is 1.
struct Strides3 {
  int64_t batch = 0;
  int64_t head = 0;
  int64_t row = 0;
};

// Sequences of unequal lengths, packed one after the other. Inactive for a batch of equal lengths. When packed,
// `batch` is the number of sequences, seqlen_q and seqlen_k are upper bounds on their lengths, and the tensors have
// no batch dimension: their batch strides are 0. Sequence b has the rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1,
// and likewise the keys of cu_seqlens_k. An array of the workspace that is [batch][heads][seqlen] otherwise is then
// [heads][total], unless its own comment says something else.
struct Packing {
  const int32_t* cu_seqlens_q = nullptr;  // [sequences + 1]
  const int32_t* cu_seqlens_k = nullptr;  // [sequences + 1]
  int32_t sequences = 0;
  int32_t total_q = 0, total_k = 0;  // rows and keys of all sequences
  // Backward: row blocks of all sequences, packed_blocks() with block_m rows each.
  int32_t m_blocks = 0;
  // Added to the offset of the bias for each key that comes before the sequence: +stride if the columns of the bias
  // are the keys of all sequences, -stride if the kernel numbers keys through all sequences (packed_bias_stride() in
  // host/problem.h).
  int64_t bias_col_stride = 0;

  constexpr bool is_active() const { return sequences > 0; }
  // Batch size and lengths of the tensors, given those of the problem.
  constexpr int32_t slabs(int32_t batch) const { return is_active() ? 1 : batch; }
  constexpr int32_t rows_q(int32_t seqlen_q) const { return is_active() ? total_q : seqlen_q; }
  constexpr int32_t rows_k(int32_t seqlen_k) const { return is_active() ? total_k : seqlen_k; }
};

// Arrays that are divided into blocks of `block` rows, where no block belongs to two sequences. first_packed_block()
// is the first block of sequence b if the sequences before it have `before` rows; packed_blocks() is the number of
// blocks of all sequences. Neither needs a sum over the earlier sequences. Each sequence gets enough blocks:
// ceil((after - before) / block) <= after / block + 1 - before / block, where `after` is the number of rows up to its
// end.
constexpr int32_t first_packed_block(int32_t before, int32_t b, int32_t block) { return before / block + b; }
constexpr int32_t packed_blocks(int32_t total, int32_t batch, int32_t block) { return total / block + batch; }

// How the bias reaches the scores.
enum class BiasKind : int32_t {
  kNone = 0,
  kKey = 1,     // the same for every row: kBlockN values per key tile, staged in shared memory as fp32
  kTile = 2,    // one value per (row, key), 16-bit, unit column stride: tiles copied to shared memory by cp.async
  kDirect = 3,  // anything else (fp32 per (row, key), strided columns, gathered columns): element loads
};

// A bias (or mask) operand of shape (batch|1, nheads|nheads_k|1, seqlen_q|1, seqlen_k|1). Broadcast dimensions
// have stride 0. The operand's head of query head h is h / head_ratio.
struct BiasParams {
  const void* ptr = nullptr;
  Dtype dtype = Dtype::kNone;
  BiasKind kind = BiasKind::kNone;
  int64_t batch_stride = 0;
  int64_t head_stride = 0;
  int64_t row_stride = 0;
  int64_t col_stride = 0;
  int32_t head_ratio = 1;
};

// The boolean mask as the caller gave it. Only the packing and compaction kernels and the kernels for few keys read
// it.
struct MaskSource {
  const uint8_t* ptr = nullptr;
  int64_t batch_stride = 0;  // 0 where broadcast
  int64_t head_stride = 0;
  int64_t row_stride = 0;
  int64_t col_stride = 0;
  int32_t batch = 1;  // extents of the operand itself: 1 where broadcast
  int32_t heads = 1;
  // Extents after broadcasting over rows and columns. Packed sequences: seqlen_q is total_q, and seqlen_k is the
  // upper bound on the columns of a row.
  int32_t seqlen_q = 0;
  int32_t seqlen_k = 0;
  Packing packing;
  bool per_key = false;  // packed: the columns are the keys of all sequences, not those of the row's own sequence
};

// Edge of the square cells whose state (empty, partial, full) the packing kernel records. A band is a row or a column
// of such cells.
constexpr int kMaskBand = 64;
// Query rows whose bands share a word of any_cols and all_cols. Each packed sequence starts with a word of its own.
constexpr int kMaskWordRows = 32 * kMaskBand;
// The key list of each packed sequence starts at a multiple of this.
constexpr int kListBlock = 128;
// Pitch of lse and delta: each head and each packed sequence starts at a multiple of this many rows. It is a multiple
// of every block_m except 96, which is not used for packed sequences.
constexpr int kRowPitch = 128;

// A dense mask, packed once. Everything is indexed [mask batch][mask head] first.
//   bits     [seqlen_q][words_per_row]       bit (j % 32) of word j / 32 keeps key j; bits past seqlen_k are 0
//   any_rows [bands_q][words_k]              bit (c % 32) of word c / 32: cell (row band, c) keeps something
//   all_rows [bands_q][words_k]              ... keeps everything inside seqlen_q x seqlen_k
//   any_cols, all_cols [bands_k][words_q]    the same, transposed, for the backward
// Packed sequences: `bits` has the rows of all sequences; words_q is the packed_blocks() of kMaskWordRows rows, and
// bands_q is 32 * words_q. Columns count from the first key of the row's own sequence.
struct MaskBits {
  const uint32_t* bits = nullptr;
  const uint32_t* any_rows = nullptr;
  const uint32_t* all_rows = nullptr;
  const uint32_t* any_cols = nullptr;
  const uint32_t* all_cols = nullptr;
  int32_t words_per_row = 0;  // a multiple of 4, so that rows start on 16 bytes
  int32_t bands_q = 0, bands_k = 0;
  int32_t words_q = 0, words_k = 0;  // ceil(bands / 32)
  int32_t heads = 1;                 // mask heads
  int32_t batch = 1;                 // mask batch
  int32_t rows = 0;                  // seqlen_q
  int32_t head_ratio = 1;            // query heads per mask head
  bool is_key_only = false;          // all rows are the same
};

// The kept keys, per (list batch, list head).
//   block_rows == 0  one list for all rows: what a key-only mask or a selection that is not causal keeps, ascending
//                    (causality is tested on top); or the list of a single query row.
//   block_rows > 0   a list for each block of block_rows query rows: the keys that any of its rows keeps, first the
//                    `full` keys that all of them keep. Key j is kept by the rows whose position
//                    r = row + seqlen_k - seqlen_q has j <= r < end[j], which includes causality; only entries at and
//                    past `full` need that test.
struct KeyList {
  const int32_t* idx = nullptr;    // [batch][heads][blocks][capacity]; zeros from count up to the next multiple of 128
  const int32_t* count = nullptr;  // [batch][heads][blocks]
  int32_t capacity = 0;            // a multiple of 128
  int32_t batch = 1;               // 1, or the batch size of the attention
  int32_t heads = 1;
  int32_t head_ratio = 1;         // query heads per list head
  int32_t block_rows = 0;         // 0 or a multiple of 128
  int32_t blocks = 1;             // ceil(seqlen_q / block_rows), or 1
  const int32_t* full = nullptr;  // [batch][heads][blocks]
  const int32_t* end = nullptr;   // [batch][heads][seqlen_k]
};
// Packed sequences have one list each, with block_rows == 0: count is [batch][heads], idx is [heads][capacity], and
// the list of sequence b starts at its first_packed_block() of kListBlock keys. Keys are numbered through all
// sequences.

// Merged lists of neighbouring row blocks (a chunk), for the backward on Hopper: keys.block_rows is the number of
// rows of a chunk, and keys.blocks the number of chunks, counted from the first row block of the launch. Written by
// chunk_key_lists(). A list is sorted by the rows of the chunk that see each key, so that few rows meet a tile of
// keys that they do not see. keys.full is nullptr.
struct KeyChunks {
  KeyList keys;
  // int2 [batch][heads][chunks][capacity / kChunkTileKeys]: the first block of kChunkTileRows rows that sees a key of
  // the tile, and the last such block + 1. If both are equal, the list has no such tile.
  void* tile_rows = nullptr;
};
constexpr int kChunkTileKeys = 128, kChunkTileRows = 64;

// Deterministic sums over the lists of chunks: what a chunk adds to dk, dv and dbias of a key is stored in a row of
// its own, so that chunks need not wait for each other. The rows of a key lie one behind the other, in the order of
// its chunks, and reduce_chunk_terms() adds them up in that order.
struct ChunkTerms {
  // [list batch][list heads][seqlen_k], written by chunk_key_lists(): the row for a key in a chunk that lists it is
  // first[key] + the number of the chunk. nullptr: chunks do not store their contributions, but take turns.
  int32_t* first = nullptr;
  float* dk = nullptr;     // fp32 [batch][nheads_k][capacity][head_dim]
  float* dv = nullptr;     // the same shape
  float* dbias = nullptr;  // fp32 [batch][nheads_k][capacity]; nullptr: not asked for
  int32_t capacity = 0;    // rows for each kv head
};

// Rows of several tokens, taken together as the rows of a head: each token has one row for every query head of a
// group. FwdParams::seqlen_q is then count * group, and FwdParams::nheads is the number of groups.
struct TokenRows {
  int32_t count = 1;
  Divisor group{1};  // rows of each token
  // Elements from one token to the next in the queries, the results and the log-sum-exps. The strides in FwdParams
  // are those between the rows of one token.
  int64_t q_token = 0, out_token = 0, lse_token = 0;
};

struct FwdParams {
  const void* q = nullptr;  // f16/bf16
  const void* k = nullptr;
  const void* v = nullptr;
  void* out = nullptr;
  float* lse = nullptr;       // natural log
  float* lse_rest = nullptr;  // optional, strides of lse: log-sum-exp minus its rounding to fp32 in lse
  Strides3 q_stride, k_stride, v_stride, out_stride, lse_stride;
  // Normalised partial results in fp32, where num_splits > 1. They are combined by combine_splits(), or by the decode
  // kernel itself. The sm80 forward kernel also writes its only part here if there are TokenRows.
  float* out_accum = nullptr;  // [num_splits][batch][nheads][seqlen_q][head_dim]
  float* lse_accum = nullptr;  // [2][num_splits][batch][nheads][seqlen_q]: lse, then its rest
  int32_t batch = 0, seqlen_q = 0, seqlen_k = 0;
  int32_t nheads = 0, nheads_k = 0, head_dim = 0;
  int32_t head_ratio = 1;  // nheads / nheads_k
  int32_t num_splits = 1;
  float softmax_scale = 1.f;
  float softcap = 0.f;  // 0: none
  bool is_causal = false;
  bool vec_q = true, vec_k = true, vec_v = true, vec_out = true;  // rows start on 16 bytes
  BiasParams bias;
  MaskBits mask;          // bits == nullptr: no dense mask
  bool has_mask = false;  // whether there is a dense mask; set before mask.bits has its place in the workspace
  KeyList keys;           // idx == nullptr: not gathered
  Packing packing;        // num_splits is 1 if sequences are packed
  // Hopper, where there are more row blocks than thread blocks: one number, which counts the row blocks (or splits of
  // them) that have been taken.
  int32_t* work_counter = nullptr;
  // Hopper, causal: > 0: the row at position r sees the keys r - window < j <= r. 0: all keys up to its own position.
  int32_t window = 0;
  // sm80 kernels only. count == 1: the rows are seqlen_q rows of one head, or those of one token, one for each head
  // of a group.
  TokenRows token_rows;
};
// Whether a window is all that is asked of the scores: there is neither a bias nor softcap.
inline bool has_plain_window(const FwdParams& p) {
  return p.window > 0 && p.bias.kind == BiasKind::kNone && p.softcap == 0.f && p.softmax_scale > 0.f;
}

// A token that is put into a cache of the best keys before its queries attend (see cache/cache.h).
struct CacheToken {
  const void* k = nullptr;  // 16-bit [batch][nheads_k][head_dim]; nullptr: there is no token
  const void* v = nullptr;
  Strides3 k_stride, v_stride;  // `row` is not used
  const void* score = nullptr;  // [batch][nheads_k], dtype of the entries' scores
  int64_t score_batch_stride = 0, score_head_stride = 0;
  int32_t* seen = nullptr;          // [batch]: the position of the token; incremented at the end
  const uint8_t* active = nullptr;  // [batch]: 0 means that the sequence has no token; nullptr: every sequence has one
  int64_t active_stride = 0;
  int32_t* entry_position = nullptr;  // [batch][nheads_k][seqlen_k], contiguous
  // Where the token is written at the end: the same memory as FwdParams::k, v and bias, through which the entries are
  // read.
  void* k_cache = nullptr;
  void* v_cache = nullptr;
  void* entry_score = nullptr;
  bool vec = true;  // k and v rows start on 16 bytes
};

// What is known of a token of a draft, which is not put into the cache of the best keys yet. Written and read in
// cache/draft.cu, and read by the attention of the drafted tokens.
struct alignas(16) DraftToken {
  int32_t slot;      // the entry that would make room for it; -1: the token would not be kept
  int32_t end;       // number of the first token that would evict it, or the number of tokens; 0: it would not be kept
  float score;       // -inf in place of NaN
  int32_t position;  // in its sequence
};
// The tokens of a draft whose queries attend. A token sees the entries and the tokens up to itself, except for those
// that a token up to itself would have evicted.
struct CacheDraft {
  const DraftToken* tokens = nullptr;  // [batch][nheads_k][count]; nullptr: there is no draft
  int32_t entries = 0;  // number of entries; the keys of the tokens come behind them and are the last keys
  int32_t count = 0;    // number of tokens: TokenRows::count, at most kMaxDraft
};
// With a token, each split of a head leaves the lowest of its entries (the one to be evicted first) here. It is not
// part of the partial results of the split, so that it can still be left out or added.
struct LowestEntries {
  // [num_splits][batch][nheads][4]: a CacheEntry (see cache/entry.cuh) in the first three words
  uint32_t* entry = nullptr;
  void* v = nullptr;  // 16-bit [num_splits][batch][nheads][head_dim]: the entry's row of V
  // [num_splits + 1][batch][nheads][seqlen_q]: logits of the lowest entry of each split; behind them the logits of
  // the token.
  float* logit = nullptr;
};

// Decoding: few query rows over any number of keys. The rows are those of one or more tokens, one for each token or,
// where heads of a group are taken together, one for each token and head. `mask` is not read, and intervals of keys
// are not tested. Causality is, if there are several tokens: the last one sees the last key. If a token is put into a
// cache, the keys are the entries and the token, without the entry that the token evicts; the token takes its place
// at the end.
struct DecodeParams : FwdParams {
  CacheToken token;
  CacheDraft draft;  // excludes `token`; `bias` then belongs to the entries alone
  LowestEntries lowest;
  // Counters of the thread blocks that have ended, where several of them share a row or a head (see Arrivals in
  // attention/sm80/decode_results.cuh). One word for each head and block of rows. With a token: one for each head,
  // then one for each sequence.
  uint64_t* arrivals = nullptr;
  uint64_t launch_tag = 0;  // a new number for each launch: next_launch_tag() in host/launch_tag.h
};

// Where dbias goes.
enum class DbiasKind : int32_t {
  kNone = 0,
  kKey = 1,    // column sums, fp32, into dbias_cols [batch][nheads][seqlen_k] (zeroed before the launch)
  kTile = 2,   // every (b, h, i, j) has its own entry: dscores stored straight to dbias in the bias's dtype
  kAccum = 3,  // dense but shared between heads or batches: fp32 atomics into dbias_accum (zeroed before)
  // Hopper, 16-bit: two heads or batches share an entry, and both add to dbias itself (zeroed before the launch). As
  // a sum of two terms is rounded once, the order makes no difference.
  kPair = 4,
};

// Hopper, 16-bit dense bias: which heads or batches that share an entry of the bias and of its gradient are handled
// by one thread block, which adds up their gradients first: kv heads 2 i and 2 i + 1 with their query heads, or
// batches 2 i and 2 i + 1.
enum class BiasPairs : int32_t { kNone = 0, kHeads = 1, kBatches = 2 };

struct BwdParams {
  const void* q = nullptr;
  const void* k = nullptr;
  const void* v = nullptr;
  const void* dout = nullptr;
  Strides3 q_stride, k_stride, v_stride, dout_stride;
  // Written by bwd_preprocess: [batch][nheads][seqlen_q_rounded]. Rows past seqlen_q and rows that keep nothing have
  // lse = +inf, so that their probabilities become 0 without a test. Packed sequences: [nheads][packed_blocks() of
  // kRowPitch rows].
  const float* lse = nullptr;
  const float* lse_rest = nullptr;  // optional, same shape: see FwdParams::lse_rest (0 in the padding)
  const float* delta = nullptr;     // rowsum(out * dout) - dlse
  // fp32 sums of dq in fragment order: [batch][nheads][dq_blocks][kBlockM * dq_dims]. Element (i, thread) of a tile
  // is at i * threads + thread, so that the atomics of a warp fall on 128 consecutive bytes. On Hopper the order is
  // that of DqTile. nullptr: dq is not asked for. Packed sequences: [nheads][packing.m_blocks][kBlockM * dq_dims],
  // and dq_semaphore is [nheads][packing.m_blocks]. If a launch handles only some heads of a group or some row
  // blocks, there is memory for these alone, and the pointers are moved back to where the first head and row block
  // would be.
  float* dq_accum = nullptr;
  // Columns of a tile of dq_accum: all columns of the tile, or only those of head_dim, rounded up to a multiple of 8.
  int32_t dq_dims = 0;
  // Row blocks of a head in dq_accum. If row blocks have lists, these are only the row blocks of a round.
  int32_t dq_blocks = 0;
  // Hopper, instead of dq_accum, if a single tile has all keys of a head: dq itself, which the kernel writes.
  void* dq = nullptr;
  Strides3 dq_stride;
  void* dk = nullptr;  // nullptr: not asked for
  void* dv = nullptr;
  Strides3 dk_stride, dv_stride;
  // fp32 sums of dk and dv of a tile of keys, to which several thread blocks or launches contribute,
  // [slot][kBlockN][kHeadDim] each; reduce_dkv() rounds them. Used if num_splits > 1, if the device chooses the
  // number of splits (schedule != nullptr), and on Hopper if launches with heads of the same group follow one
  // another. Usually slot = tile: zeroed before, added to by atomics. With has_split_slots, slot = tile * num_splits
  // + split: each is written once, and reduce_dkv() adds them up.
  float* dk_slots = nullptr;
  float* dv_slots = nullptr;
  // fp32 sums of dk and dv by key, [batch][nheads_k][seqlen_k][head_dim], zeroed before and converted after. Used if
  // launches with heads of the same group follow one another (see group_begin), and for lists of row blocks, as a key
  // lies in the lists of many row blocks. Added to by atomics if several thread blocks of a launch have the same key.
  float* dk_accum = nullptr;
  float* dv_accum = nullptr;
  // One counter for each row block of dq_accum, zeroed before, if the tiles of keys add to dq in a fixed order, as
  // for deterministic sums. nullptr: in any order.
  int32_t* dq_semaphore = nullptr;
  // Counters, zeroed before, that order deterministic sums of dk, dv and dbias_cols:
  //   sm80, lists of row blocks   [batch][nheads_k]: thread blocks of a kv head add in the order of their row blocks.
  //   Hopper, lists               [batch][nheads_k][chunks]: chunks take turns (see BwdArguments). nullptr if their
  //                               contributions are stored separately (ChunkTerms), or if a sole chunk has all rows:
  //                               each key is then in one tile, which writes dk and dv directly.
  //   Hopper, consecutive keys    two for each tile of keys: the parts of the tile take turns. Used if num_splits > 1.
  int32_t* dkv_semaphore = nullptr;
  // Gathered by a key-only mask on sm80, written by bwd_schedule(): [0] = num_splits, [1] = number of tiles, [2 + i]
  // = number of the first tile of list i, for 0 <= i <= batch * nheads_k. Lists are ordered by (batch, kv head).
  const int32_t* schedule = nullptr;
  int32_t batch = 0, seqlen_q = 0, seqlen_k = 0;
  // seqlen_q rounded up to a multiple of kRowPitch: elements from one head to the next in lse and delta
  int32_t seqlen_q_rounded = 0;
  int32_t nheads = 0, nheads_k = 0, head_dim = 0;
  int32_t head_ratio = 1;
  int32_t group_begin = 0, group_end = 1;  // query heads of each kv head handled by this launch: [begin, end)
  // Lists of row blocks: the row blocks that this launch handles.
  int32_t row_block_begin = 0, row_blocks = 1;
  // Parts of each tile of keys. On Hopper, if there are more parts than query heads in a launch, the rows of a head
  // are divided, too.
  int32_t num_splits = 1;
  // Gathered by a key-only mask: thread blocks to launch, an upper bound on tiles * splits: the larger of batch *
  // nheads_k * ceil(seqlen_k / kBlockN) and the max_work that is given to bwd_schedule().
  int32_t max_work_items = 0;
  float softmax_scale = 1.f;
  float softcap = 0.f;
  bool is_causal = false;
  bool deterministic = false;
  bool vec_q = true, vec_k = true, vec_v = true, vec_dout = true, vec_dk = true, vec_dv = true;
  BiasParams bias;
  MaskBits mask;
  KeyList keys;
  KeyChunks chunks;  // keys.idx == nullptr: there are none
  DbiasKind dbias_kind = DbiasKind::kNone;
  float* dbias_cols = nullptr;  // kKey: column sums of dscores
  void* dbias = nullptr;        // kTile, kPair: in bias.dtype; kAccum: float
  int64_t dbias_batch_stride = 0, dbias_head_stride = 0, dbias_row_stride = 0;  // unit column stride
  Packing packing;  // num_splits is 1 if sequences are packed
  // Hopper: one number, zero before the launch, which counts the items (tiles of keys) that thread blocks have taken
  // (see BwdArguments).
  int32_t* work_counter = nullptr;
  // Deterministic, not on Hopper: each split of a tile has a slot of its own. Splits then consist of whole heads.
  bool has_split_slots = false;
  int32_t window = 0;  // see FwdParams::window
  // Hopper, levels kPlain and kPacked: items are taken in pairs, see BwdArguments.
  bool mirrors_items = false;
  ChunkTerms terms;
  BiasPairs bias_pairs = BiasPairs::kNone;
  // Hopper, if heads or batches that share dbias add to it in a fixed order: see BwdArguments.
  int32_t* dbias_semaphore = nullptr;
};

}  // namespace dmattn
