// The splits of few rows are combined by whole warps: weights and results stay in registers, and no warp waits for
// another one. The results of splits are read from global memory, where decode_results.cuh has written them.
#pragma once

#include "decode_results.cuh"

namespace dmattn {

template <class T>
struct DecodeFewRows : DecodeResults<T> {
  using Base = DecodeResults<T>;
  using Element = typename T::Element;
  using typename Base::LaneEntries;
  template <int kN>
  using LaneParts = typename Base::template LaneParts<kN>;
  using Base::batch, Base::head_dim, Base::held, Base::lane, Base::p, Base::warp;
  using Base::find_replaced, Base::load_entry, Base::out_row, Base::part_index, Base::partial_row, Base::store,
      Base::store_whole_lse, Base::to_weights;
  static constexpr int kHeadDim = T::kHeadDim;
  // kColumns: neighbouring columns that a lane has. kPartsAhead: splits whose results are in flight at once.
  // kPartsTogether: how many of these are skipped together if there are fewer splits.
  static constexpr int kColumns = kHeadDim / 32, kPartsAhead = 16, kPartsTogether = 4;

  using Base::Base;

  // Whether the lane's columns are below head_dim.
  __device__ __forceinline__ bool has_columns() const { return T::kWholeRows || kColumns * lane < head_dim(); }

  // Where a lane of combine_by_warps() reads for the warp's first row. Computed while the thread block counts itself,
  // so that the last one can read at once.
  struct LaneSources {
    const float *lse, *rest, *entry_logit, *token_logit;  // of the lane's split (token_logit: of the row)
    const uint32_t* entry;
    const float* result;  // result and v: of the first split, from the lane's first column on
    const uint16_t* v;
  };
  __device__ __forceinline__ LaneSources sources(int first) const {
    LaneSources x;
    const int64_t row = partial_row(0, first + warp), row_of_lane = row + lane * p.rows_of_split;
    x.lse = p.lse_accum + row_of_lane;
    x.rest = x.lse + p.num_splits * p.rows_of_split;
    x.result = p.out_accum + row * head_dim() + kColumns * lane;
    asm volatile("" : "+l"(x.lse), "+l"(x.rest), "+l"(x.result));
    if constexpr (T::kTakesToken) {
      x.entry_logit = p.lowest.logit + row_of_lane;
      x.token_logit = p.lowest.logit + row + p.num_splits * p.rows_of_split;
      x.entry = p.lowest.entry + 4 * part_index(lane);
      x.v = static_cast<const uint16_t*>(p.lowest.v) + part_index(0) * head_dim() + kColumns * lane;
      asm volatile("" : "+l"(x.entry_logit), "+l"(x.token_logit), "+l"(x.entry), "+l"(x.v));
    }
    return x;
  }
  // Whether rows and splits are few enough for combine_by_warps().
  __device__ __forceinline__ bool has_warps_for(int count) const {
    return T::kReducesByWarps && p.num_splits <= 32 && count <= 2 * T::kWarps;
  }
  // As combine(), for all of `count` rows where has_warps_for(count). Each row is combined by one warp, and each lane
  // has one split: weights stay in registers, and so do the results of the splits, of which a lane has some columns.
  __device__ __forceinline__ int combine_by_warps(int first, int count, LaneSources from) const {
    const WholeWarp share{lane, p.num_splits > 4};
    const bool has_split = lane < p.num_splits;
    LaneEntries entries;
    if (T::kTakesToken && has_split) load_entry(entries[0], from.entry);
    // Lets the compiler see that all lanes take the same branches.
    const int own_warp = __shfl_sync(0xffffffffu, warp, 0);
    if (own_warp >= count) return find_replaced(entries);
    int replaced = -1;
#pragma unroll 1
    for (int row = own_warp; row < count; row += T::kWarps) {
      LaneParts<1> x;
      x.lse[0] = has_split ? __ldcg(from.lse) : -INFINITY;
      x.rest[0] = has_split ? __ldcg(from.rest) : 0.f;
      x.entry_logit[0] = T::kTakesToken && has_split ? __ldcg(from.entry_logit) : -INFINITY;
      x.token_logit = T::kTakesToken ? __ldcg(from.token_logit) : -INFINITY;
      const float* result = from.result;
      const uint16_t* v = from.v;
      float sum[kColumns] = {};
      float2 found;
#pragma unroll 1
      for (int begin = 0; begin < p.num_splits; begin += kPartsAhead) {
        LaneColumns part[kPartsAhead];
#pragma unroll
        for (int i = 0; i < kPartsAhead; ++i) {
          if (i % kPartsTogether == 0 && begin + i >= p.num_splits) break;
          if (begin + i < p.num_splits && has_columns()) load_columns(part[i], result, v);
          // Computed one after the other: otherwise the compiler would compute the addresses of all splits before the
          // first read.
          result += p.rows_of_split * head_dim();
          asm volatile("" : "+l"(result));
          if (!T::kTakesToken) continue;
          v += p.parts * head_dim();
          asm volatile("" : "+l"(v));
        }
        if (begin == 0) {
          replaced = find_replaced(entries);
          found = to_weights(x, entries, replaced, share);
        }
#pragma unroll
        for (int i = 0; i < kPartsAhead; ++i) {
          if (i % kPartsTogether == 0 && begin + i >= p.num_splits) break;
          const float weight = __shfl_sync(0xffffffffu, x.lse[0], begin + i);
          const float entry_weight = T::kTakesToken ? __shfl_sync(0xffffffffu, x.entry_logit[0], begin + i) : 0.f;
          if (begin + i >= p.num_splits || !has_columns()) continue;
#pragma unroll
          for (int c = 0; c < kColumns; ++c) sum[c] = fmaf(weight, part[i].x[c], sum[c]);
          if (T::kTakesToken) add_columns(sum, entry_weight, part[i].v);
        }
      }
      if constexpr (T::kTakesToken) {
        const auto* const token = reinterpret_cast<const uint32_t*>(held.token[1]) + kColumns / 2 * lane;
        uint32_t word[kColumns / 2];
#pragma unroll
        for (int i = 0; i < kColumns / 2; ++i) word[i] = token[i];
        add_columns(sum, __shfl_sync(0xffffffffu, x.token_logit, 0), word);
      }
      int own_batch = batch;
      asm volatile("" : "+r"(own_batch));  // so that addresses are not computed before the first read
      if (has_columns()) store_columns(first + row, own_batch, sum);
      if (lane == 0) store_whole_lse(first + row, own_batch, found.x, found.y);
      from.lse += T::kWarps;
      from.rest += T::kWarps;
      from.entry_logit += T::kWarps;
      from.token_logit += T::kWarps;
      from.result += T::kWarps * head_dim();
    }
    return replaced;
  }

