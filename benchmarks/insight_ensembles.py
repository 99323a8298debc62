"""Ensembles of five models on bags of digits: the mask, and biomarkers against the true share of evidence.

`python -m benchmarks.insight_ensembles --data DIR|FILE --out DIR`. Twenty repetitions train at once; five
after another are an ensemble and explain the test bags of the first of them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from xmil.bench import (
    SETUPS,
    TASKS,
    BagSet,
    Configuration,
    Instances,
    MethodSpec,
    Protocol,
    background,
    bag_auroc,
    draw_bags,
    load_instances,
    probabilities,
    score_bags,
    train_stacked,
)
from xmil.evaluate import score_evidence
from xmil.evaluate.statistics import spearman
from xmil.insights import find_consensus, map_biomarkers, strong_share
from xmil.insights.biomarkers import STRONG
from xmil.models import MILModel

MODELS = 5  # of an ensemble
TABLE1 = ("four_bags", "pos_neg_count", "adjacent_pairs")
POWERS, FACTORS = (1.0, 0.5, 0.25), (0.25, 0.5, 0.7, 1.0)
TRAINING = {"optimizer": "adam", "lr": 3e-3, "epochs": 60, "patience": 20}
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Members:
    """Scores (models, bags, classes, n) of an ensemble for bags that none of its models was trained on."""

    scores: Floats
    bags: BagSet
    evidence: npt.NDArray[np.int8]  # (bags, classes, n)
    auroc: float


def pack(source: Path, out: Path, *, digits: int) -> None:
    """Some of the digits' features in eight bits, a file for training and one for test."""
    instances = load_instances(source)
    rng = np.random.default_rng(0)
    kinds = {"train": ("train", "validation"), "test": ("test",)}
    out.mkdir(parents=True, exist_ok=True)
    top = float(instances.features.max())
    for name, pools in kinds.items():
        rows = np.concatenate([instances.pools[pool] for pool in pools])
        rows = rng.permutation(rows)[: digits if name == "train" else digits // 2]
        x = np.rint(instances.features[rows] / top * 255).astype(np.uint8)
        np.savez_compressed(
            out / f"digits_{name}.npz", x=x, y=instances.digits[rows].astype(np.uint8), top=top
        )


def unpack(source: Path) -> Instances:
    """Instances of a file or folder; eight bits are put back to the features' scale."""
    instances = load_instances(source)
    files = sorted(source.glob("*.npz")) if source.is_dir() else []
    if not files:
        return instances
    with np.load(files[0]) as held:
        scale = float(held["top"]) / 255 if "top" in held else 1.0
    return replace(instances, features=instances.features * np.float32(scale))


def ensembles(
    task: str,
    model: str,
    instances: Instances,
    *,
    count: int,
    sizes: tuple[int, int, int] = (2000, 500, 500),
    device: str = "cpu",
    seed: int = 0,
    part: str = "test",
    training: dict[str, Any] | None = None,
) -> Iterator[Members]:
    """The ensembles of a task; `part` says whether validation or test bags are explained."""
    protocol = Protocol(repetitions=MODELS * count, seed=seed, sizes=sizes, training=training or TRAINING)
    made = Configuration(TASKS[task], SETUPS[model], instances, protocol, device)
    fitted, features = train_stacked(made).models, made.table()
    for first in range(0, MODELS * count, MODELS):
        bags = getattr(made.splits(first), part)
        x = features.bags(features.to_rows(bags.rows))
        scores, aurocs = [], []
        for r in range(first, first + MODELS):
            one = fitted.model(r)
            assert isinstance(one, MILModel)  # narrows the type for mypy
            one.background = background(made, made.splits(r))
            scores.append(score_bags(one, x, MethodSpec("lrp")).double().cpu().numpy())
            aurocs.append(bag_auroc(probabilities(one, x), bags.labels))
        yield Members(np.stack(scores), bags, TASKS[task].evidence(bags.codes), float(np.mean(aurocs)))


def masks(held: Members) -> dict[str, float]:
    """AUPRC-2 of single models, of their mean, and of the mean under the mask."""
    each = np.mean([auprc2(held.evidence, scores) for scores in held.scores])
    mean = held.scores.mean(axis=0)
    flat = held.scores.transpose(0, 2, 1, 3)  # (models, classes, bags, n)
    over = np.stack([_masked(of.reshape(MODELS, -1)).reshape(of.shape[1:]) for of in flat.swapaxes(0, 1)], 1)
    within = np.stack(
        [[_masked(held.scores[:, b, c]) for c in range(mean.shape[1])] for b in range(len(mean))]
    )
    return {
        "single model": float(each),
        "mean of five": auprc2(held.evidence, mean),
        "mask, quantile over the cohort": auprc2(held.evidence, over),
        "mask, quantile per bag": auprc2(held.evidence, within),
        "auroc": held.auroc,
    }


def _masked(scores: Floats) -> npt.NDArray[np.float32]:
    return find_consensus(scores).scores


def auprc2(evidence: npt.NDArray[Any], scores: npt.NDArray[Any]) -> float:
    """The mean over bags and classes that have evidence."""
    found = score_evidence(torch.from_numpy(evidence), torch.from_numpy(np.asarray(scores, np.float64)))
    return float(found["auprc2"].nanmean())


def shares(held: Members) -> dict[str, float]:
    """Spearman's correlation of shares of supporting patches with the true share of evidence.

    The mean over the classes that have evidence; strong patches score above the mean absolute score of all.
    """
    return _over_classes(held, _shares_of)


def thresholds(held: Members) -> dict[str, float]:
    """The same for shares above multiples of the scores' power means, for one model and for the mean."""
    return _over_classes(held, _thresholds_of)


def _over_classes(held: Members, of: Callable[[Floats, Floats], dict[str, float]]) -> dict[str, float]:
    truth = (held.evidence > 0).mean(axis=-1)  # (bags, classes)
    classes = [c for c in range(truth.shape[1]) if truth[:, c].std() > 0]
    found = [of(held.scores[:, :, c], truth[:, c]) for c in classes]
    return {name: float(np.mean([row[name] for row in found])) for name in found[0]}


def _thresholds_of(scores: Floats, truth: Floats) -> dict[str, float]:
    found = {}
    for who, s in (("one model", scores[0]), ("mean of five", scores.mean(axis=0))):
        for power in POWERS:
            scale = (np.abs(s) ** power).mean() ** (1 / power)
            for factor in FACTORS:
                name = f"{who}, {factor} x power mean {power}"
                found[name] = spearman((s > factor * scale).mean(axis=1), truth)
    return found


def _shares_of(scores: Floats, truth: Floats) -> dict[str, float]:
    one, mean = scores[0], scores.mean(axis=0)
    ways = {
        "one model": [map_biomarkers(s)["supporting_share"] for s in one],
        "one model, strong": [strong_share(s, STRONG * np.abs(one).mean()) for s in one],
        "mean of five": [map_biomarkers(s)["supporting_share"] for s in mean],
        "mean of five, strong": [strong_share(s, STRONG * np.abs(mean).mean()) for s in mean],
        "agreed": [find_consensus(s).shares["agreed_share"] for s in scores.swapaxes(0, 1)],
        "relevance": [map_biomarkers(s)["supporting_relevance"] for s in mean],
    }
    return {name: spearman(np.asarray(values), truth) for name, values in ways.items()}


def count_bound(task: str, instances: Instances, *, sizes: tuple[int, int] = (2000, 500)) -> float:
    """What a count of patches one by one can reach: the true digits, with the best weight for each.

    Weights are fitted on training bags; Spearman's correlation on test bags, mean over classes with evidence.
    """
    drawn = [
        draw_bags(TASKS[task], instances, pool, n_bags=n, n=30, seed=(0, i))
        for i, (pool, n) in enumerate(zip(("train", "test"), sizes, strict=True), start=1)
    ]
    counts = [np.stack([(bags.codes == d).sum(axis=1) for d in range(11)], axis=1) for bags in drawn]
    for held in counts:
        held[:, -1] = 1  # the constant
    truths = [(TASKS[task].evidence(bags.codes) > 0).mean(axis=-1) for bags in drawn]
    found = []
    for c in np.flatnonzero(truths[1].std(axis=0) > 0):
        weights = np.linalg.lstsq(counts[0], truths[0][:, c], rcond=None)[0]
        found.append(spearman(counts[1] @ weights, truths[1][:, c]))
    return float(np.mean(found))


def main() -> None:
    """Run and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pack", type=int, help="write this many digits of --data to --out, and stop")
    parser.add_argument("--bound", action="store_true", help="print what counts of digits reach, and stop")
    parser.add_argument("--ensembles", type=int, default=4)
    parser.add_argument("--models", nargs="+", default=["attnmil", "transmil"])
    parser.add_argument("--tasks", nargs="+", default=TABLE1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", choices=("validation", "test"), default="test", help="bags to explain")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    if args.pack:
        pack(args.data, args.out, digits=args.pack)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    instances = unpack(args.data)
    if args.bound:
        print(json.dumps({task: round(count_bound(task, instances), 3) for task in args.tasks}))
        return
    rows = []
    for task in args.tasks:
        for model in args.models:
            for i, held in enumerate(
                ensembles(
                    task,
                    model,
                    instances,
                    count=args.ensembles,
                    device=args.device,
                    seed=args.seed,
                    part=args.part,
                )
            ):
                row = {"task": task, "model": model, "ensemble": i, **masks(held), "shares": shares(held)}
                row["thresholds"] = thresholds(held)
                rows.append(row)
                print(json.dumps(row), flush=True)
    (args.out / "ensembles.json").write_text(json.dumps(rows, indent=1))
    (args.out / "ensembles.md").write_text(table(rows) + "\n")
    print(table(rows))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: the mask, and the shares."""
    names = [
        name for name in rows[0] if name not in ("task", "model", "ensemble", "shares", "auroc", "thresholds")
    ]
    ways = list(rows[0]["shares"])
    head = ["task", "model", *names, *(f"share: {way}" for way in ways)]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for task, model in dict.fromkeys((row["task"], row["model"]) for row in rows):
        own = [row for row in rows if (row["task"], row["model"]) == (task, model)]
        cells = [f"{np.mean([row[name] for row in own]):.3f}" for name in names]
        cells += [f"{np.mean([row['shares'][way] for row in own]):.3f}" for way in ways]
        lines.append(f"| {task} | {model} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
