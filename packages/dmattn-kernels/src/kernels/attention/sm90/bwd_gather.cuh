// Copies listed keys for the Hopper backward: warps of the first warpgroup, each for the 64 keys of one consumer.
//
// What a list says of its keys (where they are, which rows see them, their bias) is read as soon as the item is known.
// K and V are copied at once if they have a second stage (kStagesKv). Otherwise they are copied when the consumers are
// done with the keys of the item before, while these add its dk and dv to memory.
#pragma once

#include "../shared/key_source.cuh"
#include "../shared/scores.cuh"
#include "bwd_items.cuh"

namespace dmattn::sm90 {

// A warp has 64 keys, each lane two of them: 32 i + lane.
constexpr int kGatherKeys = 64, kKeysOfLane = kGatherKeys / 32;

// Reads the keys from entry `first` of a list on. Returns how many entries there are from there on. Places behind the
// last one get key 0.
__device__ __forceinline__ int read_listed_keys(const BwdArguments& p, int64_t list, int first, int lane,
                                                int (&key)[kKeysOfLane]) {
  const int keys = read_list_count(p.keys, list) - first;
  const int32_t* const entries = p.keys.idx + list * p.keys.capacity + first;
  const KeyLimits limits = {0, p.seqlen_k - 1};
#pragma unroll
  for (int i = 0; i < kKeysOfLane; ++i) {
    const int at = 32 * i + lane;
    key[i] = at < keys ? limits.position(__ldg(entries + at)) : 0;
  }
  return keys;
}

template <class Element>
__device__ __forceinline__ float read_listed_bias(const BwdArguments& p, const ListItem& item, int key) {
  constexpr bool kIsBf16 = std::is_same_v<Element, cutlass::bfloat16_t>;
  const int64_t head = (item.head_k * p.head_ratio + p.group_begin) / p.bias.head_ratio;
  return load_bias(p.bias, item.batch * p.bias.batch_stride + head * p.bias.head_stride + key * p.bias.col_stride,
                   kIsBf16);
}

// Copies the keys' rows into a tile of kPanels panels, each of kPanelRows rows and 64 columns, in the layout in which
// TMA would write it. Keys and columns that do not exist become zeros. `to`: the tile's row of the first key. Whole
// warp.
template <int kPanels, int kPanelRows>
__device__ __forceinline__ void copy_listed_rows(const char* from, uint32_t row_stride, uint32_t to, int columns,
                                                 const int (&key)[kKeysOfLane], int keys, int lane) {
  // Eight lanes copy a row of a panel (128 bytes), 16 bytes each; a warp copies four rows side by side.
  constexpr int kChunks = 8, kPassKeys = 32 / kChunks;
  const int chunk = lane % kChunks;
  from += chunk * 16;
  to += lane / kChunks * 128;
  // The swizzled place of the thread's chunk. A thread's rows are four apart, so that only bit 2 of the place changes
  // from one to the next.
  uint32_t place = (chunk ^ (lane / kChunks)) * 16;
  int row = lane / kChunks;
#pragma unroll 1  // few registers
  for (int pass = 0; pass < kGatherKeys / kPassKeys; ++pass) {
    const uint32_t low = __shfl_sync(0xffffffffu, key[0], row % 32), high = __shfl_sync(0xffffffffu, key[1], row % 32);
    const char* const at = from + static_cast<uint64_t>(row < 32 ? low : high) * row_stride;
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      const bool has_columns = panel * 64 + chunk * 8 < columns;
      copy_async(to + place + panel * kPanelRows * 128, at + panel * 128, row < keys && has_columns);
    }
    row += kPassKeys;
    to += kPassKeys * 128;
    place ^= kPassKeys * 16;
  }
}

template <class T>
struct BwdGather {
  using Element = typename T::Element;
  static constexpr int kKeys = kGatherKeys;  // of a warp
  static_assert(T::kPanelCols == 64 && kKeys * T::kGatherWarps == T::kBlockN);

  const BwdArguments& p;
  typename T::Shared& s;
  const int part, lane;  // part: which of the warps
  RingPlace<2> item_place, facts_place;
  KvPlace<T::kStagesKv> kv_place;

