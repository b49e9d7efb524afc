// Checks and times the variants of the Hopper forward kernel over lists: see build.sh.
//   bench [a variant's name or a part of it] [list|check|time|all]
#include <cutlass/numeric_types.h>

#include <cfloat>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "lists.h"
#include "reference.cuh"
#include "variants.h"

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
  explicit Buffer(const std::vector<X>& host) : Buffer(host.size()) {
    CHECK(cudaMemcpy(data, host.data(), size * sizeof(X), cudaMemcpyHostToDevice));
  }
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

enum class Bias { kFloat, kElement, kLowest };  // its type; kLowest: fp32, every number of the first head is -FLT_MAX

struct Shape {
  int batch, seqlen_q, seqlen_k, nheads, nheads_k, head_dim;
  Kind kind;
  int window;
  int list_batch, list_heads;
  bool is_causal;
  Bias bias;
  int bias_heads;
};

template <class Element>
class Case {
 public:
  Case(const Variant& variant, const Shape& s)
      : v_(variant),
        s_(s),
        random_(17),
        ends_(make_ends(s.kind, s.list_batch * s.list_heads, s.seqlen_k, s.window, random_)),
        lists_(make_lists(s.kind, ends_, s.list_batch * s.list_heads, s.seqlen_q, s.seqlen_k)),
        q_(size_t(s.batch) * s.seqlen_q * s.nheads * s.head_dim),
        k_(size_t(s.batch) * s.seqlen_k * s.nheads_k * s.head_dim),
        v_tensor_(k_.size),
        out_(q_.size),
        lse_(size_t(s.batch) * s.nheads * s.seqlen_q),
        rest_(lse_.size),
        bias_host_(make_bias()),
        bias_(bias_host_),
        bias_element_(std::vector<Element>(bias_host_.begin(), bias_host_.end())),
        end_(ends_),
        idx_(lists_.idx),
        count_(lists_.count),
        full_(lists_.full),
        counter_(1) {
    fill_normal<<<1024, 256>>>(q_.data, q_.size, 1u);
    fill_normal<<<1024, 256>>>(k_.data, k_.size, 77u);
    fill_normal<<<1024, 256>>>(v_tensor_.data, v_tensor_.size, 991u);
    CHECK(cudaDeviceSynchronize());
    set_params();
  }

  void run(int64_t section_bytes) {
    const int64_t items = int64_t((s_.seqlen_q + 127) / 128) * s_.nheads * s_.batch;
    params_.work_counter = items > sms_ ? counter_.data : nullptr;
    CHECK(v_.launch(std::min<int64_t>(items, sms_), params_, section_bytes, nullptr));
  }

  bool check(bool all) {
    const std::vector<int> rows = chosen(all);
    out_.poison(), lse_.poison(), rest_.poison();
    run(kSection);
    CHECK(cudaDeviceSynchronize());
    const auto out = out_.read();
    const auto lse = lse_.read(), rest = rest_.read();
    size_t moved = 0, nans = 0;
    for (int i = 0; i < 2; ++i) {
      out_.poison(), lse_.poison();
      run(kSection);
      CHECK(cudaDeviceSynchronize());
      const auto again = out_.read();
      moved += std::memcmp(out.data(), again.data(), out.size() * sizeof(Element)) != 0;
      moved += std::memcmp(lse.data(), lse_.read().data(), lse.size() * 4) != 0;
    }
    for (const Element e : out) nans += std::isnan(float(e));
    for (size_t i = 0; i < lse.size(); ++i) nans += std::isnan(lse[i]) || std::isnan(rest[i]);

    const Buffer<int> list(rows);
    const size_t n = rows.size() * s_.nheads * s_.batch;
    Buffer<float> wanted_out(n * s_.head_dim), wanted_lse(n);
    CHECK(cudaFuncSetAttribute(reference::forward<Element>, cudaFuncAttributeMaxDynamicSharedMemorySize, 200 << 10));
    reference::forward<Element><<<dim3(rows.size(), s_.nheads, s_.batch), reference::kThreads, s_.seqlen_k * 4>>>(
        problem(), list.data, wanted_out.data, wanted_lse.data);
    CHECK(cudaGetLastError());
    const auto expected = wanted_out.read(), expected_lse = wanted_lse.read();
    double difference = 0, norm = 0, worst_lse = 0;
    size_t empty = 0;
    for (size_t i = 0; i < rows.size(); ++i)
      for (int h = 0; h < s_.nheads; ++h)
        for (int b = 0; b < s_.batch; ++b) {
          const size_t from = (i * s_.nheads + h) * s_.batch + b;
          const float x = lse[(size_t(b) * s_.nheads + h) * s_.seqlen_q + rows[i]], y = expected_lse[from];
          empty += y == -INFINITY;
          if (x != y) worst_lse = std::max(worst_lse, std::fabs(double(x) - y) / std::max(1., std::fabs(double(y))));
          for (int d = 0; d < s_.head_dim; ++d) {
            const size_t at = ((size_t(b) * s_.seqlen_q + rows[i]) * s_.nheads + h) * s_.head_dim + d;
            const double e = expected[from * s_.head_dim + d];
            difference += (float(out[at]) - e) * (float(out[at]) - e), norm += e * e;
          }
        }
    const double error = norm == 0 ? std::sqrt(difference) : std::sqrt(difference / norm);
    const bool good = error < (v_.is_bf16 ? 6e-3 : 1e-3) && worst_lse < 1e-4 && nans == 0 && moved == 0;
    std::printf("%-26s %-52s out %.1e lse %.1e nan %zu moved %zu empty rows %zu %s\n", v_.name, text().c_str(), error,
                worst_lse, nans, moved, empty, good ? "ok" : "WRONG");
    std::fflush(stdout);
    return good;
  }

