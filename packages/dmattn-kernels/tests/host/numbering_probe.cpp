// Which items the backward over lists on Hopper has, for test_list_numbering.py: the device functions, compiled for the
// host.
#include "kernels/shared/list_numbering.cuh"

// Of each item its place and the heads from which up to which it goes. Returns how many there are; `to` may be nullptr.
// rows_before: of each chunk, the last one first; nullptr: all chunks have as many rows as there is room for.
extern "C" int32_t probe_numbering(int32_t room_tiles, int32_t chunks, int32_t all_parts, int32_t section_parts,
                                   int32_t sections, int32_t rows, const int32_t* rows_before, int32_t tail_row,
                                   int32_t tail_parts, int32_t heads, int32_t* to) {
  using namespace dmattn;
  const ListRoom room = {room_tiles, chunks, all_parts, section_parts, sections};
  const ListNumbering numbering = {rows, tail_row, tail_parts, rows_before};
  const int32_t items = numbering.items(room);
  for (int32_t i = 0; to != nullptr && i < items; ++i) {
    const ListPlace found = numbering.find(room, heads, i);
    *to++ = found.place;
    *to++ = found.heads.begin();
    *to++ = found.heads.end();
  }
  return items;
}
