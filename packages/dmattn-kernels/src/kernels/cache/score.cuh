// Scores of tokens that go into a cache, as the caller gives them.
#pragma once

#include "../shared/helper.cuh"

namespace dmattn {

// The score of new token t, as the caller gives it.
template <class Score>
__device__ __forceinline__ Score read_new_score(const CacheAppendParams& p, int b, int h, int t) {
  return static_cast<const Score*>(
      p.score_new)[b * p.score_batch_stride + h * p.score_head_stride + t * p.score_token_stride];
}
// A score of NaN, whose token no query attends to, is stored as -inf.
template <class Score>
__device__ __forceinline__ Score cleaned(Score score) {
  return static_cast<float>(score) > -INFINITY ? score : static_cast<Score>(-INFINITY);
}

// Calls f(Score{}) for the type of the scores.
template <class F>
cudaError_t with_score_type(Dtype dtype, F&& f) {
  return dtype == Dtype::kFloat32 ? f(float{}) : prep::with_half_type(dtype, f);
}

}  // namespace dmattn
