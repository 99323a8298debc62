#!/usr/bin/env bash
# On one GPU: benchmarks/table1.sh FEATURES OUT speed|table|bench|rules [WORK]
# Needs python3 with torch, numpy and safetensors. WORK keeps trained models between calls: a call that was
# cut off goes on where it stopped, and `rules` needs the models of `table`.
set -uo pipefail
data=$1 out=$2 stage=$3 work=${4:-/tmp/xmil-table1}
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 OMP_NUM_THREADS=4
mkdir -p "$out" "$work"
{
  case $stage in
    speed) python3 benchmarks/toy.py --data "$data" --device cuda --many 30 --rounds 3 ;;
    table)
      nvidia-cuda-mps-control -d 2>/dev/null && echo "several processes share the GPU (MPS)"
      python3 benchmarks/table1.py --data "$data" --device cuda --out "$work"
      tar -C "$work" -czf "$out/rows.tar.gz" rows
      for model in attnmil transmil addmil; do
        (cd "$work" && tar -czf "$out/models-$model.tar.gz" models/*-"$model".safetensors)
      done
      ;;
    bench) # the nine columns by the referee, a process for each; a second call goes on
      export OMP_NUM_THREADS=1
      nvidia-cuda-mps-control -d 2>/dev/null && echo "several processes share the GPU (MPS)"
      for model in transmil attnmil addmil; do
        for task in four_bags pos_neg_count adjacent_pairs; do
          python3 -m xmil.bench --suite evidence --data "$data" --device cuda --minutes 8 --model $model \
            --task $task --out "$work/bench" &
        done
      done
      time wait
      tar -C "$work" -czf "$out/bench.tar.gz" bench/run.json bench/units
      ;;
    rules) python3 benchmarks/rules.py --models "$work" --data "$data" --device cuda --out "$out/rules.json" ;;
  esac
} 2>&1 | tee "$out/$stage.txt"
