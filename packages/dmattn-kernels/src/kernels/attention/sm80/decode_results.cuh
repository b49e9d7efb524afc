// From the results of the warps of the decode kernel to those of a row: the results of the warps are merged, and the
// last of the thread blocks that share a row combines the results of all of them. With a token, the lowest entries,
// which these results leave out, are put back, except for the one that leaves the cache, and the token is added.
#pragma once

#include "../shared/softmax.cuh"
#include "decode_block.cuh"

namespace dmattn {

// An acquire-release fence for the device. What this thread, and the other threads of the block before a barrier,
// have read and written comes before all that another thread does after it has seen a later atomic of this thread.
// Likewise, what follows here comes after what other threads did before atomics that this thread has seen.
__device__ __forceinline__ void device_fence() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// Counts the thread blocks that have ended, in words of the workspace that nobody clears. Each launch has a tag of 64
// bits, which the host draws anew. A word is a valid count if it is less than `count`, the number of thread blocks
// counted there, past the tag. Every thread block looks at the word before it counts itself, and sets the word to the
// tag if it holds anything else. When all are counted, the word is one past the last valid count, so that the next
// replay of a graph, which has the same tag, starts anew.
struct Arrivals {
  unsigned long long* word;
  uint64_t tag, count;
  unsigned long long found;

  // look() and prepare() are called by thread 0. They are two functions so that other loads can be in flight with
  // that of the word.
  __device__ __forceinline__ void look() {
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(found) : "l"(word) : "memory");
  }
  __device__ __forceinline__ void prepare() const {
    // If the exchange fails, another thread block of the launch has set the word before.
    if (found - tag >= count) atomicCAS(word, found, tag);
  }
  // Called by all threads. Returns whether this thread block is the last one, which then sees what all others have
  // written.
  __device__ __forceinline__ bool is_last() const {
    __syncthreads();
    bool is_last = false;
    if (threadIdx.x == 0) {
      device_fence();
      unsigned long long before;
      asm volatile("atom.acquire.gpu.global.add.u64 %0, [%1], 1;" : "=l"(before) : "l"(word) : "memory");
      is_last = before - tag == count - 1;
    }
    return __syncthreads_or(is_last);
  }
  // The same where the other thread blocks have only read something. count_in() and was_last() are called by thread
  // 0, count_in() after a device_fence(). Only was_last() waits for the answer.
  __device__ __forceinline__ void count_in() {
    // To the compiler, the number to add differs between lanes (only lane 0 gets here, which adds 1). Otherwise ptxas
    // adds up what the lanes of the warp add, and waits for the answer to distribute it.
    uint32_t lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    const uint64_t one = uint64_t{lane} + 1;
    asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], %2;" : "=l"(found) : "l"(word), "l"(one) : "memory");
  }
  __device__ __forceinline__ bool was_last() const { return found - tag == count - 1; }
};

template <class T>
struct DecodeResults : DecodeBlock<T> {
  using Base = DecodeBlock<T>;
  using Element = typename T::Element;
  using Base::batch, Base::head, Base::head_dim, Base::held, Base::lane, Base::p, Base::row0, Base::rows, Base::smem,
      Base::split, Base::warp;
  static constexpr int kHeadDim = T::kHeadDim;
  static constexpr int kQuads = kHeadDim / 4;  // columns are handled four at a time

  using Base::Base;

  // --- which blocks share a row --------------------------------------------------------------------------------------

  // Counts the splits of this thread block's rows. With a token it counts those of all rows of the head, since the
  // last thread block overwrites the entry that leaves the cache.
  __device__ __forceinline__ Arrivals arrivals() const {
    constexpr bool by_head = T::kTakesToken;
    const int64_t i = by_head ? Base::head_index() : Base::head_index() * p.row_blocks + row0 / T::kRows;
    return {words() + i, p.launch_tag, static_cast<uint64_t>(p.num_splits) * (by_head ? p.row_blocks : 1), 0};
  }
  // With a token: counts the heads of a sequence.
  __device__ __forceinline__ Arrivals head_arrivals() const {
    return {words() + static_cast<int64_t>(p.batch) * p.nheads + batch, p.launch_tag, static_cast<uint64_t>(p.nheads),
            0};
  }

  // --- what splits leave -------------------------------------------------------------------------------------------

