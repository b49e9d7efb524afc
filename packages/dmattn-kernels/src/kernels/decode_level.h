// Which of the kernels of a case of decoding a launch takes: Level::kPlain and Level::kCut are small, so that their
// instructions arrive soon where other kernels have displaced them.
#pragma once

#include "tiles.h"

namespace dmattn {

// These levels: rows start on 16 bytes, there is no softcap, and of biases only one that is the same for all rows of a
// head. From a cache, also at most so many splits of a row: a lane looks at one each. kPlain: head_dim fills its tile.
constexpr int32_t plain_decode_splits(bool from_cache) { return from_cache ? 32 : kMaxSplits; }

// Whether there is a level kCut. Of wider heads it was slower over many keys: 8 x 16384 keys, 32 heads of 160, took 732 us
// on an H200, and 640 by the general level.
constexpr bool has_cut_decoding(int head_dim_tile) { return head_dim_tile <= 128; }

}  // namespace dmattn
