// What the Hopper backward kernels are given: BwdParams, with the tensors as TMA sees them.
#pragma once

#include <cuda.h>
#include <vector_types.h>

#include <cstdint>

#include "../../params.h"
#include "bias_rows.h"
#include "gather_params.h"

namespace dmattn::sm90 {

// Sums of dbias that heads or batches share: fp32, unit column stride.
struct DbiasSums {
  float* data;
  int64_t batch_stride, head_stride, row_stride;
};

struct BwdArguments {
  CUtensorMap q, dout;       // dimensions (head_dim, seqlen, heads, batch)
  CUtensorMap k, v, dk, dv;  // likewise; not over lists
  // [batch][nheads][seqlen_q_rounded], +inf where there is no row. Times log2(e), except with a bias: then in natural
  // units.
  const float* lse;
  const float* lse_rest;  // with a bias: what lse lacks of the log-sum-exp, times log2(e); shaped like lse
  const float* delta;     // shaped like lse; 0 where there is no row
  // fp32 sums of dq / softmax_scale, zero before the launch: [batch][nheads][dq_blocks][dq_tile]. The elements of a
  // tile are in the order of DqTile.
  float* dq_accum;
  // Elements of a tile: kBlockM * kTileDim, or fewer where the last fragments lie beyond head_dim and are left out.
  int32_t dq_tile;
  uint32_t dq_last_bytes;  // bytes of the second consumer's part of a tile; computing this in the loop costs 1%
  // [batch][nheads][dq_blocks], zero before the launch: how many blocks of keys (over lists, tiles of the chunk) have
  // added to a tile of dq. For wide heads, and with kHasTurnWarps, each consumer counts. nullptr: nobody waits for a
  // turn.
  int32_t* dq_semaphore;
  // fp32 [batch][nheads_k][n_blocks][kBlockN][kTileDim], for packed sequences [nheads_k][total_k][head_dim]: added to
  // in place of dk and dv where several items or launches contribute to a block of keys. nullptr: one item has all
  // contributions.
  float* dk_slots;
  float* dv_slots;
  int32_t seqlen_q, seqlen_k, seqlen_q_rounded, nheads, nheads_k, head_ratio;
  int32_t group_begin, group_heads;  // of each group, this launch has group_heads query heads from group_begin on
  int32_t dq_blocks;                 // blocks of rows of a head in dq_accum
  // Blocks of rows and of keys of a head; over lists, n_blocks is the tiles that a list has room for.
  int32_t m_blocks, n_blocks;
  // Parts that a block of keys is divided into, each an item of its own: num_splits / row_splits shares of the query
  // heads, each of them divided into row_splits shares of their rows.
  int32_t num_splits, row_splits;
  // n_blocks * all_parts; over lists, times the number of chunks. Mirrored: 2 * pairs_of_part() * all_parts.
  int32_t items;
  // Parts (all_parts in all groups and batches) are taken in sections of section_parts. The blocks of keys of a
  // section are done before those of the next one begin, so that what they read and add to stays in L2. After
  // `sections` sections of this size, one more has the remaining parts. Over lists see choose_list_sections().
  int32_t section_parts, sections, all_parts;
  // Items are numbered in pairs, see find_mirrored_item(). Some of the `items` numbers then stand for no item.
  bool mirrors_items;
  float softmax_scale, softcap;
  bool is_causal;
  // How many items (or mirrored pairs) thread blocks have taken, zero before the launch. In kernels that cannot add dq
  // up in order (see BwdProducer::kInOrder), the first item of a thread block follows from the block's number and is
  // not counted. Kernels of wide heads use the counter only where clusters take turns. Over lists in any order:
  // ListNumbers::taken, unless lists_as_they_are is set.
  int32_t* work_counter;
  uint32_t zero;  // 0, which the compiler does not know: see move()

  // --- a bias ---
  BiasParams bias;    // of each key (kKey), the same for all heads of an item; kNone: no such bias
  float* dbias_cols;  // its gradient: fp32 [batch][nheads][seqlen_k], added to; nullptr: not asked for

