"""Run the study.

python -m benchmarks.inside prepare --wheels FOLDER --data ../shared/data --out PREPARED
python -m benchmarks.inside measure --data PREPARED --encoders resnet18,mobilenetv2 --device cuda --out OUT
python -m benchmarks.inside report --out OUT
"""

from __future__ import annotations

import argparse
import multiprocessing
import pickle
import time
from pathlib import Path

import pandas as pd

from benchmarks.inside import networks, report
from benchmarks.inside.jobs import Job, network_of, tried
from benchmarks.inside.measure import Row
from benchmarks.inside.pictures import FOLDS, embed


def measure(args: argparse.Namespace) -> None:
    """Embed, train and look, in processes; rows.csv and report.md in the folder."""
    begin = time.perf_counter()
    work = args.work or args.out
    for folder in (args.out, work):
        folder.mkdir(parents=True, exist_ok=True)
    shared = {"data": str(args.data), "work": str(work), "device": args.device, "parts": args.parts}
    shared |= {"draws": args.draws, "curved": args.curves, "maps": args.maps, "most": args.most}
    shared |= {"settings": args.settings, "every": args.every, "fills": args.fills}
    jobs: list[Job] = []
    for name in args.encoders.split(","):
        if name == "vit":
            told = networks.train_vit(args.data, work, args.device, steps=args.steps)
            print(f"vit: explains {told:.3f} of the variance of ResNet18's features", flush=True)
        net = network_of(name, str(args.data), str(work), args.device)
        (work / f"{name}.pickle").write_bytes(pickle.dumps(embed(net, args.data, args.device, args.images)))
        jobs += [
            Job(**shared, encoder=name, fold=fold, seed=seed, part=part)
            for seed in range(args.seeds)
            for part in range(args.parts)
            for fold in (int(each) for each in args.folds.split(","))
        ]
    jobs.sort(key=lambda job: job.seed)  # a run that is stopped has whole seeds
    print(f"embedded after {time.perf_counter() - begin:.0f} s; {len(jobs)} jobs", flush=True)
    rows: list[Row] = []
    with multiprocessing.get_context("spawn").Pool(args.workers) as pool:
        for done, found in enumerate(pool.imap_unordered(tried, jobs), start=1):
            rows += found
            if done % 5 == 0 or done == len(jobs):
                pd.DataFrame(rows).to_csv(args.out / "rows.csv", index=False)
                print(f"{done} of {len(jobs)} after {time.perf_counter() - begin:.0f} s", flush=True)
    report.main(args.out / "rows.csv")


def main() -> None:
    """Prepare, measure or report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("step", choices=["prepare", "measure", "report"])
    parser.add_argument("--wheels", type=Path, help="Folder with the two wheels from PyPI.")
    parser.add_argument("--data", type=Path, help="Folder of the data, or what prepare made of it.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--work", type=Path, help="For features and the trained transformer; --out by default."
    )
    parser.add_argument("--encoders", default="resnet18,mobilenetv2")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--parts", type=int, default=3, help="Jobs per fold.")
    parser.add_argument("--draws", type=int, default=20, help="Redrawn networks per image, first seed.")
    parser.add_argument("--seeds", type=int, default=3, help="Models per fold.")
    parser.add_argument("--curves", action="store_true", help="Deletion and insertion, for the first seed.")
    parser.add_argument("--fills", default="", help="Of deletion and insertion; all by default, with commas.")
    parser.add_argument("--folds", default=",".join(map(str, range(FOLDS))), help="These folds alone.")
    parser.add_argument("--maps", default="", help="These maps alone, with commas between.")
    parser.add_argument("--settings", default="", help="Only settings that this expression is found in.")
    parser.add_argument("--every", type=int, default=1, help="Redraw for every so many images of a part.")
    parser.add_argument("--most", type=int, default=3, help="Tiles per image.")
    parser.add_argument("--steps", type=int, default=3000, help="Training steps of the transformer.")
    parser.add_argument("--images", type=int, help="The first images alone, to try it out.")
    args = parser.parse_args()
    if args.step == "prepare":
        networks.prepare(args.wheels, args.data, args.out)
    elif args.step == "measure":
        measure(args)
    else:
        report.main(args.out / "rows.csv")


if __name__ == "__main__":
    main()
