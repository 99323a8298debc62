"""An estimate with its interval, the bootstrap that gives one, and intervals of many means at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from xmil.core.errors import InputError

JOINED = 0.01  # of a sample: what the mean variance of all counts for in that of each


@dataclass(frozen=True)
class Interval:
    """An estimate and the bounds of its interval."""

    estimate: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.estimate:.3f} [{self.low:.3f}, {self.high:.3f}]"


def bootstrap(
    values: npt.ArrayLike,
    *,
    statistic: Callable[..., Any] = np.mean,
    draws: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> Interval:
    """The percentile interval of a statistic over slides drawn with replacement.

    `statistic` takes (draws, n) and `axis=1`. A single value has no spread to draw from: its bounds are nan.

    >>> print(bootstrap([0.5, 0.5, 0.5]))
    0.500 [0.500, 0.500]
    """
    sample = np.asarray(values, dtype=np.float64)
    if sample.ndim != 1 or not len(sample) or not np.isfinite(sample).all():
        raise InputError(f"A bootstrap needs a vector of finite values. Got {sample.shape}.")
    estimate = float(statistic(sample[None], axis=1)[0])
    if len(sample) == 1:
        return Interval(estimate, float("nan"), float("nan"))
    rows = np.random.default_rng(seed).integers(0, len(sample), size=(draws, len(sample)))
    low, high = np.quantile(statistic(sample[rows], axis=1), ((1 - level) / 2, (1 + level) / 2))
    return Interval(estimate, float(low), float(high))


def steadied(stderr: npt.ArrayLike, samples: int, *, level: float = 0.95) -> npt.NDArray[np.float64]:
    """Half the width of the interval of each of many means, from their standard errors (n,).

    Few samples of a skewed quantity often miss what makes it vary, and its variance seems to be next to
    none. So a small share of the mean variance of all joins that of each; the quantile is Student's.

    >>> steadied([0.1, 0.0], 12).round(3).tolist()
    [0.22, 0.005]
    """
    from scipy.stats import t as student  # not at the top: reading explanations does without scipy

    squares = np.square(np.asarray(stderr, dtype=np.float64))
    joined = ((samples - 1) * squares + JOINED * squares.mean()) / (samples - 1 + JOINED)
    half: npt.NDArray[np.float64] = student.ppf(0.5 + level / 2, samples - 1) * np.sqrt(joined)
    return half
