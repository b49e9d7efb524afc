#!/bin/bash
# Checks and times every variant that build.sh compiled, each in a process of its own that cannot hang the others.
#   run.sh OUT [part of a name] [check|time|all]
out=$1 part=${2:-} what=${3:-all}
for name in $("$out/bench" "$part" list | sed -n 's/^\([a-z0-9_]*\): .*/\1/p'); do
  timeout 90 "$out/bench" "$name" "$what"
  status=$?
  if [ $status -ne 0 ]; then echo "$name: exit status $status (124: it hung)"; fi
done 2>&1 | tee "$out/results.txt"
grep "TF" "$out/results.txt" | sort -k2,9 -s > "$out/table.txt"
echo "--- kernel and everything, by shape"
cut -c1-140 "$out/table.txt"
grep -c " ok$" "$out/results.txt" | sed 's/$/ checks passed/'
grep "WRONG\|NaN\|exit status" "$out/results.txt" || true
