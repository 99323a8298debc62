"""A slide's scores as one compact block of bytes, with their metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from xmil.core.bag import FloatArray, Patches, Placed
from xmil.core.budget import read_parquet
from xmil.core.errors import FileError, refuse_damage
from xmil.core.inside import Inside
from xmil.core.interactions import Interactions
from xmil.core.task import Target
from xmil.storage import RAW, SPREAD, STABLE, STDERR, ConceptMaps, patches_in, read_header

INT32 = 2**31


@dataclass(frozen=True, eq=False)
class Evidence(Placed):
    """Scores (columns, n) of one slide in one run, and where its patches lie."""

    columns: list[dict[str, Any]]
    scores: npt.NDArray[np.float32]
    patches: Patches
    outputs: list[list[float]]  # of each model

    @property
    def logits(self) -> list[float]:
        """The outputs of the model, or the mean of an ensemble's."""
        return [float(value) for value in np.mean(self.outputs, axis=0)]

    @property
    def n(self) -> int:
        """The number of patches."""
        return int(self.scores.shape[1])

    def find(self, method: str, target: str) -> npt.NDArray[np.float32] | None:
        """Find the scores (n,) of a method for a target; None if the slide has none."""
        names = [(column["method"], column["target"]) for column in self.columns]
        return self.scores[names.index((method, target))] if (method, target) in names else None

    @property
    def placed(self) -> bool:
        """Whether the positions of the patches are known."""
        return self.patches.missing is None

    def as_bytes(self, *columns: int) -> bytes:
        """Little endian: int32 x0[n] and y0[n] if placed, then float32[n] for each of `columns`, or all."""
        scores = self.scores[list(columns)] if columns else self.scores
        values = bytes(scores.astype("<f4", copy=False).tobytes())
        if self.coords is None or not self.placed:
            return values
        return bytes(self.coords.T.astype("<i4").tobytes()) + values

    def at(self, mpp: float | None) -> Evidence:
        """Place the patches with the slide's mpp, if they need it."""
        if self.placed or self.raw_coords is None or mpp is None:
            return self
        return replace(self, patches=_check(self.patches.placed(mpp)))


def read_evidence(path: Path) -> Evidence:
    """Read the scores in a file of explanations, without other data of the methods."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    header, fault = read_header(path), f"{path.name}: the explanation is damaged"
    with refuse_damage(fault, way="explain it again", kinds=(pa.ArrowException,)):
        stored = set(pq.read_schema(path).names)
        names = [column["name"] for column in _columns(header["columns"], stored)]
        table = read_parquet(path, ["x0", "y0", *(name for name in RAW if name in stored), *names])
        if not names:
            raise ValueError("it has no scores")
        scores = [table[name].to_numpy().astype(np.float32) for name in names]
        patches = _check(patches_in(header, table))
        return Evidence(
            columns=_columns(header["columns"], stored, patches.edge_note),
            scores=np.stack(scores),
            patches=patches,
            outputs=_outputs(header, names[0]),
        )


def _outputs(header: dict[str, Any], name: str) -> list[list[float]]:
    """Read the outputs of each model; an ensemble stores them apart from its mean."""
    mean = [float(value) for value in header["columns"][name]["logits"]]
    stored = (header.get("provenance") or {}).get("logits") or [mean]
    outputs_of_models = [[float(value) for value in outputs] for outputs in stored]
    return outputs_of_models if all(len(outputs) == len(mean) for outputs in outputs_of_models) else [mean]


def targets_in(path: Path, method: str) -> dict[str, tuple[Target, str | None]]:
    """Read the targets of a method by name, each with the kind of output explained."""
    targets = {}
    for meta in read_header(path)["columns"].values():
        if meta["method"] == method:
            target, kind = Target(**meta["target"]), (meta.get("params") or {}).get("output")
            targets[str(target)] = (target, kind if isinstance(kind, str) else None)
    return targets


BESIDE = {SPREAD: "spread", STDERR: "standard error", STABLE: "stable"}


def _columns(metas: dict[str, Any], stored: set[str], edge_note: str | None = None) -> list[dict[str, Any]]:
    """List the columns to show: each method and target, then related columns.

    `beside` names the column that one belongs to; `stable`, whether the sign is certain, is 0 or 1.
    `made` describes how an explanation was made: rule, baseline, samples.
    """
    columns = []
    for name, meta in metas.items():
        params, output = meta.get("params"), meta.get("output")
        facts = params.items() if isinstance(params, dict) else ()
        plain = [(str(key), value) for key, value in facts if isinstance(value, str | bool | int | float)]
        column = {
            "name": name,
            "beside": None,
            "kind": "scores",
            "method": str(meta["method"]),
            "target": str(Target(**meta["target"])),
            "signed": bool(meta["signed"]),
            "output": None if output is None else float(output),
            "audit": meta.get("audit") if isinstance(meta.get("audit"), dict) else None,
            "made": [(key, f"{v:.6g}" if isinstance(v, float) else str(v)) for key, v in plain],
            "warnings": [str(text) for text in (*(meta.get("warnings") or ()), edge_note) if text],
        }
        columns.append(column)
        for suffix, kind in BESIDE.items():
            if name + suffix in stored:
                changes = {"name": name + suffix, "beside": name, "kind": kind, "signed": False}
                changes |= {"method": f"{column['method']} ({kind})", "output": None, "audit": None}
                columns.append({**column, **changes})
    return columns


def _check(patches: Patches) -> Patches:
    coords = patches.coords
    if coords is not None and coords.size and not np.abs(coords).max() < INT32:
        raise ValueError("coordinates out of range")
    return patches


def fitting_maps(maps: ConceptMaps, evidence: Evidence, slide_id: str) -> ConceptMaps:
    """Check that concept maps belong to this explanation's patches and scores, and return them."""
    scores = evidence.find(maps.method, maps.target)
    if scores is None or len(maps) != evidence.n or not np.allclose(scores, maps.scores, rtol=1e-4):
        raise FileError(
            f"The concepts of {slide_id!r} belong to another explanation; run `xmil insight` again."
        )
    return maps


