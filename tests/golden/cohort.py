"""The cohort of the golden runs: features, slides, labels and models, all from seeds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import xmil

WIDTH, EDGE, COLUMNS, ROWS = 8, 32, 5, 4
SLIDES, CLASSES = 12, ("neg", "pos")
MODELS = {  # by name: the seed of the weights, and what `create_model` takes beside the width
    "attnmil": (10, {"name": "attnmil", "n_classes": 2, "class_names": CLASSES}),
    "attnmil_b": (9, {"name": "attnmil", "n_classes": 2, "class_names": CLASSES}),
    "transmil": (10, {"name": "transmil", "n_classes": 2, "class_names": CLASSES}),
    "addmil": (0, {"name": "addmil", "n_classes": 3}),
    "labels": (1, {"name": "attnmil", "n_classes": 2, "task": "multilabel", "class_names": ("er", "pr")}),
    "value": (2, {"name": "meanpool", "n_classes": 1, "task": "regression", "reference": 0.5}),
    "survival": (3, {"name": "attnmil", "n_classes": 3, "task": "survival", "time_bins": (4.0, 8.0)}),
    "cox": (4, {"name": "meanpool", "n_classes": 1, "task": "cox"}),
}
SIZES = {"addmil": {"hidden": 16}, "dsmil": {"query_dim": 8}}  # of models that have no `dim`
OWN = '''
import torch
from torch import nn


class Net(nn.Module):
    """Attention over normed instances, written without this package."""

    def __init__(self, width, classes):
        super().__init__()
        self.inside, self.norm = nn.Linear(width, 12), nn.LayerNorm(12)
        self.gate, self.weight = nn.Linear(12, 6), nn.Linear(6, 1)
        self.head = nn.Linear(12, classes)

    def forward(self, x):
        h = self.norm(nn.functional.gelu(self.inside(x)))
        a = torch.softmax(self.weight(torch.tanh(self.gate(h))), dim=-2)
        return self.head((a * h).sum(dim=-2))


def build():
    net = Net(8, 2).eval()
    with torch.no_grad():
        for k, weights in enumerate(net.parameters()):
            places = torch.arange(weights.numel()).view_as(weights)
            weights.copy_(2 * torch.sin(1.8 * places + k) / weights.shape[-1] ** 0.5)
    net.head.bias.data.zero_()
    return net
'''


def make_model(name: str) -> nn.Module:
    """A model of MODELS, with weights that do not depend on torch's own initialisation."""
    seed, spec = MODELS[name]
    return redraw(small_model(**spec), seed)


def small_model(name: str, **spec: Any) -> nn.Module:
    """A narrow model of a registered kind, as `create_model` makes it."""
    return xmil.create_model(name, in_dim=WIDTH, seed=0, **{**SIZES.get(name, {"dim": 16}), **spec})


def own_model() -> nn.Module:
    """A network that knows nothing of this package."""
    scope: dict[str, Any] = {}
    exec(OWN, scope)  # noqa: S102  # the text above, which the command line gets as a file
    return scope["build"]()


def redraw(model: nn.Module, seed: int) -> nn.Module:
    """The model with weights from NumPy, a little larger than usual so that its outputs spread."""
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for weights in model.parameters():
            spread = 1.5 / np.sqrt(weights.shape[-1]) if weights.ndim > 1 else 0.2
            drawn = (
                rng.normal(scale=spread, size=tuple(weights.shape)) + (weights.ndim == 1) * weights.numpy()
            )
            weights.copy_(torch.from_numpy(drawn.astype(np.float32)))
    return model


def draw_bag(seed: int, n: int = 7, *, width: int = WIDTH) -> xmil.Bag:
    """A small bag on a grid."""
    rng = np.random.default_rng([seed, n])
    coords = np.stack(np.divmod(np.arange(n), COLUMNS)[::-1], axis=1) * EDGE
    features = rng.normal(size=(n, width)).astype(np.float32)
    return xmil.Bag(features, coords=coords, patch_size=EDGE, mpp=0.5, slide_id=f"bag{seed}")


