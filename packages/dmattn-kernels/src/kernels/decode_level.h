// Which kernel of a decode unit a launch takes. Those of Level::kPlain and Level::kCut are small, so that their
// instructions are loaded soon if other kernels have displaced them from the caches.
#pragma once

#include "tiles.h"

namespace dmattn {

// The most splits of a row for levels kPlain and kCut. With a cache, each lane reads the results of one split. These
// levels also need rows that start on 16 bytes, no softcap, and no bias or one that is the same for all rows of a
// head; kPlain needs a head_dim that fills its tile, too.
constexpr int32_t plain_decode_splits(bool from_cache) { return from_cache ? 32 : kMaxSplits; }

// Whether there are kernels of level kCut. For wider heads such a kernel was slower over many keys: 8 x 16384 keys,
// 32 heads with head_dim 160, took 732 us on an H200, and 640 us with the general level.
constexpr bool has_cut_decoding(int head_dim_tile) { return head_dim_tile <= 128; }

}  // namespace dmattn
