// Checks and times the variants of the Hopper backward kernel: see build.sh.
//   bench [a variant's name or a part of it] [list|check|time|all]
#include <cutlass/numeric_types.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "kernels/backward/backward.h"
#include "kernels/tiles.h"
#include "reference.cuh"
#include "variants.h"

namespace dmattn {
#define FORWARD(name) cudaError_t name(const KernelChoice&, const FwdParams&, cudaStream_t);
FORWARD(fwd_sm90_bf16_d64_tiled)
FORWARD(fwd_sm90_bf16_d128_tiled)
FORWARD(fwd_sm90_f16_d64_tiled)
FORWARD(fwd_sm90_f16_d128_tiled)
}  // namespace dmattn

namespace {

using namespace dmattn;

#define CHECK(x)                                                                                  \
  do {                                                                                            \
    const cudaError_t status_ = (x);                                                              \
    if (status_ != cudaSuccess) {                                                                 \
      std::printf("%s: %s (line %d)\n", #x, cudaGetErrorString(status_), __LINE__), std::exit(1); \
    }                                                                                             \
  } while (0)

template <class X>
struct Buffer {
  X* data = nullptr;
  size_t size = 0;
  explicit Buffer(size_t n) : size(n) { CHECK(cudaMalloc(&data, std::max<size_t>(n, 1) * sizeof(X))); }
  Buffer(const Buffer&) = delete;
  ~Buffer() { cudaFree(data); }
  // NaN in every format.
  void poison() { CHECK(cudaMemset(data, 0xff, size * sizeof(X))); }
  std::vector<X> read() const {
    std::vector<X> host(size);
    CHECK(cudaMemcpy(host.data(), data, size * sizeof(X), cudaMemcpyDeviceToHost));
    return host;
  }
};

template <class X>
__global__ void fill_normal(X* p, size_t n, uint32_t seed) {
  for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < n;
       i += static_cast<size_t>(gridDim.x) * blockDim.x) {
    uint32_t x = static_cast<uint32_t>(i) * 2654435761u + seed;
    x ^= x >> 16, x *= 0x85ebca6bu, x ^= x >> 13, x *= 0xc2b2ae35u, x ^= x >> 16;
    uint32_t y = x * 1664525u + 1013904223u;
    y ^= y >> 15, y *= 0x2c1b3c6du, y ^= y >> 12;
    const float u = (x + 1.f) / 4294967808.f, w = y / 4294967296.f;
    p[i] = X(sqrtf(-2.f * logf(u)) * cospif(2.f * w));
  }
}

struct Shape {
  int batch, seqlen_q, seqlen_k, nheads, nheads_k, head_dim;
  bool is_causal, has_dlse;
  int splits;
};

int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Relative error in the 2-norm; NaN stays NaN.
struct Error {
  double difference = 0, norm = 0;
  void add(double x, double expected) {
    difference += (x - expected) * (x - expected);
    norm += expected * expected;
  }
  double value() const { return norm == 0 ? std::sqrt(difference) : std::sqrt(difference / norm); }
};

template <class Element>
class Case {
 public:
  Case(const Variant& variant, const Shape& s)
      : v_(variant),
        s_(s),
        rows_(size_t(s.batch) * s.seqlen_q * s.nheads),
        keys_(size_t(s.batch) * s.seqlen_k * s.nheads_k),
        q(rows_ * s.head_dim),
        dout(rows_ * s.head_dim),
        out(rows_ * s.head_dim),
        dq(rows_ * s.head_dim),
        k(keys_ * s.head_dim),
        v(keys_ * s.head_dim),
        dk(keys_ * s.head_dim),
        dv(keys_ * s.head_dim),
        lse(rows_),
        dlse(s.has_dlse ? rows_ : 0),
        m_blocks_(ceil_div(s.seqlen_q, v_.block_m)),
        n_blocks_(ceil_div(s.seqlen_k, v_.block_n)),
        rounded_(m_blocks_ * v_.block_m),
        lse_rounded(size_t(s.batch) * s.nheads * rounded_),
        delta(size_t(s.batch) * s.nheads * rounded_),
        dq_accum(size_t(s.batch) * s.nheads * rounded_ * v_.head_dim),
        semaphore(size_t(s.batch) * s.nheads * m_blocks_ * v_.consumers),
        slots(s.splits > 1 ? size_t(2) * s.batch * s.nheads_k * n_blocks_ * s.splits * v_.block_n * v_.head_dim : 0),
        counter(1) {
    fill_normal<<<1024, 256>>>(q.data, q.size, 1u);
    fill_normal<<<1024, 256>>>(k.data, k.size, 77u);
    fill_normal<<<1024, 256>>>(v.data, v.size, 991u);
    fill_normal<<<1024, 256>>>(dout.data, dout.size, 4711u);
    if (s.has_dlse) fill_normal<<<1024, 256>>>(dlse.data, dlse.size, 31337u);
    CHECK(cudaDeviceSynchronize());
    set_params();
  }