def make_cohort(folder: Path) -> Path:
    """Features, slides, annotations, cohort.csv, models/NAME.safetensors and own.py in a folder.

    A slide has two kinds of patches; the second is inked, speaks for "pos" and comes from the north more
    often. Some cases have two slides.
    """
    for name in ("features", "slides", "truth", "models"):
        (folder / name).mkdir(parents=True)
    rng = np.random.default_rng(0)
    side = rng.normal(size=WIDTH)
    kinds = np.stack([side, -side, rng.normal(size=WIDTH) - side])
    corners = np.array([[x * EDGE, y * EDGE] for y in range(ROWS) for x in range(COLUMNS)])
    lines = ["slide_id,case_id,label,er,pr,value,time,event,site,scanner,split"]
    for i in range(SLIDES):
        share = (0.15, 0.75)[i // 2 % 2] + 0.05 * (i % 2)
        kind = np.where(rng.random(len(corners)) < share, 0, rng.integers(1, 3, len(corners)))
        features = (kinds[kind] + rng.normal(size=(len(corners), WIDTH)) * 0.4).astype(np.float32)
        n = len(corners) - i % 3  # bags of several sizes
        _write_slide(folder, f"s{i:02}", features[:n], corners[:n], kind[:n], rng)
        case = i // 2 if i < 4 else i - 2  # two cases of two slides, eight of one
        label = CLASSES[i // 2 % 2 ^ (i == 7)]  # the model is wrong about one slide
        truth = (
            f"{label},{case % 2},{case // 2 % 2},{1.5 * case % 4:.2f},{1 + 7 * case % 12},{int(case % 3 > 0)}"
        )
        seen = f"{('south', 'north')[i // 2 % 2]},{'xyz'[i % 3]}"
        lines.append(f"s{i:02},c{case},{truth},{seen},{'test' if i < 8 else 'train'}")
    (folder / "cohort.csv").write_text("\n".join(lines) + "\n")
    (folder / "own.py").write_text(OWN)
    for name in MODELS:
        xmil.save_model(make_model(name), folder / "models" / f"{name}.safetensors")
    return folder


def _write_slide(
    folder: Path,
    name: str,
    features: np.ndarray,
    corners: np.ndarray,
    kind: np.ndarray,
    rng: np.random.Generator,
) -> None:
    import tifffile

    bag = xmil.Bag(features, coords=corners, patch_size=EDGE, mpp=0.5, slide_id=name)
    xmil.write_bag(bag, folder / "features" / f"{name}.h5")
    pixels = np.full((ROWS * EDGE, COLUMNS * EDGE, 3), 240, dtype=np.uint8)
    for (x, y), one in zip(corners, kind, strict=True):
        noise = rng.integers(-20, 20, (EDGE, EDGE, 1))
        pixels[y : y + EDGE, x : x + EDGE] = np.clip(np.array([200, 120, 170]) + noise, 0, 255)
        if one == 0:
            pixels[y + 4 : y + 20, x + 4 : x + 28] = (30, 60, 190)
    scale = {"resolution": (2e4, 2e4), "resolutionunit": "CENTIMETER", "metadata": None}
    tifffile.imwrite(folder / "slides" / f"{name}.tif", pixels, tile=(64, 64), photometric="rgb", **scale)
    square = [[0, 0], [3 * EDGE, 0], [3 * EDGE, 2 * EDGE], [0, 2 * EDGE], [0, 0]]
    tumour = {
        "type": "Feature",
        "geometry": {"type": "Polygon", "coordinates": [square]},
        "properties": {"objectType": "annotation", "classification": {"name": "Tumor"}},
    }
    (folder / "truth" / f"{name}.geojson").write_text(json.dumps([tumour]))
