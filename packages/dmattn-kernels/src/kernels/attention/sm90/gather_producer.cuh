// The producer of the Hopper forward over lists of keys: a warpgroup that copies the rows of K and V that a list names
// into tiles as TMA would lay them out.
//
// Eight threads copy a row of a panel (128 bytes), 16 bytes each; the warpgroup copies 16 rows side by side. Each
// thread reads one entry of the list for each tile, a tile ahead, with what is known of the key, and hands the entry to
// the threads that copy the row by shuffles.
#pragma once

#include <climits>

#include "../shared/key_source.cuh"
#include "../shared/scores.cuh"
#include "fwd_items.cuh"
#include "gather_params.h"
#include "gather_traits.cuh"

namespace dmattn::sm90 {

// Positions count rows as keys are counted: row r is at position r + offset.
__device__ __forceinline__ int position_offset(const GatherArguments& p) {
  return p.is_causal || p.keys.block_rows > 0 ? p.seqlen_k - p.seqlen_q : 0;
}

template <class T>
struct GatherProducer {
  static constexpr int kBarrier = 7;  // of the producer's threads; the consumers have 1 to 4

  const typename T::Arguments& p;
  typename T::Shared& s;
  const int warp, lane;
  const int chunk, row;  // what this thread copies: 16 bytes of a row of a panel, in the first pass
  const int own;         // the key of a tile whose list entry this thread reads
  const uint64_t policy;
  RingPlace<T::kStages> k_place, v_place;
  RingPlace<T::kFactStages> facts_place;
  RingPlace<2> item_place;
  RingPlace<T::kQStages> q_place;
  int next_slot = 0;
  Barrier* unsaid = nullptr;  // of the copies that have been started last; kProducer alone

  // What the consumers are told of a key of a tile.
  struct Facts {
    KeyInterval interval;
    float bias;
  };
  // An item and what is known of its list before its turn comes.
  struct Work {
    int index;
    typename T::Item item;
    const int32_t* list;
    const int32_t* end;  // of the head's keys; nullptr without intervals
    int count, full;     // see Announced
    int entry;           // of the first tile
    Facts facts;         // ... and of the key that it names
  };

  __device__ __forceinline__ GatherProducer(const typename T::Arguments& arguments, typename T::Shared& shared)
      : p(arguments),
        s(shared),
        warp(cutlass::canonical_warp_idx_sync()),
        lane(threadIdx.x % 32),
        chunk(lane % T::kChunks),
        row(4 * warp + lane / T::kChunks),
        own(T::kPassKeys * (lane / 4) + 4 * warp + lane % 4),
        policy(make_policy()) {}

  // Rows of K and V are read again by other row blocks, and by the other heads of a group.
  static __device__ __forceinline__ uint64_t make_policy() {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
  }

  __device__ __forceinline__ void run() {
    Work work = {};
    work.index = blockIdx.x;
    find_list(work);
    open_list(work);
    announce(work);
    read_first_facts(work);
    while (work.index < p.items) work = copy_item(work);
    say_all();
    cute::cp_async_wait<0>();
  }

  // Other warps may not wait with the first one: once it has announced the item they could miss a phase of the barrier.
  __device__ __forceinline__ void announce(const Work& work) {
    if (warp == 0) {
      s.item_empty[item_place.stage].wait(item_place.phase ^ 1);
      __syncwarp();
      if (lane == 0) {
        s.item[item_place.stage] = {work.index, work.count, work.full, work.item};
        s.item_full[item_place.stage].arrive();
      }
      __syncwarp();
    }
    item_place.advance();
  }

