#include "host/launch_tag.h"

#include <atomic>
#include <random>

namespace dmattn {
namespace {

uint64_t draw_first() {
  std::random_device device;
  return static_cast<uint64_t>(device()) << 32 | device();
}

}  // namespace

// SplitMix64: adding an odd number over and over passes through all 64-bit numbers, and the mixing maps different
// numbers to different ones.
uint64_t next_launch_tag() {
  static std::atomic<uint64_t> state{draw_first()};
  uint64_t x = state.fetch_add(0x9e3779b97f4a7c15u, std::memory_order_relaxed);
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

}  // namespace dmattn