  // The same for rows of several tokens, with at most four splits each: a warp has eight rows, and each lane the
  // weight of one split in one row.
  static constexpr int kFewSplits = 4, kRowsOfWarp = 32 / kFewSplits;
  __device__ __forceinline__ bool has_lanes_for_token_rows() const {
    static_assert(!T::kReducesTokenRows || kRowsOfWarp * T::kWarps >= T::kRows);
    return T::kReducesTokenRows && p.num_splits <= kFewSplits;
  }
  __device__ __forceinline__ void combine_token_rows(int first, int count) const {
    int thread = threadIdx.x;
    asm volatile("" : "+r"(thread));  // so that what is derived from it is not kept in registers through the loop
    const int lane = thread % 32, warp = thread / 32;
    const WholeWarp share{lane % kFewSplits, false};
    const int row0 = kRowsOfWarp * __shfl_sync(0xffffffffu, warp, 0);  // see combine_by_warps()
    const int64_t of_lane = partial_row(share.split, first + row0 + lane / kFewSplits);
    const bool is_any = share.split < p.num_splits && row0 + lane / kFewSplits < count;
    LaneParts<1> x;
    x.lse[0] = is_any ? __ldcg(p.lse_accum + of_lane) : -INFINITY;
    x.rest[0] = is_any ? __ldcg(p.lse_accum + p.num_splits * p.rows_of_split + of_lane) : 0.f;
    x.entry_logit[0] = x.token_logit = -INFINITY;
    const float* result = p.out_accum + partial_row(0, first + row0) * head_dim() + kColumns * lane;
    constexpr int kRowsAhead = kPartsAhead / kFewSplits;
    float2 found;
#pragma unroll 1
    for (int begin = 0; begin < kRowsOfWarp; begin += kRowsAhead) {
      LaneColumns part[kRowsAhead][kFewSplits];
      const float* from = result + begin * head_dim();
#pragma unroll
      for (int s = 0; s < kFewSplits; ++s) {
#pragma unroll
        for (int i = 0; i < kRowsAhead; ++i) {
          if (s < p.num_splits && row0 + begin + i < count && has_columns()) {
            load_columns(part[i][s], from + i * head_dim(), nullptr);
          }
        }
        from += p.rows_of_split * head_dim();
      }
      const LaneEntries none;
      if (begin == 0) found = to_weights(x, none, -1, share);
#pragma unroll
      for (int i = 0; i < kRowsAhead; ++i) {
        float sum[kColumns] = {};
#pragma unroll
        for (int s = 0; s < kFewSplits; ++s) {
          const float weight = __shfl_sync(0xffffffffu, x.lse[0], kFewSplits * (begin + i) + s);
          if (s >= p.num_splits || !has_columns()) continue;
#pragma unroll
          for (int c = 0; c < kColumns; ++c) sum[c] = fmaf(weight, part[i][s].x[c], sum[c]);
        }
        if (row0 + begin + i < count && has_columns()) store_columns(first + row0 + begin + i, batch, sum);
      }
    }
    const int own_row = row0 + lane / kFewSplits;
    if (share.split == 0 && own_row < count) store_whole_lse(first + own_row, batch, found.x, found.y);
  }

