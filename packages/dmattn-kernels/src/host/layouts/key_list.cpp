#include "host/arithmetic.h"
#include "host/layouts/layouts.h"

namespace dmattn {

KeyList layout_key_list(const MaskSource& mask, Workspace& workspace) {
  KeyList keys;
  keys.capacity = round_up(mask.seqlen_k, kListBlock);
  keys.batch = mask.batch;
  keys.heads = mask.heads;
  int64_t rows = int64_t{mask.batch} * mask.heads;  // of idx
  if (mask.packing.is_active()) {
    keys.capacity = packed_blocks(mask.packing.total_k, mask.packing.sequences, kListBlock) * kListBlock;
    keys.batch = mask.packing.sequences;
    rows = mask.heads;
  }
  keys.idx = workspace.take<int32_t>(rows * keys.capacity);
  keys.count = workspace.take<int32_t>(int64_t{keys.batch} * keys.heads);
  return keys;
}

}  // namespace dmattn
