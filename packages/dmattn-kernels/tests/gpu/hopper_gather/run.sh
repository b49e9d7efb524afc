#!/bin/bash
# Checks and times every variant that build.sh compiled, each in a process of its own that cannot hang the others.
#   run.sh OUT [part of a name] [check|time|all] [folder for results]
bench=$1/bench part=${2:-} what=${3:-all} results=${4:-$1}
for name in $("$bench" "$part" list | sed -n 's/^\([a-z0-9_]*\): .*/\1/p'); do
  if [ $SECONDS -gt 75 ]; then
    echo "$name: left out, time is up"
    continue
  fi
  timeout 15 "$bench" "$name" "$what"
  status=$?
  if [ $status -ne 0 ]; then echo "$name: exit status $status (124: it hung)"; fi
done 2>&1 | tee "$results/results.txt"
echo "--- times by shape"
grep " ms (" "$results/results.txt" | sort -k2,9 -s
grep -c " ok$" "$results/results.txt" | sed 's/$/ checks passed/'
grep "WRONG\|NaN\|exit status" "$results/results.txt" || true
