"""Cohorts of 100 colon bags with a planted cause, or clean: halves of the images in patches, encoded.

One half of each image trains the model, the other half is looked at. The encoder is the ImageNet ResNet18 of
`benchmarks.colon.features`, cut off behind its third stage, as CLAM cuts its ResNet50.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from benchmarks.colon.bags import EPITHELIAL, INFLAMMATORY
from benchmarks.colon.features import MEAN, STD, encoder
from xmil.bench import nuclei
from xmil.bench.tissue import statistics
from xmil.insights import LIGHT
from xmil.nn import ResNet

SIDE, PATCH, EDGE = 250, 25, 64  # pixels of an image as it is kept, of a patch, and of what the encoder sees
ACROSS, DOWN = SIDE // 2 // PATCH, SIDE // PATCH
INKS = {"blue ink": (40, 60, 170), "green ink": (30, 120, 70), "black ink": (25, 25, 30)}
TINTS = ((1.0, 0.9, 1.0), (1.0, 1.0, 0.88), (0.9, 1.0, 1.0), (0.88, 0.95, 1.0))
SPREAD = 3.0  # of optical densities, which lie close together
Pictures = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Halves:
    """Half images (images, 2, 250, 125, 3), whether a task's class lies in each, and the images' names."""

    pixels: Pictures
    labels: dict[str, npt.NDArray[np.int64]]  # (images, 2)
    names: tuple[str, ...]


@dataclass(frozen=True)
class Planting:
    """What is put on most slides of one class: a tint of the light, or a stroke of a pen."""

    kind: str
    cause: tuple[str, ...]  # what insight may call it
    target: int
    share: float  # of that class's slides; one in twenty of the others has it as well
    colour: tuple[float, ...]


def keep(folder: Path, out: Path) -> None:
    """The images at half the resolution, and a table of what lies in their halves."""
    out.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[list[int]]] = {}
    for name, (centres, cells) in nuclei(folder).items():
        picture = Image.open(folder / f"{name}.jpg").convert("RGB").resize((SIDE, SIDE), Image.Resampling.BOX)
        picture.save(out / f"{name}.jpg", quality=95)
        right = centres[:, 0] >= SIDE
        counts = [
            [int(((cells == c) & (right == s)).sum()) for s in (0, 1)] for c in (EPITHELIAL, INFLAMMATORY)
        ]
        found[name] = counts
    (out / "halves.json").write_text(json.dumps(found))


def read_halves(folder: Path) -> Halves:
    """What `keep` wrote."""
    counts = json.loads((folder / "halves.json").read_text())
    whole = np.stack([np.asarray(Image.open(folder / f"{name}.jpg")) for name in counts])
    pixels = whole.reshape(len(whole), SIDE, 2, SIDE // 2, 3).transpose(0, 2, 1, 3, 4)
    cells = np.array(list(counts.values()))  # (images, cell types, halves)
    labels = {"epithelial": cells[:, 0] > 0, "balance": cells[:, 0] > cells[:, 1]}
    return Halves(pixels, {task: held.astype(np.int64) for task, held in labels.items()}, tuple(counts))


def keep_encoder(wheel: Path, stats: Path, out: Path) -> None:
    """The first three stages of the encoder, in half precision."""
    state = encoder(wheel, stats).state_dict()
    torch.save({k: v.half() for k, v in state.items() if not k.startswith("layer4.")}, out)


def read_encoder(path: Path, device: str = "cpu") -> ResNet:
    """What `keep_encoder` wrote; its last stage passes everything on."""
    net = ResNet("resnet18")
    net.layer4 = torch.nn.Sequential()
    held = torch.load(path, weights_only=True, map_location="cpu")
    net.load_state_dict({key: value.float() for key, value in held.items()})
    return net.eval().to(device)


def planting(kind: str, rng: np.random.Generator) -> Planting | None:
    """A draw of what is planted; None for a clean cohort."""
    if kind == "clean":
        return None
    target, share = int(rng.integers(2)), float(rng.uniform(0.75, 0.95))
    if kind == "tint":
        colour = TINTS[int(rng.integers(len(TINTS)))]
        return Planting(kind, (LIGHT,), target, share, colour)
    name = sorted(INKS)[int(rng.integers(len(INKS)))]
    return Planting(kind, (name,), target, share, INKS[name])


def plant(
    pictures: Pictures, labels: npt.NDArray[np.int64], planted: Planting | None, rng: np.random.Generator
) -> Pictures:
    """The pictures (m, h, w, 3) with the planting on most of its class."""
    out = pictures.copy()
    if planted is None:
        return out
    chance = np.where(labels == planted.target, planted.share, 0.05)
    for i in np.flatnonzero(rng.random(len(out)) < chance):
        out[i] = tinted(out[i], planted.colour) if planted.kind == "tint" else penned(out[i], planted, rng)
    return out


def tinted(picture: Pictures, colour: tuple[float, ...]) -> Pictures:
    """The picture under a coloured light."""
    return np.clip(picture * np.asarray(colour), 0, 255).astype(np.uint8)


def penned(picture: Pictures, planted: Planting, rng: np.random.Generator) -> Pictures:
    """The picture with a stroke of a pen: a wavy line from edge to edge."""
    height, width = picture.shape[:2]
    y = np.arange(height)
    middle = rng.uniform(0.2, 0.8) * width + rng.uniform(-0.4, 0.4) * (y - height / 2)
    middle = middle + 4 * np.sin(y / rng.uniform(12, 30) + rng.uniform(0, 6))
    near = np.abs(np.arange(width)[None, :] - middle[:, None]) < rng.uniform(4, 7)
    out = picture.astype(np.float64)
    out[near] = 0.15 * out[near] + 0.85 * np.asarray(planted.colour)
    return np.clip(out, 0, 255).astype(np.uint8)


def corners() -> npt.NDArray[np.int64]:
    """Corners (50, 2) of the patches of a half image."""
    return np.array([[x * PATCH, y * PATCH] for y in range(DOWN) for x in range(ACROSS)])


@torch.no_grad()
def encode(net: ResNet | None, pictures: Pictures, device: str = "cpu", *, batch: int = 1000) -> Tensor:
    """Features (m, 50, d) of the pictures' patches: 256 of the encoder, or statistics of their colours."""
    if net is None:
        rows = [picture[y : y + PATCH, x : x + PATCH] for picture in pictures for x, y in corners()]
        described = torch.from_numpy(SPREAD * statistics(np.stack(rows)))
        return described.view(len(pictures), DOWN * ACROSS, -1)
    x = torch.from_numpy(pictures).to(device).permute(0, 3, 1, 2).float() / 255
    x = (x - torch.tensor(MEAN, device=device).view(3, 1, 1)) / torch.tensor(STD, device=device).view(3, 1, 1)
    cut = x.unfold(2, PATCH, PATCH).unfold(3, PATCH, PATCH)  # (m, 3, down, across, p, p)
    flat = cut.permute(0, 2, 3, 1, 4, 5).reshape(-1, 3, PATCH, PATCH)
    parts = [
        net(F.interpolate(part, size=(EDGE, EDGE), mode="bilinear", align_corners=False))
        for part in flat.split(batch)
    ]
    return torch.cat(parts).view(len(pictures), DOWN * ACROSS, -1).cpu()
