// Which of the two kernels of a case of decoding a launch takes: Level::kPlain is small, so that its instructions
// arrive soon where other kernels have displaced them.
#pragma once

#include "tiles.h"

namespace dmattn {

// The plain level: head_dim fills its tile, rows start on 16 bytes, there is no softcap, and of biases only one that is
// the same for all rows of a head. From a cache, also at most so many splits of a row: a lane looks at one each.
constexpr int32_t plain_decode_splits(bool from_cache) { return from_cache ? 32 : kMaxSplits; }

}  // namespace dmattn
