// A dense mask and a dense bias in the Hopper backward of wide heads, for whose tiles shared memory has no room: the
// first consumer reads them from memory, a step ahead, and the second one writes the gradient of the bias.
//
// A thread reads the numbers for its own scores (see BwdConsumerState::Scores), which have sixteen rows and two keys.
// A warp reads four rows at a time, and eight neighbouring keys of each. As it reads single numbers, any strides and
// alignment will do. Before that, the producer has TMA bring both into the L2 cache.
#pragma once

#include "bwd_dbias.cuh"
#include "bwd_mask.cuh"
#include "bwd_wide_traits.cuh"

namespace dmattn::sm90 {

// The bias of a thread's scores, a number in each word, as in memory: 16 bits or fp32.
template <int kFragments>
using BiasWords = uint32_t[kFragments][4];

// The address of row `row` of a column, with `pitch` bytes from one row to the next, in one instruction. The compiler
// would take three where the same row of two columns is needed.
__device__ __forceinline__ const char* row_of_column(const char* column, int row, int pitch) {
  const char* at;
  asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(at) : "r"(row), "r"(pitch), "l"(column));
  return at;
}
template <int kBytes>
__device__ __forceinline__ uint32_t read_ahead(const char* from) {
  uint32_t word;
  // Volatile, or the compiler would move the reads to where the numbers are used.
  if constexpr (kBytes == 4) {
    asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(word) : "l"(from));
  } else {
    asm volatile("{.reg .b16 h; ld.global.nc.b16 h, [%1]; cvt.u32.u16 %0, h;}" : "=r"(word) : "l"(from));
  }
  return word;
}
// Converts all words to fp32.
template <class Element, int kFragments>
__device__ __forceinline__ void widen_bias_words(BiasWords<kFragments>& words, const BiasRows& bias) {
  if (bias.key_bytes == 4) return;
#pragma unroll
  for (int i = 0; i < kFragments; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) words[i][e] = __float_as_uint(ElementTraits<Element>::unpack(words[i][e]).x);
  }
}

// Requests the bias. `key`: the thread's first one; the other is 8 further on. Rows and keys that do not exist get the
// numbers of the last ones: their scores are masked, or their lse is +inf.
template <int kBytes, int kFragments>
__device__ __forceinline__ void read_bias_words(BiasWords<kFragments>& words, const BiasRows& bias, const char* map,
                                                int row, int key) {
  const int pitch = static_cast<int>(bias.row_stride);
  const char* const columns[2] = {map + static_cast<int64_t>(min(key, bias.keys - 1)) * kBytes,
                                  map + static_cast<int64_t>(min(key + 8, bias.keys - 1)) * kBytes};
#pragma unroll
  for (int i = 0; i < kFragments; ++i) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int at = min(row + 8 * i + e, bias.rows - 1);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        words[i][2 * half + e] = read_ahead<kBytes>(row_of_column(columns[half], at, pitch));
      }
    }
  }
}

// The bits of a mask for the thread's rows: of each a word of 32 keys, which contains those of the warp. `key`: the
// thread's first key.
struct MaskWords {
  uint32_t words[16];

  // kAhead: requests all words at once, into registers that are free until the words are used.
  template <bool kAhead>
  __device__ __forceinline__ void read(const MaskBits& mask, int batch, int head, int row, int key) {
    const int64_t map = static_cast<int64_t>(mask.batch > 1 ? batch : 0) * mask.heads + head / mask.head_ratio;
    const auto* const column =
        reinterpret_cast<const char*>(mask.bits + map * mask.rows * mask.words_per_row + key / 32);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const char* const at = row_of_column(column, min(row + 8 * i + e, mask.rows - 1), 4 * mask.words_per_row);
        words[2 * i + e] = kAhead ? read_ahead<4>(at) : __ldg(reinterpret_cast<const uint32_t*>(at));
      }
    }
  }
  __device__ __forceinline__ KeptScores kept(int key) const {
    KeptScores kept;
    kept.bits = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e) kept.bits |= (words[2 * i + e] >> key % 32 & 0x101) << (i + 16 * e);
    }
    return kept;
  }
};

// Sends the gradient of a dense bias from a tile of ds. In 16 bits TMA sends it from shared memory, or threads do if
// its rows do not start on 16 bytes, or if it is added to fp32 sums. For an fp32 bias threads send it from their
// registers.
template <class T>
struct WideDbias {
  using Element = typename T::Element;

  const BwdArguments& p;
  const int batch, head, row, key;  // row, key: the first ones of the tile

  __device__ __forceinline__ int own_batch() const { return batch * p.dbias_batch_step; }
  __device__ __forceinline__ int own_head() const { return head / p.dbias_head_ratio; }

  // One thread.
  __device__ __forceinline__ void send_tile(const Element* panel) const {
    if (p.dbias_rows.exist()) return;
    if (p.dbias_kind == DbiasKind::kTile) {
      cute::SM90_TMA_STORE_4D::copy(&p.dbias_tiles, panel, key, row, own_head(), own_batch());
    } else if (p.dbias_kind == DbiasKind::kPair) {
      cute::SM90_TMA_REDUCE_ADD_4D::copy(&p.dbias_tiles, panel, key, row, own_head(), own_batch());
    } else {
      return;
    }
    cute::tma_store_arrive();
  }
  // Whole warpgroup; `thread` is the number in it.
  template <int kFragments>
  __device__ __forceinline__ void send_rows(const float (&ds)[kFragments][4], const Element* panel, int thread) const {
    const int rows = p.seqlen_q - row, keys = p.seqlen_k - key;  // that exist from the tile's first ones on
    if (p.dbias_rows.exist()) {
      const DbiasRows& dbias = p.dbias_rows;
      const int64_t at =
          own_batch() * dbias.batch_stride + own_head() * dbias.head_stride + row * dbias.row_stride + key;
      if (p.bias_rows.key_bytes == 4) {
        send_registers(ds, static_cast<float*>(dbias.data) + at, rows, keys, thread);
      } else {
        send_dbias_panel<T::kBlockM>({static_cast<Element*>(dbias.data) + at, dbias.row_stride, rows, keys},
                                     smem_u32(panel), thread / 32, thread % 32);
      }
    } else if (p.dbias_kind == DbiasKind::kAccum) {
      const DbiasSums& sums = p.dbias_sums;
      float* const to = sums.data + own_batch() * sums.batch_stride + own_head() * sums.head_stride;
      add_panel<Element, T::kBlockM>(to + row * sums.row_stride + key, sums.row_stride, smem_u32(panel), rows, keys,
                                     thread);
    }
  }

 private:
  template <int kFragments>
  __device__ __forceinline__ void send_registers(const float (&ds)[kFragments][4], float* to, int rows, int keys,
                                                 int thread) const {
    const int lane = thread % 32, own_row = lane % 4 * 2, own_key = thread / 32 * 16 + lane / 4;
    to += own_row * p.dbias_rows.row_stride + own_key;
#pragma unroll
    for (int i = 0; i < kFragments; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e, to += p.dbias_rows.row_stride) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (own_row + 8 * i + e >= rows || own_key + 8 * half >= keys) continue;
          if (p.dbias_rows.is_sum) {
            atomicAdd(to + 8 * half, ds[i][2 * half + e]);
          } else {
            to[8 * half] = ds[i][2 * half + e];
          }
        }
      }
      to += 6 * p.dbias_rows.row_stride;
    }
  }
};

}  // namespace dmattn::sm90
