// When the backward over lists on Hopper is done, for test_list_tail.py: the device functions, compiled for the host.
#include "kernels/shared/list_tail.cuh"

extern "C" int32_t probe_end(int32_t blocks, int32_t all, int32_t heads, int32_t steps_of_head,
                             int32_t steps_of_prologue, int32_t tail, int32_t parts) {
  const dmattn::ListEnd end(blocks, all, heads, steps_of_head, steps_of_prologue);
  return tail == 0 ? end.of_whole() : end.with_tail(tail, parts);
}
extern "C" int32_t probe_quick_quotient(int32_t n, int32_t divisor, int32_t rounds_up) {
  const dmattn::QuickDivisor quick(divisor);
  return rounds_up != 0 ? quick.up(n) : quick.down(n);
}
