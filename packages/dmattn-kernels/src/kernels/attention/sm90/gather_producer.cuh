// The producer of the Hopper forward over lists of keys: a warpgroup that copies the rows of K and V that a list names
// into tiles with the layout that TMA would give them.
//
// Eight threads copy a row of a panel (128 bytes), 16 bytes each. In a large tile a thread copies neighbouring rows,
// whose entries of the list it reads with wide loads (read_rows). In a small tile the threads of a warp pass their
// positions to each other (share_position). For each tile, a thread also reads one entry of the list a tile ahead,
// which brings the list into the L1 cache, and the interval end and bias of the key that it names. No instruction uses
// a loaded value before it is needed, since it would wait for the load.
#pragma once

#include <climits>

#include "../shared/key_source.cuh"
#include "../shared/scores.cuh"
#include "fwd_items.cuh"
#include "gather_params.h"
#include "gather_traits.cuh"

namespace dmattn::sm90 {

// Row r is at position r + offset, counted like keys.
__device__ __forceinline__ int position_offset(const GatherArguments& p) {
  return p.is_causal || p.keys.block_rows > 0 ? p.seqlen_k - p.seqlen_q : 0;
}

template <class T>
struct GatherProducer {
  static constexpr int kBarrier = 7;  // named barrier of the producer's threads; the consumers' are 1 to 4

  const typename T::Arguments& p;
  typename T::Shared& s;
  const int warp, lane, team;
  const int chunk, group;  // this thread copies piece `chunk` (16 bytes) of kPasses rows of a panel: see row_of()
  const int own;           // the key of a tile whose interval and bias this thread writes for the consumers
  const uint64_t policy;
  using StagePlace = RingPlace<T::kStages / T::kTeams>;
  StagePlace k_place, v_place;            // among the stages of this team: see stage_of()
  RingPlace<T::kFactStages> facts_place;  // with one team
  int told = 0;                           // with two teams: tiles of earlier items that had facts
  RingPlace<2> item_place;
  RingPlace<T::kQStages> q_place;
  int next_slot = 0;

  // A key of a tile, its interval end, and its bias as loaded: in `bias` if its dtype is fp32, otherwise in
  // narrow_bias. Fields that are not loaded are left undefined: writing zeros to a register would wait for an earlier
  // load into it.
  struct Facts {
    int32_t key = -1;  // -1: there is no key
    uint32_t end = anything(), bias = anything(), narrow_bias = anything();
  };
  static __device__ __forceinline__ uint32_t anything() {
    uint32_t x;
    asm volatile("" : "=r"(x));
    return x;
  }
  // An item, and what is read of its list while the previous item is being copied.
  struct Work {
    int index;
    typename T::Item item;
    const int32_t* list;
    const int32_t* end;  // interval ends of the head's keys; nullptr without intervals
    int count, full;     // see Announced
    int first;           // the first tile that this thread's team copies
    int entry;           // this thread's entry of that tile
    Facts facts;         // those of the key that `entry` names
  };

  __device__ __forceinline__ GatherProducer(const typename T::Arguments& arguments, typename T::Shared& shared)
      : p(arguments),
        s(shared),
        warp(cutlass::canonical_warp_idx_sync()),
        lane(threadIdx.x % 32),
        team(warp / T::kTeamWarps),
        chunk(lane % T::kChunks),
        group(threadIdx.x % T::kTeamThreads / T::kChunks),
        own(T::kTeams == 1 ? threadIdx.x : T::kPassKeys * (lane / 4) + 4 * (warp % T::kTeamWarps) + lane % 4),
        policy(make_policy()) {}

  // Keep rows of K and V in L2: other row blocks, and the other heads of the group, read them again.
  static __device__ __forceinline__ uint64_t make_policy() {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
  }

  __device__ __forceinline__ void run() {
    if constexpr (T::kBiasInProduct) {
      s.bias_operands.write_constants(threadIdx.x, 128);
      cutlass::arch::NamedBarrier::sync(128, kBarrier);  // other threads write the other columns of the same rows
    }
    Work work = {};
    work.index = blockIdx.x;
    work.first = team;
    find_list(work);
    open_list(work);
    announce(work);
    read_first_facts(work);
    if constexpr (!T::kOneQ) copy_q(work);
    while (work.index < p.items) work = copy_item(work);
    cute::cp_async_wait<0>();
  }

  // Only the first warp waits at item_empty. If the others did too, the barrier could have gone on by two phases before
  // they look at it, and they would wait for the wrong one.
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

