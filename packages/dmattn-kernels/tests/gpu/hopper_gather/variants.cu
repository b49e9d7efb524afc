// The variants, in parts that build.sh compiles one by one: a part shares the time that the headers take.
#include "kernels/attention/sm90/gather_launch.cuh"
#include "variants.h"

namespace {

using namespace dmattn;
using namespace dmattn::sm90;
using bf16 = cutlass::bfloat16_t;
using fp16 = cutlass::half_t;
constexpr auto kNone = ProxyFence::kNone, kConsumer = ProxyFence::kConsumer, kProducer = ProxyFence::kProducer;

template <class T>
Variant describe(const char* name) {
  Variant v = {};
  v.name = name;
  v.head_dim = T::kHeadDim;
  v.block_n = T::kBlockN;
  v.is_bf16 = std::is_same_v<typename T::Element, cutlass::bfloat16_t>;
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

#define ADD(name, ...) variants().push_back([] { return describe<GatherTraits<__VA_ARGS__>>(name); });

const bool registered = [] {
// Element, head_dim, bias, keys of a tile, stages, fence, short tails, registers of the producer.
#if PART == 0
  ADD("bf16_d128_bias_consumer", bf16, 128, true, 128, 2, kConsumer, true, 56)
#elif PART == 1
  ADD("bf16_d128_bias_none", bf16, 128, true, 128, 2, kNone, true, 56)
  ADD("bf16_d128_bias_producer", bf16, 128, true, 128, 2, kProducer, true, 56)
#elif PART == 2
  ADD("bf16_d64_bias_consumer", bf16, 64, true, 128, 4, kConsumer, true, 56)
  ADD("bf16_d64_bias_none", bf16, 64, true, 128, 4, kNone, true, 56)
#elif PART == 3
  ADD("bf16_d128_plain_consumer", bf16, 128, false, 128, 2, kConsumer, true, 56)
  ADD("fp16_d128_bias_consumer", fp16, 128, true, 128, 2, kConsumer, true, 56)
#else
  ADD("bf16_d128_bias_n96", bf16, 128, true, 96, 3, kConsumer, false, 56)
#endif
  return true;
}();

}  // namespace
