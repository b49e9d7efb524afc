// Estimates when the backward over lists on Hopper ends if its last items are divided: see ListNumbers.
#pragma once

#include <cuda_runtime.h>

namespace dmattn {

// Quotients of numbers up to 2^20, rounded down or up. One warp needs many of them while the launch waits for it, and
// an integer division takes several times as long as this product of floats.
struct QuickDivisor {
  int value;
  float inverse;

  __device__ __forceinline__ explicit QuickDivisor(int divisor) : value(divisor), inverse(1.0f / divisor) {}
  __device__ __forceinline__ int down(int n) const { return static_cast<int>((n + 0.5f) * inverse); }
  __device__ __forceinline__ int up(int n) const { return down(n + value - 1); }
};

// The end of the launch in steps, as if each item had all rows of a chunk. All whole items then take the same time,
// and thread blocks, which take the next item when they are done, begin and end them together, in waves.
struct ListEnd {
  QuickDivisor blocks;
  int all;  // items before any is divided
  int heads, steps_of_head, steps_of_prologue;
  int whole;  // steps of an item that is not divided

  __device__ __forceinline__ ListEnd(int blocks, int all, int heads, int steps_of_head, int steps_of_prologue)
      : blocks(blocks),
        all(all),
        heads(heads),
        steps_of_head(steps_of_head),
        steps_of_prologue(steps_of_prologue),
        whole(heads * steps_of_head + steps_of_prologue) {}

  __device__ __forceinline__ int of_whole() const { return blocks.up(all) * whole; }

  // Each of the last `tail` items, which is at least one, becomes `parts` smaller ones.
  __device__ __forceinline__ int with_tail(int tail, int parts) const {
    const int waves = blocks.down(all - tail);  // in which all thread blocks have whole items
    const int busy = all - tail - waves * blocks.value, idle = blocks.value - busy, smaller = tail * parts;
    const QuickDivisor step((heads + parts - 1) / parts * steps_of_head + steps_of_prologue);
    // After these waves, `busy` thread blocks take one more whole item, and `idle` ones begin with smaller items. Let
    // the last smaller item end in a thread block of either kind: how many smaller items a block of that kind then
    // takes.
    const int in_whole = step.down(whole), to_whole = step.up(whole);
    const int by_idle = smaller <= idle * to_whole ? static_cast<int>((smaller + idle - 1 + 0.5f) / idle)
                                                   : blocks.up(smaller + busy * to_whole);
    const int by_busy = blocks.up(max(smaller - idle * in_whole, 0));
    return waves * whole + max(min(by_idle * step.value, whole + by_busy * step.value), busy > 0 ? whole : 0);
  }
};

}  // namespace dmattn
