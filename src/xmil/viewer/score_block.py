"""A slide's scores as one compact block of bytes, and the facts beside them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from xmil.core.budget import read_parquet
from xmil.core.errors import FileError, XmilError
from xmil.core.patches import Patches, Placed
from xmil.core.storage import KEY, RAW, SPREAD, STABLE, STDERR, patches_in, read_header
from xmil.core.target import Target

INT32 = 2**31


@dataclass(frozen=True, eq=False)
class Evidence(Placed):
    """Scores (columns, n) of one slide in one run, and where its patches lie."""

    columns: list[dict[str, Any]]
    scores: npt.NDArray[np.float32]
    patches: Patches
    outputs: list[list[float]]  # of each model of an ensemble, or of the one

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
        return self.patches.missing is None

    def count_inside(self, width: int, height: int) -> int:
        """How many patches have their centre on a slide of this size."""
        if self.coords is None or self.patch_size is None:
            return self.n
        x, y = (self.coords + self.patch_size // 2).T
        return int(((x >= 0) & (y >= 0) & (x < width) & (y < height)).sum())

    def at(self, mpp: float | None) -> Evidence:
        """The evidence with its places, where they had to wait for the slide's mpp."""
        if self.placed or self.raw_coords is None or mpp is None:
            return self
        return replace(self, patches=_checked(self.patches.placed(mpp)))

    def to_bytes(self) -> bytes:
        """Little endian: int32 x0[n] and y0[n] where placed, then float32[n] for each column."""
        scores = self.scores.astype("<f4", copy=False).tobytes()
        if self.coords is None or not self.placed:
            return scores
        return self.coords.T.astype("<i4").tobytes() + scores


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
        table = read_parquet(path, wanted)
        if not names:
            raise ValueError("no scores in it")
        scores = [table[name].to_numpy().astype(np.float32) for name in shown]
        return Evidence(
            columns=columns,
            scores=np.stack(scores),
            patches=_checked(patches_in(header, table)),
            outputs=_outputs(header, names[0]),
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


def targets_in(path: Path, method: str) -> dict[str, tuple[Target, str | None]]:
    """The targets that a method explained, by their words, each with the number that was explained."""
    found = {}
    for meta in read_header(path)["columns"].values():
        if meta["method"] == method:
            target, kind = Target(**meta["target"]), (meta.get("params") or {}).get("output")
            found[str(target)] = (target, kind if isinstance(kind, str) else None)
    return found


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


BESIDE = {SPREAD: "spread", STDERR: "standard error", STABLE: "stable"}


def _columns(metas: dict[str, Any], stored: set[str]) -> list[dict[str, Any]]:
    """The columns to show: each method and target, then what stands beside its scores.

    `beside` names the column they belong to; `stable`, whether the sign is sure, is 0 or 1.
    """
    columns = []
    for name, meta in metas.items():
        columns.append(found := _column(name, meta))
        for suffix, kind in BESIDE.items():
            if name + suffix in stored:
                facts = {"method": f"{found['method']} ({kind})", "signed": False, "output": None}
                own = {"name": name + suffix, "beside": name, "kind": kind, "audit": None}
                columns.append({**found, **facts, **own})
    return columns


def _column(name: str, meta: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "beside": None,
        "kind": "scores",
        "method": str(meta["method"]),
        "target": str(Target(**meta["target"])),
        "signed": bool(meta["signed"]),
        "output": _number(meta.get("output"), float),
        "audit": meta.get("audit") if isinstance(meta.get("audit"), dict) else None,
        "made": _made(meta.get("params")),
        "warnings": [str(text) for text in meta.get("warnings") or ()],
    }


def _made(params: Any) -> list[tuple[str, str]]:
    """What an explanation records of how it was made, as names and words: rule, baseline, samples."""
    known = params if isinstance(params, dict) else {}
    plain = {key: value for key, value in known.items() if isinstance(value, str | bool | int | float)}
    return [(str(key), f"{v:.6g}" if isinstance(v, float) else str(v)) for key, v in plain.items()]


def _checked(patches: Patches) -> Patches:
    coords = patches.coords
    if coords is not None and coords.size and not np.abs(coords).max() < INT32:
        raise ValueError("coordinates out of range")
    return patches


def _number(value: Any, kind: type) -> Any:
    return None if value is None else kind(value)
