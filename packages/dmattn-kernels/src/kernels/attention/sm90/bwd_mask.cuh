// A dense mask or a window of keys in the Hopper backward: which tiles of an item it leaves, in the order in which the
// producer announces them, and which of a thread's scores it keeps.
#pragma once

#include "bwd_bias.cuh"
#include "bwd_items.cuh"

namespace dmattn::sm90 {

// The tiles of an item that a dense mask leaves, in the order of RowSteps; or, where dq is added up in order and the
// heads have the same tiles, in that of HeadSteps. The producer has few registers, so that this keeps the states of 32
// blocks of rows alone, and computes where the next ones are when it needs them.
template <class T>
class MaskedRows {
 public:
  __device__ __forceinline__ MaskedRows(const BwdArguments& p, const BwdItem& item)
      : p_(p), item_(item), heads_(heads_of(p, item)), word_(item.m_end / 32 + 1) {}

  __device__ __forceinline__ RowTile next() {
    while (any_ == 0) {
      if (--word_ < item_.m_begin / 32) {
        if (goes_by_rows() || ++heads_.begin >= heads_.end) return RowTile::none();
        word_ = item_.m_end / 32;
      }
      read_states();
    }
    const int cell = 31 - __clz(any_), m = word_ * 32 + cell;
    const RowTile tile = RowTile::of(heads_.begin, m, cuts_tile<T>(p_, m, item_.n_block), !(all_ >> cell & 1));
    if (goes_by_rows()) {
      if (++heads_.begin < heads_.end) return tile;
      heads_.begin = heads_of(p_, item_).begin;
    }
    any_ ^= 1u << cell;
    return tile;
  }

 private:
  __device__ __forceinline__ bool goes_by_rows() const {
    const bool is_ordered = T::kHasTurnWarps || (T::kCluster > 1 && p_.dq_semaphore != nullptr);
    return is_ordered && (p_.mask.bits == nullptr || p_.mask.head_ratio % p_.head_ratio == 0);
  }
  // Reads the states of word_. A block of rows is one cell of the mask, a block of keys two, of which the last may not
  // exist.
  __device__ __forceinline__ void read_states() {
    static_assert(T::kBlockM == kMaskBand && T::kBlockN == 2 * kMaskBand);
    const MaskBits& mask = p_.mask;
    const int begin = item_.m_begin - 32 * word_, end = item_.m_end - 32 * word_;
    any_ = all_ = 0;
    if (end <= 0) return;
    if (mask.bits == nullptr) {
      any_ = all_ = 0xffffffffu;
    } else {
      find_states();
    }
    // Rows to which the mask leaves no key stay, too, as the item writes their gradient of zeros.
    if constexpr (T::kFewKeys) any_ = 0xffffffffu;
    if (begin > 0) any_ &= 0xffffffffu << begin;
    if (end < 32) any_ &= (1u << end) - 1;
  }
  __device__ __forceinline__ void find_states() {
    const MaskBits& mask = p_.mask;
    const int64_t map =
        static_cast<int64_t>(mask.batch > 1 ? item_.batch : 0) * mask.heads + heads_.begin / mask.head_ratio;
    const int band = 2 * item_.n_block;
    const int64_t one = (map * mask.bands_k + band) * mask.words_q + word_;
    const int64_t other = band + 1 < mask.bands_k ? one + mask.words_q : one;
    any_ = __ldg(mask.any_cols + one) | __ldg(mask.any_cols + other);
    all_ = __ldg(mask.all_cols + one) & __ldg(mask.all_cols + other);
  }

  const BwdArguments& p_;
  const BwdItem& item_;
  HeadRange heads_;  // heads that are left; of the first one, the tiles in any_ and in the words before word_
  int word_;         // which word of the states is in any_ and all_
  uint32_t any_ = 0, all_ = 0;
};

// How many blocks of keys before the item's add to the dq of these rows: those that the mask and the window leave.
// Whole warp.
template <class T>
__device__ __forceinline__ int blocks_before(const BwdArguments& p, const BwdItem& item, int head, int m, int lane) {
  const int first = first_block_of_window<T>(p, m);
  const MaskBits& mask = p.mask;
  if (mask.bits == nullptr) return item.n_block - first;
  static_assert(T::kBlockN == 2 * kMaskBand);
  const int64_t map = static_cast<int64_t>(mask.batch > 1 ? item.batch : 0) * mask.heads + head / mask.head_ratio;
  const uint32_t* const row = mask.any_rows + (map * mask.bands_q + m * T::kBlockM / kMaskBand) * mask.words_k;
  int blocks = 0;
#pragma unroll 1
  for (int word = first / 16 + lane; word * 16 < item.n_block; word += 32) {
    uint32_t any = __ldg(row + word);
    any = (any | any >> 1) & 0x55555555;
    if (word * 16 < first) any &= 0xffffffffu << 2 * (first - word * 16);
    if (word * 16 + 16 > item.n_block) any &= (1u << 2 * (item.n_block - word * 16)) - 1;
    blocks += __popc(any);
  }
  return __reduce_add_sync(0xffffffffu, blocks);
}

// The steps of an item as its consumers see them where they are announced beside their Q.
template <class T>
struct AnnouncedSteps {
  RowTile tile;
  int head, m;

