// One variant: build.sh names it and sets its parameters by macros.
#include "kernels/attention/sm90/bwd_launch.cuh"
#include "variants.h"

namespace {

using namespace dmattn;
using namespace dmattn::sm90;

struct Tuning : BwdTuningDefaults {
  static constexpr int kBlockM = VARIANT_BLOCK_M;
  static constexpr int kStagesQ = VARIANT_STAGES_Q, kStagesdO = VARIANT_STAGES_DO;
  static constexpr DqPath kDqPath = DqPath::VARIANT_DQ_PATH;
  static constexpr bool kEarlyScores = VARIANT_EARLY_SCORES;
  static constexpr bool kDeterministic = VARIANT_DETERMINISTIC;
  static constexpr bool kSoftcap = VARIANT_SOFTCAP;
};
using T = BwdTraits<cutlass::VARIANT_ELEMENT, VARIANT_HEAD_DIM, Tuning>;

Variant describe() {
  Variant v = {};
  v.name = VARIANT_NAME;
  v.head_dim = T::kHeadDim;
  v.block_m = T::kBlockM;
  v.block_n = T::kBlockN;
  v.consumers = T::kConsumers;
  v.is_bf16 = std::is_same_v<T::Element, cutlass::bfloat16_t>;
  v.deterministic = T::kDeterministic;
  v.softcap = T::kSoftcap;
  v.smem_bytes = T::kSmemBytes;
  cudaFuncAttributes attributes = {};
  cudaFuncGetAttributes(&attributes, bwd_kernel<T>);
  v.registers = attributes.numRegs;
  v.local_bytes = static_cast<int>(attributes.localSizeBytes);
  v.launch = [](int64_t blocks, const BwdParams& p, int64_t section_bytes, cudaStream_t stream) {
    return launch_bwd_kernel<T>(blocks, p, stream, section_bytes);
  };
  v.convert = [](const BwdParams& p, void* dq, const Strides3& stride, cudaStream_t stream) {
    return launch_convert_dq<T>(p, dq, stride, p.head_dim % 8 == 0, stream);
  };
  return v;
}

const bool registered = [] {
  variants().push_back(describe);
  return true;
}();

}  // namespace
