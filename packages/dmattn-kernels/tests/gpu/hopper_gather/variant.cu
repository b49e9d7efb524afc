// One variant: build.sh names it and sets its parameters by macros.
#include "kernels/attention/sm90/gather_launch.cuh"
#include "variants.h"

namespace {

using namespace dmattn;
using namespace dmattn::sm90;

using T = GatherTraits<cutlass::VARIANT_ELEMENT, VARIANT_HEAD_DIM, VARIANT_BIAS, VARIANT_BLOCK_N, VARIANT_STAGES,
                       ProxyFence::VARIANT_FENCE, VARIANT_TAIL, VARIANT_PRODUCER>;

Variant describe() {
  Variant v = {};
  v.name = VARIANT_NAME;
  v.head_dim = T::kHeadDim;
  v.block_n = T::kBlockN;
  v.is_bf16 = std::is_same_v<T::Element, cutlass::bfloat16_t>;
  v.has_bias = T::kBias;
  v.smem_bytes = T::kSmemBytes;
  cudaFuncAttributes attributes = {};
  cudaFuncGetAttributes(&attributes, gather_kernel<T>);
  v.registers = attributes.numRegs;
  v.local_bytes = static_cast<int>(attributes.localSizeBytes);
  v.launch = [](int64_t blocks, const FwdParams& p, int64_t section_bytes, cudaStream_t stream) {
    return launch_gather_kernel<T>(blocks, p, stream, section_bytes);
  };
  return v;
}

const bool registered = [] {
  variants().push_back(describe);
  return true;
}();

}  // namespace