  // The item of work.index, and where its list is. Its lengths are not looked at before open_list().
  __device__ __forceinline__ void find_list(Work& work) const {
    if (work.index >= p.items) return;
    work.item = find_item_of<T>(p, work.index);
    const FwdItem& item = work.item;
    int64_t i = static_cast<int64_t>(p.keys.batch > 1 ? item.batch : 0) * p.keys.heads + item.head / p.keys.head_ratio;
    if (p.keys.block_rows > 0) {
      work.end = p.keys.end + i * p.seqlen_k;
      i = i * p.keys.blocks + item.m_block * T::kBlockM / p.keys.block_rows;
      work.full = __ldg(p.keys.full + i);
    }
    work.list = p.keys.idx + i * p.keys.capacity;
    work.count = __ldg(p.keys.count + i);
  }
  // The lengths, and the entry of the first tile.
  __device__ __forceinline__ void open_list(Work& work) const {
    if (work.index >= p.items) return;
    work.count = known_list_count(p.keys, work.count);
    if (p.keys.block_rows > 0) {
      work.full = known_list_full(work.full, work.count);
    } else {
      work.full = work.count;
      if (p.is_causal) {
        // The list is ascending: a row sees the entries up to its own position.
        const int row0 = work.item.m_block * T::kBlockM;
        const int first = row0 + position_offset(p), last = min(row0 + T::kBlockM, p.seqlen_q) - 1 + position_offset(p);
        work.full = warp_lower_bound(work.list, work.count, first + 1, lane);
        work.count = warp_lower_bound(work.list, work.count, last + 1, lane);
      }
    }
    if constexpr (T::kSplit) take_share(work);
    work.entry = read_entry(work, 0);
  }
  // Of the tiles of the list: where they begin it begins, and so on.
  __device__ __forceinline__ void take_share(Work& work) const {
    const int tiles = (work.count + T::kBlockN - 1) / T::kBlockN;
    const int begin = tiles * work.item.split / p.splits * T::kBlockN;
    const int end = min(tiles * (work.item.split + 1) / p.splits * T::kBlockN, work.count);
    work.list += begin;
    work.count = end - begin;
    work.full = min(max(work.full - begin, 0), work.count);
  }
  __device__ __forceinline__ void read_first_facts(Work& work) const {
    if (work.index < p.items && has_facts(work, 0)) work.facts = read_facts(work, 0, position_of(work.entry));
  }

  __device__ __forceinline__ int read_entry(const Work& work, int n) const {
    const int entry = n * T::kBlockN + own;
    return own < T::kBlockN && entry < work.count ? __ldg(work.list + entry) : 0;
  }

  // A key of the list, or one that may be read in its place.
  __device__ __forceinline__ int position_of(int entry) const { return KeyLimits{0, p.seqlen_k - 1}.position(entry); }

  // Returns the next item, which is announced. What is known of it comes by loads that need each other: its number, its
  // list's length, an entry, the facts of a key. Each is started beside copies of this item and used after further
  // ones, as short lists leave few copies to wait behind. Of long lists the next item is taken when so many tiles are
  // left: not sooner, as blocks with long items would be given another one before others are done with theirs.
  static constexpr int kTilesLeft = 5;
  __device__ __forceinline__ Work copy_item(const Work& work) {
    int taken = p.items;
    const auto take = [&]() __attribute__((always_inline)) {
      if (p.work_counter != nullptr && threadIdx.x == 0) taken = next_number(p.work_counter);
    };
    const int tiles = (work.count + T::kBlockN - 1) / T::kBlockN;
    const int kv_head = work.item.head / p.head_ratio;
    const char* const k = p.k.data + work.item.batch * p.k.batch_stride + kv_head * p.k.head_stride + chunk * 16;
    const char* const v = p.v.data + work.item.batch * p.v.batch_stride + kv_head * p.v.head_stride + chunk * 16;
    const auto copy_v = [&](int key, int keys, bool may_be_short) __attribute__((always_inline)) {
      copy_tile(v, p.v.row_stride, s.v, s.v_full, s.v_empty, v_place, key, keys, may_be_short);
    };
    if (tiles == 0) {
      say_all();  // the consumers may need it before they are done with the last Q
      copy_q(work.item, false);
    }
    Work next = {};
    const int take_at = max(tiles - kTilesLeft, -1);
    const int find_at = take_at < 0 ? (tiles > 1 ? 1 : 0) : take_at + 1;
    if (take_at < 0) take();
    Facts facts = work.facts;
    int key = position_of(work.entry), key_before = 0;
#pragma unroll 1
    for (int n = 0; n < tiles; ++n) {
      const int ahead = read_entry(work, n + 1);
      if (n == take_at) take();
      copy_tile(k, p.k.row_stride, s.k, s.k_full, s.k_empty, k_place, key, work.count - n * T::kBlockN, n > 0);
      if (n == 0) {
        copy_q(work.item, true);
      } else {
        copy_v(key_before, T::kBlockN, false);
      }
      if (has_facts(work, n)) write_facts(facts);
      if (n == find_at) {
        next.index = share_next(taken);
        find_list(next);
      } else if (n == find_at + 1) {
        open_list(next);
      }
      key_before = key;
      key = position_of(ahead);
      if (n + 1 < tiles && has_facts(work, n + 1)) facts = read_facts(work, n + 1, key);
    }
    if (tiles == 0) {
      next.index = share_next(taken);
      find_list(next);
    }
    if (tiles <= find_at + 1) open_list(next);
    announce(next);
    if (tiles > 0) copy_v(key_before, work.count - (tiles - 1) * T::kBlockN, tiles > 1);
    read_first_facts(next);
    return next;
  }

