"""Features of a second encoder, MobileNetV2 (1,280 wide), for digits and for the nuclei of the colon images.

    python -m benchmarks.better_rule.extractor --weights mobilenet_v2-b0353104.pth --digits digits.npz \
        --colon COLON --out DIR

`digits.npz` holds images `train`, `test` (m, 28, 28) uint8 and digits `train_y`, `test_y`. DIR gets
`mobilenet/`, a folder that `--data` takes, and `colon_mobilenet.npz`, which `--colon` takes.
Needs torchvision.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.colon.features import MEAN, STD, patches
from xmil.bench import nuclei

EDGE, BATCH = 96, 512


class Pooled(nn.Module):
    """The last feature map of MobileNetV2, averaged over its places."""

    def __init__(self, weights: Path) -> None:
        super().__init__()
        from torchvision.models import mobilenet_v2

        net = mobilenet_v2(weights=None)
        net.load_state_dict(torch.load(weights, weights_only=True, map_location="cpu"))
        self.features = net.features

    def forward(self, x: Tensor) -> Tensor:
        return self.features(x).mean(dim=(2, 3))  # type: ignore[no-any-return]


@torch.no_grad()
def embed(net: nn.Module, images: Tensor, device: str) -> np.ndarray[Any, Any]:
    """Features (m, 1280) float16 of images as the encoder takes them."""
    return torch.cat([net(part.to(device)).half().cpu() for part in images.split(BATCH)]).numpy()


def digit_images(images: np.ndarray[Any, Any]) -> Tensor:
    """Grey images (m, 28, 28) as the encoder takes them."""
    grey = torch.from_numpy(images).float().div(255).unsqueeze(1)
    grey = F.interpolate(grey, size=(EDGE, EDGE), mode="bilinear", align_corners=False)
    return (grey - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)


def digits(net: nn.Module, source: Path, out: Path, device: str) -> None:
    """Write the features of the digits."""
    held = np.load(source)
    out.mkdir(parents=True, exist_ok=True)
    for part in ("train", "test"):
        images = np.array_split(held[part], max(1, len(held[part]) // 2000))
        x = np.concatenate([embed(net, digit_images(some), device) for some in images])
        np.savez(out / f"mnist_mobilenet_{part}.npz", x=x, y=held[f"{part}_y"])


def colon(net: nn.Module, folder: Path, out: Path, device: str) -> None:
    """Write the features of the nuclei."""
    parts: dict[str, list[np.ndarray[Any, Any]]] = {"features": [], "cells": [], "xy0": [], "image": []}
    tables = nuclei(folder)
    for i, (name, (centres, cells)) in enumerate(tables.items()):
        parts["features"].append(embed(net, patches(folder / f"{name}.jpg", centres), device))
        parts["cells"].append(cells)
        parts["xy0"].append(np.rint(centres).astype(np.int64))
        parts["image"].append(np.full(len(cells), i))
    arrays = {key: np.concatenate(value) for key, value in parts.items()}
    np.savez(out, **arrays, names=np.array(list(tables)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--digits", type=Path)
    parser.add_argument("--colon", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    net = Pooled(args.weights).eval().to(args.device)
    if args.digits:
        digits(net, args.digits, args.out / "mobilenet", args.device)
    if args.colon:
        colon(net, args.colon, args.out / "colon_mobilenet.npz", args.device)


if __name__ == "__main__":
    main()