  // Finds the item of work.index and its list, and starts to load the list's lengths, which open_list() uses.
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
  // Works out the lengths of the list, and starts to load the entry of the first tile.
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
    work.entry = read_entry(work, first_of(work));
  }
  // Narrows the list to the tiles of this item's split.
  __device__ __forceinline__ void take_share(Work& work) const {
    const int tiles = (work.count + T::kBlockN - 1) / T::kBlockN;
    const int begin = tiles * work.item.split / p.splits * T::kBlockN;
    const int end = min(tiles * (work.item.split + 1) / p.splits * T::kBlockN, work.count);
    work.list += begin;
    work.count = end - begin;
    work.full = min(max(work.full - begin, 0), work.count);
  }
  __device__ __forceinline__ void read_first_facts(Work& work) const {
    if (work.index < p.items && has_facts(work, first_of(work))) {
      work.facts = read_facts(work, bias_begin(work.item), first_of(work), position_of(work.entry));
    }
  }

  // Tiles are counted through all items, and team t copies those whose number is t modulo kTeams.
  static __device__ __forceinline__ int first_of(const Work& work) { return T::kTeams == 1 ? 0 : work.first; }
  __device__ __forceinline__ int stage_of(const StagePlace& place) const {
    return T::kTeams == 1 ? place.stage : place.stage * T::kTeams + team;
  }
  // Whether this thread has a key of its own in a tile.
  __device__ __forceinline__ bool has_own() const {
    static_assert(T::kTeams == 1 || T::kTeamThreads == T::kBlockN);
    return T::kTeams > 1 || own < T::kBlockN;
  }

  __device__ __forceinline__ int read_entry(const Work& work, int n) const {
    const int entry = n * T::kBlockN + own;
    return has_own() && entry < work.count ? __ldg(work.list + entry) : 0;
  }

  // The key that an entry names, clamped to keys that exist: the padding of a list may hold any number.
  __device__ __forceinline__ int position_of(int entry) const { return KeyLimits{0, p.seqlen_k - 1}.position(entry); }

  // Copies an item, and announces and returns the next one. The next item takes four loads that depend on each other:
  // its number, its list's length, an entry, and the facts of a key. Each is started between copies of this item and
  // used after further copies, so that its latency is hidden even behind a short list. A round is a tile of each team.
  // The next item is taken when kRoundsLeft rounds are left, and not sooner: a thread block with a long item would
  // otherwise take another one that an idle thread block could start earlier.
  static constexpr int kRoundsLeft = T::kTeams == 1 ? 5 : 3;
  __device__ __forceinline__ Work copy_item(const Work& work) {
    int taken = p.items;
    const auto take = [&]() __attribute__((always_inline)) {
      if (p.work_counter != nullptr && threadIdx.x == 0) taken = next_number(p.work_counter);
    };
    const int tiles = (work.count + T::kBlockN - 1) / T::kBlockN;
    const int rounds = (tiles + T::kTeams - 1) / T::kTeams;
    const int kv_head = work.item.head / p.head_ratio;
    const char* const k = rows_of(p.k, work.item.batch, kv_head);
    const char* const v = rows_of(p.v, work.item.batch, kv_head);
    const auto copy_k = [&](int n, const Rows& rows) __attribute__((always_inline)) {
      copy_tile(work, n, rows, k, p.k.row_stride, s.k, s.k_full, s.k_empty, k_place);
    };
    const auto copy_v = [&](int n, const Rows& rows) __attribute__((always_inline)) {
      copy_tile(work, n, rows, v, p.v.row_stride, s.v, s.v_full, s.v_empty, v_place);
    };
    Work next = {};
    next.first = (work.first + tiles) % T::kTeams;
    const int take_at = max(rounds - kRoundsLeft, -1);
    const int find_at = take_at < 0 ? (rounds > 1 ? 1 : 0) : take_at + 1;
    if (take_at < 0) take();
    const int64_t bias = bias_begin(work.item);
    Facts facts = work.facts;
    int entry = work.entry;
#pragma unroll 1
    for (int round = 0; round < rounds; ++round) {
      const int n = round * T::kTeams + first_of(work);
      const int entry_after = read_entry(work, n + T::kTeams);
      if (round == take_at) take();
      if constexpr (T::kTeams == 1) {
        copy_k(n, read_rows(work, n));
        if (T::kOneQ && n == 0) copy_halves_of_q(work.item);
        if (n > 0) copy_v(n - 1, read_rows(work, n - 1));
        if (tells_facts(work, n)) write_facts(work, facts, n);
      } else if (n < tiles) {
        const Rows rows = share_position(position_of(entry));
        const int stage = stage_of(k_place);
        copy_k(n, rows);
        if constexpr (T::kBiasInProduct) write_bias_operands(facts, stage);
        copy_v(n, rows);
        if (tells_facts(work, n)) write_facts(work, facts, n);
      }
      entry = entry_after;
      if (round == find_at) {
        next.index = share_next(taken);
        find_list(next);
      } else if (round == find_at + 1) {
        open_list(next);
      }
      if (n + T::kTeams < tiles && has_facts(work, n + T::kTeams)) {
        facts = read_facts(work, bias, n + T::kTeams, position_of(entry));
      }
    }
    if constexpr (T::kTeams > 1) told += max(tiles - work.full / T::kBlockN, 0);
    if (tiles == 0) {
      next.index = share_next(taken);
      find_list(next);
    }
    if (rounds <= find_at + 1) open_list(next);
    announce(next);
    if constexpr (!T::kOneQ) copy_q(next);
    if (T::kTeams == 1 && tiles > 0) copy_v(tiles - 1, read_rows(work, tiles - 1));
    read_first_facts(next);
    return next;
  }