  // By the slow reference, or (for many rows) by the forward kernel, which has been tested by itself.
  void forward(bool slowly) {
    out.poison();
    lse.poison();
    if (slowly) {
      reference::forward<Element><<<dim3(s_.seqlen_q, s_.nheads, s_.batch), reference::kThreads, s_.seqlen_k * 4>>>(
          problem(), out.data, lse.data);
    } else {
      FwdParams f;
      f.q = q.data, f.k = k.data, f.v = v.data, f.out = out.data, f.lse = lse.data;
      f.q_stride = f.out_stride = row_stride_, f.k_stride = f.v_stride = key_stride_;
      f.lse_stride = {int64_t(s_.nheads) * s_.seqlen_q, s_.seqlen_q, 1};
      f.batch = s_.batch, f.seqlen_q = s_.seqlen_q, f.seqlen_k = s_.seqlen_k;
      f.nheads = s_.nheads, f.nheads_k = s_.nheads_k, f.head_ratio = s_.nheads / s_.nheads_k, f.head_dim = s_.head_dim;
      f.softmax_scale = scale(), f.is_causal = s_.is_causal;
      const auto tile = sm90_fwd_tile(sm90_fwd_head_dim(s_.head_dim), sm90_fwd_is_short(s_.seqlen_q));
      const int items = ceil_div(s_.seqlen_q, tile.block_m()) * s_.nheads * s_.batch;
      KernelChoice choice;
      choice.blocks = std::min(132, items);
      if (items > 132) f.work_counter = counter.data;
      constexpr bool kIsBf16 = std::is_same_v<Element, cutlass::bfloat16_t>;
      const auto launch = s_.head_dim <= 64 ? (kIsBf16 ? fwd_sm90_bf16_d64_tiled : fwd_sm90_f16_d64_tiled)
                                            : (kIsBf16 ? fwd_sm90_bf16_d128_tiled : fwd_sm90_f16_d128_tiled);
      CHECK(launch(choice, f, nullptr));
    }
    CHECK(cudaGetLastError());
    CHECK(cudaDeviceSynchronize());
  }

  void before() {
    BwdPreprocessParams pre;
    pre.out = out.data, pre.dout = dout.data;
    pre.out_stride = pre.dout_stride = row_stride_;
    pre.lse = lse.data;
    pre.lse_stride = pre.dlse_stride = {int64_t(s_.nheads) * s_.seqlen_q, s_.seqlen_q, 1};
    pre.dlse = s_.has_dlse ? dlse.data : nullptr;
    pre.lse_scale = 1.4426950408889634f;
    pre.lse_rounded = lse_rounded.data, pre.delta = delta.data;
    pre.batch = s_.batch, pre.seqlen_q = s_.seqlen_q, pre.seqlen_q_rounded = rounded_, pre.nheads = s_.nheads;
    pre.head_dim = s_.head_dim;
    CHECK(bwd_preprocess(pre, dtype(), nullptr));
    CHECK(cudaMemsetAsync(dq_accum.data, 0, dq_accum.size * 4));
    if (v_.deterministic) CHECK(cudaMemsetAsync(semaphore.data, 0, semaphore.size * 4));
  }
  void kernel(int64_t section_bytes) {
    const int items = n_blocks_ * s_.batch * s_.nheads_k * s_.splits;
    params_.work_counter = items > 132 ? counter.data : nullptr;
    CHECK(v_.launch(std::min(items, 132), params_, section_bytes, nullptr));
  }
  void after() {
    CHECK(v_.convert(params_, dq.data, row_stride_, nullptr));
    if (s_.splits > 1) CHECK(reduce_dkv(params_, dtype(), v_.block_n, v_.head_dim, nullptr));
  }
  void run(int64_t section_bytes) {
    before();
    kernel(section_bytes);
    after();
  }

