"""Feature files and a cohort table for `xmil train`: `python -m benchmarks.bags digits|colon --out DIR`.

digits: bags of 30 MNIST features, 2,000 / 500 / 1,000 for training, validation and test, as in Table 1.
colon: the nuclei of the colon images, a bag for each image, embedded by `benchmarks.colon.features`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

import xmil
from benchmarks.colon.bags import TASKS, read_bags
from benchmarks.colon.features import data_folder
from xmil.bench import SPLITS, draw_splits, load_instances
from xmil.bench import TASKS as DIGIT_TASKS
from xmil.core.durable import write_text

SIZES = (2000, 500, 1000)
ENCODER = "resnet18-imagenet"


def write_digits(out: Path, task: str, *, sizes: tuple[int, int, int] = SIZES, seed: int = 0) -> None:
    """One .npy for each bag, and a table with labels and splits."""
    instances = load_instances(data_folder() / "mnist", seed=seed)
    splits = draw_splits(DIGIT_TASKS[task], instances, sizes, seed=seed, repetition=0)
    (out / "features").mkdir(parents=True, exist_ok=True)
    lines = ["slide_id,label,split"]
    for name, pool in zip(SPLITS, (splits.train, splits.validation, splits.test), strict=True):
        for i, (rows, label) in enumerate(zip(pool.rows, pool.labels, strict=True)):
            np.save(out / "features" / f"{name}{i:04}.npy", instances.features[rows])
            lines.append(f"{name}{i:04},{label},{name}")
    write_text(out / "cohort.csv", "\n".join(lines) + "\n")


def write_colon(out: Path, features: Path) -> None:
    """One HDF5 file for each image, and a table with the labels of both tasks."""
    (out / "features").mkdir(parents=True, exist_ok=True)
    lines = ["slide_id," + ",".join(TASKS)]
    for bag in read_bags(features):
        stored = xmil.Bag(bag.features.numpy(), slide_id=bag.name, encoder=ENCODER)
        xmil.write_bag(stored, out / "features" / f"{bag.name}.h5")
        lines.append(f"{bag.name}," + ",".join(str(bag.label(task)) for task in TASKS))
    write_text(out / "cohort.csv", "\n".join(lines) + "\n")


def main() -> None:
    """Write one of the cohorts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("which", choices=("digits", "colon"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--task", default="four_bags", help="of digits")
    parser.add_argument("--features", type=Path, help="of colon: written by benchmarks.colon.features")
    parser.add_argument("--seed", type=int, default=0, help="of the digits' bags")
    args = parser.parse_args()
    if args.which == "digits":
        write_digits(args.out, args.task, seed=args.seed)
    else:
        write_colon(args.out, args.features)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
