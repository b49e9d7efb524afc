// Division by a number that the host knows.
#pragma once

#include <cstdint>

namespace dmattn {

// n / value == (n * multiplier) >> (32 + shift) for 0 <= n < 2^31, unless value is 1; take() in
// attention/shared/work_index.cuh divides. The multiplier is 2^(32 + shift) / value, rounded up; it fits 32 bits. The
// rounding adds less than n / 2^(32 + shift) to the quotient. That is less than 1 / value, and so too little to reach
// the next whole number.
struct Divisor {
  uint32_t value = 1, multiplier = 0, shift = 0;

  constexpr Divisor() = default;
  constexpr explicit Divisor(int32_t divisor) : value(static_cast<uint32_t>(divisor)) {
    if (value == 1) return;
    uint32_t log2 = 0;
    while ((uint64_t{1} << log2) < value) ++log2;
    multiplier = static_cast<uint32_t>(((uint64_t{1} << (31 + log2)) + value - 1) / value);
    shift = log2 - 1;
  }
};

}  // namespace dmattn
