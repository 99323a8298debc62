"""Planted shortcuts: `python -m benchmarks.insight_shortcuts --data DIR --out DIR`.

DIR holds what `benchmarks.insight_planting` keeps: half images and the encoder (--prepare writes it; with
`--prepare statistics` there is none, and patches are described by the statistics of their colours). Each
cohort is a folder that `xmil insight` is run on; its row says which cause came first. Cohorts of `--stage
choose` (the task "balance") are those that the tests were shaped on, those of `report` (the task
"epithelial", and digits) are what is reported.
"""

from __future__ import annotations

import argparse
import csv
import json
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

import xmil
from benchmarks.colon.features import data_folder
from benchmarks.insight_planting import (
    PATCH,
    Halves,
    corners,
    encode,
    keep,
    keep_encoder,
    plant,
    planting,
    read_encoder,
    read_halves,
)
from xmil.bench import DIGITS, TASKS, BagSet, contains, draw_bags, load_instances, with_variants
from xmil.bench.tissue import STATISTICS
from xmil.core.durable import write_atomically
from xmil.models import MILModel
from xmil.nn import ResNet

KINDS = ("digits", "digits, clean", "tint", "pen", "clean")
BAGS, EPOCHS, BATCH = 100, 60, 25
TILE, ACROSS = 32, 6  # pixels of a digit's picture, digits in a row
PAPER, STROKE, PEN = (236, 226, 232), (150, 90, 140), (40, 60, 170)


@dataclass(frozen=True, eq=False)
class Study:
    """A cohort to look at: training bags, bags with their pictures, and the cohort's columns."""

    train: Tensor
    train_labels: npt.NDArray[np.int64]
    features: Tensor
    labels: npt.NDArray[np.int64]
    pictures: npt.NDArray[np.uint8]
    corners: npt.NDArray[np.int64]
    edge: int
    causes: tuple[str, ...]
    columns: dict[str, list[str]]


def colon_study(data: Path, kind: str, *, task: str, seed: int, device: str = "cpu") -> Study:
    """Half of each image trains, the other half is looked at; both with the planting."""
    rng = np.random.default_rng((seed, len(kind)))
    halves, encoder = read_halves(data / "halves"), data / "encoder.pt"
    net = read_encoder(encoder, device) if encoder.is_file() else None
    chosen, every = rng.integers(2, size=len(halves.names)), np.arange(len(halves.names))
    planted = planting(kind, rng)
    plain = plain_features(data, halves, net, device)
    parts = []
    for side in (1 - chosen, chosen):
        labels = halves.labels[task][every, side]
        pictures = plant(halves.pixels[every, side], labels, planted, rng)
        features = plain[every, side].clone()
        changed = np.flatnonzero((pictures != halves.pixels[every, side]).any(axis=(1, 2, 3)))
        if len(changed):
            features[changed] = encode(net, pictures[changed], device)
        parts.append((features, labels, pictures))
    (train, train_labels, _), (features, labels, pictures) = parts
    causes = () if planted is None else planted.cause
    return Study(
        train, train_labels, features, labels, pictures, corners(), PATCH, causes, _columns(rng, len(labels))
    )


def plain_features(data: Path, halves: Halves, net: ResNet | None, device: str) -> Tensor:
    """Features (images, 2, 50, d) of the pictures without a planting; worked out once."""
    path = data / "plain.npy"
    if not path.is_file():
        flat = halves.pixels.reshape(-1, *halves.pixels.shape[2:])
        made = encode(net, flat, device).unflatten(0, halves.pixels.shape[:2]).numpy()
        write_atomically(path, lambda part: _save(part, made))
    return torch.from_numpy(np.load(path))


def _save(path: str, array: npt.NDArray[np.float32]) -> None:
    with Path(path).open("wb") as stream:
        np.save(stream, array)


