#!/bin/bash
# Builds the driver of the Hopper backward kernel for sm_90a alone, on any machine with nvcc 12.8 or later.
#   build.sh OUT CUTLASS_INCLUDE FORWARD_OBJECTS [JOBS]
# OUT: where objects and `bench` go. FORWARD_OBJECTS: a folder with the fwd_sm90_{bf16,f16}_d{64,128}_tiled.cu.o of a
# build of the package, which the driver takes lse from where the slow reference would take too long.
# Then, on a Hopper GPU: run.sh OUT.
set -e
here=$(cd "$(dirname "$0")" && pwd)
src=$(cd "$here/../../../src" && pwd)
out=$1 cutlass=$2 forward=$3 jobs=${4:-1}
mkdir -p "$out"
common="-std=c++17 -O3 --expt-relaxed-constexpr -Xptxas=-v -diag-suppress=177 -gencode=arch=compute_90a,code=sm_90a"
common="$common -I$cutlass -I$src -I$here"
export out common here
compile() {  # name element head_dim rows stages_q stages_dout dq early det softcap wide
  local wide=
  # Matrix instructions of widths that are no power of two; their headers take long to compile.
  if [ "${11}" = 1 ]; then wide=-DCUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED; fi
  if [ ! -f "$out/$1.o" ] || [ -n "$(find "$here" "$here/../../../src/kernels" -newer "$out/$1.o" -name '*.cuh')" ]; then
    nice -n 10 nvcc $common $wide -DVARIANT_NAME="\"$1\"" -DVARIANT_ELEMENT=$2 -DVARIANT_HEAD_DIM=$3 \
      -DVARIANT_BLOCK_M=$4 -DVARIANT_STAGES_Q=$5 -DVARIANT_STAGES_DO=$6 -DVARIANT_DQ_PATH=$7 \
      -DVARIANT_EARLY_SCORES=$8 -DVARIANT_DETERMINISTIC=$9 -DVARIANT_SOFTCAP=${10} \
      -c "$here/variant.cu" -o "$out/$1.o" > "$out/$1.log" 2>&1 || { echo "$1 does not compile"; rm -f "$out/$1.o"; }
  fi
  if grep -q "C75[0-9][0-9]" "$out/$1.log"; then echo "$1: products are serialized"; rm -f "$out/$1.o"; fi
}
export -f compile
grep -v '^#' "$here/variants.txt" | xargs -P "$jobs" -L 1 bash -c 'compile "$@"' _
for file in "$here/bench.cu" "$src/kernels/backward/preprocess.cu" "$src/kernels/backward/reduce_dkv.cu"; do
  nice -n 10 nvcc $common -c "$file" -o "$out/$(basename "$file" .cu)_part.o" > "$out/$(basename "$file").log" 2>&1
done
objects=$(grep -v '^#' "$here/variants.txt" | awk -v o="$out" '{print o "/" $1 ".o"}' | xargs ls 2>/dev/null)
nvcc -cudart static -o "$out/bench" $objects "$out"/*_part.o "$forward"/fwd_sm90_{bf16,f16}_d{64,128}_tiled.cu.o
ls -l "$out/bench"