  // Index of a split of this head among those of all heads, and of a row in such a split.
  __device__ __forceinline__ int64_t part_index(int of_split) const { return of_split * p.parts + Base::head_index(); }
  __device__ __forceinline__ int64_t partial_row(int of_split, int row) const {
    return of_split * p.rows_of_split + Base::head_index() * p.seqlen_q + row;
  }

  // --- the warps of a block ------------------------------------------------------------------------------------------

  // Writes this warp's results, and the maxima and sums of its rows, to its ring, where the other warps read them.
  __device__ __forceinline__ void leave(const float (&acc_o)[T::MT][T::OT][4],
                                        const OnlineSoftmax<T::MT>& softmax) const {
#pragma unroll
    for (int r = 0; r < 2 * T::MT; ++r) {
      const int row = lane / 4 + 8 * r;
      float sum = softmax.row_sum[r];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      if (row >= rows) continue;
      if ((lane & 3) == 0) {
        merge_stats(0, warp, row) = softmax.row_max[r];
        merge_stats(1, warp, row) = sum;
      }
      float* dst = merge_row(warp, row) + 2 * (lane & 3);
#pragma unroll
      for (int ot = 0; ot < T::OT; ++ot) {
        *reinterpret_cast<float2*>(dst + 8 * ot) = {acc_o[r / 2][ot][2 * (r & 1)], acc_o[r / 2][ot][2 * (r & 1) + 1]};
      }
    }
  }
  // Merges the results of the warps; comes after a barrier.
  __device__ __forceinline__ void merge() const {
    if (is_partial()) {
      merge_rows<true>();
    } else if constexpr (!T::kTakesToken) {
      merge_rows<false>();
    }
  }

  // --- the splits of a row -------------------------------------------------------------------------------------------

  // Combines the splits of rows [first, first + count) of the head, at most kRows. Called by all threads of the last
  // thread block. Splits are summed in their order, whichever thread block does it. Returns the entry whose place the
  // token takes, or -1 if it takes none.
  __device__ __forceinline__ int combine(int first, int count) const {
    float* const weights = reinterpret_cast<float*>(smem);
    float4* const sums = reinterpret_cast<float4*>(weights + T::kWeightFloats);
    float* const parts = weights + T::kWeightFloats + T::kSumFloats;
    // Floats that each split takes: its results and, with a token, a row of V in 16 bits.
    const uint32_t results = count * head_dim(), part = results + (T::kTakesToken ? head_dim() / 2 : 0);
    int most = p.num_splits;  // splits at a time, as many as there is room for
    if (__builtin_expect(most * part > T::kPartFloats, 0)) most = T::kPartFloats / part;
    const LaneShare share(lane, p.num_splits);
    LaneEntries entries;
    load_lowest(entries, share);
    LaneParts<kEach> lane_parts;
    int replaced = -1;
    if (kLoadsPartsAhead) load_parts(lane_parts, share, first, warp * share.rows(), count);
#pragma unroll 1
    for (int begin = 0; begin < p.num_splits; begin += most) {
      const int splits = min(most, p.num_splits - begin);
      if (begin > 0) __syncthreads();
      // All of these copies are in flight at once. They bypass the L1 cache, since other SMs have written the results.
      const float* src = p.out_accum + partial_row(begin + warp, first) * head_dim();
      uint32_t dst = smem_u32(parts) + 4 * warp * part;
#pragma unroll 1
      for (int s = warp; s < splits; s += T::kWarps) {
#pragma unroll(T::kHasTokenRows ? 4 : 1)
        for (uint32_t j = 4 * lane; j < results; j += 128) cp_async16(dst + 4 * j, src + j, true);
        if (T::kTakesToken && 8 * lane < head_dim()) {
          const Element* v = static_cast<const Element*>(p.lowest.v) + part_index(begin + s) * head_dim();
          cp_async16(dst + 4 * results + 16 * lane, v + 8 * lane, true);
        }
        src += T::kWarps * p.rows_of_split * head_dim();
        dst += 4 * T::kWarps * part;
      }
      cp_async_fence();
      if (begin == 0) replaced = weigh(weights, first, count, share, entries, lane_parts);
      cp_async_wait<0>();
      __syncthreads();
      const bool is_first = begin == 0, is_last = begin + splits == p.num_splits;
#pragma unroll(T::kHasTokenRows ? 2 : 1)
      for (int i = threadIdx.x; i < count * kQuads; i += T::kThreads) {
        const int row = i / kQuads, col = i % kQuads * 4;
        if (col >= head_dim()) continue;
        const float* weight = weights + row * T::kWeightPitch;
        float4 sum = is_first ? make_float4(0.f, 0.f, 0.f, 0.f) : sums[i];
        const float* src = parts + row * head_dim() + col;
#pragma unroll 1
        for (int s = 0; s < splits; s += kSplitsAtOnce) {
          add_splits(sum, weight + begin + s, src + s * part, parts + s * part + results, part, col, splits - s);
        }
        if (T::kTakesToken && is_last) add_entry(sum, weight[T::kTokenWeight], held.token[1], col);
        if (is_last) {
          store(first + row, col, sum);
        } else {
          sums[i] = sum;
        }
      }
    }
    return replaced;
  }