def concepts_layer(maps: ConceptMaps, names: Mapping[str, str]) -> dict[str, Any]:
    """List the concepts by relevance, and the part of the scores that passes through none."""
    sums = maps.values.sum(axis=0, dtype=np.float64)
    order = np.argsort(-np.abs(maps.values).sum(axis=0), kind="stable")
    active = [int(k) for k in order if np.any(maps.values[:, k])]
    total = float(maps.scores.sum(dtype=np.float64))
    return {
        "method": maps.method,
        "target": maps.target,
        "concepts": [
            {
                "concept": k,
                "name": names.get(str(k)),
                "sum": float(sums[k]),
                "patch": int(np.abs(maps.values[:, k]).argmax()),
            }
            for k in active
        ],
        "total": total,
        "rest": total - float(sums.sum()),
    }


FINEST = 56  # cells along the edge of a patch, as many as a screen shows


def read_layer(path: Path) -> dict[str, Any]:
    """Read what the page needs from a file of maps."""
    inside = Inside.load(path)
    maps = summed(inside.maps, FINEST)
    return {
        "method": inside.method,
        "target": inside.target,
        "encoder": inside.encoder,
        "warnings": list(inside.warnings),
        "limit": float(np.abs(maps).max(initial=0.0)),
        "height": maps.shape[1],
        "width": maps.shape[2],
        "maps": [
            {
                "patch": int(inside.patches[i]),
                "box": [int(value) for value in inside.boxes[i]],
                "values": [float(value) for value in maps[i].ravel()],
                "limit": float(np.abs(maps[i]).max(initial=0.0)),
                **{name: float(values[i]) for name, values in vars(inside.audit).items()},
            }
            for i in range(len(inside))
        ],
    }


def fits(layer: dict[str, Any], evidence: Evidence) -> bool:
    """Whether the maps belong to these patches and scores."""
    rows = np.array([patch_map["patch"] for patch_map in layer["maps"]], dtype=np.int64)
    corners = np.array([patch_map["box"][:2] for patch_map in layer["maps"]], dtype=np.int64).reshape(-1, 2)
    if evidence.coords is None or len(rows) == 0 or not 0 <= rows.min() <= rows.max() < evidence.n:
        return False
    scores = np.array([patch_map["score"] for patch_map in layer["maps"]], dtype=np.float32)
    near = np.isclose(evidence.scores[:, rows], scores, rtol=1e-4, atol=1e-7).all(axis=1)
    return bool((evidence.coords[rows] == corners).all() and near.any())


def summed(maps: FloatArray, finest: int) -> FloatArray:
    """Reduce maps (k, h, w) to at most `finest` cells per side; a cell sums what it covers.

    >>> summed(np.ones((1, 6, 6), dtype=np.float32), 4).tolist()
    [[[4.0, 4.0, 4.0], [4.0, 4.0, 4.0], [4.0, 4.0, 4.0]]]
    """
    k, h, w = maps.shape
    down, across = (  # the largest number of equal parts
        next(parts for parts in range(min(length, finest), 0, -1) if length % parts == 0) for length in (h, w)
    )
    parts = maps.reshape(k, down, h // down, across, w // across)
    return np.asarray(parts.sum(axis=(2, 4), dtype=np.float64), dtype=np.float32)


def pairs_layer(results: Sequence[Interactions], slide_id: str, evidence: Evidence) -> dict[str, Any]:
    """List the pairs of this slide, without those of other bags, of groups, or with invalid rows."""
    sets = []
    for result in results:
        pairs = result.pairs
        if result.bag != slide_id or result.names is not None or not len(result):
            continue
        if pairs.min() < 0 or pairs.max() >= evidence.n:
            continue
        rows = zip(pairs.tolist(), result.values.tolist(), result.sure.tolist(), strict=True)
        listed = [{"first": a, "second": b, "value": value, "sure": sure} for (a, b), value, sure in rows]
        sets.append({"target": str(result.target), "warnings": list(result.warnings), "pairs": listed})
    return {"sets": sets}
