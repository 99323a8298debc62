"""What a patch looks like: brightness, saturation, focus, and ink of four colours. No torch here."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]
INKS = {  # hue in degrees from, to; how saturated and how dark ink is beside stained tissue
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
    for name, (start, end) in INKS.items():
        inside = (hue >= start) & (hue <= end) if start < end else (hue >= start) | (hue <= end)
        vivid = saturation > (0.65 if name == "red ink" else 0.45)
        told[name] = float((inside & vivid & (chroma > 0.25)).mean())
    return told


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
