"""Interactions: which pairs of patches, or of groups of patches, act together."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from xmil._version import __version__
from xmil.core.absence import absent
from xmil.core.bag import IntArray
from xmil.core.budget import read_parquet
from xmil.core.errors import FileError, InputError, XmilError
from xmil.core.parsing import parse_json
from xmil.core.storage import write_atomically
from xmil.core.target import Target

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

LAYOUT = 1
KEY = b"xmil-interactions"
CORNERS = ("x0", "y0", "other_x0", "other_y0")
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Interactions:
    """Pairs (k, 2) of instances by falling |value|, for one target of one bag.

    `values` (k,) are Shapley interaction indices, positive where the two say more together than one by one,
    with their standard errors; `alone` (k,) is what a pair adds to its members where nothing else is in the
    bag. With groups, pairs index `names`, and `groups` (n,) says which group each instance is in. `output`
    is the explained number of the full bag. `corners` (k, 4): level-0 x0, y0 of both patches.
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
        """Where the value is beyond three standard errors."""
        return np.asarray(np.abs(self.values) > 3 * self.stderr)

    def lines(self) -> Floats:
        """Level-0 segments (k, 4) between the centres of each pair's patches, as x0, y0, x1, y1."""
        if self.corners is None or self.patch_size is None:
            raise InputError(
                "The interactions have no places: groups have none, and a bag needs coords and a patch edge."
            )
        return np.asarray(self.corners + 0.5 * self.patch_size, dtype=np.float64)

    def to_pandas(self) -> pd.DataFrame:
        """A table of one row per pair: both instances or groups, value, standard error, the pair alone."""
        import pandas as pd

        named = self.pairs if self.names is None else np.array(self.names, dtype=object)[self.pairs]
        table = pd.DataFrame({"first": named[:, 0], "second": named[:, 1]})
        table = table.assign(value=self.values, stderr=self.stderr, alone=self.alone)
        places = {} if self.corners is None else dict(zip(CORNERS, self.corners.T, strict=True))
        return table.assign(**places)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the pairs as a Parquet table, with target and provenance in its metadata."""
        import pyarrow.parquet as pq

        table = self._to_table()
        write_atomically(path, lambda temporary: pq.write_table(table, temporary, compression="zstd"))

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Interactions:
        """Read what `save` wrote."""
        import pyarrow as pa

        try:
            table = read_parquet(path)
        except FileNotFoundError:
            raise FileError(absent(path)) from None
        except XmilError:
            raise
        except (pa.ArrowException, OSError, ValueError) as error:
            why = str(error).splitlines()[0].rstrip(".")
            raise FileError(f"{path}: not a readable Parquet file ({why}); copy or make it again.") from None
        raw = (table.schema.metadata or {}).get(KEY)
        if raw is None:
            raise FileError(f"{path}: a Parquet file, but it holds no interactions.")
        try:
            return _from_table(parse_json(raw), table)
        except (LookupError, TypeError, ValueError) as error:
            raise FileError(f"{path}: the interactions are damaged ({error}); compute them again.") from None

    def _to_table(self) -> pa.Table:
        import pyarrow as pa

        columns: dict[str, Any] = {"first": self.pairs[:, 0], "second": self.pairs[:, 1]}
        columns |= {"value": self.values, "stderr": self.stderr, "alone": self.alone}
        columns |= {} if self.corners is None else dict(zip(CORNERS, self.corners.T, strict=True))
        header = {
            "layout": LAYOUT,
            "version": __version__,
            "target": asdict(self.target),
            "groups": None if self.groups is None else self.groups.tolist(),
            **{key: getattr(self, key) for key in ("output", "bag", "model", "patch_size", "names")},
            "params": dict(self.params),
            "warnings": list(self.warnings),
        }
        return pa.table(columns).replace_schema_metadata({KEY: json.dumps(header, default=str)})


def _from_table(header: Mapping[str, Any], table: pa.Table) -> Interactions:
    if header["layout"] > LAYOUT:
        raise ValueError(f"layout {header['layout']} of a later xmil")
    groups, names = header["groups"], header["names"]
    placed = set(CORNERS) <= set(table.column_names)
    return Interactions(
        pairs=np.stack([table[name].to_numpy() for name in ("first", "second")], axis=1).astype(np.int64),
        values=table["value"].to_numpy(),
        stderr=table["stderr"].to_numpy(),
        alone=table["alone"].to_numpy(),
        target=Target(**header["target"]),
        names=None if names is None else tuple(names),
        groups=None if groups is None else np.array(groups, dtype=np.int64),
        corners=np.stack([table[name].to_numpy() for name in CORNERS], axis=1) if placed else None,
        warnings=tuple(header["warnings"]),
        **{key: header[key] for key in ("output", "bag", "model", "patch_size", "params")},
    )
