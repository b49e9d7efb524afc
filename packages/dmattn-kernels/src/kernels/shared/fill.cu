// Zeros in a strided tensor or a range of memory.
#include "fill.h"
#include "row_chunks.cuh"

namespace dmattn {
namespace {

using namespace prep;

__global__ void __launch_bounds__(kRowChunkThreads)
    fill_zero_kernel(uint16_t* dst, Strides3 stride, bool vec, int seqlen, int nheads, int head_dim) {
  follow_previous_kernel();
  for_each_chunk(blockIdx.x, nheads, seqlen, head_dim, [&](int b, int h, int row, int col) {
    uint16_t* chunk = dst + row_offset(stride, b, h, row) + col;
    if (head_dim - col >= 8) {
      store_chunk(chunk, make_uint4(0, 0, 0, 0), vec);
    } else {
      for (int i = 0; i < head_dim - col; ++i) chunk[i] = 0;
    }
  });
}

constexpr int kClearThreads = 512, kClearEach = 4;

__global__ void __launch_bounds__(kClearThreads) clear_bytes_kernel(uint4* to, int64_t quads) {
  follow_previous_kernel();
  const int64_t first = int64_t{blockIdx.x} * (kClearThreads * kClearEach) + threadIdx.x;
#pragma unroll
  for (int i = 0; i < kClearEach; ++i) {
    if (first + i * kClearThreads < quads) to[first + i * kClearThreads] = make_uint4(0, 0, 0, 0);
  }
}

// Whether the rows fill one range of memory without a gap; strides of extents of 1 do not matter.
bool is_contiguous(const Strides3& s, int64_t batch, int64_t seqlen, int64_t nheads, int64_t head_dim) {
  return (nheads == 1 || s.head == head_dim) && (seqlen == 1 || s.row == nheads * head_dim) &&
         (batch == 1 || s.batch == seqlen * nheads * head_dim);
}
bool rows_start_on_16_bytes(const void* ptr, const Strides3& s) {
  return reinterpret_cast<uintptr_t>(ptr) % 16 == 0 && s.batch % 8 == 0 && s.head % 8 == 0 && s.row % 8 == 0;
}

}  // namespace

cudaError_t clear_bytes(void* ptr, size_t bytes, cudaStream_t stream) {
  if (bytes % 16 != 0 || reinterpret_cast<uintptr_t>(ptr) % 16 != 0) return cudaMemsetAsync(ptr, 0, bytes, stream);
  const int64_t quads = static_cast<int64_t>(bytes / 16);
  return launch(clear_bytes_kernel, ceil_div<int64_t>(quads, kClearThreads * kClearEach), kClearThreads, 0, stream,
                static_cast<uint4*>(ptr), quads);
}

cudaError_t fill_zero(void* ptr, Strides3 stride, int batch, int seqlen, int nheads, int head_dim,
                      cudaStream_t stream) {
  const int64_t elements = static_cast<int64_t>(batch) * seqlen * nheads * head_dim;
  if (elements == 0) return cudaSuccess;
  if (is_contiguous(stride, batch, seqlen, nheads, head_dim)) {
    return cudaMemsetAsync(ptr, 0, static_cast<size_t>(elements) * sizeof(uint16_t), stream);
  }
  return launch(fill_zero_kernel, row_tiles(batch, nheads, seqlen), kRowChunkThreads, 0, stream,
                static_cast<uint16_t*>(ptr), stride, rows_start_on_16_bytes(ptr, stride), seqlen, nheads, head_dim);
}

}  // namespace dmattn
