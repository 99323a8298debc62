"""A bag whose features stay as the file has them, so that whoever computes widens them where it is quick."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from xmil.core.bag import Bag, FloatArray, as_features


class StoredBag(Bag):
    """A bag that keeps features in their stored type, as half precision; `features` widens them.

    >>> bag = StoredBag(np.ones((2, 3), dtype=np.float16))
    >>> bag.stored.dtype.name, bag.features.dtype.name, len(bag), bag.dim
    ('float16', 'float32', 2, 3)
    """

    stored: npt.NDArray[Any]

    def __init__(self, features: npt.ArrayLike, *args: Any, **known: Any) -> None:
        values = np.asarray(features)
        super().__init__(np.empty((len(values), 0), np.float32), *args, **known)
        object.__setattr__(self, "stored", values)
        del self.__dict__["features"]  # found by the property below instead

    @cached_property
    def features(self) -> FloatArray:
        """The features in float32."""
        return as_features(self.stored)

    def __len__(self) -> int:
        return len(self.stored)

    @property
    def dim(self) -> int:
        """Width of the feature vectors."""
        return int(self.stored.shape[1])