  // The number of the next item, which the first thread has taken.
  __device__ __forceinline__ int share_next(int taken) {
    if (threadIdx.x == 0) s.next_item[next_slot] = gridDim.x + taken;
    cutlass::arch::NamedBarrier::sync(128, kBarrier);
    const int index = __shfl_sync(0xffffffffu, s.next_item[next_slot], 0);
    next_slot ^= 1;  // written again two items later, when all threads have come past the barrier once more
    return index;
  }

  __device__ __forceinline__ void copy_q(const FwdItem& item, bool is_read) {
    if constexpr (T::kOneQ) return copy_halves_of_q(item, is_read);
    if (warp == 0) {
      Barrier& full = s.q_full[q_place.stage];
      s.q_empty[q_place.stage].wait(q_place.phase ^ 1);
      __syncwarp();
      if (lane == 0) {
        if (is_read) {
          full.arrive_and_expect(T::kTileQ * sizeof(typename T::Element));
          load_tile<T::kBlockM, T::kPanels, T::kPanelCols>(p.q, full, cute::TMA::CacheHintSm90::EVICT_FIRST,
                                                           s.q + q_place.stage * T::kTileQ, item.m_block * T::kBlockM,
                                                           item.head, item.batch);
        } else {
          full.arrive();
        }
      }
      __syncwarp();
    }
    q_place.advance();
  }

  // Each consumer's half as soon as that consumer has no more use for the last one.
  __device__ __forceinline__ void copy_halves_of_q(const FwdItem& item, bool is_read) {
    if (!is_read) return;
    if (warp == 0) {
#pragma unroll
      for (int half = 0; half < T::kConsumers; ++half) {
        s.q_empty[half].wait(q_place.phase ^ 1);
        __syncwarp();
        if (lane == 0) {
          s.q_full[half].arrive_and_expect(T::kTileQ / T::kConsumers * sizeof(typename T::Element));
          load_tile<T::kBlockM, T::kPanels, T::kPanelCols>(
              p.q, s.q_full[half], cute::TMA::CacheHintSm90::EVICT_FIRST, s.q + half * T::kQRows * T::kPanelCols,
              item.m_block * T::kBlockM + half * T::kQRows, item.head, item.batch);
        }
        __syncwarp();
      }
    }
    q_place.advance();
  }

