"""Every addition of the package in use, in a process that knows it through entry points alone.

python -m tests.plugins.walk FOLDER writes FOLDER/found.json
"""

from __future__ import annotations

import csv
import io
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import h5py
import numpy as np

import xmil
from xmil.cli._app import run
from xmil.encoders.load import load_encoder
from xmil.storage import read_explanations
from xmil.viewer.collection import Collection
from xmil.viewer.features import CaseBags
from xmil.viewer.whatif import WhatIf

NAMES, N, D = ("low", "middle", "high"), 12, 4


def walk(folder: Path) -> dict[str, Any]:
    """Train, explain, predict, draw, view and ask; each command must end well."""
    _write_cohort(folder)
    model = folder / "out" / "model" / "model.safetensors"
    paths = ["--model", f"{model}", "--features", f"{folder}/features", "--cohort", f"{folder}/cohort.csv"]
    explain = ["explain", *paths, "--methods", "lrp,lengths", "--target", "all", "--label", "grade"]
    draw = ["heatmap", f"{folder}/run", "--out", f"{folder}/maps", "--pictures", "panel"]
    done = {
        "train": run(["train", str(folder / "config.toml")]),
        "explain": run([*explain, "--out", f"{folder}/run"]),
        "predict": run(
            ["predict", *paths, "--label", "grade", "--out", f"{folder}/said", "--config", "draws=5"]
        ),
        "heatmap": run([*draw, "--to", "png,best_box"]),
    }
    said = io.StringIO()
    with redirect_stdout(said):
        done["command"] = run(["extra-count", f"{folder}/run"])
    shown = Collection([folder / "run"], features=[folder / "features"])
    asked = WhatIf(shown, CaseBags(shown), [model]).ask(0, {"run": 0, "remove": [0]})
    bag = xmil.read_bag(folder / "features" / "s0.h5")
    e = xmil.explain(xmil.load_model(model), bag, target="high")
    view = shown.describe(0)["sets"][0]
    stored = read_explanations(folder / "run" / "slides" / "s0.parquet")
    return {
        "done": done,
        "printed": said.getvalue(),
        "slides": _table(folder / "run" / "slides.csv"),
        "predictions": _table(folder / "said" / "predictions.csv"),
        "metrics": json.loads((folder / "said" / "metrics.json").read_text())["metrics"],
        "trained": _table(folder / "out" / "predictions.csv"),
        "columns": sorted(x.column for x in stored),
        "view": {key: view[key] for key in ("classes", "probabilities", "sides", "columns")},
        "whatif": asked,
        "best": json.loads((folder / "maps" / "best_box" / "s0.best.json").read_text()),
        "drawn": sorted(path.name for path in (folder / "maps" / "panel").iterdir()),
        "bag": [bag.format, len(bag), bag.patch_size],
        "audit": e.audit.as_dict() if e.audit else {},
        "logits": e.logits.tolist(),
        "encoded": _encoded(),
        "listed": [xmil.list_models(), xmil.list_methods()],
    }


def _encoded() -> list[list[float]]:
    encoder = load_encoder("mean_colour")
    patch = encoder.transform(np.full((8, 8, 3), 51, np.uint8))
    return np.asarray(encoder(patch.unsqueeze(0))).tolist()


def _write_cohort(folder: Path) -> None:
    """Slides in the package's own layout, whose grade is in their first feature."""
    rng = np.random.default_rng(0)
    (folder / "features").mkdir()
    lines = ["slide_id,case_id,grade,split"]
    for i in range(N):
        x = rng.normal(size=(6, D)).astype(np.float32)
        x[:, 0] += 2 * (i % 3)
        with h5py.File(folder / "features" / f"s{i}.h5", "w") as file:
            file["extra_features"] = x
            file["xy"] = 64 * np.stack(np.divmod(np.arange(6), 3), axis=1)
        lines.append(f"s{i},c{i},{NAMES[i % 3]},{('train', 'val', 'test')[(i // 3) % 3]}")
    (folder / "cohort.csv").write_text("\n".join(lines) + "\n")
    (folder / "config.toml").write_text(
        f"""task = "grades"
out = "{folder}/out"
[data]
features = "{folder}/features"
cohort = "{folder}/cohort.csv"
label = "grade"
class_names = {json.dumps(NAMES)}
[model]
name = "sincpool"
[optim]
lr = 0.05
[train]
epochs = 3
batch = 4
tensorboard = false
device = "cpu"
"""
    )


def _table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


if __name__ == "__main__":
    place = Path(sys.argv[1])
    (place / "found.json").write_text(json.dumps(walk(place)))
