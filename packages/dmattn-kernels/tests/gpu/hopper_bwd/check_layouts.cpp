// Without a GPU: the index arithmetic of the Hopper backward kernel against CuTe's own description of the instructions.
//   g++ -std=c++17 -O1 -w -DCUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED -I <cutlass>/include -I ../../../src \
//       -I <cuda>/include -I <cuda>/include/cccl check_layouts.cpp -o check_layouts && ./check_layouts
#include <cstdio>
#include <cstdlib>
#include <set>

#include "kernels/attention/sm90/bwd_traits.cuh"

using namespace dmattn::sm90;
using namespace cute;

#define EXPECT(x) \
  if (!(x)) std::printf("line %d: %s\n", __LINE__, #x), std::exit(1)

// Where TMA puts element (row, col) of a tile of kRows rows in panels of kCols columns: 16-byte chunks, XORed with bits
// of the row, as the swizzle of 128 or 64 bytes has it.
int tma_offset(int rows, int cols, int row, int col) {
  const int chunk = col % cols / 8, flip = cols == 64 ? row % 8 : row / 2 % 4;
  return col / cols * rows * cols + row * cols + (chunk ^ flip) * 8 + col % 8;
}

template <class Layout, class... Coordinates>
int at(Layout, Coordinates... c) {
  return int(as_position_independent_swizzle_layout(Layout{})(c...));
}

template <class T>
void check() {
  constexpr int M = T::kBlockM, N = T::kBlockN, D = T::kHeadDim, P = T::kPanelCols;
  for (int d = 0; d < D; ++d) {
    for (int r = 0; r < M; ++r) {
      for (int stage = 0; stage < T::kStagesQ; ++stage) {
        const int offset = stage * T::kTileQ + tma_offset(M, P, r, d);
        EXPECT(at(typename T::LayoutQ{}, r, d, stage) == offset);
        EXPECT(at(typename T::LayoutQt{}, d, r, stage) == offset);
      }
      for (int stage = 0; stage < T::kStagesdO; ++stage) {
        const int offset = stage * T::kTileQ + tma_offset(M, P, r, d);
        EXPECT(at(typename T::LayoutdO{}, r, d, stage) == offset);
        EXPECT(at(typename T::LayoutdOt{}, d, r, stage) == offset);
      }
    }
    for (int r = 0; r < N; ++r) {
      EXPECT(at(typename T::LayoutK{}, r, d) == tma_offset(N, P, r, d));
      EXPECT(at(typename T::LayoutKt{}, d, r) == tma_offset(N, P, r, d));
    }
    for (int r = 0; r < 64; ++r) EXPECT(at(typename T::LayoutOut{}, r, d) == tma_offset(64, P, r, d));
  }

  // Scores: which key and row a register has; as the first operand of the next product; and where ds of it goes.
  typename T::ScoreMma score_mma;
  typename T::GradMma grad_mma;
  typename T::DqMma dq_mma;
  const auto score_ids = make_identity_tensor(Shape<Int<N>, Int<M>>{});
  std::set<int> written;
  for (int thread = 0; thread < 128 * T::kConsumers; ++thread) {
    const int consumer = thread / 128, warp = thread / 32 % 4, lane = thread % 32;
    const auto c = score_mma.get_slice(thread).partition_C(score_ids);
    const auto a = grad_mma.get_slice(thread).partition_A(score_ids);
    EXPECT(size(c) == M / 8 * 4 && size(a) == size(c));
    for (int i = 0; i < M / 8; ++i) {
      for (int e = 0; e < 4; ++e) {
        const int key = 64 * consumer + 16 * warp + lane / 4 + e / 2 * 8, row = 8 * i + lane % 4 * 2 + e % 2;
        EXPECT(get<0>(c(4 * i + e)) == key && get<1>(c(4 * i + e)) == row);
        EXPECT(get<0>(a(4 * i + e)) == key && get<1>(a(4 * i + e)) == row);
      }
    }
    // stmatrix with .trans: lane l gives the address of column l % 8 of matrix l / 8. Its element j comes from lane
    // 4 * j + column / 2, of whose word of that matrix it is the low or the high half.
    for (int stage = 0; stage < T::kStagesdS; ++stage) {
      for (int group = 0; group < M / 16; ++group) {
        const int matrix = lane / 8, in_matrix = lane % 8;
        const int tile_row = matrix / 2 * 8 + in_matrix, chunk = 2 * warp + matrix % 2;
        const int bytes =
            (stage * T::kTiledS + consumer * M * 64) * 2 + tile_row * 128 + ((chunk ^ in_matrix) << 4) + group * 2048;
        EXPECT(bytes % 16 == 0);
        for (int j = 0; j < 8; ++j) {
          const int from = thread / 32 * 32 + 4 * j + in_matrix / 2;
          const auto source = score_mma.get_slice(from).partition_C(score_ids);
          // Word `matrix` of the group: words 2 * i and 2 * i + 1 are registers 0, 1 and 2, 3 of fragment i.
          const int fragment = 2 * group + matrix / 2, element = matrix % 2 * 2 + in_matrix % 2;
          const int key = get<0>(source(4 * fragment + element)), row = get<1>(source(4 * fragment + element));
          EXPECT(at(typename T::LayoutdS{}, row, key, stage) == bytes / 2 + j);
          EXPECT(written.insert(bytes / 2 + j).second);
        }
      }
    }
  }
  EXPECT(int(written.size()) == T::kStagesdS * M * N);

  // dq: which element a register has, and that the parts cover the tile.
  using Dq = typename T::Dq;
  const auto dq_ids = make_identity_tensor(Shape<Int<Dq::kRows>, Int<Dq::kCols>>{});
  std::set<int> seen;
  for (int thread = 0; thread < 128 * T::kConsumers; ++thread) {
    const auto c = dq_mma.get_slice(thread).partition_C(dq_ids);
    EXPECT(size(c) == Dq::kFragments * 4);
    for (int i = 0; i < Dq::kFragments; ++i) {
      for (int e = 0; e < 4; ++e) {
        const auto place = Dq::place(thread / 128, i, thread % 128, e);
        const int row = get<0>(c(4 * i + e)), col = get<1>(c(4 * i + e));
        EXPECT(place.row == (Dq::kTransposed ? col : row) && place.col == (Dq::kTransposed ? row : col));
        seen.insert(place.row * D + place.col);
      }
    }
  }
  EXPECT(int(seen.size()) == M * D && Dq::kPart * T::kConsumers == M * D);
  std::printf("D%d rows %d: %u bytes of shared memory, layouts agree\n", D, M, T::kSmemBytes);
}

template <int kRows, int kQ>
struct Tuning : BwdTuningDefaults {
  static constexpr int kBlockM = kRows, kStagesQ = kQ;
};

int main() {
  using Element = cutlass::bfloat16_t;
  check<BwdTraits<Element, 128, Tuning<64, 3>>>();
  check<BwdTraits<Element, 64, Tuning<64, 3>>>();
  check<BwdTraits<Element, 64, Tuning<96, 3>>>();
  check<BwdTraits<Element, 64, Tuning<112, 3>>>();
  check<BwdTraits<Element, 96, Tuning<64, 3>>>();
  check<BwdTraits<Element, 128, Tuning<80, 2>>>();
}
