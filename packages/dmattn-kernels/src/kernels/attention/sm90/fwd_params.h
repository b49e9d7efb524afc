// What the Hopper forward kernels are given: FwdParams, with the tensors as TMA sees them.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "../../params.h"
#include "../shared/seqlen.cuh"
#include "bias_classes.h"
#include "bias_rows.h"

namespace dmattn::sm90 {

struct FwdArguments {
  CUtensorMap q, k, v, out;  // dimensions (head_dim, seqlen, heads, batch)
  float* lse;
  float* lse_rest;  // nullptr: not asked for
  Strides3 lse_stride;
  int32_t seqlen_q, seqlen_k, nheads, head_ratio;
  int32_t m_blocks;  // row blocks of a head
  int32_t items;     // row blocks of all heads and batches, and of all shares of the keys
  // Heads (of all batches) whose row blocks are done before the next heads begin, so that their K and V stay in L2;
  // and the number of all heads.
  int32_t section_heads, all_heads;
  float softmax_scale;
  bool is_causal;
  // Number of items that thread blocks have taken beyond their first; zero before the launch. nullptr: a thread block
  // takes every gridDim.x-th item.
  int32_t* work_counter;
  int32_t window;  // > 0: a row sees so many keys, the last of them at its own position. 0: there is no window
};

// Arguments for ScoreMode::kKeyBias.
struct KeyBiasFwdArguments : FwdArguments {
  BiasParams bias;  // kKey
};

// Arguments of the general kernels.
struct GeneralFwdArguments : FwdArguments {
  // Dimensions (seqlen_k, seqlen_q, heads, batch), 1 where broadcast. For a bias of each row and key that TMA copies.
  CUtensorMap bias_tiles;
  // kNone; kKey; or a bias of each row and key, kTile in 16 bits and kDirect in fp32, which threads copy if there are
  // bias_rows, and TMA otherwise.
  BiasParams bias;
  BiasRows bias_rows;
  MaskBits mask;  // bits == nullptr: there is none
  float softcap;  // 0: none
};

// Arguments for ScoreMode::kUnalignedBias, which reads neither bias_tiles nor bias_rows.
struct UnalignedBiasFwdArguments : GeneralFwdArguments {
  BiasClasses bias_classes;
};

// Arguments for packed sequences. The maps are those of TensorMapper::map_packed(), there is one batch, seqlen_q and
// seqlen_k are the bounds on the lengths, and m_blocks is the packed_blocks() of all rows.
struct PackedFwdArguments : FwdArguments {
  Packing packing;
};

// Arguments of either kind with softcap. softmax_scale is the cap, which multiplies the tanh of the scores.
template <class Uncapped>
struct SoftcapFwdArguments : Uncapped {
  float scale_in_cap;  // softmax_scale / softcap
};

// Arguments for items that have a share of the keys each. Results are partial, in fp32 and contiguous: lse and
// lse_rest are those of the shares, by [split][batch][head][row], and so is `parts`, whose rows have part_columns
// numbers.
template <class Whole>
struct SplitFwdArguments : Whole {
  float* parts;
  int32_t splits, batches, part_columns;
};
// Turns a call whose items have all keys into one whose items have shares.
template <class Whole>
void share_keys(SplitFwdArguments<Whole>& a, const FwdParams& p) {
  a.parts = p.out_accum;
  a.splits = p.num_splits;
  a.batches = p.batch;
  a.part_columns = p.head_dim;
  a.lse = p.lse_accum;
  a.lse_rest = p.lse_accum + int64_t{p.num_splits} * p.batch * p.nheads * p.seqlen_q;
  a.lse_stride.row = 1;
  a.all_heads *= p.num_splits;
  a.items *= p.num_splits;
}

// An item: a block of rows of a head.
struct FwdItem {
  int m_block, head, batch;
};
// An item with a share of the keys.
struct SplitFwdItem : FwdItem {
  int split;
};
// An item of a packed sequence: m_block counts within the sequence.
struct PackedFwdItem : FwdItem {
  SeqRange q, k;
};

}  // namespace dmattn::sm90
