// From what the warps of a block of the decode kernel have found to the result: the warps' sums are merged; of the
// blocks that share a row, the last one to end combines what all of them have left. With a token, the lowest entries
// that these results leave out are put back, but for the one that leaves the cache, and so is the token.
#pragma once

#include "../shared/softmax.cuh"
#include "decode_block.cuh"

namespace dmattn {

// Whatever this thread, and the block's other threads before a barrier, have read and written comes before what any
// thread of the device does after it has seen a later atomic of this thread; and the other way round.
__device__ __forceinline__ void device_fence() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// Blocks that end are counted in words of the workspace, which holds anything at the start. A word is one of this
// launch's if it lies less than the number of those blocks past the launch's tag, 64 bits that the host draws anew for
// each launch. Every block looks at the word before it counts itself there, and sets it to the tag if it holds anything
// else. When all are counted it holds one too many to be taken for one of the next replay of a graph: nobody has to
// clear it.
struct Arrivals {
  unsigned long long* word;
  uint64_t tag, count;
  unsigned long long found;

  // Thread 0. Two calls, so that other loads can be on their way together with this one.
  __device__ __forceinline__ void look() {
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(found) : "l"(word) : "memory");
  }
  __device__ __forceinline__ void prepare() const {
    // Where this fails, another block of the launch has come first.
    if (found - tag >= count) atomicCAS(word, found, tag);
  }
  // All threads: whether this block is the last. Then it sees what all the others have written.
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
  // The same for what has only been read, in two calls, both by thread 0 and the first one after a device_fence(). Only
  // the second one waits for the answer.
  __device__ __forceinline__ void count_in() {
    // By a number that looks as if each lane had another one. Otherwise ptxas adds up what the lanes of the warp add,
    // and waits for the answer to hand it out.
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

  // The splits of a block's rows. With a token those of all rows of the head: the last block overwrites the entry that
  // leaves the cache.
  __device__ __forceinline__ Arrivals arrivals() const {
    constexpr bool by_head = T::kTakesToken;
    const int64_t i = by_head ? Base::head_index() : Base::head_index() * p.row_blocks + row0 / T::kRows;
    return {words() + i, p.launch_tag, static_cast<uint64_t>(p.num_splits) * (by_head ? p.row_blocks : 1), 0};
  }
  // With a token: the heads of a sequence.
  __device__ __forceinline__ Arrivals head_arrivals() const {
    return {words() + static_cast<int64_t>(p.batch) * p.nheads + batch, p.launch_tag, static_cast<uint64_t>(p.nheads),
            0};
  }

  // --- what splits leave -------------------------------------------------------------------------------------------

  // Number of a split of this head among those of all heads, and of a row of its.
  __device__ __forceinline__ int64_t part_index(int of_split) const { return of_split * p.parts + Base::head_index(); }
  __device__ __forceinline__ int64_t partial_row(int of_split, int row) const {
    return of_split * p.rows_of_split + Base::head_index() * p.seqlen_q + row;
  }

  // --- the warps of a block ------------------------------------------------------------------------------------------

  // What this warp has found, for the others.
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
  // The results of the warps, put together, after a barrier.
  __device__ __forceinline__ void merge() const {
    if (is_partial()) {
      merge_rows<true>();
    } else if constexpr (!T::kTakesToken) {
      merge_rows<false>();
    }
  }

  // --- the splits of a row -------------------------------------------------------------------------------------------

  // By all threads of the last block: the rows [first, first + count) of the head, at most kRows. Splits are summed in
  // their order, whichever block does it. Returns the entry whose place the token takes; -1: it takes none.
  __device__ __forceinline__ int combine(int first, int count) const {
    float* const weights = reinterpret_cast<float*>(smem);
    float4* const sums = reinterpret_cast<float4*>(weights + T::kWeightFloats);
    float* const parts = weights + T::kWeightFloats + T::kSumFloats;
    // Floats of a split: its results, and a row of V in 16 bits.
    const uint32_t results = count * head_dim(), part = results + (T::kTakesToken ? head_dim() / 2 : 0);
    int most = p.num_splits;  // that there is room for
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
      // All of them on their way at once, past the L1 cache: other SMs have written them.
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
  // Columns [col, col + 4) of a row of V. No weight: the row may hold anything.
  static __device__ __forceinline__ void add_entry(float4& sum, float weight, const void* v, int col) {
    uint2 x = *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(v) + col);
    if (weight == 0.f) x = make_uint2(0, 0);
    const float2 low = ElementTraits<Element>::unpack(x.x), high = ElementTraits<Element>::unpack(x.y);
    add(sum, weight, {low.x, low.y, high.x, high.y});
  }
  // The next splits, at most `left`, of whose results `result` is the first one's and `v` its lowest entry's row.
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
  // Each warp leaves its results in its own ring: it has not to wait for the others before.
  __device__ __forceinline__ float* merge_row(int w, int row) const {
    return reinterpret_cast<float*>(smem + w * T::kWarpBytes) + row * T::kMergePitch;
  }
  // Maximum (0) or sum (1) of a row.
  __device__ __forceinline__ float& merge_stats(int which, int w, int row) const {
    return merge_row(w, T::kRows)[which * T::kRows + row];
  }
  // The maximum of a row of this block's keys, and the sum of what follows from it.
  struct RowSum {
    float max = -INFINITY, sum = 0.f;
    __device__ __forceinline__ float scale() const { return sum > 0.f ? 1.f / sum : 0.f; }
    // Its log-sum-exp, and what rounding has dropped: see OnlineSoftmax::finish.
    __device__ __forceinline__ float2 lse() const {
      const bool empty = !(sum > 0.f);
      const float log_sum = logf(sum), whole = empty ? -INFINITY : max + log_sum;
      return {whole, empty ? 0.f : (max - whole) + log_sum};
    }
  };
  // `weight`: of the warps.
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
  // kPartial: they are those of one split.
  template <bool kPartial>
  __device__ __forceinline__ void merge_rows() const {
    const int own_row = threadIdx.x;
    static_assert(T::kRows <= T::kThreads);
    RowSum own;
    // What is the same for all columns of a row, found once, by a thread each. For few rows another barrier would take
    // longer.
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
      const float2 lse = own.lse();  // beside the sums, not behind them
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
  // With a token, even one split has results to which something is added.
  __device__ __forceinline__ bool is_partial() const { return p.num_splits > 1 || T::kTakesToken; }
  // How the lanes of a warp share the splits of rows: as many lanes as there are splits, or a few more, take a row, and
  // the others the rows behind it. A lane has split `split` and, of many, those 32 further on each time.
  struct LaneShare {
    int log, lanes;  // of a row
    int split, row;  // of this lane, the row among those of the warp
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

  // The lowest entries of the lane's splits. By words: where all four of pack_entry() are read at once, the register of
  // the last one is taken for something else, which then waits for it.
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
  // Which entry makes room: the lowest of all splits, if the token's score is not lower. Every warp comes to the same
  // answer.
  __device__ __forceinline__ int lowest_slot(const LaneEntries& entries) const {
    CacheEntry low;
#pragma unroll
    for (int i = 0; i < kEach; ++i) low = lower(low, entries[i]);
    low = warp_lowest(low);
    // There is no lowest entry where every score is NaN.
    const bool takes = low.slot != INT_MAX && held.score > -INFINITY && held.score >= score_of_order(low.score);
    return takes ? low.slot : -1;
  }

  // Before the results of the splits, which are more. Not where ptxas would keep queries in local memory for it.
  static constexpr bool kLoadsPartsAhead = kHeadDim <= 128 || !T::kGathered;
  // What the lane's splits have found in a row, and the logits there of their lowest entries and of the token.
  template <int kN>
  struct LaneParts {
    float lse[kN], rest[kN], entry_logit[kN], token_logit;
  };
  // Of the lane's row, `row` being the warp's first one among `count` from `first` on.
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

  // What was loaded, from here on. Nothing looks at it further up, which would be to wait for it.
  __device__ __forceinline__ int find_replaced(LaneEntries& entries) const {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      asm volatile("" : "+r"(entries[i].score), "+r"(entries[i].position), "+r"(entries[i].slot));
    }
    return T::kTakesToken ? lowest_slot(entries) : -1;
  }

  // x becomes the weights of the splits in a row, and with a token those of their lowest entries and its own, but for
  // the entry that leaves or the token. Returns the row's maximum and its sum.
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

  // The weights of all rows. `x` is what the warp has loaded for its first rows, if kLoadsPartsAhead. Returns the entry
  // whose place the token takes.
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
  // Of this block's keys.
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
  // Of all keys; `max` is that of the splits' log-sum-exps, and 0 where no split keeps a key.
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
