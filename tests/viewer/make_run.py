"""A small run to look at: slides of patches with known colours, features, two models and their runs.

python -m tests.viewer.make_run FOLDER [--columns 12 --rows 8 --edge 256 --slides 3]
"""

from __future__ import annotations

import argparse
import csv
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import tifffile
import torch

import xmil
from xmil.core.bag import Bag
from xmil.core.durable import file_digest
from xmil.data.bags import Case
from xmil.evaluate import FaithfulnessSettings, evaluate_slide
from xmil.models import save_model
from xmil.runs.evaluate import SCHEMA
from xmil.storage import write_explanations

NAMES = ("benign", "tumour")
METHODS = ("lrp", "attention", "gxi")
MODELS: dict[str, dict[str, Any]] = {"attnmil": {"dim": 16}, "transmil": {"dim": 16, "heads": 2}}
DIM = 8


@dataclass(frozen=True)
class Made:
    """Where everything lies; `runs` and `models` are in the same order."""

    runs: list[Path]
    models: list[Path]
    slides: Path
    features: Path
    names: list[str]


def patch_colours(n: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    """The colour of each patch (n, 3)."""
    return np.random.default_rng(seed).integers(60, 200, size=(n, 3)).astype(np.uint8)


def write_slide(
    path: Path, colours: npt.NDArray[np.uint8], *, edge: int = 256, mpp: float | None = 0.5
) -> None:
    """A pyramidal TIFF whose patches (rows, columns, 3) each have one colour."""
    level = colours.repeat(edge, axis=0).repeat(edge, axis=1)
    dots = None if mpp is None else (10_000 / mpp, 10_000 / mpp)
    about = {"tile": (256, 256), "photometric": "rgb", "compression": "zlib", "resolution": dots}
    with tifffile.TiffWriter(path) as file:
        for step in range(4):
            file.write(
                np.ascontiguousarray(level),
                subfiletype=1 if step else 0,
                resolutionunit=None if mpp is None else "CENTIMETER",
                metadata=None,
                **about,
            )
            about["resolution"] = None
            level = level[::2, ::2]
            if min(level.shape[:2]) < 32:
                break


def make_bag(name: str, *, columns: int, rows: int, edge: int, seed: int, mpp: float = 0.5) -> Bag:
    """Patches of a grid in reading order; a block of them carries evidence for the second class."""
    rng = np.random.default_rng(seed)
    y, x = np.divmod(np.arange(columns * rows), columns)
    features = rng.normal(size=(columns * rows, DIM)).astype(np.float32)
    features[(x < columns // 3) & (y < rows // 2), 0] += 4.0 if seed % 2 else -4.0
    coords = np.stack([x, y], axis=1) * edge
    return Bag(features, coords=coords, patch_size=edge, mpp=mpp, slide_id=name)


def make_run(
    folder: Path,
    *,
    slides: int = 3,
    columns: int = 12,
    rows: int = 8,
    edge: int = 256,
    names: list[str] | None = None,
    models: tuple[str, ...] = tuple(MODELS),
    certificates: bool = True,
) -> Made:
    """Slides, features, and a run for each model, as `xmil explain` and `xmil evaluate` leave them."""
    made = Made(
        [folder / f"run-{name}" for name in models],
        [folder / "models" / f"{name}.safetensors" for name in models],
        folder / "slides",
        folder / "features",
        names or [f"slide-{i}" for i in range(slides)],
    )
    for place in (*made.runs, made.slides, made.features, folder / "models"):
        place.mkdir(parents=True, exist_ok=True)
    bags = [make_bag(n, columns=columns, rows=rows, edge=edge, seed=i) for i, n in enumerate(made.names)]
    for i, bag in enumerate(bags):
        colours = patch_colours(len(bag), seed=i).reshape(rows, columns, 3)
        write_slide(made.slides / f"{bag.slide_id}.tif", colours, edge=edge)
        xmil.write_bag(bag, made.features / f"{bag.slide_id}.h5")
    for name, run, path in zip(models, made.runs, made.models, strict=True):
        net = xmil.create_model(name, in_dim=DIM, n_classes=2, class_names=NAMES, seed=1, **MODELS[name])
        _train(net, columns=columns, rows=rows)
        save_model(net, path)
        _explain_all(net, bags, run, path, made.features, certificates=certificates)
    return made


def _train(net: Any, *, columns: int, rows: int) -> None:
    """A few steps on bags like ours: removing the block of evidence must turn the prediction."""
    torch.manual_seed(0)
    small = {"columns": min(columns, 12), "rows": min(rows, 8), "edge": 1}
    x = torch.stack([torch.from_numpy(make_bag("t", seed=100 + i, **small).features) for i in range(16)])
    y = torch.arange(16) % 2
    weights = list(net.parameters())
    for _ in range(30):
        loss = torch.nn.functional.cross_entropy(net(x), y)
        for weight, slope in zip(weights, torch.autograd.grad(loss, weights), strict=True):
            weight.data -= 0.3 * slope  # plain descent: torch's optimisers are slow to import
    net.eval()


def _explain_all(
    net: Any, bags: list[Bag], run: Path, model: Path, features: Path, *, certificates: bool
) -> None:
    if certificates:
        _certify(net, bags, run)
    (run / "slides").mkdir(exist_ok=True)
    table = []
    for i, bag in enumerate(bags):
        found = [e for method in METHODS for e in xmil.explain_classes(net, bag, method=method)]
        write_explanations(found, run / "slides" / f"{bag.slide_id}.parquet")
        table.append(_row(bag, found[0].logits, i % 2, features))
    with (run / "slides.csv").open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, list(table[0]))
        writer.writeheader()
        writer.writerows(table)
    spec = {"name": net.spec.name, "task": net.spec.task, "class_names": list(NAMES), "in_dim": DIM}
    about = {
        "kind": "explain",
        "version": xmil.__version__,
        "model": {"path": str(model), "digest": file_digest(model), "spec": spec},
        "class_names": list(NAMES),
        "task": net.spec.task,
        "methods": list(METHODS),
        "features": str(features),
    }
    (run / "run.json").write_text(json.dumps(about), encoding="utf-8")


def _certify(net: Any, bags: list[Bag], run: Path) -> None:
    """What `xmil evaluate` leaves for each slide, but for its figure."""
    settings = FaithfulnessSettings(methods=("lrp", "attention"), modes=("remove",), steps=10, orders=4)
    for folder in ("certificates", "results"):
        (run / folder).mkdir(exist_ok=True)
    for i, bag in enumerate(bags):
        slide = Case(str(bag.slide_id), (str(bag.slide_id),), (Path(),), i % 2)
        result = evaluate_slide(net, bag, settings, label=slide.label)
        paper = json.dumps(result.as_dict(slide.name))
        (run / "certificates" / f"{slide.name}.json").write_text(paper, encoding="utf-8")
        table = pa.Table.from_pylist(result.rows, schema=SCHEMA)
        pq.write_table(table, run / "results" / f"{slide.name}.parquet")


def _row(bag: Bag, logits: npt.NDArray[np.float32], label: int, features: Path) -> dict[str, Any]:
    p = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    predicted = int(p.argmax())
    return {
        "slide_id": bag.slide_id,
        "case_id": f"case of {bag.slide_id}",
        "label": NAMES[label],
        "predicted": NAMES[predicted],
        "correct": predicted == label,
        **{f"p:{name}": float(value) for name, value in zip(NAMES, p, strict=True)},
        "n": len(bag),
        "features": str(features / f"{bag.slide_id}.h5"),
        "seconds": 0.1,
    }


def main() -> None:
    """Write a run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    for name, value in {"slides": 3, "columns": 12, "rows": 8, "edge": 256}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    given = vars(parser.parse_args())
    make_run(given.pop("folder"), **given)


if __name__ == "__main__":
    main()
