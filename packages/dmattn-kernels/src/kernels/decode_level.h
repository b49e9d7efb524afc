// Which of the two kernels of a case of decoding a launch takes: Level::kPlain is small, so that its instructions arrive
// soon where other kernels have displaced them.
#pragma once

#include <cstdint>

namespace dmattn {

// The plain level: head_dim fills its tile, rows start on 16 bytes, there is no softcap, and of biases only one that is
// the same for all rows of a head. And the splits of a row are at most so many: a lane looks at one each.
constexpr int32_t kPlainDecodeSplits = 32;

}  // namespace dmattn
