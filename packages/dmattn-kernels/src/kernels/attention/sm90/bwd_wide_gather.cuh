// Copies listed keys for the Hopper backward of wide heads: three warps of the first warpgroup, each of which copies
// 64 rows of K or V.
#pragma once

#include "bwd_gather.cuh"
#include "bwd_wide_traits.cuh"

namespace dmattn::sm90 {

// The number of the list to which an item's tile belongs in KeyList, which counts (batch, head, block).
__device__ __forceinline__ int64_t list_of(const BwdArguments& p, const BwdItem& item) {
  return head_list_of(p, item.batch, item.head_k) * p.keys.blocks + item.chunk;
}

template <class T>
struct WideGather {
  using Element = typename T::Element;
  static_assert(T::kOwnKeys == kGatherKeys && T::kPanelCols == 64);

  const BwdArguments& p;
  typename T::Shared& s;
  const int rank, lane;

  // part: which of the kGatherWarps warps. The warp that copies K of the block's own keys also announces what the list
  // says about them.
  __device__ __forceinline__ void run(const BwdItem& item, int part) const {
    const bool is_of_other = part == 2;
    int key[kKeysOfLane];
    const int first = item.n_block * T::kBlockN + (is_of_other ? rank ^ 1 : rank) * T::kOwnKeys;
    const int keys = read_listed_keys(p, list_of(p, item), first, lane, key);
    if (part == 0) {
      copy<T::kAllPanels>(p.gathered_k, item, s.k, 0, key, keys);
      s.k_full.arrive_when_copied();
      announce_facts(item, key, keys);
    } else if (part == 1) {
      copy<T::kPanels>(p.gathered_v, item, s.v, 0, key, keys);
      s.v_full.arrive_when_copied();
    } else {
      copy<T::kOwnPanels>(p.gathered_k, item, s.other_k, rank * T::kOwnPanels * T::kPanelCols, key, keys);
      s.k_full.arrive_when_copied();
    }
  }

 private:
  // Copies kPanels panels, from a column on.
  template <int kPanels>
  __device__ __forceinline__ void copy(const GatheredTensor& from, const BwdItem& item, Element* to, int column,
                                       const int (&key)[kKeysOfLane], int keys) const {
    const char* const head = from.data + item.batch * from.batch_stride + item.head_k * from.head_stride;
    copy_listed_rows<kPanels, T::kOwnKeys>(head + column * sizeof(Element), from.row_stride, smem_u32(to),
                                           p.head_dim - column, key, keys, lane);
  }

  // Writes to shared memory which rows see the keys, and the keys' bias.
  __device__ __forceinline__ void announce_facts(const BwdItem& item, const int (&key)[kKeysOfLane], int keys) const {
    const int32_t* const ends =
        p.keys.end == nullptr ? nullptr : p.keys.end + head_list_of(p, item.batch, item.head_k) * p.seqlen_k;
    // The position of the item's first row.
    const int first_position = item.m_begin * T::kBlockM + p.seqlen_k - p.seqlen_q;
    const int rows = (item.m_end - item.m_begin) * T::kBlockM;
    const ListItem list_item = {item.n_block, item.chunk, item.head_k, item.batch};
    int latest = 0, earliest = rows;  // rows from `latest` up to `earliest` see all keys
#pragma unroll
    for (int i = 0; i < kKeysOfLane; ++i) {
      const int at = 32 * i + lane;
      const bool exists = at < keys;
      // Intervals may come from the caller and hold any numbers.
      int begin = 0, end = exists ? rows : 0;
      if (exists && !p.all_rows_see) {
        begin = min(max(key[i] - first_position, 0), rows);
        if (ends != nullptr) {
          const int seen_to = min(max(__ldg(ends + key[i]), 0), p.seqlen_k);
          end = min(max(seen_to - first_position, begin), rows);
        }
      }
      latest = max(latest, begin);
      earliest = min(earliest, end);
      s.facts.rows[at] = end > begin ? static_cast<uint32_t>(end - begin) << 16 | static_cast<uint32_t>(begin) : 0;
      if constexpr (T::kListBias) s.facts.bias[at] = exists ? read_listed_bias<Element>(p, list_item, key[i]) : 0.f;
    }
    latest = __reduce_max_sync(0xffffffffu, latest);
    earliest = __reduce_min_sync(0xffffffffu, earliest);
    if (lane == 0) s.facts.seen_by_all = make_int2(latest, earliest);
    s.facts_full.arrive();
  }
};

}  // namespace dmattn::sm90
