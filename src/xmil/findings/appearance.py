"""What a patch looks like: ink, light, and what tissue and acquisition share. No torch here.

Ink and the light's colour (the brightest pixels of a slide, which hold no tissue) say how a slide was made.
Brightness, saturation, hue and focus of a patch depend on its cells as well: they are described, not accused.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]
INK = ("blue ink", "green ink", "red ink", "black ink")
LIGHT = "tint of the light"
TISSUE = ("brightness", "saturation", "redness", "blueness", "focus")
LEAST_INK = 0.02  # of a patch's pixels; less is dark nuclei
BRIGHTEST, LEAST_LIGHT = 0.01, 0.6  # share of a slide's pixels; how bright they are where there is no tissue
HUES = {  # hue in degrees from, to; how saturated and how dark ink is beside stained tissue
    "blue ink": (195.0, 255.0),
    "green ink": (75.0, 175.0),
    "red ink": (345.0, 15.0),
}


def appearance(patch: Pixels) -> dict[str, float]:
    """Numbers that describe a patch (h, w, 3) and say nothing of its cells.

    >>> found = appearance(np.full((8, 8, 3), (20, 60, 200), dtype=np.uint8))
    >>> found["blue ink"], found["green ink"], round(found["brightness"], 2)
    (1.0, 0.0, 0.37)
    """
    x = np.asarray(patch, dtype=np.float64) / 255
    high, low = x.max(axis=2), x.min(axis=2)
    chroma = high - low
    saturation = np.where(high > 0, chroma / np.maximum(high, 1e-9), 0.0)
    hue = _hue(x, high, chroma)
    told = {
        "brightness": float(x.mean()),
        "saturation": float(saturation.mean()),
        "redness": float((x[..., 0] - x[..., 1:].mean(axis=2)).mean()),
        "blueness": float((x[..., 2] - x[..., :2].mean(axis=2)).mean()),
        "focus": _focus(x.mean(axis=2)),
        "black ink": float(((high < 0.22) & (chroma < 0.12)).mean()),
    }
    for name, (start, end) in HUES.items():
        inside = (hue >= start) & (hue <= end) if start < end else (hue >= start) | (hue <= end)
        vivid = saturation > (0.65 if name == "red ink" else 0.45)
        told[name] = float((inside & vivid & (chroma > 0.25)).mean())
    return told | {name: told[name] if told[name] >= LEAST_INK else 0.0 for name in INK}


@dataclass(frozen=True)
class Light:
    """The light on a slide: red and blue against green, strength; and the stain that is measured against it.

    `stain` is the mean optical density of each colour beside the light's own: it tells tissue, not the light.
    """

    colour: tuple[float, float, float]
    stain: tuple[float, float, float]


def light(patches: npt.ArrayLike) -> Light:
    """The light on patches (m, h, w, 3) of a slide, from its brightest pixels; nan where none is bright.

    A tint colours the empty glass, too; tissue does not.

    >>> found = light(np.full((4, 8, 8, 3), (250, 225, 250), dtype=np.uint8))
    >>> [round(part, 2) for part in found.colour], found.stain
    ([0.11, 0.11, 0.95], (0.0, 0.0, 0.0))
    """
    x = np.log(np.maximum(np.asarray(patches, dtype=np.float64).reshape(-1, 3) / 255, 1 / 255))
    order = np.argsort(-x.mean(axis=1), kind="stable")
    top = x[order[: max(1, round(BRIGHTEST * len(x)))]].mean(axis=0)
    strength = float(np.exp(top).mean())
    if strength < LEAST_LIGHT:
        return Light((float("nan"),) * 3, (float("nan"),) * 3)
    red, green, blue = (float(part) for part in top)
    stain = [float(part) for part in np.maximum(top - x, 0).mean(axis=0)]
    return Light((red - green, blue - green, strength), (stain[0], stain[1], stain[2]))


def _hue(
    x: npt.NDArray[np.float64], high: npt.NDArray[np.float64], chroma: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    r, g, b = (x[..., i] for i in range(3))
    safe = np.maximum(chroma, 1e-9)
    hue = np.where(high == r, (g - b) / safe % 6, np.where(high == g, (b - r) / safe + 2, (r - g) / safe + 4))
    return np.asarray(np.where(chroma > 0, 60 * hue, 0.0))


def _focus(grey: npt.NDArray[np.float64]) -> float:
    """The Laplacian's spread relative to that of the grey values: low where the patch is blurred."""
    if min(grey.shape) < 3:
        return 0.0
    inner = grey[1:-1, 1:-1]
    laplacian = grey[:-2, 1:-1] + grey[2:, 1:-1] + grey[1:-1, :-2] + grey[1:-1, 2:] - 4 * inner
    return float(laplacian.std() / max(float(grey.std()), 1e-3))
