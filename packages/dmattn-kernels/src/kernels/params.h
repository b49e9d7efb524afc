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

// Sequences of unequal lengths, packed one after the other; inactive for a batch of equal lengths.
// When packed, `batch` counts sequences, seqlen_q and seqlen_k bound their lengths, and the tensors have no batch:
// their batch strides are 0, and sequence b has the rows from cu_seqlens_q[b] and the keys from cu_seqlens_k[b] up to
// those of b + 1. What is [batch][heads][seqlen] in the workspace is [heads][total] then, unless its own comment says
// otherwise.
struct Packing {
  const int32_t* cu_seqlens_q = nullptr;  // [sequences + 1]
  const int32_t* cu_seqlens_k = nullptr;  // [sequences + 1]
  int32_t sequences = 0;
  int32_t total_q = 0, total_k = 0;  // rows and keys of all sequences
  int32_t m_blocks = 0;              // backward: packed_blocks() of block_m query rows
  // Added to the offset of the bias for each key before the sequence: +stride if the bias has columns for the keys of
  // all sequences, -stride if the kernel's key numbers count through all of them (packed_bias_stride() in
  // host/problem.h).
  int64_t bias_col_stride = 0;

  constexpr bool is_active() const { return sequences > 0; }
  // Batch and lengths of the tensors, given those of the problem.
  constexpr int32_t slabs(int32_t batch) const { return is_active() ? 1 : batch; }
  constexpr int32_t rows_q(int32_t seqlen_q) const { return is_active() ? total_q : seqlen_q; }
  constexpr int32_t rows_k(int32_t seqlen_k) const { return is_active() ? total_k : seqlen_k; }
};

// Arrays in blocks of `block` rows that no two sequences share: the first block of sequence b, before which the other
// sequences have `before` rows, and the number of blocks in all. This needs no sum over the blocks of the sequences
// before b, and each sequence gets enough of them:
// ceil((after - before) / block) <= after / block + 1 - before / block.
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

// The boolean mask as the caller gave it: read only by the packing and compaction kernels.
struct MaskSource {
  const uint8_t* ptr = nullptr;
  int64_t batch_stride = 0;  // 0 where broadcast
  int64_t head_stride = 0;
  int64_t row_stride = 0;
  int64_t col_stride = 0;
  int32_t batch = 1;  // extents of the operand itself: 1 where broadcast
  int32_t heads = 1;
  int32_t seqlen_q = 0;  // extents after broadcasting over rows and columns
  int32_t seqlen_k = 0;
  // Packed sequences: seqlen_q is total_q; seqlen_k bounds the columns of a row.
  Packing packing;
  bool per_key = false;  // packed: columns are the keys of all sequences, not of the row's own
};

// Edge of the square cells whose state (empty, partial, full) the packing kernel records.
constexpr int kMaskBand = 64;
// Rows of the bands that share a word of any_cols and all_cols: packed sequences start with a word of their own.
constexpr int kMaskWordRows = 32 * kMaskBand;
// Packed sequences: each starts its list of keys at a multiple of this.
constexpr int kListBlock = 128;
// Pitch of lse and delta between heads, and between packed sequences: a multiple of every block_m.
constexpr int kRowPitch = 128;

// A dense mask, packed once. Everything is indexed [mask batch][mask head] first.
//   bits     [seqlen_q][words_per_row]       bit (j % 32) of word j / 32 keeps key j; bits past seqlen_k are 0
//   any_rows [bands_q][words_k]              bit (c % 32) of word c / 32: cell (row band, c) keeps something
//   all_rows [bands_q][words_k]              ... keeps everything inside seqlen_q x seqlen_k
//   any_cols, all_cols [bands_k][words_q]    the same, transposed, for the backward
// Packed sequences: bits has the rows of all of them, words_q are packed_blocks() of kMaskWordRows rows, and there are
// 32 bands_q to each. Columns count from the first key of the row's own sequence.
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
//   block_rows == 0  one list for all rows: what a key-only mask keeps, ascending. Causality is checked on top.
//   block_rows > 0   a list for each block of block_rows query rows: the keys that any of its rows keeps, the ones that
//                    all of them keep first. Key j is kept by the rows whose position r = row + seqlen_k - seqlen_q has
//                    j <= r < end[j] (causality included); only entries at and past `full` need the test.
struct KeyList {
  const int32_t* idx = nullptr;    // [batch][heads][blocks][capacity]; zeros from count up to the next multiple of 128
  const int32_t* count = nullptr;  // [batch][heads][blocks]
  int32_t capacity = 0;            // a multiple of 128
  int32_t batch = 1;               // 1 or the attention's batch
  int32_t heads = 1;
  int32_t head_ratio = 1;         // query heads per list head
  int32_t block_rows = 0;         // 0 or a multiple of 128
  int32_t blocks = 1;             // ceil(seqlen_q / block_rows), or 1
  const int32_t* full = nullptr;  // [batch][heads][blocks]
  const int32_t* end = nullptr;   // [batch][heads][seqlen_k]
};
// Packed sequences have lists with block_rows == 0: count is [batch][heads], idx [heads][capacity] with the list of
// sequence b from the first_packed_block() of kListBlock keys on. Keys are numbered through all sequences.

