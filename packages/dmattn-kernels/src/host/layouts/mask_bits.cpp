#include "host/arithmetic.h"
#include "host/layouts/layouts.h"
#include "host/problem.h"

namespace dmattn {

MaskBits layout_mask_bits(const MaskSource& mask, Workspace& workspace) {
  MaskBits m;
  m.words_per_row = round_up(ceil_div(mask.seqlen_k, 32), 4);
  m.bands_q = ceil_div(mask.seqlen_q, kMaskBand);
  m.bands_k = ceil_div(mask.seqlen_k, kMaskBand);
  m.words_q = ceil_div(m.bands_q, 32);
  if (mask.packing.is_active()) {
    m.words_q = packed_blocks(mask.seqlen_q, mask.packing.sequences, kMaskWordRows);
    m.bands_q = 32 * m.words_q;
  }
  m.words_k = ceil_div(m.bands_k, 32);
  m.heads = mask.heads;
  m.batch = mask.batch;
  m.rows = mask.seqlen_q;
  m.is_key_only = is_key_only(mask);

  const int64_t masks = int64_t{mask.batch} * mask.heads;
  m.bits = workspace.take<uint32_t>(masks * m.rows * m.words_per_row);
  m.any_rows = workspace.take<uint32_t>(masks * m.bands_q * m.words_k);
  m.all_rows = workspace.take<uint32_t>(masks * m.bands_q * m.words_k);
  m.any_cols = workspace.take<uint32_t>(masks * m.bands_k * m.words_q);
  m.all_cols = workspace.take<uint32_t>(masks * m.bands_k * m.words_q);
  return m;
}

}  // namespace dmattn
