"""Small inputs for every command that writes a folder, and what of its results must be equal."""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
import typer
from PIL import Image
from torch import nn

import xmil
from xmil.core.errors import XmilError
from xmil.core.ledger import plain_number
from xmil.models.checkpoints.files import read_weights
from xmil.storage import read_ledger
from xmil.viewer.study import make_study
from xmil.viewer.study.plan import make_plan

WIDTH, SLIDES, PATCHES = 12, 4, 20
NEVER_EQUAL = {
    "commit",
    "seconds",
    "written",
    "started",
    "time",
    "created",
    "host",
    "machine",
    "date",
    "finished",
    "id",
    "committed",
    "forward",
    "seconds_per_bag",
    "forward_passes",
}
# Files that hold clocks; what they lead to, or are drawn from, is compared.
LOGS = ("last.ckpt", "events.out.tfevents", "index.html")
CONFIG = """
[data]
features = "{0}/features"
cohort = "{0}/cohort.csv"
[model]
name = "attnmil"
dim = 8
[train]
epochs = 3
batch = 2
repeats = 2
device = "cpu"
"""

NET = """
import torch


class Mean(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x).mean(dim=1)


def build(in_dim, n_classes):
    return Mean(in_dim, n_classes)
"""


class Means(nn.Module):
    """An encoder that needs no weights: mean colours of the quarters of a patch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.adaptive_avg_pool2d(x, 2).flatten(1)


def network() -> nn.Module:
    """What `--encoder benchmarks.killed.commands:network` makes."""
    return Means()


def prepare(folder: Path) -> None:
    """Slides, features, a table, a model and a finished explanation of a small cohort."""
    rng = np.random.default_rng(0)
    for name in ("slides", "features"):
        (folder / name).mkdir(parents=True)
    lines = ["slide_id,case_id,label,split,site"]
    corners = np.stack(np.divmod(np.arange(PATCHES), 5), axis=1) * 64
    for i in range(SLIDES):
        pixels = rng.integers(60, 200, size=(192, 256, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(folder / "slides" / f"s{i}.png")
        x = np.abs(rng.normal(size=(PATCHES, WIDTH))).astype(np.float32)
        bag = xmil.Bag(x, coords=corners, patch_size=64, mpp=0.5, slide_id=f"s{i}")
        xmil.write_bag(bag, folder / "features" / f"s{i}.h5")
        lines.append(f"s{i},c{i},{i % 2},{('train', 'train', 'val', 'val')[i]},{'ab'[i % 2]}")
    (folder / "cohort.csv").write_text("\n".join(lines) + "\n")
    (folder / "config.toml").write_text(CONFIG.format(folder))
    (folder / "net.py").write_text(NET)
    xmil.save_model(
        xmil.create_model("attnmil", in_dim=WIDTH, n_classes=2, seed=0, dim=8), folder / "m.safetensors"
    )
    for name in ("explain", "tile", "embed"):  # what other commands build on
        run([*COMMANDS[name](folder), "--out", str(folder / f"done_{name}")])
    embedded = ["--model", f"{folder}/m.safetensors", "--features", f"{folder}/done_embed"]
    run(["explain", *embedded, "--methods", "lrp", "--target", "1", "--out", f"{folder}/done_pixels"])
    labelled = ["--cohort", f"{folder}/cohort.csv", "--out", f"{folder}/done_read"]
    *words, _ = COMMANDS["explain"](folder)
    run([*words, "all", *labelled])  # readers see the predicted class
    plan = make_plan({"readers": ["anna", "ben"], "practice": 0, "washout_days": 0.0})
    make_study([folder / "done_read"], slides=folder / "slides", plan=plan, out=folder / "done_study")


def run(arguments: list[str]) -> int:
    """One command as `xmil` runs it, without importing the others; its exit code."""
    name = arguments[0]
    app = typer.Typer()
    app.callback()(lambda: None)
    app.command(name)(getattr(import_module(f"xmil.cli.{name}"), name))
    try:
        return int(app(arguments, standalone_mode=False) or 0)
    except (XmilError, ImportError) as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        return 2


def _model(folder: Path) -> list[str]:
    return ["--model", f"{folder}/m.safetensors", "--features", f"{folder}/features"]


def _evaluate(folder: Path) -> list[str]:
    few = ["--methods", "lrp,attention", "--modes", "remove", "--steps", "4", "--orders", "2"]
    return ["evaluate", *_model(folder), "--cohort", f"{folder}/cohort.csv", *few]


def _heatmap(folder: Path) -> list[str]:
    small = ["--size", "60", "--config", "top=1", "--pictures", "map", "--to", "png,geojson,csv"]
    return ["heatmap", f"{folder}/done_explain", *small]


def _bench(folder: Path) -> list[str]:
    few = ["--quick", "--only", "--task", "standard", "--repetitions", "1", "--methods", "gxi"]
    return ["bench", "--suite", "evidence", *few, "--model", f"{folder}/net.py:build"]


def _embed(folder: Path) -> list[str]:
    tiles = ["--tiles", f"{folder}/done_tile", "--slides", f"{folder}/slides"]
    return ["embed", *tiles, "--encoder", "benchmarks.killed.commands:network", "--device", "cpu"]


def _inside(folder: Path) -> list[str]:
    pictures = ["--slides", f"{folder}/slides", "--encoder", "benchmarks.killed.commands:network"]
    few = ["--patches", "1", "--map", "occlusion"]
    return ["inside", f"{folder}/done_pixels", *pictures, "--model", f"{folder}/m.safetensors", *few]


def _more(folder: Path) -> list[str]:
    return ["explain", *_model(folder), "--methods", "lrp,gxi", "--target", "1"]


def _insight(folder: Path) -> list[str]:
    inputs = ["--features", f"{folder}/features", "--cohort", f"{folder}/cohort.csv"]
    model = ["--model", f"{folder}/m.safetensors"]
    return ["insight", f"{folder}/done_explain", *inputs, *model, "--config", "concepts=2"]


COMMANDS: dict[str, Callable[[Path], list[str]]] = {
    "tile": lambda d: ["tile", f"{d}/slides", "--size", "64", "--slide-mpp", "0.5", "--min-tissue", "0"],
    "embed": _embed,
    "train": lambda d: ["train", f"{d}/config.toml"],
    "predict": lambda d: ["predict", *_model(d), "--cohort", f"{d}/cohort.csv", "--config", "draws=5"],
    "explain": lambda d: ["explain", *_model(d), "--methods", "lrp,attention", "--target", "1"],
    "explain more": _more,
    "explain again": lambda d: [*COMMANDS["explain"](d), "--restart"],
    "tile again": lambda d: [*COMMANDS["tile"](d), "--restart"],
    "embed again": lambda d: [*COMMANDS["embed"](d), "--restart"],
    "evaluate": _evaluate,
    "insight": _insight,
    "inside": _inside,
    "heatmap": _heatmap,
    "export": lambda d: ["export", f"{d}/done_explain", "--to", "qupath"],
    "bench": _bench,
    "export stores": lambda d: ["export", f"{d}/done_explain", "--to", "ome-zarr"],  # folders, not files
}
STARTS = {  # commands that go on, or start over, in a copy of a finished run
    "explain more": "done_explain",
    "explain again": "done_explain",
    "tile again": "done_tile",
    "embed again": "done_embed",
}
IN_PROCESSES = (  # take --workers
    "tile", "embed", "predict", "explain", "evaluate", "insight", "inside", "heatmap", *STARTS,
)  # fmt: skip


def contents(folder: Path) -> dict[str, str]:
    """Every result under its final name, by a digest of what it says; clocks and machines do not count."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file() and not _unfinished(path, folder))
    files = (path for path in found if not path.name.startswith(LOGS))
    return {str(path.relative_to(folder)): digest(path, folder) for path in files}


