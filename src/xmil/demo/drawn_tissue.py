"""Drawn sections of tissue: stroma, nests of tumour nuclei, lymphocytes, and now and then a pen mark.

Tumour nuclei are large, pale and crowded, with a nucleolus; lymphocytes are small, round and dark, and lie in
sections with and without tumour. Every nucleus is known by kind and place.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Image = npt.NDArray[np.uint8]

MPP = 0.5  # microns per pixel
SIZE = (1024, 1280)  # rows, columns
TUMOUR, LYMPHOCYTE, STROMA = "tumour", "inflammatory", "fibroblast"
GLASS, EOSIN, NEST = (244.0, 243.0, 245.0), (231.0, 176.0, 204.0), (214.0, 165.0, 205.0)
INKS = ((24, 60, 150), (20, 110, 70), (35, 35, 38))  # blue, green, black
SPACING = {TUMOUR: 25, LYMPHOCYTE: 15, STROMA: 36}  # pixels between nuclei where they are densest


@dataclass(frozen=True)
class Nuclei:
    """Nuclei of one kind: centres (n, 2) in pixels, and the direction of each."""

    kind: str
    xy: Floats
    angles: Floats


@dataclass(frozen=True)
class DrawnSection:
    """A drawn slide: its pixels (h, w, 3), its nuclei, and whether it has a pen mark."""

    image: Image
    nuclei: tuple[Nuclei, ...]
    pen: bool


def draw_section(seed: int, *, tumour: bool, pen: bool = False) -> DrawnSection:
    """A section with or without tumour.

    >>> [kind.kind for kind in draw_section(0, tumour=False).nuclei]
    ['fibroblast', 'inflammatory', 'tumour']
    """
    rng = np.random.default_rng((7, seed))
    y, x = np.mgrid[: SIZE[0], : SIZE[1]] / np.array(SIZE)[:, None, None] - 0.5
    tissue = _soft(0.40 - np.hypot(x, y) + 0.04 * _noise(rng, 360), 0.006)
    nests = _soft(_noise(rng, 260) + 0.3 * _noise(rng, 90) - 1.0, 0.15) * tissue if tumour else 0 * tissue
    inflamed = _soft(_noise(rng, 230) - 1.15, 0.2) * tissue * (1 - nests)
    fibres = _noise(rng, 70) + 0.7 * _noise(rng, 16)
    nuclei = tuple(
        _scatter(rng, kind, share, _noise(rng, 200))
        for kind, share in (
            (STROMA, 0.45 * tissue * (1 - nests)),
            (LYMPHOCYTE, np.maximum(0.8 * inflamed, 0.02 * tissue * (1 - nests))),
            (TUMOUR, 0.9 * nests),
        )
    )
    image = _painted(rng, tissue, nests, fibres, nuclei)
    return DrawnSection(_inked(rng, image, nests if tumour else tissue) if pen else image, nuclei, pen)


def _painted(
    rng: np.random.Generator, tissue: Floats, nests: Floats, fibres: Floats, nuclei: tuple[Nuclei, ...]
) -> Image:
    """Glass, stroma and nests with their nuclei, and the grain of a camera."""
    from PIL import Image as Pictures

    shade = np.array((7.0, 13.0, 8.0)) * fibres[..., None]
    colour = np.array(EOSIN) + (np.array(NEST) - EOSIN) * nests[..., None] + shade
    colour = np.array(GLASS) + (colour - GLASS) * tissue[..., None]
    picture = Pictures.fromarray(np.clip(colour, 0, 255).astype(np.uint8))
    for kind in nuclei:
        _draw_nuclei(rng, picture, kind)
    soft = _blurred(np.asarray(picture, dtype=np.float64), 0.7)
    return np.clip(soft + rng.normal(scale=2.5, size=soft.shape), 0, 255).astype(np.uint8)


def _draw_nuclei(rng: np.random.Generator, picture: object, nuclei: Nuclei) -> None:
    from PIL import ImageDraw

    pen = ImageDraw.Draw(picture)  # type: ignore[arg-type]
    for (x, y), angle in zip(nuclei.xy, nuclei.angles, strict=True):
        if nuclei.kind == TUMOUR:
            radius, tone = rng.uniform(9.5, 13.0), int(rng.integers(-14, 14))
            outline = _blob(rng, (x, y), (radius * rng.uniform(1.05, 1.4), radius), angle)
            pen.polygon(outline, fill=(133 + tone, 96 + tone, 168 + tone), outline=(84, 54, 132))
            at = x + rng.uniform(-3, 3), y + rng.uniform(-3, 3)
            pen.ellipse((at[0] - 2.4, at[1] - 2.4, at[0] + 2.4, at[1] + 2.4), fill=(74, 40, 116))
        elif nuclei.kind == LYMPHOCYTE:
            radius = rng.uniform(5.0, 6.2)
            pen.polygon(_blob(rng, (x, y), (radius, radius), angle, ragged=0.04), fill=(58, 36, 104))
        else:
            pen.polygon(_blob(rng, (x, y), (rng.uniform(9, 14), 2.6), angle), fill=(104, 70, 140))


def _blob(
    rng: np.random.Generator,
    at: tuple[float, float],
    radii: tuple[float, float],
    angle: float,
    *,
    ragged: float = 0.08,
) -> list[tuple[float, float]]:
    """A turned oval with a somewhat uneven rim."""
    turn = np.linspace(0, 2 * np.pi, 14, endpoint=False)
    reach = 1 + ragged * rng.normal(size=len(turn))
    across, down = radii[0] * reach * np.cos(turn), radii[1] * reach * np.sin(turn)
    xs = at[0] + across * np.cos(angle) - down * np.sin(angle)
    ys = at[1] + across * np.sin(angle) + down * np.cos(angle)
    return list(zip(xs.tolist(), ys.tolist(), strict=True))


def _scatter(rng: np.random.Generator, kind: str, share: Floats, flow: Floats) -> Nuclei:
    """Nuclei on a shaken grid, kept by the share (h, w) there; they lie along the flow."""
    step = SPACING[kind]
    rows, columns = (np.arange(step / 2, edge, step) for edge in SIZE)
    xy = np.stack(np.meshgrid(columns, rows), axis=-1).reshape(-1, 2)
    xy += rng.uniform(-0.36, 0.36, size=xy.shape) * step
    xy = np.clip(xy, 0, np.array(SIZE[::-1]) - 1)
    column, row = xy.astype(int).T
    kept = rng.random(len(xy)) < share[row, column]
    angles = np.pi * flow[row, column][kept] + rng.normal(scale=0.25, size=int(kept.sum()))
    return Nuclei(kind, xy[kept], angles)


def _inked(rng: np.random.Generator, image: Image, near: Floats) -> Image:
    """A stroke of a felt pen along the rim of what it marks; ink lets some light through."""
    from PIL import Image as Pictures
    from PIL import ImageDraw

    rows, columns = np.nonzero(near > 0.5)
    middle = np.array([columns.mean(), rows.mean()]) + rng.normal(scale=40, size=2)
    reach = rng.uniform(180, 300)
    begin, span = rng.uniform(0, 2 * np.pi), rng.uniform(2.2, 3.4)
    turn = begin + np.linspace(0, span, 60)
    path = middle + reach * np.stack([np.cos(turn), 0.8 * np.sin(turn)], axis=1)
    mask = Pictures.new("L", SIZE[::-1])
    ImageDraw.Draw(mask).line([tuple(p) for p in path.tolist()], fill=255, width=60, joint="curve")
    cover = _blurred(np.asarray(mask, dtype=np.float64)[..., None] / 255, 3.0)
    ink = np.array(INKS[int(rng.integers(len(INKS)))], dtype=np.float64) / 255
    through = 1 - cover * (1 - ink * rng.uniform(0.95, 1.05))
    return np.clip(image * through + 6 * cover, 0, 255).astype(np.uint8)


def _noise(rng: np.random.Generator, scale: float) -> Floats:
    """Smooth noise (h, w) of unit variance with blobs of about `scale` pixels."""
    from scipy import ndimage

    step = max(1, int(scale / 6))
    small = rng.normal(size=(SIZE[0] // step + 8, SIZE[1] // step + 8))
    smooth = ndimage.gaussian_filter(small, scale / step / 3)
    wide = ndimage.zoom(smooth, step, order=1)[: SIZE[0], : SIZE[1]]
    return np.asarray((wide - wide.mean()) / wide.std())


def _soft(field: Floats, width: float) -> Floats:
    """0 to 1 across zero, over a rim of this width."""
    return np.asarray(np.clip(field / width + 0.5, 0, 1))


def _blurred(image: Floats, sigma: float) -> Floats:
    from scipy import ndimage

    return np.asarray(ndimage.gaussian_filter(image, (sigma, sigma, 0)))