// The lists of neighbouring row blocks put together, for the backward on Hopper: keys.block_rows counts the rows of
// such a chunk, keys.blocks the chunks from the first row block that a launch handles. Written by chunk_key_lists(). A
// list is ordered by the rows of the chunk that see a key, so that few rows meet a tile that they do not see; keys.full
// is nullptr.
struct KeyChunks {
  KeyList keys;
  // int2 [batch][heads][chunks][capacity / kChunkTileKeys]: the first block of kChunkTileRows rows that sees a key of
  // the tile, and the last one + 1. Equal: the list has no such tile.
  void* tile_rows = nullptr;
};
constexpr int kChunkTileKeys = 128, kChunkTileRows = 64;

// Deterministic sums over the lists of chunks: what a chunk adds to dk, dv and dbias of a key has a row of its own, so
// that chunks need not wait for each other. The rows of a key lie one behind the other, in the order of its chunks, and
// reduce_chunk_terms() adds them up.
struct ChunkTerms {
  // [list batch][list heads][seqlen_k], written by chunk_key_lists(): first[key] + chunk is the row of a key for a
  // chunk that lists it. nullptr: chunks take turns instead.
  int32_t* first = nullptr;
  float* dk = nullptr;     // fp32 [batch][nheads_k][capacity][head_dim]
  float* dv = nullptr;     // likewise
  float* dbias = nullptr;  // fp32 [batch][nheads_k][capacity]; nullptr: not asked for
  int32_t capacity = 0;    // rows of a kv head
};

// Rows of a head that are those of several tokens, each with a row for every head of a group: FwdParams::seqlen_q =
// count * group, and FwdParams::nheads counts groups.
struct TokenRows {
  int32_t count = 1;
  Divisor group{1};  // rows of a token
  // Elements between the queries, the results and the log-sum-exps of two tokens. FwdParams has the strides of a
  // token's rows.
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
  // num_splits > 1, or TokenRows of the forward kernel: normalised partial results, fp32, combined by combine_splits()
  // or by the decode kernel itself.
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
  bool has_mask = false;  // a dense mask: known before its bits have a place
  KeyList keys;           // idx == nullptr: not gathered
  Packing packing;        // num_splits is 1 then
  // Hopper, where there are more row blocks than thread blocks: one number, which counts those that are taken.
  int32_t* work_counter = nullptr;
  // Hopper, causal: > 0: the row at position r sees the keys r - window < j <= r. 0: all keys up to its own position.
  int32_t window = 0;
  // Of the sm80 kernels; count == 1: rows are those of `seqlen_q` tokens, or of the heads of one.
  TokenRows token_rows;
};
// Whether a window is all that is asked of the scores.
inline bool has_plain_window(const FwdParams& p) {
  return p.window > 0 && p.bias.kind == BiasKind::kNone && p.softcap == 0.f && p.softmax_scale > 0.f;
}

// The token that a cache of the best keys takes in before its queries attend (see cache/cache.h).
struct CacheToken {
  const void* k = nullptr;  // 16-bit [batch][nheads_k][head_dim]; nullptr: there is no token
  const void* v = nullptr;
  Strides3 k_stride, v_stride;  // row is not used
  const void* score = nullptr;  // [batch][nheads_k], dtype of the entries' scores
  int64_t score_batch_stride = 0, score_head_stride = 0;
  int32_t* seen = nullptr;          // [batch]: the token's position; raised at the end
  const uint8_t* active = nullptr;  // [batch]: 0 where the token is none; nullptr: all are
  int64_t active_stride = 0;
  int32_t* entry_position = nullptr;  // [batch][nheads_k][seqlen_k], contiguous
  // What the token is written to at the end: FwdParams::k, v and bias, as which the entries are read.
  void* k_cache = nullptr;
  void* v_cache = nullptr;
  void* entry_score = nullptr;
  bool vec = true;  // k and v rows start on 16 bytes
};