  // Errors of dq, dk, dv, on all rows and keys or some of them, and whether repetitions give the same bits.
  bool check(bool all) {
    std::vector<int> rows = chosen(s_.seqlen_q, all), keys = chosen(s_.seqlen_k, all);
    dq.poison(), dk.poison(), dv.poison(), slots.poison(), dq_accum.poison();
    run(kSection);
    CHECK(cudaDeviceSynchronize());
    const auto got_q = dq.read(), got_k = dk.read(), got_v = dv.read();
    const double error_q = compare_rows(got_q, rows);
    double error_k, error_v;
    compare_keys(got_k, got_v, keys, error_k, error_v);
    size_t moved = 0, moved_q = 0, nans = 0;
    for (int i = 0; i < 2; ++i) {
      dq.poison(), dk.poison(), dv.poison();
      run(kSection);
      CHECK(cudaDeviceSynchronize());
      moved += different(got_k, dk.read()) + different(got_v, dv.read());
      moved_q += different(got_q, dq.read());
    }
    for (const auto* x : {&got_q, &got_k, &got_v}) {
      for (const Element e : *x) nans += std::isnan(float(e));
    }
    const double limit = std::is_same_v<Element, cutlass::bfloat16_t> ? 1e-2 : 2e-3;
    const bool good = error_q < limit && error_k < limit && error_v < limit && nans == 0 && moved == 0 &&
                      (!v_.deterministic || moved_q == 0);
    std::printf("%-26s %-38s dq %.1e dk %.1e dv %.1e nan %zu moved %zu dq %zu %s\n", v_.name, text().c_str(), error_q,
                error_k, error_v, nans, moved, moved_q, good ? "ok" : "WRONG");
    std::fflush(stdout);
    return good;
  }

  void time(int64_t section_bytes) {
    Buffer<char> cold(size_t(256) << 20);
    cudaEvent_t begin, mid, end, stop;
    for (auto* e : {&begin, &mid, &end, &stop}) CHECK(cudaEventCreate(e));
    std::vector<float> alone, total;
    for (int i = 0; i < 17; ++i) {
      CHECK(cudaMemsetAsync(cold.data, i, cold.size));
      CHECK(cudaEventRecord(begin));
      before();
      CHECK(cudaEventRecord(mid));
      kernel(section_bytes);
      CHECK(cudaEventRecord(end));
      after();
      CHECK(cudaEventRecord(stop));
      CHECK(cudaEventSynchronize(stop));
      float a, t;
      CHECK(cudaEventElapsedTime(&a, mid, end));
      CHECK(cudaEventElapsedTime(&t, begin, stop));
      if (i >= 2) alone.push_back(a), total.push_back(t);
    }
    std::sort(alone.begin(), alone.end());
    std::sort(total.begin(), total.end());
    const double a = alone[alone.size() / 2], t = total[total.size() / 2];
    const double pairs = s_.is_causal ? s_.seqlen_q * (s_.seqlen_q + 1.0) / 2 : double(s_.seqlen_q) * s_.seqlen_k;
    const double work = 10.0 * s_.batch * s_.nheads * s_.head_dim * pairs;
    std::printf("%-26s %-38s section %3ld MB  kernel %7.3f ms %4.0f TF  all %7.3f ms %4.0f TF\n", v_.name,
                text().c_str(), long(section_bytes >> 20), a, work / a / 1e9, t, work / t / 1e9);
    std::fflush(stdout);
  }

 private:
  static constexpr int64_t kSection = 40 << 20;
  static constexpr Dtype dtype() {
    return std::is_same_v<Element, cutlass::bfloat16_t> ? Dtype::kBFloat16 : Dtype::kFloat16;
  }
  float scale() const { return 1.f / std::sqrt(float(s_.head_dim)); }
  float softcap() const { return v_.softcap ? 2.f : 0.f; }

