// Without a GPU: the index arithmetic of the Hopper forward over lists against CuTe's own description of the instructions.
//   g++ -std=c++17 -O1 -w -I <cutlass>/include -I ../../../src -I <cuda>/include -I <cuda>/include/cccl
//       check_layouts.cpp -o check_layouts && ./check_layouts
#include <cstdio>
#include <cstdlib>
#include <map>
#include <set>

#include "kernels/attention/sm90/gather_traits.cuh"

using namespace dmattn::sm90;
using namespace cute;

#define EXPECT(x) \
  if (!(x)) std::printf("line %d: %s\n", __LINE__, #x), std::exit(1)

template <class Layout, class... Coordinates>
int at(Layout, Coordinates... c) {
  return int(as_position_independent_swizzle_layout(Layout{})(c...));
}

// Which rows and columns the accumulators of a product have, and that the first operand of the next has the same.
template <class T, int kKeys, class Mma>
void check_scores(Mma mma) {
  const auto ids = make_identity_tensor(Shape<Int<T::kBlockM>, Int<kKeys>>{});
  typename T::OutMma out_mma;
  for (int thread = 0; thread < 256; ++thread) {
    const auto c = mma.get_slice(thread).partition_C(ids);
    const auto a = out_mma.get_slice(thread).partition_A(ids);
    EXPECT(size(c) == kKeys / 8 * 4 && size(a) == size(c));
    const int warp = thread / 32 % 4, lane = thread % 32;
    for (int i = 0; i < kKeys / 8; ++i) {
      for (int e = 0; e < 4; ++e) {
        const int row = thread / 128 * 64 + warp * 16 + lane / 4 + e / 2 * 8, key = lane % 4 * 2 + 8 * i + e % 2;
        EXPECT(get<0>(c(4 * i + e)) == row && get<1>(c(4 * i + e)) == key);
        EXPECT(get<0>(a(4 * i + e)) == row && get<1>(a(4 * i + e)) == key);
      }
    }
  }
}

template <class T, int kKeys>
void check_tail() {
  const auto layout = typename T::LayoutK{};
  const auto tile = local_tile(
      make_tensor(static_cast<typename T::Element*>(nullptr), as_position_independent_swizzle_layout(layout)),
      Shape<Int<kKeys>, Int<T::kHeadDim>, Int<T::kStages>>{}, make_coord(_0{}, _0{}, _0{}));
  EXPECT(size<0>(tile) == kKeys && size<1>(tile) == T::kHeadDim && size<2>(tile) == T::kStages);
  for (int stage = 0; stage < T::kStages; ++stage)
    for (int key = 0; key < kKeys; ++key)
      for (int d = 0; d < T::kHeadDim; ++d)
        EXPECT(int(tile.layout()(key, d, stage)) == at(typename T::LayoutK{}, key, d, stage));
  check_scores<T, kKeys>(typename T::template TailMma<kKeys>{});
}

template <class T>
void check() {
  constexpr int N = T::kBlockN, D = T::kHeadDim;
  // Where the producer's threads copy to: each element of a tile once, as the products expect it.
  for (int stage = 0; stage < T::kStages; ++stage) {
    std::set<int> written;
    std::map<int, int> entries;  // which key's entry a lane of a warp reads
    for (int thread = 0; thread < 128; ++thread) {
      const int warp = thread / 32, lane = thread % 32;
      entries[thread] = T::kPassKeys * (lane / 4) + 4 * warp + lane % 4;
    }
    for (int thread = 0; thread < 128; ++thread) {
      const int warp = thread / 32, lane = thread % 32;
      const int chunk = lane % T::kChunks, row = 4 * warp + lane / T::kChunks;
      const int to = stage * T::kTileBytes + row * 128 + ((chunk ^ (row % T::kChunks)) * 16);
      for (int pass = 0; pass < T::kPasses; ++pass) {
        const int key = pass * T::kPassKeys + row;
        EXPECT(entries[warp * 32 + 4 * pass + lane / T::kChunks] == key);
        for (int panel = 0; panel < T::kPanels; ++panel) {
          const int bytes = to + pass * T::kPassKeys * 128 + panel * T::kPanelBytes;
          EXPECT(bytes % 16 == 0 && written.insert(bytes).second);
          for (int e = 0; e < 8; ++e) {
            const int d = panel * T::kPanelCols + chunk * 8 + e;
            EXPECT(at(typename T::LayoutK{}, key, d, stage) == bytes / 2 + e);
            EXPECT(at(typename T::LayoutVt{}, d, key, stage) == bytes / 2 + e);
          }
        }
      }
    }
    EXPECT(int(written.size()) == N * D / 8);
  }
  for (int stage = 0; stage < T::kQStages; ++stage)
    for (int row = 0; row < T::kBlockM; ++row)
      for (int d = 0; d < D; ++d)
        EXPECT(at(typename T::LayoutQs{}, row, d, stage) == stage * T::kTileQ + at(typename T::LayoutQ{}, row, d));
  check_scores<T, N>(typename T::ScoreMma{});
  if constexpr (T::kShortTail) {
    check_tail<T, T::kTail>();
    check_tail<T, T::kLongTail>();
  }
  std::printf("D%d keys %d: %u bytes of shared memory, layouts agree\n", D, N, T::kSmemBytes);
}

int main() {
  using Element = cutlass::bfloat16_t;
  check<GatherTraits<Element, 128, true, 128, 2, ProxyFence::kNone, true, 56>>();
  check<GatherTraits<Element, 128, true, 96, 3, ProxyFence::kNone, true, 56>>();
  check<GatherTraits<Element, 64, true, 128, 4, ProxyFence::kNone, true, 56>>();
  check<GatherTraits<Element, 64, false, 96, 4, ProxyFence::kNone, true, 56>>();
}