 private:
  // What to_weights() needs to know of the lanes: each has one split. If not is_wide, values are reduced over groups
  // of four lanes, each of which then has the result of its group.
  struct WholeWarp {
    int split;
    bool is_wide;  // more than four splits
    template <class F>
    __device__ __forceinline__ float reduce(float x, F&& f) const {
      if (is_wide) {
#pragma unroll
        for (int i = 16; i > 2; i /= 2) x = f(x, __shfl_xor_sync(0xffffffffu, x, i));
      }
#pragma unroll
      for (int i = 2; i > 0; i /= 2) x = f(x, __shfl_xor_sync(0xffffffffu, x, i));
      return x;
    }
  };
  struct LaneColumns {
    float x[kColumns];
    uint32_t v[kColumns / 2];  // with a token: of the row of V of the split's lowest entry
  };
  // Reads bypass the L1 cache, since other SMs have written the results.
  static __device__ __forceinline__ void load_columns(LaneColumns& to, const float* result, const uint16_t* v) {
    if constexpr (kColumns == 2) {
      const float2 x = __ldcg(reinterpret_cast<const float2*>(result));
      to.x[0] = x.x, to.x[1] = x.y;
      if (T::kTakesToken) to.v[0] = __ldcg(reinterpret_cast<const uint32_t*>(v));
    } else {
#pragma unroll
      for (int i = 0; i < kColumns; i += 4) {
        const float4 x = __ldcg(reinterpret_cast<const float4*>(result + i));
        to.x[i] = x.x, to.x[i + 1] = x.y, to.x[i + 2] = x.z, to.x[i + 3] = x.w;
        if (!T::kTakesToken) continue;
        const uint2 y = __ldcg(reinterpret_cast<const uint2*>(v + i));
        to.v[i / 2] = y.x, to.v[i / 2 + 1] = y.y;
      }
    }
  }
  // Adds columns of a row of V. If the weight is 0, the row may hold anything.
  static __device__ __forceinline__ void add_columns(float (&sum)[kColumns], float weight,
                                                     const uint32_t (&v)[kColumns / 2]) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      const float2 x = ElementTraits<Element>::unpack(weight == 0.f ? 0u : v[i]);
      sum[2 * i] = fmaf(weight, x.x, sum[2 * i]);
      sum[2 * i + 1] = fmaf(weight, x.y, sum[2 * i + 1]);
    }
  }
  __device__ __forceinline__ void store_columns(int row, int of_batch, const float (&x)[kColumns]) const {
    uint16_t* dst = out_row(row, of_batch) + kColumns * lane;
    if constexpr (kColumns == 2) {
      *reinterpret_cast<uint32_t*>(dst) = ElementTraits<Element>::pack(x[0], x[1]);
    } else {
#pragma unroll
      for (int i = 0; i < kColumns; i += 4) store(dst + i, {x[i], x[i + 1], x[i + 2], x[i + 3]});
    }
  }
};

}  // namespace dmattn
