// The pieces of work that the thread blocks of a Hopper forward kernel take: a block of rows of a head each.
#pragma once

#include <cuda_runtime.h>

namespace dmattn::sm90 {

struct FwdItem {
  int m_block, head, batch;
};

// Items are numbered by sections of heads; in each from the last row blocks, which are the longest under causality, to
// the first, the heads of the section side by side.
template <class Arguments>
__device__ __forceinline__ FwdItem find_item(const Arguments& p, int index) {
  const int section = index / (p.section_heads * p.m_blocks);
  const int first_head = section * p.section_heads;
  const int heads = min(p.section_heads, p.all_heads - first_head);
  const int in_section = index - first_head * p.m_blocks;
  const int rank = in_section / heads;
  const int head = first_head + in_section - rank * heads;
  const int batch = head / p.nheads;
  return {p.m_blocks - 1 - rank, head - batch * p.nheads, batch};
}

// Of a tile that begins with key0: keys past the last one, or past what a row may see, get -inf. first_row: the first of
// the two rows that this thread has, the other comes 8 later.
template <int kFragments, class Arguments>
__device__ __forceinline__ void cut_keys(const Arguments& p, float (&scores)[1][kFragments][4], int key0, int first_row,
                                         int lane) {
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int row = first_row + 8 * j;
    int limit = p.is_causal ? min(p.seqlen_k, row + 1 + p.seqlen_k - p.seqlen_q) : p.seqlen_k;
    limit -= key0 + (lane % 4) * 2;
#pragma unroll
    for (int i = 0; i < kFragments; ++i) {
      if (8 * i >= limit) scores[0][i][2 * j] = -INFINITY;
      if (8 * i + 1 >= limit) scores[0][i][2 * j + 1] = -INFINITY;
    }
  }
}

}  // namespace dmattn::sm90
