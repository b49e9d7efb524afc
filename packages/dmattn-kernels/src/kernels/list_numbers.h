// How the backward on Hopper numbers its items over lists, once it is known how long these are.
#pragma once

#include <cstdint>

namespace dmattn {

// Zero before chunk_key_lists(), which fills it; behind it an int32 for each chunk of the launch, how many items its tiles
// would be. BwdParams::work_counter is `taken`.
struct ListNumbers {
  int32_t taken;  // items that thread blocks have taken
  int32_t tiles;  // of the longest list: items are numbered as if each list had so many
  // The first chunks, whose items come last, where all would end sooner if those were smaller: of each of their tiles so
  // many items, which share out the query heads of the group. 0: there are no such chunks.
  int32_t tail_chunks, tail_parts;
  int32_t lists_done;  // by chunk_key_lists()
  int32_t unused[3];
};

}  // namespace dmattn
