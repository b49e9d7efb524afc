// A dense 16-bit bias whose rows start on any two bytes, in a form that TMA takes.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "numbered_rows.h"

namespace dmattn::sm90 {

// TMA wants a tensor to start on 16 bytes, a multiple of 16 bytes from each row to the next, and copies that start at a
// multiple of 16 bytes of a row: at other columns an H200 stops with an illegal instruction. Rows are numbered through
// all heads and batches. By that number modulo 8 they fall into classes, in each of which they are a multiple of 16
// bytes apart, and all start equally far behind a multiple of 16 bytes. A class has a map of its own, which starts
// there. Its keys begin `shift` columns later, and so they do in what is copied.
struct BiasClasses {
  CUtensorMap maps[kRowClasses];     // dimensions (columns, rows of the class, 1, 1)
  uint32_t head_rows, batch_rows;    // rows from one head, or batch, to the next; 0 where it is broadcast
  uint32_t first_shift, next_shift;  // of row 0, and how much larger that of the next row is, modulo 8

  __host__ __device__ uint32_t number(uint32_t batch, uint32_t head, uint32_t row) const {
    return batch * batch_rows + head * head_rows + row;
  }
  __host__ __device__ uint32_t shift(uint32_t row_class) const { return (first_shift + row_class * next_shift) % 8; }
};

}  // namespace dmattn::sm90
