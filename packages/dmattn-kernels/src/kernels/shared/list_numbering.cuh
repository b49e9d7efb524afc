// The numbers by which thread blocks take the items of the backward over lists on Hopper, where these are in any order.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace dmattn {

// Query heads of a group, from begin up to end, as one word.
struct HeadShare {
  int32_t word;

  static __device__ __forceinline__ HeadShare of(int begin, int end) { return {begin | end << 16}; }
  __device__ __forceinline__ int begin() const { return word & 0xffff; }
  __device__ __forceinline__ int end() const { return word >> 16; }
};

// What lists have room for, in the order of places: sections of parts (groups of all batches), in each chunk by chunk, in
// each tile by tile, and of each tile the parts of the section.
struct ListRoom {
  int tiles, chunks;
  int all_parts, section_parts, sections;  // sections: of section_parts; one more has the rest
};
struct ListPlace {
  int place;
  HeadShare heads;
};

// Items have the numbers of places without the tiles behind the longest list, which would take as long to pass over as to
// find. A tile of the last chunks, by places, is several items, which share out the heads of the group.
struct ListNumbering {
  int tiles, tail_chunks, tail_parts;

  __device__ __forceinline__ int items_of_part(const ListRoom& room) const {
    return tiles * (room.chunks + tail_chunks * (tail_parts - 1));
  }
  __device__ __forceinline__ int items(const ListRoom& room) const { return items_of_part(room) * room.all_parts; }

  __device__ __forceinline__ ListPlace find(const ListRoom& room, int heads, int number) const {
    const int of_part = items_of_part(room);
    const int section = min(number / (room.section_parts * of_part), room.sections);
    const int first = section * room.section_parts;
    const int parts = section < room.sections ? room.section_parts : room.all_parts - first;
    const int in_section = number - first * of_part;
    int row = in_section / parts;
    const int part = in_section - row * parts;
    HeadShare share = HeadShare::of(0, heads);
    const int tail = tiles * (room.chunks - tail_chunks);
    if (row >= tail) {
      const int tile = (row - tail) / tail_parts, i = row - tail - tile * tail_parts;
      row = tail + tile;
      share = HeadShare::of(heads * i / tail_parts, heads * (i + 1) / tail_parts);
    }
    const int chunk = row / tiles, tile = row - chunk * tiles;
    return {first * room.tiles * room.chunks + (chunk * room.tiles + tile) * parts + part, share};
  }
};

}  // namespace dmattn
