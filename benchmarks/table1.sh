#!/usr/bin/env bash
# Table 1, speed and the search for rules on one GPU: benchmarks/table1.sh FEATURES OUT
# Needs python3 with torch, numpy and safetensors; leaves OUT/log.txt, OUT/rows.tar.gz, OUT/models-*.tar.gz,
# OUT/rules.json.
set -uo pipefail
data=$1 out=$2
work=$(mktemp -d)
export PYTHONPATH=src PYTHONUNBUFFERED=1 OMP_NUM_THREADS=4
mkdir -p "$out"
{
  nvidia-cuda-mps-control -d 2>/dev/null && echo "several processes share the GPU (MPS)"
  python3 benchmarks/toy.py --data "$data" --device cuda --many 30 --rounds 3
  python3 benchmarks/table1.py --data "$data" --device cuda --out "$work"
  tar -C "$work" -czf "$out/rows.tar.gz" rows
  for model in attnmil transmil addmil; do
    (cd "$work" && tar -czf "$out/models-$model.tar.gz" models/*-$model.safetensors)
  done
  python3 benchmarks/rules.py --models "$work" --data "$data" --device cuda --out "$out/rules.json"
} 2>&1 | tee "$out/log.txt"
