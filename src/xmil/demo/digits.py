"""Pos-Neg bags of scikit-learn's digits: 4, 6, 8 speak for class 1, and 5, 7, 9 against it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

POSITIVE, NEGATIVE = (4, 6, 8), (5, 7, 9)
Images = npt.NDArray[np.float32]


@dataclass(frozen=True)
class DigitBags:
    """Bags (b, n) of digits with their images (b, n, 8, 8)."""

    digits: npt.NDArray[np.int64]
    images: Images

    @property
    def features(self) -> Images:
        """Pixels, centred and scaled to unit size."""
        return (self.images.reshape(*self.images.shape[:2], -1) - 5.0) / 6.0

    @property
    def evidence(self) -> npt.NDArray[np.int64]:
        """+1 for class 1, -1 against it, 0 irrelevant."""
        return np.isin(self.digits, POSITIVE).astype(np.int64) - np.isin(self.digits, NEGATIVE)

    @property
    def labels(self) -> npt.NDArray[np.int64]:
        """1 where the bag holds more of the positive numbers than of the negative ones."""
        found = [
            np.stack([(self.digits == d).any(axis=1) for d in kind]).sum(axis=0)
            for kind in (POSITIVE, NEGATIVE)
        ]
        return np.asarray(found[0] > found[1], dtype=np.int64)


def draw_bags(n_bags: int, *, part: str, seed: int, n: int = 30) -> DigitBags:
    """Bags from the training or the test half of the digits; each number enters a bag with probability 0.5.

    >>> bags = draw_bags(2, part="test", seed=0)
    >>> bags.features.shape
    (2, 30, 64)
    """
    from sklearn.datasets import load_digits

    data = load_digits()
    half = slice(0, None, 2) if part == "train" else slice(1, None, 2)
    images, digits = data.images[half].astype(np.float32), data.target[half]
    rng = np.random.default_rng(seed)
    rows = np.stack([_draw_rows(digits, n, rng) for _ in range(n_bags)])
    return DigitBags(digits[rows], images[rows])


def _draw_rows(digits: npt.NDArray[np.int64], n: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    numbers = np.flatnonzero(rng.random(10) < 0.5)
    numbers = numbers if len(numbers) else rng.integers(10, size=1)
    return rng.choice(np.flatnonzero(np.isin(digits, numbers)), size=n)
