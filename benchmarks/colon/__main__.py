"""The colon benchmark: `python -m benchmarks.colon --features FILE --out DIR`.

Each run is one file in the folder, so that a stopped benchmark goes on where it was; the table is made of
all that is there.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch

from benchmarks.colon.bags import TASKS, read_bags
from benchmarks.colon.measure import ROWS, measure
from benchmarks.colon.train import EPOCHS, MODELS
from xmil.core.durable import write_atomically
from xmil.evaluate.statistics import compare

METRICS = ("auprc2", "aupc", "srg", "flipped_at_zero")


def main() -> None:
    """Run what is missing, then print the tables."""
    args = _arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    bags = read_bags(args.features) if args.runs else []
    for run in range(args.runs):
        for name in args.models:
            for task in TASKS:
                path = args.out / f"{task}_{name}_{run}.json"
                if not path.exists():
                    done = measure(
                        name, bags, task, run=run, thorough=run < args.thorough, epochs=args.epochs
                    )
                    write_atomically(path, lambda part, d=done: Path(part).write_text(json.dumps(d)))
    print(tables([json.loads(path.read_text()) for path in sorted(args.out.glob("*.json"))]))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--features", type=Path, required=True, help="written by benchmarks.colon.features")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--runs", type=int, default=10, help="0 prints the tables of what is there")
    parser.add_argument("--thorough", type=int, default=5, help="runs with curves and with the slow methods")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    return parser.parse_args()


def tables(runs: list[dict]) -> str:
    """A Markdown table for each task: mean and standard deviation over runs of the runs' means."""
    parts = []
    for task in TASKS:
        lines = [
            f"### {task}",
            "",
            "| model | method | " + " | ".join(METRICS) + " |",
            "|---|---|" + "---|" * 4,
        ]
        for name in MODELS:
            chosen = [run for run in runs if run["task"] == task and run["model"] == name]
            if chosen:
                lines += _rows(name, chosen)
        parts.append("\n".join([*lines, "", *_comparisons(task, runs)]))
    return "\n\n".join(parts)


def _rows(name: str, runs: list[dict]) -> list[str]:
    left_out = sum(run["left_out"] for run in runs)
    auroc = _spread([run["auroc"] for run in runs])
    lines = [f"| {name} | *bag AUROC* | {auroc} ({len(runs)} runs, {left_out} bags misclassified) | | | |"]
    for row in ROWS:
        means = {
            metric: [np.mean(run["rows"][row][metric]) for run in runs if _has(run, row, metric)]
            for metric in METRICS
        }
        if means["auprc2"]:
            lines.append(
                f"| {name} | {row} | "
                + " | ".join(_spread(means[metric], of=len(runs)) for metric in METRICS)
                + " |"
            )
    return lines


def _comparisons(task: str, runs: list[dict]) -> list[str]:
    """LRP against attention and random over runs, by the mean AUPRC-2 of each run."""
    lines = []
    for name in MODELS:
        chosen = [run for run in runs if run["task"] == task and run["model"] == name]
        if len(chosen) < 2:
            continue
        rows = ("lrp", "attention", "random")
        values = {row: [np.mean(run["rows"][row]["auprc2"]) for run in chosen] for row in rows}
        for c in compare(values, [("lrp", "attention"), ("lrp", "random")], units=range(len(values["lrp"]))):
            gain = f"{c.difference:+.3f} over {c.n} runs (paired t-test, Holm: p = {c.t_holm:.1g})"
            lines.append(f"- {name}: lrp against {c.second} {gain}")
    return lines


def _has(run: dict, row: str, metric: str) -> bool:
    return row in run["rows"] and len(run["rows"][row][metric]) > 0


def _spread(values: list[float], *, of: int | None = None) -> str:
    """Mean and deviation; how many runs, where they are not all."""
    if not values:
        return "-"
    spread = f" ± {np.std(values):.3f}" if len(values) > 1 else ""
    runs = "" if of in (None, len(values)) else f" ({len(values)} run{'s' * (len(values) > 1)})"
    return f"{np.mean(values):.3f}{spread}{runs}"


if __name__ == "__main__":
    main()