  __device__ __forceinline__ void read(const RowTile& announced) {
    // By the shuffles the compiler knows that all lanes have the same values.
    tile.word = __shfl_sync(0xffffffffu, announced.word, 0);
    head = tile.head = __shfl_sync(0xffffffffu, announced.head, 0);
    m = tile.m();
  }
  __device__ __forceinline__ bool is_last() const { return tile.is_last(); }
};

// Whether a mask that is the same for all rows hides the key from all heads of the item.
__device__ __forceinline__ bool hides_key(const BwdArguments& p, const BwdItem& item, int key) {
  const MaskBits& mask = p.mask;
  const HeadRange heads = heads_of(p, item);
  const int64_t first = static_cast<int64_t>(mask.batch > 1 ? item.batch : 0) * mask.heads;
  uint32_t kept = 0;
#pragma unroll 1
  for (int head = heads.begin / mask.head_ratio; head <= (heads.end - 1) / mask.head_ratio; ++head) {
    kept |= __ldg(mask.bits + (first + head) * mask.rows * mask.words_per_row + key / 32);
  }
  return !(kept >> key % 32 & 1);
}

// The number of the item's mask, where that is the same for all rows and for the heads of a group, and is read from
// memory.
__device__ __forceinline__ int64_t find_key_mask(const BwdArguments& p, const BwdItem& item) {
  const MaskBits& mask = p.mask;
  return static_cast<int64_t>(mask.batch > 1 ? item.batch : 0) * mask.heads +
         item.head_k * p.head_ratio / mask.head_ratio;
}
// Whether such a mask leaves none of the item's keys: then their rows are not loaded.
__device__ __forceinline__ bool hides_item(const BwdArguments& p, const BwdItem& item) {
  const MaskBits& mask = p.mask;
  if (mask.bits == nullptr) return false;
  const int band = 2 * item.n_block;
  const int64_t one = (find_key_mask(p, item) * mask.bands_k + band) * mask.words_q;
  const int64_t other = band + 1 < mask.bands_k ? one + mask.words_q : one;
  return (__ldg(mask.any_cols + one) | __ldg(mask.any_cols + other)) == 0;
}
// Which of a thread's two keys of an item such a mask hides (bits 0 and 1), and whether it hides any key of the warp
// (bit 2).
struct HiddenKeys {
  uint32_t bits = 0;

  __device__ __forceinline__ bool has(int half) const { return bits >> half & 1; }
  __device__ __forceinline__ bool has_any() const { return bits & 4; }
  __device__ __forceinline__ void read(const BwdArguments& p, const BwdItem& item, int first_key) {
    const MaskBits& mask = p.mask;
    bits = 0;
    if (mask.bits == nullptr) return;
    const uint32_t* const row = mask.bits + find_key_mask(p, item) * mask.rows * mask.words_per_row;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = first_key + 8 * half;
      bits |= (~__ldg(row + key / 32) >> key % 32 & 1) << half;
    }
    if (__any_sync(0xffffffffu, bits != 0)) bits |= 4;
  }
};

// Which of a thread's scores of a tile the mask, causality, a window and the lengths leave: bit i + 8 * half + 16 * e
// is that of key `half` and of row 8 i + e, counted from the thread's first row.
struct KeptScores {
  uint32_t bits = 0xffffffffu;

  __device__ __forceinline__ bool has(int i, int half, int e) const { return bits >> (i + 8 * half + 16 * e) & 1; }
  // Reads the tile's bits from shared memory, 16 bytes a row. A warp has 16 keys of each row, a half-word. The thread
  // needs bits lane / 4 and lane / 4 + 8 of it, for the rows 8 i + lane % 4 * 2 and the next ones. Eight rows of eight
  // half-words are a matrix. When it is read transposed, lane l gets half-word l / 4 of row l % 4 * 2 and of the next
  // one. Lane `asked` has the half-word of the thread's warp, of the thread's rows.
  __device__ __forceinline__ void read(uint32_t tile, int consumer, int warp, int lane) {
    const int asked = 4 * (4 * consumer + warp) + lane % 4;
    bits = 0;
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      uint32_t rows[4];
      load_matrices(rows, tile + (8 * i + lane) * 16);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t pair = __shfl_sync(0xffffffffu, rows[j], asked);
        bits |= (pair >> lane / 4 & 0x01010101) << (i + j);
      }
    }
  }
  // The thread's rows before `first`, counted from its first one, do not see the key.
  __device__ __forceinline__ void cut(int half, int first) {
#pragma unroll
    for (int e = 0; e < 2; ++e) bits &= ~(before(first, e) << (8 * half + 16 * e));
  }
  // Likewise those from `end` on.
  __device__ __forceinline__ void cut_from(int half, int end) {
#pragma unroll
    for (int e = 0; e < 2; ++e) bits &= ~((before(end, e) ^ 0xffu) << (8 * half + 16 * e));
  }
  // A bit for each i with 8 i + e < row.
  static __device__ __forceinline__ uint32_t before(int row, int e) {
    return (1u << min(max((row - e + 7) >> 3, 0), 8)) - 1;
  }
};

}  // namespace dmattn::sm90
