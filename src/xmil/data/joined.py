"""The slides of one case as one bag, the features still on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from xmil.core.bag import Bag
from xmil.core.errors import InputError
from xmil.data.header import Header


@dataclass(frozen=True)
class JoinedHeader:
    """Stored bags one after the other; `read` brings all of their instances or some rows."""

    parts: tuple[Header, ...]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    @property
    def path(self) -> Path:
        """The file of the first slide."""
        return self.parts[0].path

    @property
    def slide_id(self) -> str:
        """The slides' names, joined."""
        return "+".join(str(part.slide_id) for part in self.parts)

    @property
    def encoder(self) -> str | None:
        """The encoder of the first slide."""
        return self.parts[0].encoder

    @property
    def dim(self) -> int:
        """Width of the feature vectors."""
        return next((part.dim for part in self.parts if len(part)), self.parts[0].dim)

    @property
    def nbytes(self) -> int:
        """Bytes of the features once read."""
        return sum(part.nbytes for part in self.parts)

    @property
    def columns(self) -> Mapping[str, npt.NDArray[Any]]:
        """The columns that every slide has, one after the other."""
        shared = set.intersection(*(set(part.columns) for part in self.parts))
        return {name: np.concatenate([part.columns[name] for part in self.parts]) for name in sorted(shared)}

    def read(self, rows: npt.ArrayLike | None = None) -> Bag:
        """The features of the case, or of the given ascending rows."""
        index = np.arange(len(self)) if rows is None else np.asarray(rows)
        ends = np.cumsum([len(part) for part in self.parts])
        taken = np.split(index, np.searchsorted(index, ends[:-1]))
        starts = ends - [len(part) for part in self.parts]
        read = [
            part.read(own - start).features
            for part, own, start in zip(self.parts, taken, starts, strict=True)
            if len(own)
        ]
        return Bag(np.concatenate(read), slide_id=self.slide_id, encoder=self.encoder, source=str(self.path))


def join_headers(headers: Sequence[Header]) -> JoinedHeader:
    """The bags of one case as one; they must be of one width."""
    widths = {header.dim: header.path for header in headers if len(header)}
    if len(widths) > 1:
        (one, first), (two, second), *_ = widths.items()
        raise InputError(
            f"{second}: has width {two} but {first} has {one}; features of a case come from one encoder."
        )
    return JoinedHeader(tuple(headers))