// What is known of a token behind the entries of a cache of the best keys, without its being put in: written and read
// in cache/draft.cu, and read by the attention of the drafted tokens.
struct alignas(16) DraftToken {
  int32_t slot;      // of the entry that would make room for it; -1: it would not be kept
  int32_t end;       // number of the first token that would push it out, or of all tokens; 0: it would not be kept
  float score;       // -inf for NaN
  int32_t position;  // in its sequence
};
// Tokens of a draft whose queries attend: to the entries that none of them up to their own has pushed out, and to those
// tokens themselves that have not been.
struct CacheDraft {
  const DraftToken* tokens = nullptr;  // [batch][nheads_k][count]; nullptr: there is no draft
  int32_t entries = 0;                 // keys before the tokens, which are the last keys
  int32_t count = 0;                   // at most kMaxDraft, as many as there are TokenRows
};
// With a token, what each split of a head leaves beside its results: of its entries the one that would leave the cache
// first, which these results leave out.
struct LowestEntries {
  uint32_t* entry = nullptr;  // [num_splits][batch][nheads][4]: a CacheEntry (see cache/entry.cuh) in the first three
  void* v = nullptr;          // 16-bit [num_splits][batch][nheads][head_dim]: its row of V
  float* logit = nullptr;     // [num_splits + 1][batch][nheads][seqlen_q]; last, the logits of the token
};

// Few query rows (of one token or some, each one a head, or the heads of a group) over any number of keys: decoding. Of
// FwdParams, `mask` is not read, and key intervals cut nothing; causality does where there are several tokens, the last
// of which sees the last key. With a token that comes to a cache, the keys are its entries and the token, except for
// the one that leaves the cache, whose place the token takes at the end.
struct DecodeParams : FwdParams {
  CacheToken token;
  CacheDraft draft;  // excludes a token; bias is that of the entries
  LowestEntries lowest;
  // Blocks that have ended, where several share a row or a head; see Arrivals in attention/sm80/decode_results.cuh. One
  // word for each head and block of rows; with a token, one for each head and then one for each sequence.
  uint64_t* arrivals = nullptr;
  uint64_t launch_tag = 0;  // drawn anew for each launch: next_launch_tag() in host/launch_tag.h
};

// Where dbias goes.
enum class DbiasKind : int32_t {
  kNone = 0,
  kKey = 1,    // column sums, fp32, into dbias_cols [batch][nheads][seqlen_k] (zeroed before the launch)
  kTile = 2,   // every (b, h, i, j) has its own entry: dscores stored straight to dbias in the bias's dtype
  kAccum = 3,  // dense but shared between heads or batches: fp32 atomics into dbias_accum (zeroed before)
  kPair =
      4,  // Hopper, 16-bit: two heads or batches share an entry, and add to dbias itself (zeroed before). The second
          // sum is rounded once, whichever comes first.
};

// Hopper, 16-bit dense bias: which of those that share an entry of the bias and of its gradient have a thread block
// together, which adds their gradients up first: kv heads 2 i and 2 i + 1 with their query heads, or such batches.
enum class BiasPairs : int32_t { kNone = 0, kHeads = 1, kBatches = 2 };

