// How the items of the backward over lists on Hopper are numbered. The device finds the numbers, once it knows how
// long the lists are.
#pragma once

#include <cstdint>

namespace dmattn {

// Zero before chunk_key_lists(), which fills it. BwdParams::work_counter points to it, and `taken` is the counter.
// Two int32 arrays with an entry for each chunk of the launch follow it in memory: how many items the chunk's tiles
// would be if none were divided, and how many numbering rows come before those of the chunk. Numbering row i of a
// chunk stands for the i-th tile of each of its lists, so that a chunk has as many of these rows as its longest list
// has tiles. The rows of the last chunk come first.
struct ListNumbers {
  int32_t taken;  // items that thread blocks have taken
  int32_t rows;   // numbering rows of all chunks
  // The items of the first chunks come last. If the launch ends sooner with smaller items there, each tile of the
  // first tail_chunks chunks becomes tail_parts items, which divide the query heads of the group. tail_chunks == 0:
  // no tiles are divided.
  int32_t tail_chunks, tail_parts;
  int32_t lists_done;  // lists that chunk_key_lists() has counted
  int32_t unused[3];

  static constexpr int32_t kWordsOfChunk = 2;
};

}  // namespace dmattn
