"""What lies beyond one patch, measured: `python -m benchmarks.beyond STUDY [--quick] [--out FILE]`.

    speed     Shapley values of 10,000 patches, in forward passes of the bag
    table     AUPRC-2 of Shapley values and of contexts beside plain LRP, on the same models (--models)
    pairs     interactions against the true partners of Adjacent Pairs: one-hot digits, bags of 12
    partners  the same on features of real digits, bags of 30 (--models)
    features  the same on features, with models that see new bags in each step; --models keeps what is done
    signs     interactions in Context Flip, and in sums, which have none
    errors    how often intervals from the standard errors hold the long-run mean
    sets      minimal sets against exhaustive search, and how far their bounds lie apart
    rivals    Shapley values and interactions beside those of shapiq, which must be installed

Each prints its figures, and with `--out` writes them as JSON. The studies of trained
models run over many processes by `python -m benchmarks.beyond.everything`, those of models that are
there already by `python -m benchmarks.beyond.packed` and `python -m benchmarks.beyond.carried`.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path

import torch

from benchmarks.beyond import errors, features, pairs, rivals, sets, speed, table

STUDIES = {
    "speed": speed.study,
    "table": table.study,
    "pairs": pairs.study,
    "partners": pairs.partners,
    "features": features.study,
    "signs": pairs.signs,
    "errors": errors.study,
    "sets": sets.study,
    "rivals": rivals.study,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--quick", action="store_true", help="few repetitions, to see that it runs")
    parser.add_argument(
        "--data", help="folder or file of digits' features; default: one-hot vectors with noise"
    )
    parser.add_argument(
        "--models", type=Path, help="folder of `xmil bench --suite paper`, for table and partners"
    )
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}", flush=True)
    found = STUDIES[arguments.study](
        quick=arguments.quick, data=arguments.data or "onehot", models=arguments.models
    )
    print(json.dumps(found, indent=1))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
