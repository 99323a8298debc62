"""Small made-up files under the names that the pages use, so that their blocks really run."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch import nn

import xmil
from tests.data import producers
from tests.models.test_checkpoints import CASES, in_family
from tests.slides.pyramids import textured, write_pyramid

N, D, EDGE, MPP = 40, 1024, 512, 0.25
CONFIG = """
out = "runs/made-up"
[model]
name = "attnmil"
dim = 8
[train]
epochs = 2
device = "cpu"
tensorboard = false
"""


class Net(nn.Module):
    """A network of a reader's own: mean pooling and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(D, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(b, n, d) to logits (b, c)."""
        return self.head(torch.relu(self.body(x)).mean(dim=1))


def made_up_bag(name: str, seed: int) -> xmil.Bag:
    """A bag on a grid of patches."""
    values = np.random.default_rng(seed).normal(size=(N, D)).astype(np.float32)
    corners = np.stack(np.divmod(np.arange(N), 8), axis=1)[:, ::-1] * EDGE
    return xmil.Bag(values, corners, patch_size=EDGE, mpp=MPP, slide_id=name, encoder="made_up")


def write_files(folder: Path, text: str) -> None:
    """Feature files, a cohort and checkpoints; slides and a run where the text speaks of them."""
    for place in ("features", "slides", "annotations"):
        (folder / place).mkdir()
    names = [f"s{i}" for i in range(12)]
    for i, name in enumerate(names):
        xmil.write_bag(made_up_bag(name, i), folder / "features" / f"{name}.h5")
    shutil.copy(folder / "features" / "s0.h5", folder / "slide.h5")
    rows = [
        f"{name},c{i // 2},{i % 2},{'train' if i < 6 else 'val' if i < 8 else 'test'}"
        for i, name in enumerate(names)
    ]
    (folder / "cohort.csv").write_text("slide_id,case_id,label,split\n" + "\n".join(rows) + "\n")
    model = xmil.create_model("attnmil", in_dim=D, n_classes=2, dim=8, attention_dim=4, seed=0)
    xmil.save_model(model, folder / "model.safetensors")
    _write_published(folder / "best_model.pt", n_classes=2)
    _write_published(folder / "published.pt", n_classes=4)
    (folder / "config.toml").write_text(CONFIG)
    _write_paper_tables(folder)
    pixels = textured([(0, 0, 900, 700)], (1200, 900))
    write_pyramid(folder / "slide.tif", pixels, mpp=MPP, compression="zlib")
    shutil.copytree(producers.tiatoolbox(folder / "made"), folder / "slide.zarr")
    with h5py.File(folder / "mytool.h5", "w") as file:
        file["my_features"] = made_up_bag("mytool", 0).features

    if ".svs" in text:
        for path in (folder / "slide.svs", folder / "slides" / "s1.svs"):
            _write_slide(path)
    if "run/slides" in text:
        (folder / "run" / "slides").mkdir(parents=True)
        e = xmil.explain(model, made_up_bag("s1", 1), method="lrp", target=1)
        e.save(folder / "run" / "slides" / "s1.parquet")


def _write_slide(path: Path) -> None:
    """A slide under the patches of a bag: tiled, two levels, with mpp."""
    import tifffile

    pixels = np.full((EDGE * N // 8, EDGE * 8, 3), 220, dtype=np.uint8)
    with tifffile.TiffWriter(path) as file:
        for scale in (1, 4):
            unit = {
                "resolution": (1e4 / (MPP * scale),) * 2,
                "resolutionunit": "CENTIMETER",
                "metadata": None,
            }
            level, kind = pixels[::scale, ::scale], {"tile": (256, 256), "photometric": "rgb"}
            file.write(level, compression="zlib", subfiletype=int(scale > 1), **kind, **unit)


def _write_published(path: Path, n_classes: int) -> None:
    """A checkpoint as the paper's code writes it."""
    name, params, rules, prefix, container = CASES["xmil-attnmil"]
    model = xmil.create_model(name, in_dim=D, n_classes=n_classes, seed=0, **params)
    torch.save({container: in_family(model, rules, prefix)}, path)


def _write_paper_tables(folder: Path) -> None:
    """The paper's metadata and a split by case."""
    (folder / "metadata").mkdir()
    (folder / "metadata" / "case_metadata.csv").write_text(",case_id,age\n0,c0,50\n1,c1,60\n")
    (folder / "metadata" / "slide_metadata.csv").write_text("slide_id,case_id\ns0,c0\ns1,c0\ns2,c1\n")
    (folder / "split.csv").write_text("case_id,label,subset\nc0,1,train\nc1,0,test\n")


def names(folder: Path) -> dict[str, Any]:
    """The names that a page may use without having made them."""
    paths = sorted((folder / "features").glob("*.h5"))
    return {
        "xmil": xmil,
        "np": np,
        "torch": torch,
        "model": xmil.load_model(folder / "model.safetensors"),
        "bag": xmil.read_bag(folder / "slide.h5"),
        "features": xmil.read_bag(folder / "slide.h5").features,
        "net": Net(),
        "paths": paths,
        "labels": [i % 2 for i in range(len(paths))],
        "probabilities": np.random.default_rng(0).dirichlet((1, 1), size=len(paths)),
        "other": xmil.explain(
            xmil.load_model(folder / "model.safetensors"), made_up_bag("s1", 1), method="gxi"
        ),
        "network": torch.nn.Flatten(),
        "x": 0,
        "y": 0,
        "case_ids": [f"c{i // 2}" for i in range(len(paths))],
    }
