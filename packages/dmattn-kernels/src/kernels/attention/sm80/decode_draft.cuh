// Which rows of a draft see which keys. The tokens of a draft are few: in each step every lane of a warp looks at one
// of them, and a vote tells which tokens concern the keys of the step. Most steps concern none.
#pragma once

#include "../shared/scores.cuh"
#include "decode_results.cuh"

namespace dmattn {

// `slot` and `end` of each DraftToken, a copy for each warp. They are in shared memory as registers are short in the
// loop.
template <class T>
struct SharedDraft {
  int2 token[T::kDraft ? T::kWarps : 1][T::kDraft ? kMaxDraft : 1];
};

template <class T>
struct DecodeDraft {
  SharedDraft<T>& shared;

  // fetch() reads the token of this lane; each warp reads all of them for itself. keep() puts them into shared
  // memory, once the warp's other loads are in flight. They can be used after the warp's next __syncwarp().
  __device__ __forceinline__ int2 fetch(const DecodeResults<T>& block) const {
    if (!T::kDraft || block.lane >= block.p.draft.count) return make_int2(-1, 0);
    return __ldg(reinterpret_cast<const int2*>(all(block) + block.lane));
  }
  __device__ __forceinline__ void keep(const DecodeResults<T>& block, int2 token) const {
    shared.token[block.warp][block.lane] = token;
  }
  // The score of a key that is one of the tokens.
  __device__ __forceinline__ float score_of(const DecodeResults<T>& block, int key) const {
    return __ldg(&all(block)[key - block.p.draft.entries].score);
  }

  // acc = -inf where the row's token does not see the key. Called by whole warps.
  __device__ __forceinline__ void limit(float (&acc)[T::MT][T::NT][4], const DecodeResults<T>& block, int step,
                                        const FragmentMap& map) const {
    const int2* const tokens = shared.token[block.warp];
    const int first = step * T::kKeys, behind = first - block.p.draft.entries;
    const int slot = tokens[block.lane].x;
    uint32_t leaving = __ballot_sync(0xffffffffu, slot >= first && slot < first + T::kKeys);
    if (leaving == 0 && behind <= -T::kKeys) return;
    // For the lane's columns: the first token that no longer sees the key. A key that is itself a token is seen from
    // this token on.
    int end[T::NT][2];
#pragma unroll
    for (int nt = 0; nt < T::NT; ++nt)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int number = behind + map.col(nt, c);
        end[nt][c] = number < 0 ? kMaxDraft : tokens[number % kMaxDraft].y;
      }
#pragma unroll 1
    for (; leaving != 0; leaving &= leaving - 1) {
      const int number = __ffs(leaving) - 1, gone = tokens[number].x - first;
#pragma unroll
      for (int nt = 0; nt < T::NT; ++nt)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          if (map.col(nt, c) == gone) end[nt][c] = min(end[nt][c], number);
        }
    }
    int row0 = block.row0 + map.row0;
    asm volatile("" : "+r"(row0));  // so that tokens of rows are not kept in registers from step to step
#pragma unroll
    for (int mt = 0; mt < T::MT; ++mt)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int token = block.token_of(row0 + 16 * mt + 8 * (e >> 1));
#pragma unroll
        for (int nt = 0; nt < T::NT; ++nt) {
          const int number = behind + map.col(nt, e);
          if (token < number || token >= end[nt][e & 1]) acc[mt][nt][e] = -INFINITY;
        }
      }
  }

 private:
  static __device__ __forceinline__ const DraftToken* all(const DecodeResults<T>& block) {
    return block.p.draft.tokens + block.head_index() * block.p.draft.count;
  }
};

}  // namespace dmattn
