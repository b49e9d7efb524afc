// Over lists the two thread blocks of a cluster stay on their SMs and take one item after the other: which ones they are,
// and the three warps of the first warpgroup that copy their keys, each 64 rows of K or V.
#pragma once

#include "bwd_gather.cuh"
#include "bwd_wide_traits.cuh"

namespace dmattn::sm90 {

// The list that a tile is of, as KeyList numbers (batch, head, block).
__device__ __forceinline__ int64_t list_of(const BwdArguments& p, const BwdItem& item) {
  return head_list_of(p, item.batch, item.head_k) * p.keys.blocks + item.chunk;
}

// The items of a cluster. The producer of the first thread block takes them and tells both blocks, of which each warp, and
// the producer's thread, reads them by this.
template <class T>
struct WideItems {
  using Announced = typename T::Announced;

  const BwdArguments& p;
  typename T::Shared& s;
  RingPlace<2> place;

  // How many say that they have read an item.
  static constexpr int kReaders = T::kCluster * (4 * T::kConsumers + T::kGatherWarps + 1);

  // Whole warp.
  __device__ __forceinline__ Announced next() {
    s.lists.item_full[place.stage].wait(place.phase);
    Announced item = s.lists.item[place.stage];
    item.index = __shfl_sync(0xffffffffu, item.index, 0);
    item.m_begin = __shfl_sync(0xffffffffu, item.m_begin, 0);
    item.m_end = __shfl_sync(0xffffffffu, item.m_end, 0);
    if (threadIdx.x % 32 == 0) finish_reading();
    place.advance();
    return item;
  }
  // A producer's thread, without which the other warps of its thread block do not see the item.
  __device__ __forceinline__ Announced next_of_producer() {
    s.lists.item_full[place.stage].arrive_and_expect(sizeof(Announced));
    s.lists.item_full[place.stage].wait(place.phase);
    const Announced item = s.lists.item[place.stage];
    finish_reading();
    place.advance();
    return item;
  }
  // The first block's producer tells of the next item that there is: lists have room for more tiles than they fill. The
  // item may arrive in a thread block before its barrier is told to expect it: no phase ends before its producer has.
  __device__ __forceinline__ void announce() const {
    const Announced item = take();
    s.lists.item_empty[place.stage].wait(place.phase ^ 1);
#pragma unroll
    for (int rank = 0; rank < T::kCluster; ++rank) {
      asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.s32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                       cute::set_block_rank(smem_u32(&s.lists.item[place.stage]), rank)),
                   "r"(item.index), "r"(item.m_begin), "r"(item.m_end), "r"(item.unused),
                   "r"(cute::set_block_rank(smem_u32(&s.lists.item_full[place.stage].word), rank))
                   : "memory");
    }
  }

 private:
  __device__ __forceinline__ Announced take() const {
    while (true) {
      const int index = atomicAdd(p.work_counter, 1);
      if (index >= p.items) return {index, 0, 0, 0};
      const ListItem item = find_list_item<T>(p, index);
      const int2 rows = __ldg(tile_rows_of(p, item.batch, item.head_k, item.chunk) + item.tile);
      if (rows.x < rows.y) return {index, rows.x, rows.y, 0};
    }
  }
  __device__ __forceinline__ void finish_reading() const {
    cutlass::arch::ClusterBarrier::arrive(&s.lists.item_empty[place.stage].word, /*cta_id=*/0, 1);
  }
};

template <class T>
struct WideGather {
  using Element = typename T::Element;
  static_assert(T::kOwnKeys == kGatherKeys && T::kPanelCols == 64);

  const BwdArguments& p;
  typename T::Shared& s;
  const int rank, lane;
  int phase = 0;  // of what the consumers release once an item

  // part: of kGatherWarps.
  __device__ __forceinline__ void run(int part) {
    WideItems<T> items{p, s};
    while (true) {
      const typename T::Announced announced = items.next();
      if (announced.index >= p.items) return;
      copy_item(find_item<T>(p, announced), part);
      phase ^= 1;
    }
  }

  // What a list says of the block's keys is read by the warp that copies them.
  __device__ __forceinline__ void copy_item(const BwdItem& item, int part) const {
    const bool is_of_other = part == 2;
    int key[kKeysOfLane];
    const int first = item.n_block * T::kBlockN + (is_of_other ? rank ^ 1 : rank) * T::kOwnKeys;
    const int keys = read_listed_keys(p, list_of(p, item), first, lane, key);
    (part == 1 ? s.lists.v_empty : s.lists.k_empty).wait(phase ^ 1);
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
  // So many panels from a column on.
  template <int kPanels>
  __device__ __forceinline__ void copy(const GatheredTensor& from, const BwdItem& item, Element* to, int column,
                                       const int (&key)[kKeysOfLane], int keys) const {
    const char* const head = from.data + item.batch * from.batch_stride + item.head_k * from.head_stride;
    copy_listed_rows<kPanels, T::kOwnKeys>(head + column * sizeof(Element), from.row_stride, smem_u32(to),
                                           p.head_dim - column, key, keys, lane);
  }

  // Which rows see the keys, and their bias.
  __device__ __forceinline__ void announce_facts(const BwdItem& item, const int (&key)[kKeysOfLane], int keys) const {
    const int32_t* const ends =
        p.keys.end == nullptr ? nullptr : p.keys.end + head_list_of(p, item.batch, item.head_k) * p.seqlen_k;
    // Row 0 of the item sees up to there.
    const int first_position = item.m_begin * T::kBlockM + p.seqlen_k - p.seqlen_q;
    const int rows = (item.m_end - item.m_begin) * T::kBlockM;
    const ListItem list_item = {item.n_block, item.chunk, item.head_k, item.batch};
    int latest = 0, earliest = rows;  // the rows between these two see all keys
    uint32_t seen_by[kKeysOfLane];
    float bias[kKeysOfLane];
#pragma unroll
    for (int i = 0; i < kKeysOfLane; ++i) {
      const bool exists = 32 * i + lane < keys;
      // Intervals may be the caller's and hold any numbers.
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
      seen_by[i] = end > begin ? static_cast<uint32_t>(end - begin) << 16 | static_cast<uint32_t>(begin) : 0;
      bias[i] = T::kListBias && exists ? read_listed_bias<Element>(p, list_item, key[i]) : 0.f;
    }
    latest = __reduce_max_sync(0xffffffffu, latest);
    earliest = __reduce_min_sync(0xffffffffu, earliest);
    s.lists.facts_empty.wait(phase ^ 1);
#pragma unroll
    for (int i = 0; i < kKeysOfLane; ++i) {
      s.facts.rows[32 * i + lane] = seen_by[i];
      if constexpr (T::kListBias) s.facts.bias[32 * i + lane] = bias[i];
    }
    if (lane == 0) s.facts.seen_by_all = make_int2(latest, earliest);
    s.facts_full.arrive();
  }
};

}  // namespace dmattn::sm90
