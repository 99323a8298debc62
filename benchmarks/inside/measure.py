"""Every map on every telling tile of the test images, and the tokens under redrawn weights."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import numpy as np
import torch
import torch.nn.functional as F
from scipy.ndimage import gaussian_filter
from scipy.stats import spearmanr
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

import xmil
from benchmarks.inside.curves import FILLS, curves, fills_of
from benchmarks.inside.maps import BACKWARD, Variant, counted, random_map
from benchmarks.inside.pictures import (
    SEEN,
    TILE,
    TiledImage,
    features_of,
    folds,
    picture,
    seen,
    telling_tiles,
)
from xmil.core.errors import UnsupportedError
from xmil.evaluate import redrawn
from xmil.methods import EncoderNetwork, MapSettings, Tile, TileMap, map_tile
from xmil.network import frozen

SMOOTH = 3.0  # pixels of the tile, for maps at pixels
REDRAWN = {"turned": MapSettings(), "turned plain": MapSettings()}  # maps made again under redrawn weights
FEW = 12  # tiles of an image that a redrawn encoder encodes
CURVED = (
    "tokens",
    "turned",
    "turned plain",
    "dark",
    "lrp turned",
    "occlusion",
    "shifted",
    "random",
    "scattered",
)
Row = dict[str, object]
Truth = tuple[
    np.ndarray, np.ndarray, Tensor
]  # centres of nuclei, epithelial or not, the tile that lends tissue


def fit(images: list[TiledImage], *, seed: int, epochs: int = 25) -> nn.Module:
    """AttnMIL of width 64, one bag per step, dropout of features 0.2."""
    torch.manual_seed(seed)
    width = images[0].features.shape[1]
    model = xmil.create_model("attnmil", in_dim=width, n_classes=2, dim=64, attention_dim=32)
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


def margins(model: nn.Module, bags: Tensor) -> np.ndarray:
    """Logit of the class minus the other's, for bags (b, n, d)."""
    with torch.no_grad():
        logits = model(bags)
    return (logits[:, 1] - logits[:, 0]).numpy()


@dataclass(frozen=True)
class Scope:
    """What is measured: maps (all, where empty), tiles per image, curves or not, redrawn networks, fills."""

    maps: frozenset[str]
    most: int
    curved: bool
    draws: int
    fills: tuple[str, ...] = FILLS


