"""Interactions: pairs of patches, or of groups of patches, that act together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from xmil.core.bag import IntArray
from xmil.core.errors import InputError
from xmil.core.services import service
from xmil.core.task import Floats, Target

if TYPE_CHECKING:
    import pandas as pd

CORNERS = ("x0", "y0", "other_x0", "other_y0")


@dataclass(frozen=True, eq=False)
class Interactions:
    """Pairs (k, 2) of instances by falling |value|, for one target of one bag.

    `values` (k,) are Shapley interaction indices, positive if the two add more together than separately, with
    their standard errors; `alone` (k,) is what a pair adds to its members if the bag has no other instances.
    With groups, pairs index `names`, and `groups` (n,) is the group of each instance. `output` is the
    explained number of the full bag. `corners` (k, 4) has level-0 x0, y0 of both patches.
    """

    pairs: IntArray
    values: Floats
    stderr: Floats
    alone: Floats
    target: Target
    output: float
    names: tuple[str, ...] | None = None
    groups: IntArray | None = None
    bag: str | None = None
    model: str | None = None
    corners: IntArray | None = None
    patch_size: int | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    warnings: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.pairs)

    def __repr__(self) -> str:
        where = f" of {self.bag!r}" if self.bag else ""
        return f"Interactions({len(self)} pairs{where}, target={self.target})"

    @property
    def sure(self) -> npt.NDArray[np.bool_]:
        """Whether each value is beyond three standard errors."""
        return np.asarray(np.abs(self.values) > 3 * self.stderr)

    def lines(self) -> Floats:
        """Compute level-0 segments (k, 4) between the centres of each pair's patches, as x0, y0, x1, y1."""
        if self.corners is None or self.patch_size is None:
            raise InputError(
                "The interactions have no places: groups have none, and a bag needs coords and a patch edge."
            )
        return np.asarray(self.corners + 0.5 * self.patch_size, dtype=np.float64)

    def to_pandas(self) -> pd.DataFrame:
        """Make a table with a row per pair: its members, value, standard error, and the pair alone."""
        import pandas as pd

        members = self.pairs if self.names is None else np.array(self.names, dtype=object)[self.pairs]
        table = pd.DataFrame({"first": members[:, 0], "second": members[:, 1]})
        table = table.assign(value=self.values, stderr=self.stderr, alone=self.alone)
        places = {} if self.corners is None else dict(zip(CORNERS, self.corners.T, strict=True))
        return table.assign(**places)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the pairs as a Parquet table, with target and provenance in its metadata."""
        service("write_interactions")(self, path)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Interactions:
        """Read a file written by `save`."""
        stored: Interactions = service("read_interactions")(path)
        return stored