 protected:
  __device__ __forceinline__ unsigned long long* words() const {
    return reinterpret_cast<unsigned long long*>(p.arrivals);
  }
  static __device__ __forceinline__ void add(float4& sum, float weight, const float4& x) {
    sum.x = fmaf(weight, x.x, sum.x);
    sum.y = fmaf(weight, x.y, sum.y);
    sum.z = fmaf(weight, x.z, sum.z);
    sum.w = fmaf(weight, x.w, sum.w);
  }
  // Adds columns [col, col + 4) of a row of V. If the weight is 0, the row may hold anything.
  static __device__ __forceinline__ void add_entry(float4& sum, float weight, const void* v, int col) {
    uint2 x = *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(v) + col);
    if (weight == 0.f) x = make_uint2(0, 0);
    const float2 low = ElementTraits<Element>::unpack(x.x), high = ElementTraits<Element>::unpack(x.y);
    add(sum, weight, {low.x, low.y, high.x, high.y});
  }
  // Adds the next splits, at most `left`. `result` points to the results of the first of them, and `v` to the row of
  // V of its lowest entry.
  static constexpr int kSplitsAtOnce = 4;
  static __device__ __forceinline__ void add_splits(float4& sum, const float* weight, const float* result,
                                                    const float* v, uint32_t part, int col, int left) {
#pragma unroll
    for (int i = 0; i < kSplitsAtOnce; ++i) {
      if (i >= left) continue;
      add(sum, weight[i], *reinterpret_cast<const float4*>(result + i * part));
      if (T::kTakesToken) add_entry(sum, weight[T::kEntryWeights + i], v + i * part, col);
    }
  }
  // Each warp leaves its results in its own ring, so that it need not wait for the others before.
  __device__ __forceinline__ float* merge_row(int w, int row) const {
    return reinterpret_cast<float*>(smem + w * T::kWarpBytes) + row * T::kMergePitch;
  }
  // Maximum (which == 0) or sum (which == 1) of a row.
  __device__ __forceinline__ float& merge_stats(int which, int w, int row) const {
    return merge_row(w, T::kRows)[which * T::kRows + row];
  }
  // The maximum of a row over the keys of this thread block, and its sum of exp(score - maximum).
  struct RowSum {
    float max = -INFINITY, sum = 0.f;
    __device__ __forceinline__ float scale() const { return sum > 0.f ? 1.f / sum : 0.f; }
    // The log-sum-exp, and what rounding dropped from it: see OnlineSoftmax::finish().
    __device__ __forceinline__ float2 lse() const {
      const bool empty = !(sum > 0.f);
      const float log_sum = logf(sum), whole = empty ? -INFINITY : max + log_sum;
      return {whole, empty ? 0.f : (max - whole) + log_sum};
    }
  };
  // `weight` becomes the weights of the warps in a row.
  __device__ __forceinline__ RowSum weigh_warps(float (&weight)[T::kWarps], int row) const {
    RowSum found;
#pragma unroll
    for (int w = 0; w < T::kWarps; ++w) found.max = fmaxf(found.max, merge_stats(0, w, row));
    const float shift = found.max == -INFINITY ? 0.f : found.max;  // nothing kept: all weights are exp(-inf) = 0
#pragma unroll
    for (int w = 0; w < T::kWarps; ++w) {
      weight[w] = exp2_approx((merge_stats(0, w, row) - shift) * kLog2e);
      found.sum += weight[w] * merge_stats(1, w, row);
    }
    return found;
  }
  // kPartial: the results are those of one split, and go to the workspace.
  template <bool kPartial>
  __device__ __forceinline__ void merge_rows() const {
    const int own_row = threadIdx.x;
    static_assert(T::kRows <= T::kThreads);
    RowSum own;
    // What is the same for all columns of a row is computed once, by one thread for each row. With few rows, every
    // thread computes it, since the additional barrier would take longer.
    if constexpr (T::kSharesWeights) {
      if (own_row < rows) {
        float weight[T::kWarps];
        own = weigh_warps(weight, own_row);
#pragma unroll
        for (int w = 0; w < T::kWarps; ++w) merge_stats(0, w, own_row) = weight[w];
        merge_stats(1, 0, own_row) = own.scale();
      }
      __syncthreads();
    }
    float* const results = p.out_accum + partial_row(split, row0) * head_dim();
#pragma unroll(T::kHasTokenRows ? 2 : 1)
    for (int i = threadIdx.x; i < rows * kQuads; i += T::kThreads) {
      const int row = i / kQuads, col = i % kQuads * 4;
      if (col >= head_dim()) continue;
      float weight[T::kWarps], scale;
      if constexpr (T::kSharesWeights) {
#pragma unroll
        for (int w = 0; w < T::kWarps; ++w) weight[w] = merge_stats(0, w, row);
        scale = merge_stats(1, 0, row);
      } else {
        own = weigh_warps(weight, row);
        scale = own.scale();
      }
      const float2 lse = own.lse();  // here, to be computed at the same time as the sums below
      float4 out = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
      for (int w = 0; w < T::kWarps; ++w)
        add(out, weight[w], *reinterpret_cast<const float4*>(merge_row(w, row) + col));
      out = {out.x * scale, out.y * scale, out.z * scale, out.w * scale};
      if constexpr (kPartial) {
        *reinterpret_cast<float4*>(results + (T::kWholeRows ? 4 * i : row * head_dim() + col)) = out;
      } else {
        store(row0 + row, col, out);
      }
      if (!T::kSharesWeights && col == 0) leave_lse<kPartial>(row, lse);
    }
    if (T::kSharesWeights && own_row < rows) leave_lse<kPartial>(own_row, own.lse());
  }
  // With a token even the results of a single split are partial, since an entry or the token is added to them.
  __device__ __forceinline__ bool is_partial() const { return p.num_splits > 1 || T::kTakesToken; }
  // How the lanes of a warp share rows and their splits. A row takes a lane for each split, rounded up to a power of
  // two and at most 32; the remaining lanes take the rows behind it. A lane has split `split` and, if there are more
  // than 32 splits, every 32nd one after it.
  struct LaneShare {
    int log, lanes;  // a row takes `lanes` lanes; log: log2 of that
    int split, row;  // of this lane; the row counts among those of the warp
    __device__ __forceinline__ LaneShare(int lane, int splits)
        : log((splits > 1) + (splits > 2) + (splits > 4) + (splits > 8) + (splits > 16)),
          lanes(1 << log),
          split(lane & (lanes - 1)),
          row(lane >> log) {}
    __device__ __forceinline__ int rows() const { return 32 >> log; }
    template <class F>
    __device__ __forceinline__ float reduce(float x, F&& f) const {
#pragma unroll
      for (int i = 16; i > 0; i /= 2) {
        if (i < lanes) x = f(x, __shfl_xor_sync(0xffffffffu, x, i));
      }
      return x;
    }
  };
  static constexpr int kEach = T::kSplits / 32;  // splits of a lane

  // Loads the lowest entries of the lane's splits, as two words and one: if all four words of pack_entry() were read
  // at once, the register of the last, unused one would be used for something else, which would wait for the read.
  using LaneEntries = CacheEntry[kEach];
  __device__ __forceinline__ void load_lowest(LaneEntries& found, const LaneShare& share) const {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int s = share.split + 32 * i;
      if (!T::kTakesToken || s >= p.num_splits) continue;
      load_entry(found[i], p.lowest.entry + 4 * part_index(s));
    }
  }
  static __device__ __forceinline__ void load_entry(CacheEntry& found, const uint32_t* from) {
    const uint2 key = __ldcg(reinterpret_cast<const uint2*>(from));
    found = {key.x, key.y, static_cast<int32_t>(__ldcg(from + 2))};
  }
  // The entry that makes room: the lowest of all splits, if the token's score is not lower. Otherwise -1. Every warp
  // finds the same answer.
  __device__ __forceinline__ int lowest_slot(const LaneEntries& entries) const {
    CacheEntry low;
#pragma unroll
    for (int i = 0; i < kEach; ++i) low = lower(low, entries[i]);
    low = warp_lowest(low);
    // There is no lowest entry where every score is NaN.
    const bool takes = low.slot != INT_MAX && held.score > -INFINITY && held.score >= score_of_order(low.score);
    return takes ? low.slot : -1;
  }

  // Whether LaneParts are loaded before the results of the splits, which have more bytes. Not where ptxas would keep
  // queries in local memory for that.
  static constexpr bool kLoadsPartsAhead = kHeadDim <= 128 || !T::kGathered;
  // Log-sum-exps of a row in the lane's splits, and the logits of the splits' lowest entries and of the token there.
  template <int kN>
  struct LaneParts {
    float lse[kN], rest[kN], entry_logit[kN], token_logit;
  };
  // Loads those of the lane's row. The warp's first row is `row`, counted from `first`; there are `count` rows.
  template <int kN>
  __device__ __forceinline__ void load_parts(LaneParts<kN>& x, const LaneShare& share, int first, int row,
                                             int count) const {
    row += share.row;
    const bool is_row = row < count;
    const int64_t rows_of_split = p.rows_of_split;
    const float* lse = p.lse_accum + partial_row(0, first + row);
    const float* rest = lse + p.num_splits * rows_of_split;
    const float* logit = p.lowest.logit + partial_row(0, first + row);
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      const int s = share.split + 32 * i;
      const bool is_any = is_row && s < p.num_splits;
      x.lse[i] = is_any ? __ldcg(lse + s * rows_of_split) : -INFINITY;
      x.rest[i] = is_any ? __ldcg(rest + s * rows_of_split) : 0.f;
      x.entry_logit[i] = T::kTakesToken && is_any ? __ldcg(logit + s * rows_of_split) : -INFINITY;
    }
    x.token_logit = T::kTakesToken && is_row ? __ldcg(logit + p.num_splits * rows_of_split) : -INFINITY;
  }

  // The loaded entries are used from here on: the asm keeps the compiler from doing so earlier, where it would wait
  // for them. Returns the entry that the token replaces, or -1.
  __device__ __forceinline__ int find_replaced(LaneEntries& entries) const {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      asm volatile("" : "+r"(entries[i].score), "+r"(entries[i].position), "+r"(entries[i].slot));
    }
    return T::kTakesToken ? lowest_slot(entries) : -1;
  }

  // Turns x into weights: of the splits in a row and, with a token, of their lowest entries and of the token. The entry
  // that the token replaces has weight 0; if there is none, the token has. Returns the row's maximum and its sum.
  template <int kN, class Share>
  __device__ __forceinline__ float2 to_weights(LaneParts<kN>& x, const LaneEntries& entries, int replaced,
                                               const Share& share) const {
    const auto larger = [](float a, float b) { return fmaxf(a, b); };
    const auto plus = [](float a, float b) { return a + b; };
    if (T::kTakesToken) {
      if (replaced < 0) x.token_logit = -INFINITY;
#pragma unroll
      for (int i = 0; i < kN; ++i) {
        if (entries[i].slot == replaced) x.entry_logit[i] = -INFINITY;
      }
    }
    // A part's log-sum-exp is lse + rest: rounding lse may have dropped the sum (see FwdParams::lse_rest).
    float max = x.token_logit;
#pragma unroll
    for (int i = 0; i < kN; ++i) max = fmaxf(max, fmaxf(x.lse[i], x.entry_logit[i]));
    max = share.reduce(max, larger);
    if (max == -INFINITY) max = 0.f;  // no split keeps a key: all weights are then exp(-inf) = 0
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      x.lse[i] = expf(x.lse[i] - max + x.rest[i]);
      sum += x.lse[i];
      if (!T::kTakesToken) continue;
      x.entry_logit[i] = expf(x.entry_logit[i] - max);
      sum += x.entry_logit[i];
    }
    x.token_logit = T::kTakesToken ? expf(x.token_logit - max) : 0.f;
    if (share.split == 0) sum += x.token_logit;
    sum = share.reduce(sum, plus);
    const float scale = sum == 0.f ? 0.f : 1.f / sum;
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      x.lse[i] *= scale;
      if (T::kTakesToken) x.entry_logit[i] *= scale;
    }
    x.token_logit *= scale;
    return {max, sum};
  }

  // Computes the weights of all rows. If kLoadsPartsAhead, `x` is what the warp has loaded for its first rows.
  // Returns the entry whose place the token takes, or -1.
  __device__ __forceinline__ int weigh(float* weights, int first, int count, const LaneShare& share,
                                       LaneEntries& entries, LaneParts<kEach>& x) const {
    const int replaced = find_replaced(entries);
#pragma unroll 1
    for (int of_warp = warp * share.rows(); of_warp < count; of_warp += T::kWarps * share.rows()) {
      if (!kLoadsPartsAhead || of_warp != warp * share.rows()) load_parts(x, share, first, of_warp, count);
      const int row = of_warp + share.row;
      const float2 found = to_weights(x, entries, replaced, share);
      if (row >= count) continue;
      float* const weight = weights + row * T::kWeightPitch;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int s = share.split + 32 * i;
        if (s >= p.num_splits) continue;
        weight[s] = x.lse[i];
        if (T::kTakesToken) weight[T::kEntryWeights + s] = x.entry_logit[i];
      }
      if (share.split != 0) continue;
      if (T::kTakesToken) weight[T::kTokenWeight] = x.token_logit;
      store_whole_lse(first + row, batch, found.x, found.y);
    }
    return replaced;
  }

  // --- global memory -------------------------------------------------------------------------------------------------

  __device__ __forceinline__ uint16_t* out_row(int row, int of_batch) const {
    return static_cast<uint16_t*>(p.out) + of_batch * p.out_stride.batch + head * p.out_stride.head +
           Base::row_at(p.out_stride, p.token_rows.out_token, row);
  }
  __device__ __forceinline__ void store(int row, int col, const float4& x) const {
    store(out_row(row, batch) + col, x);
  }
  __device__ __forceinline__ void store(uint16_t* dst, const float4& x) const {
    const uint2 word = {ElementTraits<Element>::pack(x.x, x.y), ElementTraits<Element>::pack(x.z, x.w)};
    if (Base::is_vec(p.vec_out)) {
      *reinterpret_cast<uint2*>(dst) = word;
    } else {
      dst[0] = static_cast<uint16_t>(word.x);
      dst[1] = static_cast<uint16_t>(word.x >> 16);
      dst[2] = static_cast<uint16_t>(word.y);
      dst[3] = static_cast<uint16_t>(word.y >> 16);
    }
  }
  // The log-sum-exp over the keys of this thread block.
  template <bool kPartial>
  __device__ __forceinline__ void leave_lse(int row, const float2& lse) const {
    if constexpr (kPartial) {
      float* dst = p.lse_accum + partial_row(split, row0 + row);
      dst[0] = lse.x;
      dst[p.num_splits * p.rows_of_split] = lse.y;
    } else {
      store_lse(row0 + row, batch, lse.x, lse.y);
    }
  }
  // The log-sum-exp over all keys. `max` is the largest of the splits' log-sum-exps, or 0 if no split keeps a key.
  __device__ __forceinline__ void store_whole_lse(int row, int of_batch, float max, float sum) const {
    if (!has_lse()) return;
    const float log_sum = logf(sum), whole = max + log_sum;
    store_lse(row, of_batch, whole, sum == 0.f ? 0.f : (max - whole) + log_sum);
  }
  __device__ __forceinline__ bool has_lse() const { return !T::kFromCache && p.lse != nullptr; }
  __device__ __forceinline__ void store_lse(int row, int of_batch, float lse, float rest) const {
    if (!has_lse()) return;
    const int64_t i = of_batch * p.lse_stride.batch + head * p.lse_stride.head +
                      Base::row_at(p.lse_stride, p.token_rows.lse_token, row);
    p.lse[i] = lse;
    if (p.lse_rest != nullptr) p.lse_rest[i] = rest;
  }
};

}  // namespace dmattn
