"""Where scores are cut off before they are coloured: box-plot whiskers, percentiles, or not at all."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from xmil.core.errors import InputError, bad_parameter, unknown_name

Clip = Literal["whiskers", "percentile", "none"]
CLIPS: tuple[str, ...] = get_args(Clip)
REACH = 1.5  # interquartile ranges from the quartiles to a whisker's farthest end


def clip_limits(
    scores: npt.ArrayLike, *, clip: str = "whiskers", percentile: float = 99.0
) -> tuple[float, float]:
    """The lowest and highest score that keep a colour of their own.

    Whiskers end at the last score within 1.5 interquartile ranges of the quartiles, as a box plot draws them.
    Where more than half of the scores are equal, whiskers would cut off everything else: then nothing is cut.

    >>> clip_limits([0, 1, 2, 3, 4, 100])
    (0.0, 4.0)
    >>> clip_limits([0, 0, 0, 0, 0, 7])
    (0.0, 7.0)
    """
    values = _finite(scores)
    if clip not in CLIPS:
        raise unknown_name("clip", clip, CLIPS)
    if clip == "percentile":
        return _percentiles(values, percentile)
    low, high = (float(values.min()), float(values.max())) if clip == "none" else whiskers(values)
    return (low, high) if low < high else (float(values.min()), float(values.max()))


def whiskers(scores: npt.ArrayLike) -> tuple[float, float]:
    """The ends of a box plot's whiskers: the last scores within 1.5 IQR of the quartiles."""
    values = _finite(scores)
    first, third = (float(q) for q in np.percentile(values, [25, 75]))
    reach = REACH * (third - first)
    below, above = values[values >= first - reach], values[values <= third + reach]
    return min(float(below.min()), first), max(float(above.max()), third)


def _percentiles(values: npt.NDArray[np.float64], percentile: float) -> tuple[float, float]:
    if not 50 < percentile <= 100:
        raise bad_parameter("percentile", "clip_limits", "in the range (50, 100]", percentile)
    low, high = np.percentile(values, [100 - percentile, percentile])
    return float(low), float(high)


def _finite(scores: npt.ArrayLike) -> npt.NDArray[np.float64]:
    values = np.asarray(scores, dtype=np.float64).ravel()
    if not len(values):
        raise InputError("There are no scores to draw.")
    if not np.isfinite(values).all():
        raise InputError("Scores must be finite numbers; explain the slide again.")
    return values
