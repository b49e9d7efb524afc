// Faults that compute-sanitizer must find, one per tool, and one run without any: proof that the tools bite.
//   planted_faults none | memcheck | racecheck | initcheck | synccheck
#include <cuda_runtime.h>

#include <cstdio>
#include <cstring>

__global__ void copy(const int* in, int* out, int n) {
  if (threadIdx.x < n) out[threadIdx.x] = in[threadIdx.x] + 1;
}

// Every thread reads its neighbour's word with no barrier after the write.
__global__ void race(int* out) {
  __shared__ volatile int shared[128];
  shared[threadIdx.x] = static_cast<int>(threadIdx.x);
  out[threadIdx.x] = shared[(threadIdx.x + 32) % 128];
}

// Half of a warp names only the other half in its barrier.
__global__ void wrong_mask(int* out) {
  __syncwarp(0x0000ffffu);
  out[threadIdx.x] = 1;
}

int main(int argc, char** argv) {
  const char* fault = argc > 1 ? argv[1] : "none";
  constexpr int kCount = 128;
  int host[kCount] = {};
  int *in = nullptr, *out = nullptr;
  cudaMalloc(&in, sizeof(host));
  cudaMalloc(&out, sizeof(host));
  if (std::strcmp(fault, "initcheck") != 0) cudaMemcpy(in, host, sizeof(host), cudaMemcpyHostToDevice);
  if (std::strcmp(fault, "racecheck") == 0) {
    race<<<1, kCount>>>(out);
  } else if (std::strcmp(fault, "synccheck") == 0) {
    wrong_mask<<<1, 32>>>(out);
  } else {
    const bool beyond = std::strcmp(fault, "memcheck") == 0;
    copy<<<1, beyond ? 2 * kCount : kCount>>>(in, out, beyond ? 2 * kCount : kCount);
  }
  const cudaError_t status = cudaDeviceSynchronize();
  std::printf("%s: %s\n", fault, cudaGetErrorString(status));
  cudaFree(in);
  cudaFree(out);
  return 0;
}
