"""An estimate with its interval, and the bootstrap that gives one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from xmil.core.errors import InputError


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