  // The first `keys` keys of a tile; zeros for the others that are computed. may_be_short: it is the last of several.
  __device__ __forceinline__ void copy_tile(const char* from, uint32_t row_stride, typename T::Element* tiles,
                                            Barrier* full, Barrier* empty, RingPlace<T::kStages>& place, int key,
                                            int keys, bool may_be_short) {
    const int width = may_be_short ? T::tile_width(keys) : T::kBlockN;
    wait_until_free(empty[place.stage], place.phase ^ 1);
    const uint32_t to = smem_u32(tiles) + place.stage * T::kTileBytes + row * 128 + ((chunk ^ (row % T::kChunks)) * 16);
#pragma unroll
    for (int pass = 0; pass < T::kPasses; ++pass) {
      if (pass * T::kPassKeys < width) {
        const uint32_t position = __shfl_sync(0xffffffffu, key, 4 * pass + lane / T::kChunks);
        const char* const at = from + static_cast<uint64_t>(position) * row_stride;
        const bool exists = pass * T::kPassKeys + row < keys;
#pragma unroll
        for (int panel = 0; panel < T::kPanels; ++panel) {
          const bool has_columns = panel * T::kPanelCols + chunk * 8 < p.head_dim;
          copy_async(to + pass * T::kPassKeys * 128 + panel * T::kPanelBytes, at + panel * 128, exists && has_columns,
                     policy);
        }
      }
    }
    say_when_copied(full[place.stage]);
    place.advance();
  }

  // --- saying that copies are there --------------------------------------------------------------------------------

  // The first way lets the copies say so themselves. The second needs a thread that has waited for them: it does so
  // after it has started the next tile's, or when it has nothing else to do.
  __device__ __forceinline__ void say_when_copied(Barrier& full) {
    if constexpr (T::kFence == ProxyFence::kProducer) {
      cute::cp_async_fence();
      if (unsaid != nullptr) {
        cute::cp_async_wait<1>();
        cutlass::arch::fence_view_async_shared();
        unsaid->arrive();
      }
      unsaid = &full;
    } else {
      full.arrive_when_copied();
    }
  }
  __device__ __forceinline__ void say_all() {
    if constexpr (T::kFence == ProxyFence::kProducer) {
      if (unsaid == nullptr) return;
      cute::cp_async_wait<0>();
      cutlass::arch::fence_view_async_shared();
      unsaid->arrive();
      unsaid = nullptr;
    }
  }
  __device__ __forceinline__ void wait_until_free(Barrier& empty, int phase) {
    if constexpr (T::kFence == ProxyFence::kProducer) {
      if (__any_sync(0xffffffffu, !empty.is_past(phase))) say_all();
    }
    empty.wait(phase);
  }

  // --- facts of keys -----------------------------------------------------------------------------------------------

  static __device__ __forceinline__ bool has_intervals(const Work& work, int n) {
    return (n + 1) * T::kBlockN > work.full;
  }
  // Whether the consumers need any of tile n, which the list has.
  static __device__ __forceinline__ bool has_facts(const Work& work, int n) {
    return T::kBias || has_intervals(work, n);
  }
  // Of `key`, this thread's of tile n.
  __device__ __forceinline__ Facts read_facts(const Work& work, int n, int key) const {
    Facts facts = {};
    if (own >= T::kBlockN || n * T::kBlockN + own >= work.count) return facts;
    if (has_intervals(work, n)) {
      if (work.end != nullptr) {
        facts.interval = {key, __ldg(work.end + key) - key};
      } else {
        facts.interval = {p.is_causal ? key : 0, INT_MAX};
      }
    }
    if constexpr (T::kBias) {
      constexpr bool kIsBf16 = std::is_same_v<typename T::Element, cutlass::bfloat16_t>;
      const int64_t base =
          work.item.batch * p.bias.batch_stride + (work.item.head / p.bias.head_ratio) * p.bias.head_stride;
      facts.bias = load_bias(p.bias, base + key * p.bias.col_stride, kIsBf16);
    }
    return facts;
  }
  __device__ __forceinline__ void write_facts(const Facts& facts) {
    // What the consumers wait for next may not have been said yet.
    wait_until_free(s.facts_empty[facts_place.stage], facts_place.phase ^ 1);
    if (own < T::kBlockN) {
      s.intervals[facts_place.stage][own] = make_uint2(facts.interval.begin, facts.interval.length);
      if constexpr (T::kBias) s.bias[facts_place.stage][own] = facts.bias;
    }
    s.facts_full[facts_place.stage].arrive();
    facts_place.advance();
  }
};

}  // namespace dmattn::sm90