  void time(int64_t section_bytes) {
    Buffer<char> cold(size_t(256) << 20);
    cudaEvent_t begin, end;
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    std::vector<float> times;
    for (int i = 0; i < 17; ++i) {
      CHECK(cudaMemsetAsync(cold.data, i, cold.size));
      CHECK(cudaEventRecord(begin));
      run(section_bytes);
      CHECK(cudaEventRecord(end));
      CHECK(cudaEventSynchronize(end));
      float t;
      CHECK(cudaEventElapsedTime(&t, begin, end));
      if (i >= 2) times.push_back(t);
    }
    std::sort(times.begin(), times.end());
    const double t = times[times.size() / 2];
    const double pairs = count_pairs(ends_, s_.list_batch * s_.list_heads, s_.seqlen_q, s_.seqlen_k);
    const double work = 4. * s_.batch * s_.nheads * s_.head_dim * pairs;
    double listed = 0;
    for (const int n : lists_.count) listed += n;
    const double bytes = listed * s_.batch / s_.list_batch * s_.nheads / s_.list_heads * s_.head_dim * 4;
    std::printf("%-26s %-52s section %3ld MB  %7.4f ms (%.4f to %.4f) %4.0f TF, gathered %.2f TB/s\n", v_.name,
                text().c_str(), long(section_bytes >> 20), t, times.front(), times.back(), work / t / 1e9,
                bytes / t / 1e9);
    std::fflush(stdout);
  }

 private:
  static constexpr int64_t kSection = 40 << 20;

  void set_params() {
    int device = 0;
    CHECK(cudaGetDevice(&device));
    CHECK(cudaDeviceGetAttribute(&sms_, cudaDevAttrMultiProcessorCount, device));
    const int64_t d = s_.head_dim;
    FwdParams& p = params_;
    p.q = q_.data, p.k = k_.data, p.v = v_tensor_.data, p.out = out_.data, p.lse = lse_.data, p.lse_rest = rest_.data;
    p.q_stride = p.out_stride = {int64_t(s_.seqlen_q) * s_.nheads * d, d, s_.nheads * d};
    p.k_stride = p.v_stride = {int64_t(s_.seqlen_k) * s_.nheads_k * d, d, s_.nheads_k * d};
    p.lse_stride = {int64_t(s_.nheads) * s_.seqlen_q, s_.seqlen_q, 1};
    p.batch = s_.batch, p.seqlen_q = s_.seqlen_q, p.seqlen_k = s_.seqlen_k;
    p.nheads = s_.nheads, p.nheads_k = s_.nheads_k, p.head_ratio = s_.nheads / s_.nheads_k, p.head_dim = s_.head_dim;
    p.softmax_scale = scale(), p.is_causal = s_.is_causal;
    p.keys.idx = idx_.data, p.keys.count = count_.data, p.keys.capacity = lists_.capacity;
    p.keys.batch = s_.list_batch, p.keys.heads = s_.list_heads, p.keys.head_ratio = s_.nheads / s_.list_heads;
    if (s_.kind != Kind::kMask) {
      p.keys.block_rows = kRowsOfList, p.keys.blocks = lists_.blocks, p.keys.full = full_.data, p.keys.end = end_.data;
    }
    if (!v_.has_bias) return;
    const bool is_float = s_.bias != Bias::kElement;
    p.bias.ptr = is_float ? static_cast<void*>(bias_.data) : static_cast<void*>(bias_element_.data);
    p.bias.dtype = is_float ? Dtype::kFloat32 : v_.is_bf16 ? Dtype::kBFloat16 : Dtype::kFloat16;
    p.bias.kind = BiasKind::kKey;
    p.bias.batch_stride = int64_t(s_.bias_heads) * s_.seqlen_k;
    p.bias.head_stride = s_.bias_heads > 1 ? s_.seqlen_k : 0;
    p.bias.col_stride = 1;
    p.bias.head_ratio = s_.nheads / s_.bias_heads;
  }
  // As the kernel will read it.
  std::vector<float> make_bias() {
    std::vector<float> bias(size_t(s_.batch) * s_.bias_heads * s_.seqlen_k);
    std::normal_distribution<float> normal;
    for (float& x : bias) x = s_.bias == Bias::kElement ? float(Element(normal(random_))) : normal(random_);
    if (s_.bias == Bias::kLowest) std::fill(bias.begin(), bias.begin() + s_.seqlen_k, -FLT_MAX);
    return bias;
  }
  float scale() const { return 1.f / std::sqrt(float(s_.head_dim)); }
  reference::Problem<Element> problem() const {
    return {q_.data,       k_.data,     v_tensor_.data, v_.has_bias ? bias_.data : nullptr,
            end_.data,     s_.seqlen_q, s_.seqlen_k,    s_.nheads,
            s_.nheads_k,   s_.head_dim, s_.list_batch,  s_.list_heads,
            s_.bias_heads, scale(),     s_.is_causal};
  }
  std::string text() const {
    static const char* const kinds[] = {"running", "ties", "intervals", "mask"};
    char line[96];
    std::snprintf(line, sizeof(line), "B%d %dx%d H%d/%d D%d %s w%d lists %dx%d%s", s_.batch, s_.seqlen_q, s_.seqlen_k,
                  s_.nheads, s_.nheads_k, s_.head_dim, kinds[int(s_.kind)], s_.window, s_.list_batch, s_.list_heads,
                  s_.is_causal ? "" : " full");
    return line;
  }
  std::vector<int> chosen(bool all) const {
    const int n = s_.seqlen_q;
    std::vector<int> found;
    if (all) {
      for (int i = 0; i < n; ++i) found.push_back(i);
    } else {
      for (int i : {0, 1, 63, 64, 65, 127, 128, 129, 1023, 1024, 1025, n / 3, n / 2, n - 129, n - 128, n - 2, n - 1}) {
        if (i >= 0 && i < n) found.push_back(i);
      }
    }
    return found;
  }