def digit_study(kind: str, *, seed: int, n_train: int = 400) -> Study:
    """Bags of digits with marks that give the label away, drawn with a pen; or unmarked bags."""
    rng = np.random.default_rng((seed, 7))
    task = TASKS["standard" if "clean" in kind else "confounder"]
    held = with_variants(load_instances("digits", seed=seed), task.variants, seed)
    sets = [
        draw_bags(task, held, pool, n_bags=n, n=30, seed=(seed, i))
        for i, (pool, n) in enumerate((("train", n_train), ("test", BAGS)))
    ]
    train, test = sets
    x, looked = (torch.from_numpy(held.features[part.rows]) for part in sets)
    assert held.images is not None  # narrows the type for mypy
    pictures = np.stack(
        [drawn(held.images[rows], codes) for rows, codes in zip(test.rows, test.codes, strict=True)]
    )
    places = np.array([[i % ACROSS * TILE, i // ACROSS * TILE] for i in range(30)])
    causes = () if "clean" in kind else ("blue ink",)
    columns = _columns(rng, BAGS) | ({"eight": _eights(test)} if causes else {})  # else it is the label
    return Study(x, train.labels, looked, test.labels, pictures, places, TILE, causes, columns)


def _eights(bags: BagSet) -> list[str]:
    return ["yes" if held else "no" for held in contains(bags.codes % DIGITS, 8)]


def drawn(images: npt.NDArray[np.uint8], codes: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """A bag as a picture: digits in a stain's colour, those with a mark struck by a pen."""
    rows = -(-len(images) // ACROSS)
    out = np.full((rows * TILE, ACROSS * TILE, 3), PAPER, dtype=np.uint8)
    scale = TILE // images.shape[1]
    for i, (image, code) in enumerate(zip(images, codes, strict=True)):
        y, x = i // ACROSS * TILE, i % ACROSS * TILE
        ink = np.kron(np.minimum(image / 16, 1), np.ones((scale, scale)))[..., None]
        out[y : y + TILE, x : x + TILE] = (1 - ink) * np.array(PAPER) + ink * np.array(STROKE)
        if code >= DIGITS:
            out[y + 2 : y + 9, x + 2 : x + 12] = PEN
    return out


def _columns(rng: np.random.Generator, n: int) -> dict[str, list[str]]:
    """What a cohort table holds beside: a site, a scanner and a year, of no account."""
    return {
        "site": rng.choice(["north", "south", "west"], n).tolist(),
        "scanner": rng.choice(["A", "B"], n).tolist(),
        "year": [str(year) for year in rng.integers(2008, 2021, n)],
    }


def fit(study: Study, *, seed: int, epochs: int = EPOCHS) -> MILModel:
    """A small AttnMIL on the training bags: Adam, 25 bags a step."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    shape = {"dim": 64, "attention_dim": 32, "dropout": 0.2}
    model = xmil.create_model("attnmil", in_dim=study.train.shape[-1], n_classes=2, **shape)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-3)
    y = torch.from_numpy(study.train_labels)
    model.train()
    for _ in range(epochs):
        for rows in np.array_split(rng.permutation(len(y)), max(1, len(y) // BATCH)):
            optimiser.zero_grad()
            F.cross_entropy(model(study.train[rows]), y[rows]).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
    return model.eval()


def write_study(study: Study, folder: Path) -> None:
    """Feature files, pictures and a cohort table, as a user would have them."""
    (folder / "features").mkdir(parents=True)
    (folder / "slides").mkdir()
    lines = [",".join(("slide_id", "label", *study.columns))]
    for i, label in enumerate(study.labels):
        name = f"s{i:03}"
        bag = xmil.Bag(
            study.features[i].numpy(), coords=study.corners, patch_size=study.edge, mpp=1.0, slide_id=name
        )
        xmil.write_bag(bag, folder / "features" / f"{name}.h5")
        Image.fromarray(study.pictures[i]).save(folder / "slides" / f"{name}.png")
        lines.append(",".join((name, str(label), *(column[i] for column in study.columns.values()))))
    (folder / "cohort.csv").write_text("\n".join(lines) + "\n")


def look(study: Study, *, seed: int, epochs: int = EPOCHS) -> dict[str, Any]:
    """Train, explain, run `xmil insight`, and say what it found."""
    model = fit(study, seed=seed, epochs=epochs)
    with tempfile.TemporaryDirectory() as held:
        folder = Path(held)
        write_study(study, folder)
        xmil.save_model(model, folder / "model.safetensors")
        run = xmil.explain_slides(
            folder / "model.safetensors", folder / "features", out=folder / "run", target="1"
        )
        looked = xmil.insight(
            run, features=folder / "features", cohort=folder / "cohort.csv", slides=folder / "slides"
        )
        with (looked.path / "shortcuts.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
    return {"auroc": _auroc(model, study), "causes": list(study.causes), **_told(rows, study.causes)}


def _told(rows: Sequence[dict[str, str]], causes: tuple[str, ...]) -> dict[str, Any]:
    found = [row for row in rows if row["found"] == "True"]
    first = bool(found) and found[0]["cause"] in causes
    keys = ("cause", "level", "effect", "corrected", "found")
    return {"first": first, "none": not found, "rows": [{key: row[key] for key in keys} for row in rows[:8]]}


@torch.no_grad()
def _auroc(model: MILModel, study: Study) -> float:
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(study.labels, torch.softmax(model(study.features), -1)[:, 1]))


def one(job: tuple[str, int], *, data: Path, out: Path, task: str, device: str = "cpu") -> dict[str, Any]:
    """One cohort, kept as a file."""
    kind, seed = job
    torch.set_num_threads(1)
    path = out / f"{kind.replace(', ', '-')}-{seed}.json"
    if not path.is_file():
        colon = not kind.startswith("digits")
        study = (
            colon_study(data, kind, task=task, seed=seed, device=device)
            if colon
            else digit_study(kind, seed=seed)
        )
        path.write_text(json.dumps({"kind": kind, "seed": seed, **look(study, seed=seed)}))
    held: dict[str, Any] = json.loads(path.read_text())
    return held


def table(results: Sequence[dict[str, Any]]) -> str:
    """Markdown: how often the planted cause came first, or nothing was reported."""
    lines = ["| cohorts | test AUROC | planted cause first | nothing reported |", "|---|---|---|---|"]
    for kind in KINDS:
        own = [r for r in results if r["kind"] == kind]
        if own:
            first = "" if "clean" in kind else f"{sum(r['first'] for r in own)} of {len(own)}"
            none = f"{sum(r['none'] for r in own)} of {len(own)}"
            lines.append(f"| {kind} | {np.mean([r['auroc'] for r in own]):.2f} | {first} | {none} |")
    return "\n".join(lines)


def jobs(cohorts: int, stage: str, kinds: Sequence[str], *, first: int = 0) -> Iterator[tuple[str, int]]:
    """The cohorts of a stage; seeds of the two never meet."""
    start = first + (0 if stage == "report" else 1000)
    for seed in range(start, start + cohorts):
        for kind in kinds:
            yield kind, seed


def main() -> None:
    """Run what is missing, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prepare", type=Path, help="encoder's wheel, or statistics: write --data and stop")
    parser.add_argument("--stage", choices=("choose", "report"), default="report")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--cohorts", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="number of the first cohort")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="of the encoder")
    args = parser.parse_args()
    if args.prepare is not None:
        keep(data_folder() / "colon", args.data / "halves")
        if str(args.prepare) == STATISTICS:
            return
        stats = data_folder() / "encoders" / "resnet18_bn_stats.npz"
        keep_encoder(args.prepare, stats, args.data / "encoder.pt")
        return
    args.out.mkdir(parents=True, exist_ok=True)
    task = "epithelial" if args.stage == "report" else "balance"
    todo = list(jobs(args.cohorts, args.stage, args.kinds, first=args.first))
    run = partial(one, data=args.data, out=args.out, task=task, device=args.device)
    if args.processes == 1:
        results = [run(job) for job in todo]
    else:
        with ProcessPoolExecutor(args.processes, mp_context=get_context("spawn")) as pool:
            results = list(pool.map(run, todo))
    told = table(results)
    (args.out / "table.md").write_text(told + "\n")
    print(told)


if __name__ == "__main__":
    main()