@dataclass(frozen=True, eq=False)
class Seat:
    """One image under one model: what each of its tiles' features is worth; `ordinary` is the mean patch."""

    data: Path
    image: TiledImage
    model: nn.Module
    net: nn.Module
    device: str
    scope: Scope
    variants: Sequence[Variant]
    ordinary: Tensor | None = None

    def explained(self, features: Tensor, model: nn.Module) -> tuple[np.ndarray, Tensor]:
        """Scores (n,) and weights per unit of feature (n, d)."""
        e = xmil.explain(model, features, method="lrp", target=1, preset="exact", feature_level=True)
        tiny = features.abs() <= 1e-7
        g = torch.where(
            tiny, 0.0, torch.from_numpy(np.asarray(e.relevance)) / features.masked_fill(tiny, 1.0)
        )
        return e.scores, g

    def tile(self, whole: Tensor, row: int, g: Tensor, ordinary: Tensor | None = None) -> Tile:
        """A tile of the image as the encoder sees it."""
        mean = self.ordinary if ordinary is None else ordinary

        def moved(dx: float, dy: float) -> Tensor:
            corner = self.image.corners[row] + np.rint(np.array([dx, dy]) * TILE).astype(int)
            return seen(whole, corner).to(self.device)

        pixels = seen(whole, self.image.corners[row]).to(self.device)
        return Tile(pixels, g.to(self.device), moved, None if mean is None else mean.to(self.device))

    def lender(self, whole: Tensor, row: int, scores: np.ndarray) -> Tensor:
        """The tile that speaks least for the class, of those that share no pixel with this one."""
        apart = np.abs(self.image.corners - self.image.corners[row]).max(axis=1) >= TILE
        lowest = np.where(apart, scores, np.inf).argmin()
        return seen(whole, self.image.corners[lowest]).to(self.device)

    def rows(self) -> list[Row]:
        """Rows of the image: every map on its telling tiles, then the redrawn networks."""
        scores, g = self.explained(self.image.features, self.model)
        telling = list(telling_tiles(self.image, scores, most=self.scope.most))
        if not telling:
            return []
        whole = picture(self.data, self.image.name).to(self.device)
        network = EncoderNetwork(self.net, self.net)
        found: list[Row] = []
        for row, centres, positive in telling:
            tile = self.tile(whole, row, g[row])
            other = self.lender(whole, row, scores)
            about = {"image": self.image.name, "tile": row, "score": float(scores[row])}
            for variant in self.variants:
                told = self._measured(
                    network, tile, variant, row, float(scores[row]), (centres, positive, other)
                )
                found.append({**about, "map": variant[0], "variant": variant[1], **told})
            told = self._judged("dark", tile, darkness(tile), row, (centres, positive, other))
            found.append({**about, "map": "dark", "variant": "", **told, "passes": 0, "seconds": 0.0})
            for name, edge in (("random", 6), ("scattered", 24)):
                noise = random_map(crc32(f"{self.image.name} {row}".encode()), edge)
                told = self._judged(name, tile, noise, row, (centres, positive, other))
                found.append({**about, "map": name, "variant": "", **told, "passes": 0, "seconds": 0.0})
        return found + (self._redrawn(whole, telling[0][0], g, network) if self.scope.draws else [])

    def _measured(
        self,
        network: EncoderNetwork,
        tile: Tile,
        variant: Variant,
        row: int,
        score: float,
        truth: Truth,
    ) -> Row:
        _, _, method, settings = variant
        begin = time.perf_counter()
        try:
            copies = [copy.module for copy in network.copies.values()]
            with frozen(self.net), counted(self.net, *copies) as forward:
                made = map_tile(method, network, tile, settings)
                values = made.values.detach().float().cpu()
        except UnsupportedError as error:
            return {"auroc": 0.5, "refused": str(error)[:80]}
        spent = time.perf_counter() - begin
        viewed = settings.views + bool(settings.reach) if "turned" in method else 0
        told = self._judged(variant[0], tile, values, row, truth)
        backward = viewed or BACKWARD.get(method, 0)
        more = {"passes": sum(forward) + 2 * backward, "seconds": spent, **account(made, score)}
        return {**told, **more}

    def _judged(self, name: str, tile: Tile, values: Tensor, row: int, truth: Truth) -> Row:
        drawn, (centres, positive, other) = upsampled(values), truth
        found: Row = {"auroc": at_nuclei(drawn, centres, positive)}
        if self.scope.curved and name in CURVED:
            seed = crc32(f"{self.image.name} {row}".encode())
            fills = fills_of(tile.pixels, other, self.scope.fills)
            found |= curves(
                tile.pixels, drawn, lambda pictures: self._scores(pictures, tile, row), fills=fills, seed=seed
            )
        return found

    def _scores(self, pictures: Tensor, tile: Tile, row: int) -> dict[str, np.ndarray]:
        """The margin of the whole image's prediction, and the patch's score g . f over its present value."""
        features = features_of(self.net, torch.cat([tile.pixels, pictures]), self.device)
        own = (features @ tile.weights.cpu()).numpy()
        bags = self.image.features.expand(len(pictures), -1, -1).clone()
        bags[:, row] = features[1:]
        return {"slide": margins(self.model, bags), "patch": own[1:] / own[0]}

    def _redrawn(self, whole: Tensor, row: int, g: Tensor, network: EncoderNetwork) -> list[Row]:
        """Rank correlation of the strongest tile's maps with those under redrawn weights, all made anew."""
        maps = {name: self._made(network, self.tile(whole, row, g[row]), name) for name in REDRAWN}
        few = self._few(row)  # what a tile's features are worth in AttnMIL depends on the others by a factor
        tiles, dark = seen(whole, self.image.corners[few]), darkness(self.tile(whole, row, g[row]))
        found: list[Row] = []
        for draw in range(self.scope.draws):
            seed = crc32(f"{self.image.name} {draw}".encode()) % 2**31
            other = redrawn(self.net, seed=seed).eval()
            features = features_of(other, tiles, self.device)
            cases = {"encoder": (other, features, self.model)}
            cases["model"] = (self.net, self.image.features[few], redrawn(self.model, seed=seed).eval())
            for what, (net, given, model) in cases.items():
                _, worth = self.explained(given, model)
                used = EncoderNetwork(net, net, layers=network.layers)
                mean = None if net is self.net or self.ordinary is None else given.mean(dim=0)
                for name, values in maps.items():
                    drawn = self._made(used, self.tile(whole, row, worth[0], mean), name)
                    about = {"image": self.image.name, "tile": row, "map": f"redrawn {what}"}
                    told = {**_agreement(values, drawn), "dark": _agreement(dark, drawn)["spearman"]}
                    found.append({**about, "variant": name, **told})
        return found

    def _few(self, row: int) -> list[int]:
        """A tile and some others of its image."""
        rng = np.random.default_rng(crc32(self.image.name.encode()))
        return [row, *rng.choice(len(self.image.corners), FEW - 1, replace=False).tolist()]

    def _made(self, network: EncoderNetwork, tile: Tile, name: str) -> Tensor | None:
        try:
            with frozen(network.traceable()):
                return map_tile(name, network, tile, REDRAWN[name]).values.detach().float().cpu()
        except UnsupportedError:
            return None


