// A dense 16-bit bias whose rows start on any two bytes, in a form that TMA takes.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "numbered_rows.h"

namespace dmattn::sm90 {

// TMA requires that a tensor starts at a multiple of 16 bytes, that its rows are a multiple of 16 bytes apart, and
// that a copy starts at a multiple of 16 bytes of a row: at other columns an H200 stops with an illegal instruction.
// So the rows of all heads and batches are numbered consecutively, and rows whose numbers are equal modulo 8 form a
// class: they are a multiple of 16 bytes apart, and all start equally far behind a multiple of 16 bytes. Each class
// has its own map, which starts at such a multiple. Key 0 is then in column `shift` of the map, and in a copy, too,
// all keys are `shift` columns further on.
struct BiasClasses {
  CUtensorMap maps[kRowClasses];     // dimensions (columns, rows of the class, 1, 1)
  uint32_t head_rows, batch_rows;    // rows from one head, or batch, to the next; 0 if the bias is broadcast
  uint32_t first_shift, next_shift;  // the shift of row 0, and how much larger that of the next row is, modulo 8

  __host__ __device__ uint32_t number(uint32_t batch, uint32_t head, uint32_t row) const {
    return batch * batch_rows + head * head_rows + row;
  }
  __host__ __device__ uint32_t shift(uint32_t row_class) const { return (first_shift + row_class * next_shift) % 8; }
};

}  // namespace dmattn::sm90
