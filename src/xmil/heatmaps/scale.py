"""From scores to colours: zero-centred red and blue for signed scores, a sequence for unsigned ones."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from xmil.core.errors import InputError, bad_parameter, unknown_name

Pixels = npt.NDArray[np.uint8]

SIGNED, UNSIGNED = "red-blue", "viridis"  # red supports the explained class, blue speaks against it
RED, BLUE = "#8E0F23", "#1B4F87"  # the same two for letters and lines, on white
LIGHT_RED, LIGHT_BLUE = "#F2858F", "#7FB2EA"  # and on dark pages
TRIMMED = (0.1, 0.9)  # of RdBu: its darkest ends turn brown and black over tissue
BEYOND = 0.1  # share of patches beyond the scale from which on pictures and commands say so
STEPS = 257  # odd, so that zero has the middle colour to itself
Clip = Literal["whiskers", "percentile", "none"]
CLIPS: tuple[str, ...] = get_args(Clip)
REACH = 1.5  # interquartile ranges from the quartiles to a whisker's farthest end


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
        """Make the scale of these scores; that of signed scores reaches equally far to both sides of zero."""
        values = np.asarray(scores, dtype=np.float64)
        low, high = clip_limits(values, clip=clip, percentile=percentile)
        if signed:
            high = max(abs(low), abs(high))
            low = -high
        cut = (bool(values.min() < low), bool(values.max() > high))
        return cls(low, high, signed, colours or (SIGNED if signed else UNSIGNED), cut)

    def share_beyond(self, scores: npt.ArrayLike) -> float:
        """Count the share of scores beyond the scale's ends: they have the ends' full colour, and look alike.

        >>> Scale(-1.0, 1.0, True, SIGNED).share_beyond([-2.0, -1.0, 0.5, 3.0])
        0.5
        """
        values = np.asarray(scores, dtype=np.float64)
        return float(np.mean((values < self.low) | (values > self.high))) if values.size else 0.0

    def paint(self, values: npt.ArrayLike) -> Pixels:
        """Colour the values as RGBA (..., 4); NaN is transparent."""
        numbers = np.asarray(values)
        middle, half = (self.low + self.high) / 2, (STEPS - 1) / 2
        reach = max(middle - self.low, float(np.finfo(np.float32).tiny))
        step = (numbers - middle) * (half / reach) + half
        step = np.nan_to_num(np.clip(step, 0, STEPS - 1), copy=False, nan=STEPS)
        return np.asarray(_table(self.colours)[np.rint(step, out=step).astype(np.int16)])


@lru_cache(maxsize=16)
def _table(name: str) -> Pixels:
    """Look up the map's colours (STEPS + 1, 4); the last is transparent."""
    from matplotlib import colormaps

    source, ends = ("RdBu_r", TRIMMED) if name == SIGNED else (name, (0.0, 1.0))
    if source not in colormaps:
        raise unknown_name("colour map", name, [SIGNED, *colormaps])
    table = np.zeros((STEPS + 1, 4), dtype=np.uint8)
    table[:STEPS] = colormaps[source].resampled(1025)(np.linspace(*ends, STEPS), bytes=True)
    return table


def clip_limits(
    scores: npt.ArrayLike, *, clip: str = "whiskers", percentile: float = 99.0
) -> tuple[float, float]:
    """Find the lowest and highest score that keep a colour of their own.

    Whiskers end at the last score within 1.5 interquartile ranges of the quartiles, as a box plot draws them.
    If more than half of the scores are equal, whiskers would cut off everything else: then nothing is cut.

    >>> clip_limits([0, 1, 2, 3, 4, 100])
    (0.0, 4.0)
    >>> clip_limits([0, 0, 0, 0, 0, 7])
    (0.0, 7.0)
    """
    values = _finite(scores)
    if clip not in CLIPS:
        raise unknown_name("clip", clip, CLIPS)
    if clip == "percentile":
        if not 50 < percentile <= 100:
            raise bad_parameter("percentile", "clip_limits", "in the range (50, 100]", percentile)
        low, high = np.percentile(values, [100 - percentile, percentile])
        return float(low), float(high)
    low, high = (float(values.min()), float(values.max())) if clip == "none" else whiskers(values)
    return (low, high) if low < high else (float(values.min()), float(values.max()))


def whiskers(scores: npt.ArrayLike) -> tuple[float, float]:
    """Find the ends of a box plot's whiskers: the last scores within 1.5 IQR of the quartiles."""
    values = _finite(scores)
    first, third = (float(q) for q in np.percentile(values, [25, 75]))
    reach = REACH * (third - first)
    below, above = values[values >= first - reach], values[values <= third + reach]
    return min(float(below.min()), first), max(float(above.max()), third)


def _finite(scores: npt.ArrayLike) -> npt.NDArray[np.float64]:
    values = np.asarray(scores, dtype=np.float64).ravel()
    if not len(values):
        raise InputError("There are no scores to draw.")
    if not np.isfinite(values).all():
        raise InputError("Scores must be finite numbers; explain the slide again.")
    return values
