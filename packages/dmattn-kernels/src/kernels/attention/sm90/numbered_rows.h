// The rows of a dense bias, numbered consecutively through all heads and batches.
#pragma once

#include <cstdint>

#include "../../params.h"

namespace dmattn::sm90 {

// Eight rows of 16-bit numbers are a multiple of 16 bytes together, however far apart they are: row i + 8 starts as
// far behind a multiple of 16 bytes as row i.
constexpr uint32_t kRowClasses = 8;

struct NumberedRows {
  // From one head, or batch, to the next; 0 where there is only one, or the bias is broadcast.
  int64_t head_rows = 0, batch_rows = 0;
  int64_t count = 0;  // 0: the rows cannot be numbered, or there are too few or too many of them

  bool exist() const { return count > 0; }
};

// Rows can be numbered if all of them are equally far apart: in a contiguous tensor, in a slice of a larger one, and
// in expanded views of these. heads: of the bias.
inline NumberedRows number_rows(const BiasParams& bias, int32_t batch, int32_t heads, int32_t rows, int32_t keys) {
  // TMA requires strides of less than 2^40 bytes, and the rows of a class are eight rows apart.
  constexpr int64_t kMostStride = int64_t{1} << 35;
  constexpr int64_t kMostRows = int64_t{1} << 30;  // so that numbers past the last row, too, fit 32 bits
  const int64_t row = bias.row_stride;
  const int64_t head = heads > 1 ? bias.head_stride : 0, item = batch > 1 ? bias.batch_stride : 0;
  if (row < 1 || row < keys || row >= kMostStride) return {};
  if (head < 0 || item < 0 || head % row != 0 || item % row != 0) return {};
  if (head / row > kMostRows || item / row > kMostRows) return {};  // the sum of products stays below 2^63
  const int64_t count = (batch - 1) * (item / row) + (heads - 1) * (head / row) + rows;
  if (count < kRowClasses || count > kMostRows) return {};  // each class needs a row
  return {head / row, item / row, count};
}

}  // namespace dmattn::sm90