  // --- a dense bias ---
  // Dimensions (seqlen_k, seqlen_q, heads, batch). The extent of heads or batch is 1 where all of them share the bias.
  CUtensorMap bias_tiles;
  BiasRows bias_rows;  // in place of bias_tiles where TMA does not take its rows; wide heads always read these
  // Wide heads: keys of a box of bias_tiles, by which TMA brings the bias into the L2 cache. 0: it does not.
  int32_t bias_tile_keys;
  int32_t bias_head_ratio;  // query heads that share a head of the bias
  int32_t bias_batch_step;  // 0: all batches share one bias; 1: each has its own
  int32_t batches;
  DbiasKind dbias_kind;
  // Up to head_dim 128: kTile, kPair, and kAccum where TMA adds in fp32 (an fp32 bias, and pairs). Wide heads: kTile
  // and kPair in 16 bits. Dimensions like those of bias_tiles.
  CUtensorMap dbias_tiles;
  DbiasSums dbias_sums;  // kAccum beside a 16-bit bias
  // In place of both, where TMA does not take the rows; for an fp32 bias wide heads always use these.
  DbiasRows dbias_rows;
  int32_t dbias_head_ratio;  // query heads that share a head of dbias
  int32_t dbias_batch_step;  // 0: all batches share one; 1: each has its own
  // kAccum in a fixed order: [batches of dbias][heads of dbias][m_blocks][n_blocks], zero before the launch: how many
  // consumers have added to a tile. nullptr: nobody waits for a turn.
  int32_t* dbias_semaphore;

  // --- a dense mask; up to head_dim 128, one beside an fp32 bias is the same for all rows and heads of a group ---
  MaskBits mask;          // bits == nullptr: there is none
  CUtensorMap mask_bits;  // dimensions (words_per_row, rows, heads, batch) of `mask`

  // --- lists ---
  GatheredTensor gathered_k, gathered_v;
  KeyList keys;            // of chunks of rows; end == nullptr: no row stops seeing a key
  bool all_rows_see;       // all rows see a listed key, those before its position, too
  bool lists_as_they_are;  // items are the tiles of the mask's own list, which are not counted (no ListNumbers)
  // [list][n_blocks]: the first block of rows that sees a tile, and the last one + 1. Equal: the list has no such
  // tile.
  const int2* tile_rows;
  // Counters of turns at dk and dv in a fixed order, zero before the launch. nullptr: nobody waits for a turn.
  // Lists: [batch][nheads_k][chunks], how many consumers have added the dk and dv of a tile of the chunk. nullptr also
  // where what chunks add is kept apart (`terms`), and where a sole chunk has all rows: no other item has its keys
  // then, and dk and dv are stored (dk_rows, dv_rows).
  // Consecutive keys in several parts: [batch][nheads_k][n_blocks][kBlockN / 64], how many parts have been added to
  // the dk and dv of 64 keys; for wide heads dk and dv count one each.
  int32_t* dkv_semaphore;
  // fp32 [batch][nheads_k][seqlen_k][head_dim], added to; or dk and dv of `terms`, which are stored.
  float* dk_accum;
  float* dv_accum;
  // In place of the sums, where no other item has the keys of a tile. data == nullptr: there are sums.
  RowsOfOut dk_rows, dv_rows;
  int32_t head_dim;

  RowsOfOut dq_rows;  // DqPath::kRows: dq itself, in place of dq_accum

  // Consecutive keys, in kernels with kWindows. > 0: a row sees this many keys, the last of them at its own position.
  // 0: there is no window.
  int32_t window;
  // --- packed sequences ---
  // The maps of tensors are those of TensorMapper::map_packed(), batch is 1, seqlen_q and seqlen_k bound the lengths,
  // and n_blocks and dq_blocks count the packed_blocks() of keys and of rows. lse, delta and dq_accum: see BwdParams.
  Packing packing;

  // --- lists, sums in a fixed order ---
  // Where dk, dv and dbias of each chunk go. first == nullptr: chunks take turns, or a sole one has all rows.
  ChunkTerms terms;
  int32_t group_chunks;  // chunks whose tiles are taken side by side: see find_grouped_item()
  // --- pairs ---
  // Steps from the first member to the second: to the next kv head, or to the next batch. One is 1, the other 0.
  int32_t pair_head_step, pair_batch_step;
};

}  // namespace dmattn::sm90
