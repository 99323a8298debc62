#!/usr/bin/env bash
# On one GPU: benchmarks/table1.sh FEATURES OUT speed|bench|rules [WORK]
# Needs python3 with torch, numpy, safetensors and pydantic. WORK keeps trained models between calls: a call that
# was cut off goes on where it stopped, and `rules` needs the models of `bench`.
set -uo pipefail
data=$1 out=$2 stage=$3 work=${4:-/tmp/xmil-table1}
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 OMP_NUM_THREADS=4
mkdir -p "$out" "$work"
{
  case $stage in
    speed) python3 benchmarks/toy.py --data "$data" --device cuda --many 30 --rounds 3 ;;
    bench) # the nine columns by the referee; the page: xmil bench --out BENCH
      export OMP_NUM_THREADS=1
      nvidia-cuda-mps-control -d 2>/dev/null && echo "several processes share the GPU (MPS)"
      python3 benchmarks/table1.py --data "$data" --device cuda --minutes 8 --out "$work/bench"
      tar -C "$work" -czf "$out/bench.tar.gz" bench/run.json bench/units
      ;;
    rules) python3 benchmarks/rules.py --models "$work/bench" --data "$data" --device cuda --out "$out/rules.json" ;;
  esac
} 2>&1 | tee "$out/$stage.txt"