def _unfinished(path: Path, folder: Path) -> bool:
    """Whether a file is no result: the lock, or under a hidden name of its own or of its folder's."""
    return path.name == ".lock" or any(
        part.startswith(".") and part.endswith(".part") for part in path.relative_to(folder).parts
    )


def digest(path: Path, root: Path) -> str:
    """A digest of the content; raises where the file is not whole."""
    parts = {".parquet": _table, ".json": _json, ".csv": _rows, ".safetensors": _weights, ".h5": _bag}
    parts |= {".jsonl": _ledger, ".npz": _unit if path.parent.name == "units" else _bytes}
    made = hashlib.sha256()
    for part in parts.get(path.suffix, _bytes)(path):
        made.update(str(part).replace(str(root), "OUT").encode())
    return made.hexdigest()[:16]


def _bytes(path: Path) -> Iterator[Any]:
    yield path.read_bytes()


def _table(path: Path) -> Iterator[Any]:
    table = pq.read_table(path, partitioning=None)
    yield table.drop_columns([name for name in table.column_names if name in NEVER_EQUAL]).to_pydict()
    for key, value in sorted((table.schema.metadata or {}).items()):
        yield key
        yield _without(json.loads(value)) if value[:1] in (b"{", b"[") else value


def _json(path: Path) -> Iterator[Any]:
    yield _without(json.loads(path.read_text()))


def _ledger(path: Path) -> Iterator[Any]:
    """What a ledger says of files, items and runs; digests of files, which hold clocks, do not count."""
    ledger = read_ledger(path.parent)
    assert ledger is not None
    files = {name: entry.get("of") for name, entry in ledger.files.items()}
    yield sorted((name, str(item)) for name, item in files.items() if not Path(name).name.startswith(LOGS))
    yield sorted(ledger.runs)
    for item, record in sorted(ledger.records.items()):
        yield item
        yield _without(json.loads(json.dumps(record.as_dict(), default=plain_number)))


def _unit(path: Path) -> Iterator[Any]:
    """A unit of the benchmark without the times it measured."""
    from xmil.bench import Unit

    unit = Unit.read(path)
    yield from (unit.settings, _without(list(unit.facts.values())), list(unit.rows))
    yield [values.tobytes() for values in unit.values.values()]


def _without(value: Any) -> Any:
    """The same without what differs from run to run."""
    if isinstance(value, dict):
        return {key: _without(held) for key, held in value.items() if key not in NEVER_EQUAL}
    return [_without(held) for held in value] if isinstance(value, list) else value


def _rows(path: Path) -> Iterator[Any]:
    with path.open(newline="", encoding="utf-8") as stream:
        for row in csv.DictReader(stream):
            yield {key: value for key, value in row.items() if key not in NEVER_EQUAL}


def _weights(path: Path) -> Iterator[Any]:
    for name, value in sorted(read_weights(path).state.items()):
        yield name
        yield value.numpy().tobytes()


def _bag(path: Path) -> Iterator[Any]:
    header = xmil.open_bag(path)
    bag = header.read()
    yield from (bag.features.tobytes(), None if bag.coords is None else bag.coords.tolist(), bag.encoder)
