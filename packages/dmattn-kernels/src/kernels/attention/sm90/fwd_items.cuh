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

}  // namespace dmattn::sm90
