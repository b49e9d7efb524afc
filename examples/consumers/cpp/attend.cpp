// A C++ program that uses the kernels without Python and without torch: versions, checked calls, errors, and, where
// there is a GPU, a forward that is compared with a loop on the CPU. Exit status 0: all was as expected.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <dmattn/dmattn.hpp>
#include <exception>
#include <optional>
#include <random>
#include <vector>

#include "gpu.hpp"

namespace {

constexpr int64_t kSeqlenQ = 100, kSeqlenK = 130, kHeads = 4, kHeadsK = 2, kHeadDim = 64;
constexpr float kScale = 0.125f;

// Values of bfloat16: the upper half of a float, rounded to nearest even.
uint16_t to_bfloat16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

float from_bfloat16(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

std::vector<uint16_t> random_bfloat16(size_t count, unsigned seed) {
  std::mt19937 generator(seed);
  std::uniform_real_distribution<float> uniform(-1, 1);
  std::vector<uint16_t> values(count);
  for (uint16_t& value : values) value = to_bfloat16(uniform(generator));
  return values;
}

// What every call below has in common; null pointers stand for memory that is not there yet.
dmattn_fwd_params forward_params(void* q, void* k, void* v, void* bias, void* out, void* lse) {
  auto params = dmattn::make_params<dmattn_fwd_params>();
  params.is_causal = 1;
  params.softmax_scale = kScale;
  params.q = dmattn::make_tensor(q, DMATTN_BFLOAT16, {1, kSeqlenQ, kHeads, kHeadDim});
  params.k = dmattn::make_tensor(k, DMATTN_BFLOAT16, {1, kSeqlenK, kHeadsK, kHeadDim});
  params.v = dmattn::make_tensor(v, DMATTN_BFLOAT16, {1, kSeqlenK, kHeadsK, kHeadDim});
  // One number for each key and key/value head, the same for every row.
  params.bias = dmattn::make_tensor(bias, DMATTN_FLOAT32, {1, kHeadsK, 1, kSeqlenK});
  params.out = dmattn::make_tensor(out, DMATTN_BFLOAT16, {1, kSeqlenQ, kHeads, kHeadDim});
  params.softmax_lse = dmattn::make_tensor(lse, DMATTN_FLOAT32, {1, kHeads, kSeqlenQ});
  return params;
}

// The error that a call ends with, if it does.
std::optional<dmattn::Error> error_of(const dmattn_fwd_params& params) {
  try {
    dmattn::workspace_size(params);
  } catch (const dmattn::Error& error) {
    return error;
  }
  return std::nullopt;
}

bool wrong_calls_are_refused() {
  auto shape = forward_params(nullptr, nullptr, nullptr, nullptr, nullptr, nullptr);
  shape.v.shape[1] = kSeqlenK - 1;
  auto dtype = forward_params(nullptr, nullptr, nullptr, nullptr, nullptr, nullptr);
  dtype.k.dtype = DMATTN_FLOAT16;
  const struct {
    const dmattn_fwd_params& params;
    dmattn_status status;
  } wrong[] = {{shape, DMATTN_ERROR_INVALID_VALUE}, {dtype, DMATTN_ERROR_INVALID_DTYPE}};
  for (const auto& call : wrong) {
    const auto error = error_of(call.params);
    if (!error || error->status() != call.status) {
      std::fprintf(stderr, "a wrong call was not refused with status %d\n", call.status);
      return false;
    }
    std::printf("refused: %s\n", error->what());
  }
  return true;
}

struct Attention {
  std::vector<double> out, lse;
};

// The definition, row by row.
Attention plain_loop(const std::vector<uint16_t>& q, const std::vector<uint16_t>& k, const std::vector<uint16_t>& v,
                     const std::vector<float>& bias) {
  Attention result;
  result.out.assign(q.size(), 0.0);
  result.lse.assign(kHeads * kSeqlenQ, 0.0);
  for (int64_t h = 0; h < kHeads; ++h) {
    const int64_t h_k = h / (kHeads / kHeadsK);
    for (int64_t i = 0; i < kSeqlenQ; ++i) {
      const uint16_t* row = &q[(i * kHeads + h) * kHeadDim];
      std::vector<double> logits(i + kSeqlenK - kSeqlenQ + 1);  // causal, aligned to the bottom right corner
      for (size_t j = 0; j < logits.size(); ++j) {
        double product = 0;
        const uint16_t* key = &k[(j * kHeadsK + h_k) * kHeadDim];
        for (int64_t d = 0; d < kHeadDim; ++d) product += double(from_bfloat16(row[d])) * from_bfloat16(key[d]);
        logits[j] = kScale * product + bias[h_k * kSeqlenK + j];
      }
      const double highest = *std::max_element(logits.begin(), logits.end());
      double sum = 0;
      for (double logit : logits) sum += std::exp(logit - highest);
      result.lse[h * kSeqlenQ + i] = highest + std::log(sum);
      for (size_t j = 0; j < logits.size(); ++j) {
        const double probability = std::exp(logits[j] - highest) / sum;
        const uint16_t* value = &v[(j * kHeadsK + h_k) * kHeadDim];
        for (int64_t d = 0; d < kHeadDim; ++d)
          result.out[(i * kHeads + h) * kHeadDim + d] += probability * from_bfloat16(value[d]);
      }
    }
  }
  return result;
}

bool forward_agrees_with_the_loop(Gpu& gpu) {
  const auto q = random_bfloat16(kSeqlenQ * kHeads * kHeadDim, 1);
  const auto k = random_bfloat16(kSeqlenK * kHeadsK * kHeadDim, 2);
  const auto v = random_bfloat16(kSeqlenK * kHeadsK * kHeadDim, 3);
  std::vector<float> bias;
  for (uint16_t value : random_bfloat16(kHeadsK * kSeqlenK, 4)) bias.push_back(from_bfloat16(value));

  void* out = gpu.allocate(q.size() * sizeof(uint16_t));
  void* lse = gpu.allocate(kHeads * kSeqlenQ * sizeof(float));
  const auto params = forward_params(gpu.upload(q), gpu.upload(k), gpu.upload(v), gpu.upload(bias), out, lse);
  const size_t bytes = dmattn::workspace_size(params);
  dmattn::launch(params, bytes > 0 ? gpu.allocate(bytes) : nullptr, bytes, nullptr);

  const Attention expected = plain_loop(q, k, v, bias);
  const auto found_out = gpu.download<uint16_t>(out, q.size());
  const auto found_lse = gpu.download<float>(lse, kHeads * kSeqlenQ);
  double out_error = 0, lse_error = 0;
  for (size_t i = 0; i < found_out.size(); ++i)
    out_error = std::fmax(out_error, std::fabs(from_bfloat16(found_out[i]) - expected.out[i]));
  for (size_t i = 0; i < found_lse.size(); ++i)
    lse_error = std::fmax(lse_error, std::fabs(found_lse[i] - expected.lse[i]));
  std::printf("largest difference from the loop: out %.2e, lse %.2e\n", out_error, lse_error);
  // The values are below 1, where bfloat16 rounds by at most 2^-9: once the probabilities, once the result.
  return out_error <= 0x1p-8 && lse_error <= 1e-4;
}

}  // namespace

int main() try {
  std::printf("dmattn %s, ABI version %d, architectures %s\n", dmattn_version(), dmattn_abi_version(),
              dmattn_architectures());
  if (dmattn_abi_version() != DMATTN_ABI_VERSION) {
    std::fprintf(stderr, "the library has ABI version %d, the header %d\n", dmattn_abi_version(), DMATTN_ABI_VERSION);
    return 1;
  }
  if (!wrong_calls_are_refused()) return 1;

  const auto error = error_of(forward_params(nullptr, nullptr, nullptr, nullptr, nullptr, nullptr));
  if (error && error->status() == DMATTN_ERROR_NO_DEVICE) {
    std::printf("no GPU, no forward: %s\n", error->what());
    return 0;
  }
  if (error) throw *error;
  Gpu gpu;
  return forward_agrees_with_the_loop(gpu) ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