  __device__ __forceinline__ void run() {
    while (true) {
      const typename T::Announced announced = take_announced<T>(s, item_place, lane);
      if (announced.index >= p.items) return;
      copy_item(find_list_item<T>(p, announced.index));
    }
  }

  __device__ __forceinline__ void copy_item(const ListItem& item) {
    int key[kKeysOfLane];
    const int keys = take_facts(item, key);
    const auto copy = [&](const GatheredTensor& from, Element* tiles, auto& full, auto& empty) {
      const char* const head = from.data + item.batch * from.batch_stride + item.head_k * from.head_stride;
      const int stage = kv_place.stage;
      empty[stage].wait(kv_place.phase ^ 1);
      copy_tile(head, from.row_stride, tiles + stage * T::kTileK, full[stage], key, keys);
    };
    copy(p.gathered_k, s.k, s.k_full, s.k_empty);
    copy(p.gathered_v, s.v, s.v_full, s.v_empty);
    kv_place.advance();
  }

  // Reads the lane's keys, and writes what is known of them to shared memory. Returns how many of the warp's keys
  // exist.
  __device__ __forceinline__ int take_facts(const ListItem& item, int (&key)[kKeysOfLane]) {
    const int64_t head_list = head_list_of(p, item.batch, item.head_k);
    const int64_t list = head_list * p.keys.blocks + item.chunk;
    const int first = item.tile * T::kBlockN + part * kKeys;
    const int keys = read_listed_keys(p, list, first, lane, key);
    const int32_t* const ends = p.keys.end == nullptr ? nullptr : p.keys.end + head_list * p.seqlen_k;
    KeyInterval interval[kKeysOfLane];
    float bias[kKeysOfLane];
    int latest = INT_MIN, earliest = INT_MAX;  // rows at positions between these two see all keys
#pragma unroll
    for (int i = 0; i < kKeysOfLane; ++i) {
      const bool exists = 32 * i + lane < keys;
      if (p.all_rows_see) {
        interval[i] = {key[i], exists ? p.seqlen_q : 0};
        latest = max(latest, exists ? INT_MIN : INT_MAX);
        earliest = min(earliest, exists ? INT_MAX : INT_MIN);
      } else {
        const int end = !exists ? 0 : ends == nullptr ? p.seqlen_k : __ldg(ends + key[i]);
        interval[i] = {key[i], exists ? end - key[i] : 0};
        latest = max(latest, exists ? key[i] : INT_MAX);
        earliest = min(earliest, exists ? end : INT_MIN);
      }
      bias[i] = T::kBias && exists ? read_listed_bias<Element>(p, item, key[i]) : 0.f;
    }
    latest = __reduce_max_sync(0xffffffffu, latest);
    earliest = __reduce_min_sync(0xffffffffu, earliest);

    auto& facts = s.facts[facts_place.stage];
    s.facts_empty[facts_place.stage].wait(facts_place.phase ^ 1);
#pragma unroll
    for (int i = 0; i < kKeysOfLane; ++i) {
      const int at = part * kKeys + 32 * i + lane;
      facts.interval[at] = interval[i];
      if constexpr (T::kOrdered) facts.term[at] = read_term(p, head_list, item.chunk, key[i], interval[i].length > 0);
      if constexpr (T::kBias) facts.bias[at] = bias[i];
    }
    if (lane == 0) facts.seen_by_all[part] = make_int2(latest, earliest);
    s.facts_full[facts_place.stage].arrive();
    facts_place.advance();
    return keys;
  }

  // Copies the warp's rows of a tile.
  __device__ __forceinline__ void copy_tile(const char* from, uint32_t row_stride, Element* tile, Barrier& full,
                                            const int (&key)[kKeysOfLane], int keys) {
    copy_listed_rows<T::kPanels, T::kBlockN>(from, row_stride, smem_u32(tile) + part * (kKeys * 128), p.head_dim, key,
                                             keys, lane);
    full.arrive_when_copied();
  }
};

}  // namespace dmattn::sm90