  void set_params() {
    const int64_t d = s_.head_dim;
    row_stride_ = {int64_t(s_.seqlen_q) * s_.nheads * d, d, s_.nheads * d};
    key_stride_ = {int64_t(s_.seqlen_k) * s_.nheads_k * d, d, s_.nheads_k * d};
    BwdParams& p = params_;
    p.q = q.data, p.k = k.data, p.v = v.data, p.dout = dout.data, p.dk = dk.data, p.dv = dv.data;
    p.q_stride = p.dout_stride = row_stride_, p.k_stride = p.v_stride = p.dk_stride = p.dv_stride = key_stride_;
    p.lse = lse_rounded.data, p.delta = delta.data, p.dq_accum = dq_accum.data, p.dq_semaphore = semaphore.data;
    p.dk_slots = slots.data, p.dv_slots = slots.data + slots.size / 2;
    p.batch = s_.batch, p.seqlen_q = s_.seqlen_q, p.seqlen_k = s_.seqlen_k, p.seqlen_q_rounded = rounded_;
    p.nheads = s_.nheads, p.nheads_k = s_.nheads_k, p.head_dim = s_.head_dim, p.head_ratio = s_.nheads / s_.nheads_k;
    p.group_end = p.head_ratio, p.num_splits = s_.splits, p.softmax_scale = scale(), p.softcap = softcap();
    p.is_causal = s_.is_causal, p.deterministic = true;  // a slot for each split
  }
  reference::Problem<Element> problem() const {
    return {q.data,      k.data,      v.data,    dout.data,   out.data,    lse.data, s_.has_dlse ? dlse.data : nullptr,
            s_.seqlen_q, s_.seqlen_k, s_.nheads, s_.nheads_k, s_.head_dim, scale(),  softcap(),
            s_.is_causal};
  }
  std::string text() const {
    char line[96];
    std::snprintf(line, sizeof(line), "B%d %dx%d H%d/%d D%d%s%s%s", s_.batch, s_.seqlen_q, s_.seqlen_k, s_.nheads,
                  s_.nheads_k, s_.head_dim, s_.is_causal ? " causal" : "", s_.has_dlse ? " dlse" : "",
                  s_.splits > 1 ? " split" : "");
    return line;
  }
  static std::vector<int> chosen(int n, bool all) {
    std::vector<int> found;
    if (all) {
      for (int i = 0; i < n; ++i) found.push_back(i);
    } else {
      for (int i : {0, 1, 63, 64, 65, 79, 80, 127, 128, 129, n / 3, n / 2, n - 129, n - 128, n - 65, n - 2, n - 1}) {
        if (i >= 0 && i < n) found.push_back(i);
      }
    }
    return found;
  }
  static size_t different(const std::vector<Element>& x, const std::vector<Element>& y) {
    size_t n = 0;
    for (size_t i = 0; i < x.size(); ++i) n += std::memcmp(&x[i], &y[i], sizeof(Element)) != 0;
    return n;
  }
  double compare_rows(const std::vector<Element>& got, const std::vector<int>& rows) {
    Buffer<int> list(rows.size());
    CHECK(cudaMemcpy(list.data, rows.data(), rows.size() * 4, cudaMemcpyHostToDevice));
    Buffer<float> result(rows.size() * s_.nheads * s_.batch * s_.head_dim);
    CHECK(cudaFuncSetAttribute(reference::dq<Element>, cudaFuncAttributeMaxDynamicSharedMemorySize, 160 << 10));
    reference::dq<Element><<<dim3(rows.size(), s_.nheads, s_.batch), reference::kThreads, s_.seqlen_k * 4>>>(
        problem(), list.data, result.data);
    CHECK(cudaGetLastError());
    const auto expected = result.read();
    return error(got, expected, rows, s_.seqlen_q, s_.nheads);
  }
  void compare_keys(const std::vector<Element>& got_k, const std::vector<Element>& got_v, const std::vector<int>& keys,
                    double& error_k, double& error_v) {
    Buffer<int> list(keys.size());
    CHECK(cudaMemcpy(list.data, keys.data(), keys.size() * 4, cudaMemcpyHostToDevice));
    const size_t n = keys.size() * s_.nheads_k * s_.batch * s_.head_dim;
    Buffer<float> result_k(n), result_v(n);
    reference::dkv<Element><<<dim3(keys.size(), s_.nheads_k, s_.batch), reference::kThreads>>>(
        problem(), list.data, result_k.data, result_v.data);
    CHECK(cudaGetLastError());
    error_k = error(got_k, result_k.read(), keys, s_.seqlen_k, s_.nheads_k);
    error_v = error(got_v, result_v.read(), keys, s_.seqlen_k, s_.nheads_k);
  }
  double error(const std::vector<Element>& got, const std::vector<float>& expected, const std::vector<int>& list,
               int seqlen, int heads) const {
    Error e;
    for (size_t i = 0; i < list.size(); ++i)
      for (int h = 0; h < heads; ++h)
        for (int b = 0; b < s_.batch; ++b)
          for (int d = 0; d < s_.head_dim; ++d) {
            const size_t at = ((size_t(b) * seqlen + list[i]) * heads + h) * s_.head_dim + d;
            e.add(float(got[at]), expected[((i * heads + h) * s_.batch + b) * s_.head_dim + d]);
          }
    return e.value();
  }

