// How the backward on Hopper numbers its items over lists, once it is known how long these are.
#pragma once

#include <cstdint>

namespace dmattn {

// Zero before chunk_key_lists(), which fills it. Behind it two int32 for each chunk of the launch: first for all chunks
// how many items their tiles would be, then for all of them how many rows come before theirs. Items of a list head are
// numbered by rows: the chunks have as many as the longest of their lists has tiles, and the last chunk comes first.
// BwdParams::work_counter is `taken`.
struct ListNumbers {
  int32_t taken;  // items that thread blocks have taken
  int32_t rows;   // of all chunks
  // The first chunks, whose items come last, where all would end sooner if those were smaller: of each of their tiles
  // so many items, which share out the query heads of the group. 0: there are no such chunks.
  int32_t tail_chunks, tail_parts;
  int32_t lists_done;  // by chunk_key_lists()
  int32_t unused[3];

  static constexpr int32_t kWordsOfChunk = 2;
};

}  // namespace dmattn
