"""From scores to colours: zero-centred red and blue for signed scores, a sequence for unsigned ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from xmil.core.errors import InputError, unknown_name
from xmil.slides.clipping import clip_limits

Pixels = npt.NDArray[np.uint8]

SIGNED, UNSIGNED = "red-blue", "viridis"  # red supports the explained class, blue speaks against it
TRIMMED = (0.1, 0.9)  # of RdBu: its darkest ends turn brown and black over tissue
STEPS = 257  # odd, so that zero has the middle colour to itself


@dataclass(frozen=True)
class Scale:
    """Scores from `low` to `high` and their colour map; `cut` says on which sides scores were cut off.

    >>> Scale.of([-1.0, 0.0, 3.0], signed=True, clip="none")
    Scale(low=-3.0, high=3.0, signed=True, colours='red-blue', cut=(False, False))
    """

    low: float
    high: float
    signed: bool
    colours: str
    cut: tuple[bool, bool] = (False, False)

    @classmethod
    def of(
        cls,
        scores: npt.ArrayLike,
        *,
        signed: bool,
        clip: str = "whiskers",
        percentile: float = 99.0,
        colours: str | None = None,
    ) -> Scale:
        """The scale of these scores; that of signed scores reaches equally far to both sides of zero."""
        values = np.asarray(scores, dtype=np.float64)
        low, high = clip_limits(values, clip=clip, percentile=percentile)
        if signed:
            high = max(abs(low), abs(high))
            low = -high
        cut = (bool(values.min() < low), bool(values.max() > high))
        return cls(low, high, signed, colours or (SIGNED if signed else UNSIGNED), cut)

    def paint(self, values: npt.ArrayLike) -> Pixels:
        """RGBA (..., 4) of the values; NaN is transparent."""
        numbers = np.asarray(values)
        middle, half = (self.low + self.high) / 2, (STEPS - 1) / 2
        reach = max(middle - self.low, float(np.finfo(np.float32).tiny))
        step = (numbers - middle) * (half / reach) + half
        step = np.nan_to_num(np.clip(step, 0, STEPS - 1), copy=False, nan=STEPS)
        return np.asarray(_table(self.colours)[np.rint(step, out=step).astype(np.int16)])


def pooled(scores: Iterable[npt.ArrayLike], *, signed: bool, **how: object) -> Scale:
    """One scale for the scores of many slides, taken together."""
    held = [np.asarray(values, dtype=np.float32).ravel() for values in scores]
    if not held:
        raise InputError("There are no scores to draw.")
    return Scale.of(np.concatenate(held), signed=signed, **how)  # type: ignore[arg-type]


@lru_cache(maxsize=16)
def _table(name: str) -> Pixels:
    """The map's colours (STEPS + 1, 4); the last is transparent."""
    from matplotlib import colormaps

    source, ends = ("RdBu_r", TRIMMED) if name == SIGNED else (name, (0.0, 1.0))
    if source not in colormaps:
        raise unknown_name("colour map", name, [SIGNED, *colormaps])
    table = np.zeros((STEPS + 1, 4), dtype=np.uint8)
    table[:STEPS] = colormaps[source].resampled(1025)(np.linspace(*ends, STEPS), bytes=True)
    return table
