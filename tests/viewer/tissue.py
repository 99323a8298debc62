"""Drawn tissue to look at: stroma, nests of dark nuclei, and a run that explains them.

python -m tests.viewer.tissue FOLDER
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tifffile
import torch
from scipy import ndimage

import xmil
from tests.viewer.make_run import NAMES, Made, _explain_all
from xmil.core.bag import Bag
from xmil.models import save_model

Floats = npt.NDArray[np.float64]
EDGE, DIM, SIZE = 128, 8, (3072, 4608)  # patch edge, width of the features, height and width


def _noise(rng: np.random.Generator, shape: tuple[int, int], scale: float) -> Floats:
    """Smooth noise of unit variance with blobs of about `scale` pixels."""
    step = max(1, int(scale / 8))
    small = rng.normal(size=(shape[0] // step + 8, shape[1] // step + 8))
    smooth = ndimage.gaussian_filter(small, scale / step / 2)
    wide = ndimage.zoom(smooth, step, order=1)[: shape[0], : shape[1]]
    return np.asarray((wide - wide.mean()) / wide.std())


def _nuclei(rng: np.random.Generator, density: Floats, radius: float) -> Floats:
    """A mask of round nuclei, as many as the density says for each pixel."""
    seeds = rng.random(density.shape) < density
    distance = ndimage.distance_transform_edt(~seeds)
    ragged = radius * (1 + 0.25 * _noise(rng, density.shape, 12))
    return np.asarray(np.clip(ragged - distance + 0.5, 0, 1))


def draw_tissue(
    seed: int, *, tumour: bool, size: tuple[int, int] = SIZE
) -> tuple[npt.NDArray[np.uint8], Floats, Floats]:
    """The picture (h, w, 3), where tissue is, and how much of it is tumour (both h, w)."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[: size[0], : size[1]]
    oval = 1.05 - np.hypot((x - size[1] / 2) / (size[1] * 0.46), (y - size[0] / 2) / (size[0] * 0.45))
    tissue = ndimage.gaussian_filter((oval + 0.16 * _noise(rng, size, 700) > 0).astype(float), 3)
    wide = _noise(rng, size, 1100) + 0.35 * _noise(rng, size, 240)
    nests = np.clip((wide - (0.35 if tumour else 2.4)) * 4, 0, 1) * tissue
    fibres = _noise(rng, size, 60) + 0.6 * _noise(rng, size, 14)
    lumen = np.clip((_noise(rng, size, 110) - 1.55) * 6, 0, 1) * tissue * (1 - nests)
    dots = _nuclei(rng, 0.0006 * tissue * (1 - nests), 4.2)
    dots = np.maximum(dots, _nuclei(rng, 0.0035 * nests, 5.6))
    pink = np.array([232.0, 178.0, 205.0]) + np.array([9.0, 15.0, 10.0]) * fibres[..., None]
    nest = np.array([202.0, 150.0, 198.0]) + 8.0 * fibres[..., None]
    colour = pink + (nest - pink) * nests[..., None]
    colour += (np.array([88.0, 58.0, 132.0]) - colour) * (0.86 * dots)[..., None]
    ground = np.array([246.0, 244.0, 246.0])
    colour = ground + (colour - ground) * (tissue * (1 - 0.92 * lumen))[..., None]
    return np.clip(colour + rng.normal(scale=2.5, size=colour.shape), 0, 255).astype(np.uint8), tissue, nests


def _bag(name: str, tissue: Floats, nests: Floats, seed: int) -> Bag:
    """Patches on tissue with features that know the share of tumour."""
    rows, columns = SIZE[0] // EDGE, SIZE[1] // EDGE
    mean = lambda field: field.reshape(rows, EDGE, columns, EDGE).mean(axis=(1, 3)).ravel()  # noqa: E731
    kept = np.flatnonzero(mean(tissue) > 0.5)
    y, x = np.divmod(kept, columns)
    features = np.random.default_rng(seed).normal(scale=0.35, size=(len(kept), DIM)).astype(np.float32)
    features[:, 0] += 3.0 * mean(nests)[kept] - 0.8
    coords = np.stack([x, y], axis=1) * EDGE
    return Bag(features, coords=coords, patch_size=EDGE, mpp=0.5, slide_id=name)


def write_tiff(path: Path, level: npt.NDArray[np.uint8], *, mpp: float = 0.5) -> None:
    """A pyramid of five levels."""
    with tifffile.TiffWriter(path) as file:
        for step in range(5):
            file.write(
                np.ascontiguousarray(level),
                tile=(256, 256),
                photometric="rgb",
                compression="zlib",
                subfiletype=1 if step else 0,
                resolution=(10_000 / mpp, 10_000 / mpp) if step == 0 else None,
                resolutionunit="CENTIMETER",
                metadata=None,
            )
            level = (
                level.reshape(level.shape[0] // 2, 2, level.shape[1] // 2, 2, 3)
                .mean(axis=(1, 3))
                .astype(np.uint8)
            )


def _fit(net: Any, bags: list[Bag], labels: list[int]) -> None:
    optimiser = torch.optim.Adam(net.parameters(), lr=0.002)
    for _ in range(12):
        for bag, label in zip(bags, labels, strict=True):
            optimiser.zero_grad()
            x = torch.from_numpy(bag.features).unsqueeze(0)
            torch.nn.functional.cross_entropy(net(x), torch.tensor([label])).backward()
            optimiser.step()
    net.eval()


def make_tissue_run(folder: Path, *, slides: int = 4, models: tuple[str, ...] = ("attnmil",)) -> Made:
    """Slides of drawn tissue with features, a model and a run of its evidence."""
    names = [f"biopsy-{i + 1:02d}" for i in range(slides)]
    runs = [folder / f"run-{name}" for name in models]
    files = [folder / "models" / f"{name}.safetensors" for name in models]
    made = Made(runs, files, folder / "slides", folder / "features", names)
    for place in (*runs, made.slides, made.features, folder / "models"):
        place.mkdir(parents=True, exist_ok=True)
    bags = []
    for i, name in enumerate(names):
        picture, tissue, nests = draw_tissue(i, tumour=bool(i % 2))
        write_tiff(made.slides / f"{name}.tif", picture)
        bags.append(_bag(name, tissue, nests, i))
        xmil.write_bag(bags[-1], made.features / f"{name}.h5")
    for name, run, file in zip(models, runs, files, strict=True):
        sizes = {"dim": 16, "heads": 2} if name == "transmil" else {}
        net = xmil.create_model(name, in_dim=DIM, n_classes=2, class_names=NAMES, seed=1, **sizes)
        _fit(net, bags, [i % 2 for i in range(slides)])
        save_model(net, file)
        _explain_all(net, bags, run, file, made.features, certificates=True)
    return made


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    make_tissue_run(parser.parse_args().folder)