  const Variant& v_;
  const Shape s_;
  const size_t rows_, keys_;

 public:
  Buffer<Element> q, dout, out, dq, k, v, dk, dv;
  Buffer<float> lse, dlse;

 private:
  const int m_blocks_, n_blocks_, rounded_;
  Buffer<float> lse_rounded, delta, dq_accum;
  Buffer<int32_t> semaphore;
  Buffer<float> slots;
  Buffer<int32_t> counter;
  Strides3 row_stride_, key_stride_;
  BwdParams params_;
};

template <class Element>
bool check_all(const Variant& v) {
  const int d = v.head_dim, odd = d - 8;  // fewer columns than the tile has
  const Shape shapes[] = {{1, 128, 128, 1, 1, d, false, false, 1},    {1, 1, 1, 1, 1, d, false, false, 1},
                          {1, 1, 300, 2, 2, d, true, false, 1},       {2, 127, 127, 2, 2, d, true, false, 1},
                          {1, 129, 129, 3, 3, d, true, true, 1},      {2, 257, 300, 4, 2, d, true, false, 1},
                          {2, 300, 257, 4, 2, d, true, true, 1},      {2, 300, 257, 4, 1, d, false, true, 1},
                          {1, 1000, 1000, 8, 2, d, true, false, 2},   {3, 333, 129, 6, 1, odd, true, false, 3},
                          {2, 1024, 1024, 40, 8, d, true, false, 1},  {1, 4095, 4095, 4, 4, d, true, false, 1},
                          {1, 4095, 1000, 4, 2, odd, false, false, 1}};
  bool good = true;
  for (const Shape& s : shapes) {
    Case<Element> c(v, s);
    c.forward(true);
    good &= c.check(s.seqlen_q <= 1100);
  }
  return good;
}

template <class Element>
void time_all(const Variant& v) {
  const int d = v.head_dim;
  const Shape shapes[] = {{1, 16384, 16384, 2048 / d, 2048 / d, d, true, false, 1},
                          {1, 16384, 16384, 16, 4, d, true, false, 1},
                          {4, 4096, 4096, 16, 16, d, true, false, 1},
                          {1, 8192, 8192, 16, 16, d, false, false, 1}};
  for (const Shape& s : shapes) {
    if (v.softcap) return;  // the forward kernel has none
    Case<Element> c(v, s);
    c.forward(false);
    c.check(false);
    const bool is_first = &s == shapes;
    for (const int64_t megabytes : {20, 40, 80, 400}) {
      if (is_first || megabytes == 40) c.time(megabytes << 20);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string filter = argc > 1 ? argv[1] : "";
  const std::string what = argc > 2 ? argv[2] : "all";
  bool good = true, is_name = false;
  for (const auto describe : variants()) is_name |= filter == describe().name;
  for (const auto describe : variants()) {
    const Variant v = describe();
    if (is_name ? filter != v.name : std::strstr(v.name, filter.c_str()) == nullptr) continue;
    std::printf("%s: %d registers at entry, %d bytes local, %d bytes shared\n", v.name, v.registers, v.local_bytes,
                v.smem_bytes);
    if (what == "list") continue;
    if (what != "time") good &= v.is_bf16 ? check_all<cutlass::bfloat16_t>(v) : check_all<cutlass::half_t>(v);
    if (what != "check") v.is_bf16 ? time_all<cutlass::bfloat16_t>(v) : time_all<cutlass::half_t>(v);
  }
  std::printf("%s\n", good ? "all checks passed" : "SOMETHING IS WRONG");
  return good ? 0 : 1;
}