  // Hands the number of the next item, which the first thread has taken, to all threads of the producer.
  __device__ __forceinline__ int share_next(int taken) {
    if (threadIdx.x == 0) s.next_item[next_slot] = gridDim.x + taken;
    cutlass::arch::NamedBarrier::sync(128, kBarrier);
    const int index = __shfl_sync(0xffffffffu, s.next_item[next_slot], 0);
    next_slot ^= 1;  // a slot is written again two items later: the barrier in between ensures that all have read it
    return index;
  }

  // Copies the Q of an item once the item has been announced, and not after its first K: a Q comes from memory, a K
  // mostly from the L2 cache. Its stage is the one that the item two before had. The consumers release it before they
  // ask for the item announced now, and what they need until then has been copied, or is copied by warps that do not
  // wait for this one. The Q of an item without keys is not read.
  __device__ __forceinline__ void copy_q(const Work& work) {
    if (work.index >= p.items) return;
    if (warp == 0) {
      Barrier& full = s.q_full[q_place.stage];
      s.q_empty[q_place.stage].wait(q_place.phase ^ 1);
      __syncwarp();
      if (lane == 0) {
        if (work.count > 0) {
          full.arrive_and_expect(T::kTileQ * sizeof(typename T::Element));
          load_tile<T::kBlockM, T::kPanels, T::kPanelCols>(
              p.q, full, cute::TMA::CacheHintSm90::EVICT_FIRST, s.q + q_place.stage * T::kTileQ,
              work.item.m_block * T::kBlockM, work.item.head, work.item.batch);
        } else {
          full.arrive();
        }
      }
      __syncwarp();
    }
    q_place.advance();
  }

