"""Pillow's resize on any device, to the last bit: its own fixed-point weights, one axis at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import floor, pi, sin

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from xmil.core.fitting import PatchFit

BITS = 22  # after the point, in Pillow's weights for 8-bit pictures


def _bilinear(x: float) -> float:
    return max(0.0, 1.0 - abs(x))


def _bicubic(x: float) -> float:
    a, x = -0.5, abs(x)
    if x < 1.0:
        return ((a + 2.0) * x - (a + 3.0)) * x * x + 1
    return (((x - 5) * x + 8) * x - 4) * a if x < 2.0 else 0.0


def _sinc(x: float) -> float:
    return 1.0 if x == 0.0 else sin(x * pi) / (x * pi)


def _lanczos(x: float) -> float:
    return _sinc(x) * _sinc(x / 3) if -3.0 <= x < 3.0 else 0.0


FILTERS: dict[str, tuple[Callable[[float], float], float]] = {
    "bilinear": (_bilinear, 1.0),
    "bicubic": (_bicubic, 2.0),
    "lanczos": (_lanczos, 3.0),
}


def weights(given: int, wanted: int, kind: str) -> npt.NDArray[np.float64]:
    """(wanted, given) whole numbers: what each pixel adds to each new one, in units of 2**-22."""
    function, reach = FILTERS[kind]
    scale = given / wanted
    stretch = max(scale, 1.0)
    support = reach * stretch
    found = np.zeros((wanted, given))
    for row in range(wanted):
        centre = (row + 0.5) * scale
        first, last = max(int(centre - support + 0.5), 0), min(int(centre + support + 0.5), given)
        values = [function((x - centre + 0.5) * (1.0 / stretch)) for x in range(first, last)]
        total = 0.0
        for value in values:
            total += value
        shares = [value / total if total else value for value in values]
        found[row, first:last] = [
            int(share * (1 << BITS) + (0.5 if share >= 0 else -0.5)) for share in shares
        ]
    return found


@lru_cache(maxsize=32)
def _on_device(given: int, wanted: int, kind: str, device: torch.device) -> Tensor:
    return torch.from_numpy(weights(given, wanted, kind)).to(device)


def resized(patches: Tensor, wanted: int, kind: str = "bilinear") -> Tensor:
    """Square patches (n, h, h, 3) in uint8 at another size, as Pillow resizes them.

    >>> resized(torch.full((1, 4, 4, 3), 7, dtype=torch.uint8), 2)[0, :, :, 0].tolist()
    [[7, 7], [7, 7]]
    """
    given = patches.shape[1]
    if given == wanted:
        return patches
    factors = _on_device(given, wanted, kind, patches.device)
    across = _rounded(torch.einsum("nhwc,vw->nhvc", patches.double(), factors))
    return _rounded(torch.einsum("nhvc,uh->nuvc", across, factors)).to(torch.uint8)


def _rounded(sums: Tensor) -> Tensor:
    return torch.floor((sums + (1 << (BITS - 1))) / (1 << BITS)).clamp_(0, 255)


def fitted(patches: Tensor, fit: PatchFit) -> Tensor:
    """Patches (n, h, h, 3) as the encoder sees them: what `PatchFit` does, for all of them at once."""
    if fit.size is None:
        return patches
    found = resized(patches, floor(fit.size / fit.crop), fit.interpolation)
    start = round((found.shape[1] - fit.size) / 2.0)
    return found[:, start : start + fit.size, start : start + fit.size]
