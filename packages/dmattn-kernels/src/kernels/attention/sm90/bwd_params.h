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
  const float* lse;  // times log2(e), but with a bias; [batch][nheads][seqlen_q_rounded], +inf where there is no row
  const float* lse_rest;  // with a bias: what is missing of lse, times log2(e)
  const float* delta;     // likewise; 0 where there is no row
  // fp32, zero before the launch, in units of 1 / softmax_scale: [batch][nheads][dq_blocks][dq_tile], each tile in the
  // order of DqTile.
  float* dq_accum;
  int32_t dq_tile;  // elements: kBlockM * kTileDim, or without the last fragments, which have no columns of head_dim
  uint32_t dq_last_bytes;  // of them, the part of the second of two consumers; worked out in the loop it costs 1%
  // [batch][nheads][dq_blocks], zero before the launch: blocks of keys that have added to a tile of dq; of wide heads,
  // consumers. nullptr: nobody waits for a turn.
  int32_t* dq_semaphore;
  // fp32 [batch][nheads_k][n_blocks][kBlockN][kTileDim], added to instead of dk and dv, where several items or launches
  // have parts of a block of keys. nullptr: an item has all that sees its keys. Of packed sequences
  // [nheads_k][total_k][head_dim].
  float* dk_slots;
  float* dv_slots;
  int32_t seqlen_q, seqlen_k, seqlen_q_rounded, nheads, nheads_k, head_ratio;
  int32_t group_begin, group_heads;  // of each group of query heads, those that this launch has
  int32_t dq_blocks;                 // blocks of rows a head that dq_accum has
  int32_t m_blocks, n_blocks;        // blocks of rows and of keys of a head; over lists, tiles that a list has room for
  // Parts of what sees a block of keys, each an item of its own: shares of the query heads, times row_splits of their
  // rows.
  int32_t num_splits, row_splits;
  int32_t items;  // n_blocks * all_parts; over lists, times the number of chunks
  // Sections of as many parts (of groups, of all batches), whose blocks of keys are done before those of the next
  // section begin, so that what they read and add to stays in L2. One more section has the rest of all parts. Lists:
  // see choose_list_sections().
  int32_t section_parts, sections, all_parts;
  // Items are numbered two by two, see find_mirrored_item(). Then some of `items` are none.
  bool mirrors_items;
  float softmax_scale, softcap;
  bool is_causal;
  // Number of items that thread blocks have taken, zero before the launch. Where no block waits for another's turn each
  // has its first by its own number, and those do not count. Wide heads do without it then. Over lists, unless an item
  // has all rows or sums are in a fixed order: the first of ListNumbers.
  int32_t* work_counter;
  uint32_t zero;  // 0, for BwdConsumer::move()

  // --- a bias ---
  BiasParams bias;    // of each key: kNone, or kKey, the same for all heads of an item
  float* dbias_cols;  // its gradient: fp32 [batch][nheads][seqlen_k], added to; nullptr: not asked for

  // --- a dense bias ---
  CUtensorMap bias_tiles;   // dimensions (seqlen_k, seqlen_q, heads, batch), 1 where it is the same for all of them
  BiasRows bias_rows;       // instead, where TMA does not take them; wide heads always read these
  int32_t bias_tile_keys;   // wide heads: of a box of bias_tiles, which only bring the bias into the L2 cache; 0: none
  int32_t bias_head_ratio;  // query heads to a head of bias_tiles
  int32_t bias_batch_step;  // 0: one bias for all batches; 1
  int32_t batches;
  DbiasKind dbias_kind;
  CUtensorMap dbias_tiles;   // kTile, kPair, kAccum in fp32: like bias_tiles
  DbiasSums dbias_sums;      // kAccum otherwise
  DbiasRows dbias_rows;      // instead of both, where the rows do not start on 16 bytes
  int32_t dbias_head_ratio;  // query heads to a head of dbias
  int32_t dbias_batch_step;  // 0: one for all batches; 1
  // kAccum in a fixed order: [batches of dbias][heads of dbias][m_blocks][n_blocks], zero before the launch: consumers
  // that have added to a tile. nullptr: nobody waits for a turn.
  int32_t* dbias_semaphore;

  // --- a dense mask; with a bias in fp32 one that is the same for all rows and for the heads of a group ---
  MaskBits mask;          // bits == nullptr: there is none
  CUtensorMap mask_bits;  // dimensions (words_per_row, rows, heads, batch) of `mask`

  // --- lists ---
  GatheredTensor gathered_k, gathered_v;
  KeyList keys;            // of chunks of rows; end == nullptr: no row stops seeing a key
  bool all_rows_see;       // a key of a list is seen by rows before its own, too
  bool lists_as_they_are;  // items are the tiles of the mask's list: nobody has counted them (ListNumbers)
  const int2* tile_rows;   // first and last + 1 block of rows that see a tile: [list][n_blocks]; equal: there is none
  // [batch][nheads_k][chunks], zero before the launch: consumers that have added the dk and dv of a tile. nullptr:
  // nobody waits for their turn; where sums are in a fixed order, `terms` has them. Consecutive keys, in a fixed order:
  // [batch][nheads_k][n_blocks][64 keys], the parts of a block of keys that have been added; of wide heads, their dk
  // and dv one by one. nullptr: there are none.
  int32_t* dkv_semaphore;
  float* dk_accum;  // fp32 [batch][nheads_k][seqlen_k][head_dim], added to; or those of `terms`
  float* dv_accum;
  RowsOfOut dk_rows, dv_rows;  // instead, where no other item has the keys of a tile; data == nullptr: otherwise
  int32_t head_dim;

  RowsOfOut dq_rows;  // DqPath::kRows: dq, in place of dq_accum

  // Consecutive keys, where steps are announced: > 0: a row sees so many keys, the last of them at its own position. 0:
  // all up to there.
  int32_t window;
  // --- packed sequences ---
  // The maps of tensors are those of TensorMapper::map_packed(), batch is 1, seqlen_q and seqlen_k bound the lengths,
  // and n_blocks and dq_blocks count the packed_blocks() of keys and of rows. lse, delta and dq_accum: see BwdParams.
  Packing packing;

  // --- lists, sums in a fixed order ---
  ChunkTerms terms;      // where dk, dv and dbias go unless dkv_semaphore says that chunks take turns
  int32_t group_chunks;  // chunks whose tiles are taken side by side: see find_list_item()
  // --- pairs ---
  // From the first member to the second: to the next head of keys, or to the next batch. One is 1, the other 0.
  int32_t pair_head_step, pair_batch_step;
};

}  // namespace dmattn::sm90
