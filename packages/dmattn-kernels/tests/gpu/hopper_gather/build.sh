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
compile() {  # number of a part
  nice -n 10 nvcc $common -DPART=$1 -c "$here/variants.cu" -o "$out/part$1.o" > "$out/part$1.log" 2>&1
  # Products that the compiler serializes would be slow; it says so by numbers such as C7510.
  if grep "C75[0-9][0-9]" "$out/part$1.log"; then exit 255; fi
}
export -f compile
nice -n 10 nvcc $common -c "$here/bench.cu" -o "$out/bench.o" > "$out/bench.log" 2>&1
seq 0 4 | xargs -P "$jobs" -L 1 bash -c 'compile "$@"' _
nvcc -cudart static -o "$out/bench" "$out"/part[0-9].o "$out/bench.o"
ls -l "$out/bench"
