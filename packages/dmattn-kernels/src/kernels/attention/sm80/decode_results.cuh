// From what the warps of a block of the decode kernel have found to the result: the warps' sums are merged; of the
// blocks that share a row, the last one to end combines what all of them have left.
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
    __shared__ bool answer;
    __syncthreads();
    if (threadIdx.x == 0) {
      device_fence();
      answer = atomicAdd(word, 1ull) - tag == count - 1;
      device_fence();
    }
    __syncthreads();
    return answer;
  }
};

template <class T>
struct DecodeResults : DecodeBlock<T> {
  using Base = DecodeBlock<T>;
  using Element = typename T::Element;
  using Base::batch, Base::head, Base::lane, Base::p, Base::row0, Base::rows, Base::smem, Base::split, Base::warp;
  static constexpr int kHeadDim = T::kHeadDim;
  static constexpr int kQuads = kHeadDim / 4;  // columns are handled four at a time

  using Base::Base;

  // --- which blocks share a row --------------------------------------------------------------------------------------

  // The splits of a block's rows. With a token those of all rows of the head: only the last block may overwrite the
  // entry that leaves the cache.
  __device__ __forceinline__ Arrivals arrivals() const {
    const bool by_head = Base::has_token();
    const int64_t i = by_head ? Base::head_index() : Base::head_index() * p.row_blocks + row0 / T::kRows;
    return {words() + i, p.launch_tag, static_cast<uint64_t>(p.num_splits) * (by_head ? p.row_blocks : 1), 0};
  }
  // With a token: the heads of a sequence.
  __device__ __forceinline__ Arrivals head_arrivals() const {
    return {words() + static_cast<int64_t>(p.batch) * p.nheads + batch, p.launch_tag, static_cast<uint64_t>(p.nheads),
            0};
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
  __device__ __forceinline__ void merge() const {
#pragma unroll 1
    for (int i = threadIdx.x; i < rows * kQuads; i += T::kThreads) {
      const int row = i / kQuads, col = i % kQuads * 4;
      float max = -INFINITY;
#pragma unroll
      for (int w = 0; w < T::kWarps; ++w) max = fmaxf(max, merge_stats(0, w, row));
      const float shift = max == -INFINITY ? 0.f : max;  // nothing kept: all weights are exp(-inf) = 0
      float sum = 0.f;
      float4 out = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
      for (int w = 0; w < T::kWarps; ++w) {
        const float weight = exp2_approx((merge_stats(0, w, row) - shift) * kLog2e);
        sum += weight * merge_stats(1, w, row);
        add(out, weight, *reinterpret_cast<const float4*>(merge_row(w, row) + col));
      }
      const float scale = sum > 0.f ? 1.f / sum : 0.f;
      out = {out.x * scale, out.y * scale, out.z * scale, out.w * scale};
      if (col < p.head_dim) {
        if (is_partial()) {
          *reinterpret_cast<float4*>(p.out_accum + partial_row(split, row0 + row) * p.head_dim + col) = out;
        } else {
          store(row0 + row, col, out);
        }
      }
      if (col == 0) leave_lse(row, max, sum);
    }
  }

  // --- the splits of a row -------------------------------------------------------------------------------------------

  // By all threads of the last block: the rows [first, first + count) of the head, at most kRows. Splits are summed in
  // their order, whichever block does it.
  __device__ __forceinline__ void combine(int first, int count) const {
    constexpr int kItems = T::kRows * kQuads / T::kThreads;
    float* const weights = reinterpret_cast<float*>(smem);
    float* const parts = weights + T::kWeightFloats;
    const uint32_t part = count * p.head_dim;  // floats of a split
    const int most = T::kPartFloats / part;    // splits that there is room for
    float4 acc[kItems];
#pragma unroll
    for (int k = 0; k < kItems; ++k) acc[k] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 1
    for (int begin = 0; begin < p.num_splits; begin += most) {
      const int splits = min(most, p.num_splits - begin);
      if (begin > 0) __syncthreads();
      // All of them on their way at once, past the L1 cache: other SMs have written them.
#pragma unroll 1
      for (int s = warp; s < splits; s += T::kWarps) {
        const float* src = p.out_accum + partial_row(begin + s, first) * p.head_dim;
        const uint32_t dst = smem_u32(parts + s * part);
        for (uint32_t j = 4 * lane; j < part; j += 128) cp_async16(dst + 4 * j, src + j, true);
      }
      cp_async_fence();
      if (begin == 0) weigh(weights, first, count);
      cp_async_wait<0>();
      __syncthreads();
#pragma unroll
      for (int k = 0; k < kItems; ++k) {
        const int i = threadIdx.x + k * T::kThreads, row = i / kQuads, col = i % kQuads * 4;
        if (row >= count || col >= p.head_dim) continue;
        const float* weight = weights + row * kMaxSplits + begin;
        const float* src = parts + row * p.head_dim + col;
#pragma unroll 4
        for (int s = 0; s < splits; ++s) add(acc[k], weight[s], *reinterpret_cast<const float4*>(src + s * part));
      }
    }
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      const int i = threadIdx.x + k * T::kThreads, row = i / kQuads, col = i % kQuads * 4;
      if (row < count && col < p.head_dim) store(first + row, col, acc[k]);
    }
  }

