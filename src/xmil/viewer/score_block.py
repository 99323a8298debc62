"""A slide's scores as one compact block of bytes, and the facts beside them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from xmil.core.errors import FileError, XmilError
from xmil.core.placement import place
from xmil.core.storage import KEY, RAW, SPREAD, read_header
from xmil.core.target import Target

INT32 = 2**31


@dataclass(frozen=True, eq=False)
class Evidence:
    """Scores (columns, n) of one slide in one run, with corners (2, n) where they are known."""

    columns: list[dict[str, Any]]
    scores: npt.NDArray[np.float32]
    corners: npt.NDArray[np.int32] | None
    edge: int | None
    mpp: float | None
    outputs: list[list[float]]  # of each model of an ensemble, or of the one
    raw: npt.NDArray[np.float64] | None = None
    unit: str | None = None
    raw_edge: float | None = None
    slide_size: tuple[int, int] | None = None

    @property
    def logits(self) -> list[float]:
        """The outputs of the model, or the mean of an ensemble's."""
        return [float(value) for value in np.mean(self.outputs, axis=0)]

    @property
    def n(self) -> int:
        """How many patches the slide has."""
        return int(self.scores.shape[1])

    @property
    def placed(self) -> bool:
        """Whether it is known where the patches lie."""
        return self.corners is not None and self.edge is not None

    def count_inside(self, width: int, height: int) -> int:
        """How many patches have their centre on a slide of this size."""
        if self.corners is None or self.edge is None:
            return self.n
        x, y = self.corners.astype(np.int64) + self.edge // 2
        return int(((x >= 0) & (y >= 0) & (x < width) & (y < height)).sum())

    def at(self, mpp: float | None) -> Evidence:
        """The evidence with its places, where they had to wait for the slide's mpp."""
        if self.placed or self.raw is None or self.unit is None or mpp is None:
            return self
        found = place(self.raw, self.unit, edge=self.raw_edge, mpp=mpp)
        corners = None if found.coords is None else _as_corners(found.coords)
        return replace(self, corners=corners, edge=found.patch_size, mpp=mpp)

    def to_bytes(self) -> bytes:
        """Little endian: int32 x0[n] and y0[n] where placed, then float32[n] for each column."""
        scores = self.scores.astype("<f4", copy=False).tobytes()
        if self.corners is None or not self.placed:
            return scores
        return self.corners.astype("<i4", copy=False).tobytes() + scores


def read_evidence(path: Path) -> Evidence:
    """The scores in a file of explanations; what methods keep beyond scores is left unread."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    header = read_header(path)
    names = list(header["columns"])
    try:
        stored = set(pq.read_schema(path).names)
        columns = _columns(header["columns"], stored)
        shown = [column["name"] for column in columns]
        wanted = ["x0", "y0", *(name for name in RAW if name in stored), *shown]
        table = pq.read_table(path, partitioning=None, columns=wanted)
        if not names:
            raise ValueError("no scores in it")
        scores = [table[name].to_numpy().astype(np.float32) for name in shown]
        return Evidence(
            columns=columns,
            scores=np.stack(scores),
            corners=None if table["x0"].null_count else _as_corners(_stacked(table, ("x0", "y0")).T),
            edge=_number(header.get("patch_size"), int),
            mpp=_number(header.get("mpp"), float),
            outputs=_outputs(header, names[0]),
            raw=_stacked(table, RAW).T if set(RAW) <= set(table.column_names) else None,
            unit=header.get("unit"),
            raw_edge=_number(header.get("raw_edge"), float),
            slide_size=_size(header.get("slide_size")),
        )
    except XmilError:
        raise
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise FileError(f"{path.name}: the explanation is damaged ({reason}); explain it again.") from None


def _outputs(header: dict[str, Any], name: str) -> list[list[float]]:
    """The outputs of each model: beside the scores of an ensemble, whose own are the mean."""
    mean = [float(value) for value in header["columns"][name]["logits"]]
    stored = (header.get("provenance") or {}).get("logits") or [mean]
    each = [[float(value) for value in outputs] for outputs in stored]
    return each if all(len(outputs) == len(mean) for outputs in each) else [mean]


def _size(stored: Any) -> tuple[int, int] | None:
    return None if stored is None else (int(stored[0]), int(stored[1]))


def count_patches(path: Path) -> int:
    """How many patches a file of explanations has, from its footer; an error where it is damaged."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        found = pq.read_metadata(path)
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise FileError(f"{path.name}: not a readable explanation ({reason}); explain it again.") from None
    if KEY not in (found.metadata or {}):
        raise FileError(f"{path.name}: a Parquet file, but not an explanation (no xmil metadata).")
    return int(found.num_rows)


def _columns(metas: dict[str, Any], stored: set[str]) -> list[dict[str, Any]]:
    """The columns to show: each method and target, then an ensemble's spread as a method of its own."""
    columns = []
    for name, meta in metas.items():
        columns.append(found := _column(name, meta))
        if name + SPREAD in stored:
            facts = {"method": f"{found['method']} (spread)", "signed": False, "output": None, "audit": None}
            columns.append({**found, "name": name + SPREAD, **facts})
    return columns


def _column(name: str, meta: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "method": str(meta["method"]),
        "target": str(Target(**meta["target"])),
        "signed": bool(meta["signed"]),
        "output": _number(meta.get("output"), float),
        "audit": meta.get("audit") if isinstance(meta.get("audit"), dict) else None,
    }


def _stacked(table: Any, names: tuple[str, ...]) -> npt.NDArray[Any]:
    return np.stack([table[name].to_numpy() for name in names])  # (2, n)


def _as_corners(coords: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    if coords.size and not (np.abs(coords).max() < INT32):
        raise ValueError("coordinates out of range")
    return np.ascontiguousarray(coords.T, dtype=np.int32)  # (2, n)


def _number(value: Any, kind: type) -> Any:
    return None if value is None else kind(value)
