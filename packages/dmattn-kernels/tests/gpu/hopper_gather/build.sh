#!/bin/bash
# Builds the driver of the Hopper forward kernel over lists for sm_90a alone, on any machine with nvcc 12.8 or later.
#   build.sh OUT CUTLASS_INCLUDE [JOBS]
# OUT: where objects and `bench` go. Then, on a Hopper GPU: run.sh OUT.
set -e
here=$(cd "$(dirname "$0")" && pwd)
src=$(cd "$here/../../../src" && pwd)
out=$1 cutlass=$2 jobs=${3:-1}
mkdir -p "$out"
common="-std=c++17 -O3 --expt-relaxed-constexpr -Xptxas=-v -diag-suppress=177 -gencode=arch=compute_90a,code=sm_90a"
common="$common -I$cutlass -I$src -I$here"
export out common here
compile() {  # name element head_dim bias keys stages fence tail registers
  if [ ! -f "$out/$1.o" ] || [ -n "$(find "$here" "$here/../../../src/kernels" -newer "$out/$1.o" -name '*.cuh')" ]; then
    nice -n 10 nvcc $common -DVARIANT_NAME="\"$1\"" -DVARIANT_ELEMENT=$2 -DVARIANT_HEAD_DIM=$3 -DVARIANT_BIAS=$4 \
      -DVARIANT_BLOCK_N=$5 -DVARIANT_STAGES=$6 -DVARIANT_FENCE=$7 -DVARIANT_TAIL=$8 -DVARIANT_PRODUCER=$9 \
      -c "$here/variant.cu" -o "$out/$1.o" > "$out/$1.log" 2>&1 || { echo "$1 does not compile"; rm -f "$out/$1.o"; }
  fi
  if grep -q "C75[0-9][0-9]" "$out/$1.log"; then echo "$1: products are serialized"; rm -f "$out/$1.o"; fi
}
export -f compile
grep -v '^#' "$here/variants.txt" | xargs -P "$jobs" -L 1 bash -c 'compile "$@"' _
nice -n 10 nvcc $common -c "$here/bench.cu" -o "$out/bench_part.o" > "$out/bench.log" 2>&1
objects=$(grep -v '^#' "$here/variants.txt" | awk -v o="$out" '{print o "/" $1 ".o"}' | xargs ls 2>/dev/null)
nvcc -cudart static -o "$out/bench" $objects "$out/bench_part.o"
ls -l "$out/bench"
