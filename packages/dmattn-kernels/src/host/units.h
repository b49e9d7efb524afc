// Which kernel units this build holds.
#pragma once

#include <cstdint>

#include "kernels/params.h"
#include "kernels/tiles.h"

namespace dmattn {

// kShortForward and kShortBackward are for few keys (kernels/short_params.h).
enum class Direction : int32_t { kForward, kBackward, kDecode, kShortForward, kShortBackward };

struct Unit {
  Arch arch{};
  Direction direction = Direction::kForward;
  Dtype dtype = Dtype::kNone;
  int32_t head_dim_tile = 0;  // as head_dim_tile() rounds it up
  bool gathered = false;      // the keys come from lists; otherwise they are walked tile by tile

  constexpr bool operator==(const Unit& other) const {
    return arch == other.arch && direction == other.direction && dtype == other.dtype &&
           head_dim_tile == other.head_dim_tile && gathered == other.gathered;
  }
};

// Generated together with the table behind kernels/units.h.
bool has_unit(const Unit& unit);

}  // namespace dmattn