def _agreement(values: Tensor | None, drawn: Tensor | None) -> Row:
    """The rank correlation of two maps; zero, and said, where there is none."""
    if values is None or drawn is None or float(drawn.std()) == 0 or not torch.isfinite(drawn).all():
        return {"spearman": 0.0, "refused": "no map"}
    return {"spearman": float(spearmanr(values.flatten(), drawn.flatten()).statistic)}


def darkness(tile: Tile) -> Tensor:
    """How dark the tile is, on the grid of the tokens: what a map must know more than."""
    return -F.avg_pool2d(tile.pixels.mean(dim=1), SEEN // 6)[0].cpu()


def account(made: TileMap, score: float) -> Row:
    """How far map, constant and rest are from the patch's score, and the constant's size, in shares of it."""
    total = float(made.values.double().sum()) + made.constant
    return {"error": abs(total - score) / abs(score), "constant": made.constant / score}


def upsampled(values: Tensor) -> np.ndarray:
    """A map at the tile's pixels (TILE, TILE); maps at pixels are smoothed."""
    if values.shape[0] == SEEN:
        small = F.avg_pool2d(values[None, None], SEEN // TILE)[0, 0].numpy()
        return np.asarray(gaussian_filter(small, SMOOTH))
    drawn = F.interpolate(values[None, None], size=(TILE, TILE), mode="bilinear", align_corners=False)
    return drawn[0, 0].numpy()


def at_nuclei(drawn: np.ndarray, centres: np.ndarray, positive: np.ndarray) -> float:
    """AUROC of the map's value at the nuclei, epithelial against others."""
    x, y = np.clip(np.rint(centres).astype(int), 0, TILE - 1).T
    return float(roc_auc_score(positive, drawn[y, x]))


def fold_model(images: list[TiledImage], fold: int, seed: int) -> tuple[nn.Module, np.ndarray, list[Row]]:
    """The model of a fold, its test rows, and the margins of the test bags."""
    test = folds(images)[fold]
    model = fit([image for i, image in enumerate(images) if i not in set(test)], seed=fold + 100 * seed)
    told: list[Row] = []
    for i in test:
        margin = float(margins(model, images[i].features.unsqueeze(0))[0])
        told.append({"image": images[i].name, "map": "bag", "score": margin, "auroc": images[i].label})
    return model, test, told