  // Copies each consumer's half of Q as soon as that consumer has released its half of the previous Q.
  __device__ __forceinline__ void copy_halves_of_q(const FwdItem& item) {
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

  // The address of this thread's 16 bytes of row 0. Opaque to the compiler, which would otherwise add up its terms
  // again for each row.
  __device__ __forceinline__ const char* rows_of(const GatheredTensor& tensor, int batch, int head) const {
    const char* rows = tensor.data + batch * tensor.batch_stride + head * tensor.head_stride + chunk * 16;
    asm volatile("" : "+l"(rows));
    return rows;
  }

  // The keys of the rows of a tile that this thread copies (row_of()): with one team entries of the list as loaded,
  // with two teams positions. In whole tiles a thread of a single team has neighbouring rows, whose entries it loads at
  // once. Otherwise it has every kPassKeys-th row, so that all threads have a part of the rows that there are.
  struct Rows {
    alignas(16) int32_t key[T::kPasses];
  };
  template <bool kAtOnce>
  __device__ __forceinline__ int row_of(int i) const {
    return kAtOnce ? group * T::kPasses + i : group + i * T::kPassKeys;
  }
  static __device__ __forceinline__ bool may_read_at_once(const Work& work, int n) {
    const bool is_whole = work.count - n * T::kBlockN >= T::kBlockN;
    return T::kTeams == 1 && is_whole && reinterpret_cast<uintptr_t>(work.list + n * T::kBlockN) % 16 == 0;
  }
  __device__ __forceinline__ Rows read_rows(const Work& work, int n) const {
    using Vector = cute::conditional_t<T::kPasses % 4 == 0, int4, int2>;
    constexpr int kEntries = sizeof(Vector) / sizeof(int32_t);
    static_assert(T::kPasses % kEntries == 0);
    const int32_t* const list = work.list + n * T::kBlockN;
    const int keys = work.count - n * T::kBlockN;
    Rows rows;
    if (may_read_at_once(work, n)) {
      const auto* const from = reinterpret_cast<const Vector*>(list + row_of<true>(0));
#pragma unroll
      for (int i = 0; i < T::kPasses / kEntries; ++i) reinterpret_cast<Vector*>(rows.key)[i] = __ldg(from + i);
    } else {
#pragma unroll
      for (int i = 0; i < T::kPasses; ++i) rows.key[i] = row_of<false>(i) < keys ? __ldg(list + row_of<false>(i)) : 0;
    }
    return rows;
  }
  // The same, by shuffles, from the one position that each thread has read: `own` is chosen so that a warp's threads
  // have read those that the warp needs.
  __device__ __forceinline__ Rows share_position(int position) const {
    Rows rows;
#pragma unroll
    for (int i = 0; i < T::kPasses; ++i) rows.key[i] = __shfl_sync(0xffffffffu, position, 4 * i + lane / T::kChunks);
    return rows;
  }

  // Copies tile n of the list: the rows of its keys, and zeros for the further rows that are computed.
  __device__ __forceinline__ void copy_tile(const Work& work, int n, const Rows& rows, const char* from,
                                            uint32_t row_stride, typename T::Element* tiles, Barrier* full,
                                            Barrier* empty, StagePlace& place) {
    const int keys = work.count - n * T::kBlockN;
    const int stage = stage_of(place);
    empty[stage].wait(place.phase ^ 1);
    const uint32_t to = smem_u32(tiles) + stage * T::kTileBytes;
    if (may_read_at_once(work, n)) {
      copy_rows<true, true>(rows, from, row_stride, to, T::kBlockN, T::kBlockN);
    } else if (T::kTeams > 1 && keys >= T::kBlockN) {
      copy_rows<false, true>(rows, from, row_stride, to, T::kBlockN, T::kBlockN);
    } else {
      copy_rows<false, false>(rows, from, row_stride, to, keys, n > 0 ? T::tile_width(keys) : T::kBlockN);
    }
    full[stage].arrive_when_copied();
    place.advance();
  }
  // width: how many rows are computed. The addresses of several rows are worked out before the first copy, in registers
  // of their own: an instruction that overwrites an address register waits until the copy that uses it has read it. Two
  // teams have registers for the addresses of two rows, others for those of all.
  template <bool kAtOnce, bool kIsWhole>
  __device__ __forceinline__ void copy_rows(const Rows& rows, const char* from, uint32_t row_stride, uint32_t to,
                                            int keys, int width) {
    constexpr int kAddresses = T::kTeams == 1 ? T::kPasses : 2;
    const char* at[kAddresses];
    const uint32_t own_rows = to + row_of<kAtOnce>(0) * 128;
#pragma unroll
    for (int i = 0; i < T::kPasses; ++i) {
      if (i % kAddresses == 0) {
#pragma unroll
        for (int j = 0; j < kAddresses; ++j) {
          const uint32_t position = T::kTeams == 1 ? position_of(rows.key[i + j]) : rows.key[i + j];
          asm volatile("mad.wide.u32 %0, %1, %2, %3;" : "=l"(at[j]) : "r"(position), "r"(row_stride), "l"(from));
        }
      }
      const int row = row_of<kAtOnce>(i);
      if (!kIsWhole && i * T::kPassKeys >= width) break;
      // The swizzle depends on the row's place among eight rows. It follows from that of the first row by an exclusive
      // or, except where a thread has six neighbouring rows. The swizzle is applied last: when it is applied before a
      // uniform term is added, ptxas 13.0 makes an instruction that the GPU does not know.
      constexpr bool kAreSix = kAtOnce && T::kChunks % T::kPasses != 0;
      const int in_eight = kAreSix ? row % T::kChunks : row_of<kAtOnce>(0) % T::kChunks ^ (kAtOnce ? i : 0);
      const uint32_t line = kAreSix ? to + row * 128 : own_rows;
      const uint32_t to_row = (line ^ (chunk ^ in_eight) * 16) + (kAreSix ? 0 : (row - row_of<kAtOnce>(0)) * 128);
#pragma unroll
      for (int panel = 0; panel < T::kPanels; ++panel) {
        const bool has_columns = panel * T::kPanelCols + chunk * 8 < p.head_dim;
        copy_async(to_row + panel * T::kPanelBytes, at[i % kAddresses] + panel * 128,
                   has_columns && (kIsWhole || row < keys), policy);
      }
    }
  }

  // Writes the bias of this thread's key beside a stage of K: as operands of the product, or, where it is too large for
  // them, as a number that the consumers add.
  __device__ __forceinline__ void write_bias_operands(const Facts& facts, int stage) {
    using Operands = typename T::BiasOperands;
    const float bias = bias_of(facts);
    const bool is_large = !(fabsf(bias) <= p.most_bias);  // NaN is
    const uint32_t keys = smem_u32(s.bias_operands.keys) + stage * (T::kBlockN * Operands::kRowBytes);
    const uint2 columns = split_in_three<typename T::Element>(is_large ? 0.f : bias * p.bias_factor);
    st_shared_v2(keys + Operands::row_offset(own), columns);
    s.bias[stage][own] = is_large ? bias : 0.f;
    const bool any_is_large = __any_sync(0xffffffffu, is_large);
    if (lane == 0) {  // two bytes for each of the two warps
      static_assert(T::kTeamWarps == 2);
      reinterpret_cast<uint16_t*>(s.bias_operands.is_large + stage)[warp % T::kTeamWarps] = any_is_large;
    }
    __syncwarp();
    if (lane == 0) s.k_full[stage].arrive();
  }

  // --- facts of keys -----------------------------------------------------------------------------------------------

  static __device__ __forceinline__ bool has_intervals(const Work& work, int n) {
    return (n + 1) * T::kBlockN > work.full;
  }
  // has_facts: whether the keys of tile n have facts. tells_facts: whether consumers wait for them at facts_full; a
  // bias that the products add lies beside K instead.
  static __device__ __forceinline__ bool has_facts(const Work& work, int n) {
    return T::kBias || has_intervals(work, n);
  }
  static __device__ __forceinline__ bool tells_facts(const Work& work, int n) {
    return (T::kBias && !T::kBiasInProduct) || has_intervals(work, n);
  }
  // The offset of the bias of an item's keys. Opaque to the compiler, which would otherwise divide again for each tile.
  __device__ __forceinline__ int64_t bias_begin(const FwdItem& item) const {
    if constexpr (!T::kBias) return 0;
    int64_t begin = item.batch * p.bias.batch_stride + (item.head / p.bias.head_ratio) * p.bias.head_stride;
    asm volatile("" : "+l"(begin));
    return begin;
  }
  // Starts to load the facts of `key`, this thread's key of tile n. bias: see bias_begin().
  __device__ __forceinline__ Facts read_facts(const Work& work, int64_t bias, int n, int key) const {
    Facts facts;
    if (!has_own() || n * T::kBlockN + own >= work.count) return facts;
    facts.key = key;
    if (work.end != nullptr && has_intervals(work, n)) {
      facts.end = __ldg(reinterpret_cast<const uint32_t*>(work.end) + key);
    }
    if constexpr (T::kBias) {
      const int64_t at = bias + key * p.bias.col_stride;
      if (p.bias.dtype == Dtype::kFloat32) {
        facts.bias = __ldg(static_cast<const uint32_t*>(p.bias.ptr) + at);
      } else {
        facts.narrow_bias = __ldg(static_cast<const uint16_t*>(p.bias.ptr) + at);
      }
    }
    return facts;
  }
  // The positions that see the key.
  __device__ __forceinline__ KeyInterval interval_of(const Work& work, const Facts& facts) const {
    if (facts.key < 0) return {0, 0};
    if (work.end != nullptr) return {facts.key, static_cast<int32_t>(facts.end) - facts.key};
    return {p.is_causal ? facts.key : 0, INT_MAX};
  }
  __device__ __forceinline__ float bias_of(const Facts& facts) const {
    if (facts.key < 0) return 0.f;
    if (p.bias.dtype == Dtype::kFloat32) return __uint_as_float(facts.bias);
    return ElementTraits<typename T::Element>::unpack(facts.narrow_bias).x;
  }
  __device__ __forceinline__ void write_facts(const Work& work, const Facts& facts, int n) {
    if constexpr (T::kTeams > 1) {
      // Tiles with facts are the last ones of an item, and the other team writes every other one.
      const int number = told + n - work.full / T::kBlockN;
      facts_place.stage = number % T::kFactStages;
      facts_place.phase = number / T::kFactStages % 2;
    }
    s.facts_empty[facts_place.stage].wait(facts_place.phase ^ 1);
    if (has_own()) {
      const KeyInterval interval = interval_of(work, facts);
      s.intervals[facts_place.stage][own] = make_uint2(interval.begin, interval.length);
      if constexpr (T::kBias && !T::kBiasInProduct) s.bias[facts_place.stage][own] = bias_of(facts);
    }
    s.facts_full[facts_place.stage].arrive();
    if constexpr (T::kTeams == 1) facts_place.advance();
  }
};

}  // namespace dmattn::sm90
