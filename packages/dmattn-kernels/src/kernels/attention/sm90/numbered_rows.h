// Rows of a dense bias as one sequence, through all heads and batches.
#pragma once

#include <cstdint>

#include "../../params.h"

namespace dmattn::sm90 {

// Eight rows of 16-bit numbers, wherever they start, are a multiple of 16 bytes away from the eight rows before them.
constexpr uint32_t kRowClasses = 8;

struct NumberedRows {
  int64_t head_rows = 0,
          batch_rows = 0;  // from one head, or batch, to the next; 0 where there is one, or it is broadcast
  int64_t count = 0;       // 0: rows have no such numbers, or too few or too many of them

  bool exist() const { return count > 0; }
};

// They have numbers where all are equally far apart: in a contiguous tensor, in one that is cut from a larger one, and
// in what is expanded from these. heads: of the bias.
inline NumberedRows number_rows(const BiasParams& bias, int32_t batch, int32_t heads, int32_t rows, int32_t keys) {
  constexpr int64_t kMostStride = int64_t{1}
                                  << 35;  // TMA wants less than 2^40 bytes, and eight rows are one of its steps
  constexpr int64_t kMostRows = int64_t{1} << 30;  // with those of a tile behind them, in 32 bits
  const int64_t row = bias.row_stride;
  const int64_t head = heads > 1 ? bias.head_stride : 0, item = batch > 1 ? bias.batch_stride : 0;
  if (row < 1 || row < keys || row >= kMostStride) return {};
  if (head < 0 || item < 0 || head % row != 0 || item % row != 0) return {};
  if (head / row > kMostRows || item / row > kMostRows) return {};  // products below stay far from 2^63
  const int64_t count = (batch - 1) * (item / row) + (heads - 1) * (head / row) + rows;
  if (count < kRowClasses || count > kMostRows) return {};  // each class has a row
  return {head / row, item / row, count};
}

}  // namespace dmattn::sm90
