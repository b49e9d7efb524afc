// Integer division and rounding up.
#pragma once

namespace dmattn {

template <class Int>
constexpr Int ceil_div(Int a, Int b) {
  return (a + b - 1) / b;
}
template <class Int>
constexpr Int round_up(Int a, Int b) {
  return ceil_div(a, b) * b;
}

}  // namespace dmattn
