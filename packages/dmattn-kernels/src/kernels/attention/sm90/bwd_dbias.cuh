// How the gradient of a dense bias gets from a consumer's tile in shared memory to global memory: by TMA or, where its
// rows do not start on 16 bytes, by threads. Then each warp writes whole rows, and leaves out rows and keys outside
// the tensor.
#pragma once

#include "bias_rows.h"
#include "bwd_bias.cuh"

namespace dmattn::sm90 {

// Whether dbias is shared, and added up in a fixed order.
template <class T>
__device__ __forceinline__ bool orders_dbias(const BwdArguments& p) {
  return T::kDenseBias && T::kHasTurnWarps && p.dbias_semaphore != nullptr;
}

// Where a consumer's part of a tile begins in dbias.
struct DbiasPlace {
  int key, row, head, batch;
};
template <class T>
__device__ __forceinline__ DbiasPlace find_dbias_place(const BwdArguments& p, const BwdItem& item, int head, int m,
                                                       int consumer) {
  return {item.n_block * T::kBlockN + consumer * kPanelKeys, m * T::kBlockM, head / p.dbias_head_ratio,
          item.batch * p.dbias_batch_step};
}
__device__ __forceinline__ void send_dbias_by_tma(const BwdArguments& p, const void* panel, const DbiasPlace& to) {
  if (p.dbias_kind == DbiasKind::kTile) {
    cute::SM90_TMA_STORE_4D::copy(&p.dbias_tiles, panel, to.key, to.row, to.head, to.batch);
  } else {
    cute::SM90_TMA_REDUCE_ADD_4D::copy(&p.dbias_tiles, panel, to.key, to.row, to.head, to.batch);
  }
}
// Likewise in fp32, all panels of a consumer. `tile`: that of both consumers.
template <class T>
__device__ __forceinline__ void send_wide_dbias(const BwdArguments& p, const float* tile, int consumer, DbiasPlace to) {
  constexpr int kPanel = T::kBlockM * kWidePanelKeys, kPanels = kPanelKeys / kWidePanelKeys;
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel) {
    send_dbias_by_tma(p, tile + (consumer * kPanels + panel) * kPanel, to);
    to.key += kWidePanelKeys;
  }
}

// Where a panel begins in dbias, and how many rows and keys exist from there on.
struct DbiasPart {
  void* to;  // fp32 or 16-bit
  int64_t row_stride;
  int rows, keys;
};

// The address of a lane's word in a row of a panel, which has 128 bytes.
__device__ __forceinline__ uint32_t word_of_row(uint32_t panel, uint32_t row, int lane) {
  return panel + row * kPanelRowBytes + ((lane / 4 ^ row % 8) << 4) + lane % 4 * 4;
}

// Stores a 16-bit panel of 64 keys. A warp has every fourth row, and a lane two keys of a row, 32 apart. Numbers are
// stored one by one, as a row may start at any multiple of two bytes: with words that were shifted to their places,
// and the ends of a row apart, it took four times as many instructions. kIsWhole: all rows and keys exist.
template <int kRows, bool kIsWhole>
__device__ __forceinline__ void send_dbias_rows_of(const DbiasPart& part, uint32_t panel, int warp, int lane) {
  constexpr int kBatch = 4;  // rows that are read before they are sent
  static_assert(kRows % (4 * kBatch) == 0);
  // Four rows further on the swizzle is the same, except that chunks four apart have changed places.
  uint32_t first = panel + warp * kPanelRowBytes + ((lane / 8 ^ warp) << 4) + lane % 8 * 2;
  uint16_t* to = static_cast<uint16_t*>(part.to) + warp * part.row_stride + lane;
  const int64_t step = 4 * part.row_stride;
  int rows = part.rows - warp;
#pragma unroll 1
  for (int row = 0; row < kRows; row += 4 * kBatch) {
    uint32_t numbers[kBatch][2];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t place = i % 2 == half ? first : first ^ 4 << 4;
        numbers[i][half] = ld_shared_u16(place + 4 * i * kPanelRowBytes);
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i, to += step) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (!kIsWhole && (4 * i >= rows || lane + 32 * half >= part.keys)) continue;
        to[32 * half] = static_cast<uint16_t>(numbers[i][half]);
      }
    }
    first += 4 * kBatch * kPanelRowBytes;
    rows -= 4 * kBatch;
  }
}
template <int kRows>
__device__ __forceinline__ void send_dbias_panel(const DbiasPart& part, uint32_t panel, int warp, int lane) {
  if (part.rows >= kRows && part.keys >= kPanelKeys) {
    send_dbias_rows_of<kRows, true>(part, panel, warp, lane);
  } else {
    send_dbias_rows_of<kRows, false>(part, panel, warp, lane);
  }
}

// Stores a panel of 32 keys in fp32, or adds it to sums.
template <int kRows>
__device__ __forceinline__ void send_wide_dbias_panel(const DbiasPart& part, uint32_t panel, bool is_sum, int warp,
                                                      int lane) {
#pragma unroll 4
  for (int row = warp; row < min(kRows, part.rows); row += 4) {
    const float x = __uint_as_float(ld_shared(word_of_row(panel, row, lane)));
    float* const to = static_cast<float*>(part.to) + row * part.row_stride + lane;
    if (lane >= part.keys) continue;
    if (is_sum) {
      atomicAdd(to, x);
    } else {
      *to = x;
    }
  }
}

}  // namespace dmattn::sm90