struct BwdParams {
  const void* q = nullptr;
  const void* k = nullptr;
  const void* v = nullptr;
  const void* dout = nullptr;
  Strides3 q_stride, k_stride, v_stride, dout_stride;
  // Written by bwd_preprocess: [batch][nheads][seqlen_q_rounded]; rows past seqlen_q and rows that keep nothing
  // have lse = +inf, so that their probabilities come out as 0 without a test. Packed sequences: [nheads] and
  // packed_blocks() of kRowPitch rows.
  const float* lse = nullptr;
  const float* lse_rest = nullptr;  // optional, as lse: see FwdParams (0 in the padding)
  const float* delta = nullptr;     // rowsum(out * dout) - dlse
  // fp32 dq in fragment order: [batch][nheads][dq_blocks][kBlockM * dq_dims], element (i, thread) of a tile at
  // i * threads + thread, so that a warp's atomics fall on 128 consecutive bytes. nullptr: dq is not asked for. Packed
  // sequences: [nheads][packing.m_blocks], and dq_semaphore too. On Hopper the order is that of DqTile. A launch for
  // some of the group's heads or of the row blocks has room for those only, and the pointers to where the first of all
  // would be.
  float* dq_accum = nullptr;
  int32_t dq_dims = 0;  // columns of a tile of dq_accum: those of the tile, or only those of head_dim, rounded up to 8
  int32_t dq_blocks = 0;  // row blocks a head; fewer than there are only for interval lists
  // Hopper, in place of dq_accum where a single tile has all keys of a head: dq itself.
  void* dq = nullptr;
  Strides3 dq_stride;
  void* dk = nullptr;  // nullptr: not asked for
  void* dv = nullptr;
  Strides3 dk_stride, dv_stride;
  // num_splits > 1, or chosen on the device (schedule != nullptr), or on Hopper launches that follow one another with
  // heads of one group: dk and dv of a tile come from several blocks, as fp32 [slot][kBlockN][kHeadDim] each, rounded
  // by reduce_dkv(). slot = tile, zeroed before and added to by atomics; with has_split_slots, slot = tile * num_splits
  // + split, summed by reduce_dkv().
  float* dk_slots = nullptr;
  float* dv_slots = nullptr;
  // fp32 [batch][nheads_k][seqlen_k][head_dim], zeroed before and converted after: for launches that follow one another
  // with heads of one group (see group_begin), and for interval lists (a key lies in the lists of many row blocks).
  // Added to by atomics where several blocks of a launch have the same key.
  float* dk_accum = nullptr;
  float* dv_accum = nullptr;
  // Where tiles add to dq in ascending or descending key order, as for deterministic sums: one for each row block of
  // dq_accum, zeroed.
  int32_t* dq_semaphore = nullptr;
  // Deterministic sums over interval lists: [batch][nheads_k], zeroed. Blocks of one kv head add to dk, dv and
  // dbias_cols in the order of their row blocks. Hopper: [batch][nheads_k][chunks], see BwdArguments; nullptr where
  // what chunks add is kept apart (see ChunkTerms). Consecutive keys on Hopper: two for each tile, whose parts take
  // turns.
  int32_t* dkv_semaphore = nullptr;
  // Gathered by a key-only mask, written by bwd_schedule(): [0] = num_splits, [1] = number of tiles, [2 + i] = first
  // tile of list i (batch-major over (batch, nheads_k)), i <= batch * nheads_k.
  const int32_t* schedule = nullptr;
  int32_t batch = 0, seqlen_q = 0, seqlen_k = 0;
  int32_t seqlen_q_rounded = 0;  // multiple of kRowPitch: head pitch of lse and delta
  int32_t nheads = 0, nheads_k = 0, head_dim = 0;
  int32_t head_ratio = 1;
  int32_t group_begin = 0, group_end = 1;       // query heads of each kv head handled by this launch: [begin, end)
  int32_t row_block_begin = 0, row_blocks = 1;  // interval lists: the row blocks handled by this launch
  int32_t num_splits = 1;  // on Hopper, if there are more than heads in a launch, some of them share out its rows
  // Gathered by a key-only mask: blocks to launch, an upper bound on tiles * splits: max(batch * nheads_k *
  // ceil(seqlen_k / kBlockN), the max_work given to bwd_schedule).
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
  Packing packing;                                                              // num_splits is 1 then
  // Hopper: one number, zero before the launch, which counts the blocks of keys that thread blocks have taken (see
  // BwdArguments).
  int32_t* work_counter = nullptr;
  bool has_split_slots = false;  // deterministic, but not on Hopper: splits then fall on whole heads
  int32_t window = 0;            // as in FwdParams
  bool mirrors_items = false;    // on Hopper, with levels kPlain and kPacked: see BwdArguments
  ChunkTerms terms;
  BiasPairs bias_pairs = BiasPairs::kNone;
  // On Hopper, where what shares dbias adds to it in a fixed order: see BwdArguments.
  int32_t* dbias_semaphore = nullptr;
};

}  // namespace dmattn
