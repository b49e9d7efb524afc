// The numbers by which thread blocks take the items of the backward over lists on Hopper, where sums are added up in
// any order.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace dmattn {

// The query heads begin, ..., end - 1 of a group, packed into one word.
struct HeadShare {
  int32_t word;

  static __device__ __forceinline__ HeadShare of(int begin, int end) { return {begin | end << 16}; }
  __device__ __forceinline__ int begin() const { return word & 0xffff; }
  __device__ __forceinline__ int end() const { return word >> 16; }
};

// The tiles that lists have room for, and how their places are ordered: by section, in a section by chunk (the last
// one first), in a chunk by tile, and for each tile by part. A part is the query heads of one kv head of a batch
// entry.
struct ListRoom {
  int tiles, chunks;
  int all_parts, section_parts, sections;  // sections: those of section_parts; one more has the rest
};
struct ListPlace {
  int place;
  HeadShare heads;
};

// Items are numbered in the order of places, but without the places of tiles behind the longest list of a chunk:
// passing over these would take long. Each tile of the chunks whose places come last is several items, which divide
// the query heads of the group between them.
struct ListNumbering {
  int rows, tail_row, tail_parts;  // divided tiles begin at tail_row; `rows` and 1: there are none
  const int32_t* rows_before;      // see ListNumbers; nullptr: chunks have all the tiles that there is room for

  __device__ __forceinline__ int items_of_part() const { return rows + (rows - tail_row) * (tail_parts - 1); }
  __device__ __forceinline__ int items(const ListRoom& room) const { return items_of_part() * room.all_parts; }

  __device__ __forceinline__ ListPlace find(const ListRoom& room, int heads, int number) const {
    const int of_part = items_of_part();
    const int section = min(number / (room.section_parts * of_part), room.sections);
    const int first = section * room.section_parts;
    const int parts = section < room.sections ? room.section_parts : room.all_parts - first;
    const int in_section = number - first * of_part;
    int row = in_section / parts;
    const int part = in_section - row * parts;
    HeadShare share = HeadShare::of(0, heads);
    if (row >= tail_row) {
      const int tile = (row - tail_row) / tail_parts, i = row - tail_row - tile * tail_parts;
      row = tail_row + tile;
      share = HeadShare::of(heads * i / tail_parts, heads * (i + 1) / tail_parts);
    }
    return {first * room.tiles * room.chunks + place_of_row(room, row) * parts + part, share};
  }

 private:
  __device__ __forceinline__ int place_of_row(const ListRoom& room, int row) const {
    if (rows_before == nullptr) return row;
    // The last chunk has the first rows, so rows_before falls as chunks are numbered upwards. The row lies in the
    // lowest-numbered chunk that does not begin behind it.
    int low = 0, high = room.chunks - 1;
    while (low < high) {
      const int chunk = (low + high) / 2;
      if (rows_before[chunk] <= row) {
        high = chunk;
      } else {
        low = chunk + 1;
      }
    }
    return (room.chunks - 1 - low) * room.tiles + row - rows_before[low];
  }
};

}  // namespace dmattn