 private:
  __device__ __forceinline__ unsigned long long* words() const {
    return reinterpret_cast<unsigned long long*>(p.arrivals);
  }
  static __device__ __forceinline__ void add(float4& sum, float weight, const float4& x) {
    sum.x = fmaf(weight, x.x, sum.x);
    sum.y = fmaf(weight, x.y, sum.y);
    sum.z = fmaf(weight, x.z, sum.z);
    sum.w = fmaf(weight, x.w, sum.w);
  }
  __device__ __forceinline__ float* merge_row(int w, int row) const {
    return reinterpret_cast<float*>(smem) + (w * T::kRows + row) * T::kMergePitch;
  }
  // Maximum (0) or sum (1) of a row.
  __device__ __forceinline__ float& merge_stats(int which, int w, int row) const {
    return reinterpret_cast<float*>(smem)[T::kMergeFloats + (which * T::kWarps + w) * T::kRows + row];
  }
  __device__ __forceinline__ bool is_partial() const { return p.num_splits > 1; }
  __device__ __forceinline__ int64_t partial_row(int of_split, int row) const {
    return ((static_cast<int64_t>(of_split) * p.batch + batch) * p.nheads + head) * p.seqlen_q + row;
  }

  // The splits' weights in the rows, and the log-sum-exp of the rows. A warp takes a row at a time.
  __device__ __forceinline__ void weigh(float* weights, int first, int count) const {
    constexpr int kEach = kMaxSplits / 32;
    const int64_t rows_of_split = static_cast<int64_t>(p.batch) * p.nheads * p.seqlen_q;
#pragma unroll 1
    for (int row = warp; row < count; row += T::kWarps) {
      // A part's log-sum-exp is lse + rest: rounding lse may have dropped the sum (see FwdParams::lse_rest).
      const float* lse = p.lse_accum + partial_row(0, first + row);
      const float* rest = lse + p.num_splits * rows_of_split;
      float part_lse[kEach], part_rest[kEach];
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int s = lane + 32 * i;
        part_lse[i] = s < p.num_splits ? __ldcg(lse + s * rows_of_split) : -INFINITY;
        part_rest[i] = s < p.num_splits ? __ldcg(rest + s * rows_of_split) : 0.f;
      }
      float max = part_lse[0];
#pragma unroll
      for (int i = 1; i < kEach; ++i) max = fmaxf(max, part_lse[i]);
#pragma unroll
      for (int i = 16; i > 0; i /= 2) max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, i));
      if (max == -INFINITY) max = 0.f;  // no split keeps a key: all weights are then exp(-inf) = 0
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        part_lse[i] = expf(part_lse[i] - max + part_rest[i]);
        sum += part_lse[i];
      }
#pragma unroll
      for (int i = 16; i > 0; i /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, i);
      const float scale = sum == 0.f ? 0.f : 1.f / sum;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int s = lane + 32 * i;
        if (s < p.num_splits) weights[row * kMaxSplits + s] = part_lse[i] * scale;
      }
      if (lane != 0) continue;
      const float log_sum = logf(sum), whole = max + log_sum;
      store_lse(first + row, whole, sum == 0.f ? 0.f : (max - whole) + log_sum);
    }
  }

  // --- global memory -------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void store(int row, int col, const float4& x) const {
    uint16_t* dst = static_cast<uint16_t*>(p.out) + batch * p.out_stride.batch + head * p.out_stride.head +
                    Base::row_at(p.out_stride, p.draft.out_token, row) + col;
    const uint2 word = {ElementTraits<Element>::pack(x.x, x.y), ElementTraits<Element>::pack(x.z, x.w)};
    if (p.vec_out) {
      *reinterpret_cast<uint2*>(dst) = word;
    } else {
      dst[0] = static_cast<uint16_t>(word.x);
      dst[1] = static_cast<uint16_t>(word.x >> 16);
      dst[2] = static_cast<uint16_t>(word.y);
      dst[3] = static_cast<uint16_t>(word.y >> 16);
    }
  }
  // Of this block's keys.
  __device__ __forceinline__ void leave_lse(int row, float max, float sum) const {
    const bool empty = !(sum > 0.f);
    const float log_sum = logf(sum);
    const float lse = empty ? -INFINITY : max + log_sum;
    const float rest = empty ? 0.f : (max - lse) + log_sum;  // see OnlineSoftmax::finish
    if (is_partial()) {
      const int64_t all = static_cast<int64_t>(p.num_splits) * p.batch * p.nheads * p.seqlen_q;
      float* dst = p.lse_accum + partial_row(split, row0 + row);
      dst[0] = lse;
      dst[all] = rest;
    } else {
      store_lse(row0 + row, lse, rest);
    }
  }
  __device__ __forceinline__ void store_lse(int row, float lse, float rest) const {
    if (p.lse == nullptr) return;
    const int64_t i = batch * p.lse_stride.batch + head * p.lse_stride.head + row * p.lse_stride.row;
    p.lse[i] = lse;
    if (p.lse_rest != nullptr) p.lse_rest[i] = rest;
  }
};

}  // namespace dmattn