  const Variant& v_;
  const Shape s_;
  std::mt19937 random_;
  const std::vector<int32_t> ends_;
  const Lists lists_;
  Buffer<Element> q_, k_, v_tensor_, out_;
  Buffer<float> lse_, rest_;
  const std::vector<float> bias_host_;
  const Buffer<float> bias_;
  const Buffer<Element> bias_element_;
  const Buffer<int32_t> end_, idx_, count_, full_;
  Buffer<int32_t> counter_;
  int sms_ = 132;
  FwdParams params_;
};

template <class Element>
bool check_all(const Variant& v) {
  const int d = v.head_dim, odd = d - 8;  // fewer columns than the tile has
  const Shape shapes[] = {                // batch, rows, keys, heads, kv heads, head_dim, kind, w, lists, causal, bias
                          {1, 128, 128, 1, 1, d, Kind::kRunning, 128, 1, 1, true, Bias::kFloat, 1},
                          {1, 1, 1, 1, 1, d, Kind::kRunning, 1, 1, 1, true, Bias::kFloat, 1},
                          {1, 256, 256, 2, 1, d, Kind::kRunning, 160, 1, 1, true, Bias::kFloat, 1},
                          {2, 300, 300, 4, 2, d, Kind::kTies, 40, 1, 2, true, Bias::kElement, 4},
                          {2, 257, 400, 4, 1, d, Kind::kRunning, 100, 2, 1, true, Bias::kElement, 1},
                          {1, 1000, 1000, 4, 2, d, Kind::kIntervals, 150, 1, 4, true, Bias::kLowest, 2},
                          {2, 1000, 1100, 6, 2, odd, Kind::kIntervals, 60, 2, 2, true, Bias::kFloat, 6},
                          {1, 700, 700, 8, 8, d, Kind::kTies, 333, 1, 1, true, Bias::kElement, 8},
                          {1, 500, 500, 4, 4, d, Kind::kMask, 200, 1, 4, true, Bias::kElement, 4},
                          {2, 300, 700, 4, 2, odd, Kind::kMask, 300, 2, 1, false, Bias::kFloat, 1},
                          {3, 2000, 2000, 16, 4, d, Kind::kRunning, 500, 3, 4, true, Bias::kElement, 4},
                          {1, 4095, 5000, 8, 2, d, Kind::kRunning, 1024, 1, 2, true, Bias::kElement, 2}};
  bool good = true;
  for (const Shape& s : shapes) good &= Case<Element>(v, s).check(s.seqlen_q <= 1100);
  return good;
}

template <class Element>
void time_all(const Variant& v) {
  const int d = v.head_dim;
  std::vector<Shape> shapes = {{1, 16384, 16384, 16, 4, d, Kind::kRunning, 1024, 1, 4, true, Bias::kElement, 4},
                               {1, 32768, 32768, 2, 1, d, Kind::kRunning, 1024, 1, 1, true, Bias::kElement, 1},
                               {1, 16384, 16384, 16, 4, d, Kind::kRunning, 4096, 1, 4, true, Bias::kElement, 4}};
  for (const Shape& s : shapes) {
    Case<Element> c(v, s);
    c.check(false);
    c.time(40 << 20);
    if (&s == shapes.data()) c.time(10 << 20);
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
