"""An overview of the cohort: its strongest patches, its colour scale, and small maps of its slides."""

from __future__ import annotations

import time
from contextlib import suppress
from heapq import nlargest
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from xmil.core.errors import XmilError
from xmil.core.task import TASKS
from xmil.viewer.cache import Cache, Stamp, stamp
from xmil.viewer.collection import PATIENCE, Collection, MissingError
from xmil.viewer.deepzoom import encode
from xmil.viewer.layers import Evidence

K = 12  # patches to show
PER_SLIDE = 3  # most patches from one slide
SMALL = 64  # pixels of the longer edge of a small picture
POOLED = 4_000_000  # scores of a column for the cohort's scale; large cohorts use even samples
Key = tuple[str | None, bool | None]
Strong = tuple[float, int, int]  # strength, slide, patch


class CohortWall:
    """The strongest patches by label and correctness; slides are read one by one."""

    def __init__(self, collection: Collection) -> None:
        self._collection = collection
        self._walls: Cache[dict[str, Any]] = Cache(32)
        self._scales: Cache[dict[str, Any]] = Cache(8)
        self._checked: dict[int, tuple[float, dict[str, Any]]] = {}
        self._small: Cache[bytes] = Cache(16 << 20, len)
        self._lock = Lock()  # one wall is built at a time

    def columns(self, run: int) -> dict[str, Any]:
        """List the signed methods and targets of a run, from its first readable slide."""
        task = TASKS[self._collection.run(run).task]
        _, first = next(self._collection.readable(run), (0, None))
        signed = [(c["method"], c["target"]) for c in first.columns if c["signed"]] if first else []
        ends = [task.short_ends(target) for _, target in signed]
        return {
            "columns": [{"method": m, "target": t, "ends": e} for (m, t), e in zip(signed, ends, strict=True)]
        }

    def wall(self, run: int, column: int) -> dict[str, Any]:
        """Find the strongest patches for and against, by label and correctness."""
        method, target = self._name_column(run, column)
        with self._lock:
            key = (run, method, target, self._stamps(run))
            return self._walls.fetch(key, lambda: self._build(run, method, target))

    def scales(self, run: int) -> dict[str, Any]:
        """Compute the end of each method's colour scale: 99 % of the cohort's scores lie within."""
        self._collection.run(run)
        checked, scales = self._checked.get(run, (0.0, {}))
        if time.monotonic() - checked > PATIENCE:  # every small picture calls this
            with self._lock:
                scales = self._scales.fetch((run, self._stamps(run)), lambda: self._measure(run))
            self._checked[run] = (time.monotonic(), scales)
        return scales

    def _measure(self, run: int) -> dict[str, Any]:
        from xmil.heatmaps import Scale

        pools: dict[str, list[npt.NDArray[np.float32]]] = {}
        signed: dict[str, bool] = {}
        most = max(2, POOLED // max(1, len(self._collection.refresh())))
        slides = 0
        for _, evidence in self._collection.readable(run):
            slides += 1
            for column, scores in zip(evidence.columns, evidence.scores, strict=True):
                ordered = np.sort(scores[np.isfinite(scores)])
                if column["kind"] == "scores" and len(ordered):
                    rows = np.linspace(0, len(ordered) - 1, min(most, len(ordered)))
                    pools.setdefault(column["method"], []).append(ordered[rows.round().astype(np.int64)])
                    signed[column["method"]] = column["signed"]
        scales = {}
        for method, parts in pools.items():
            scores = np.concatenate(parts)
            scale = Scale.of(scores, signed=signed[method], clip="percentile")
            ends = {"low": scale.low, "high": scale.high}
            scales[method] = ends | {"lowest": float(scores.min()), "highest": float(scores.max())}
        return {"slides": slides, "scales": scales}

    def small(self, key: int, run: int, column: int) -> bytes:
        """Draw a slide's scores as a small grey PNG on the cohort's scale; the page colours it."""
        path = self._collection.run(run).find("explanations", self._collection.slide(key))
        method, target = self._name_column(run, column)
        ends = self.scales(run)["scales"].get(method) or {"high": 1.0}

        def draw() -> bytes:
            evidence = self._collection.evidence(key, run)
            scores = evidence.find(method, target)
            if scores is None:
                raise MissingError(f"This slide has no scores of {method} for {target}.")
            return _picture(evidence, scores, ends["high"])

        known = (key, run, method, target, ends["high"], stamp(path) if path else None)
        return self._small.fetch(known, draw)

    def _name_column(self, run: int, column: int) -> tuple[str, str]:
        columns = self.columns(run)["columns"]
        if not 0 <= column < len(columns):
            raise MissingError(f"There is no column {column}; the run has {len(columns)} with signed scores.")
        return columns[column]["method"], columns[column]["target"]

    def _stamps(self, run: int) -> tuple[tuple[str, Stamp | None], ...]:
        """A value that changes when a file of the run's explanations does."""
        stamps: dict[str, Stamp | None] = {}
        for slide in self._collection.refresh():
            with suppress(XmilError):
                path = self._collection.run(run).find("explanations", slide)
                stamps[slide] = stamp(path) if path else None
        return tuple(stamps.items())

    def _build(self, run: int, method: str, target: str) -> dict[str, Any]:
        groups: dict[Key, tuple[list[Strong], list[Strong]]] = {}
        slides = 0
        for key, evidence in self._collection.readable(run):
            scores = evidence.find(method, target)
            if scores is None:
                continue
            slides += 1
            facts = self._collection.facts(key)
            sides = groups.setdefault((facts["label"], facts["correct"]), ([], []))
            for side, signed in zip(sides, (scores, -scores), strict=True):
                positive = np.flatnonzero(signed > 0)
                best = positive[np.argsort(-signed[positive], kind="stable")[:PER_SLIDE]]
                side[:] = nlargest(K, [*side, *((float(signed[i]), key, int(i)) for i in best)])
        entries = [
            {
                "label": label,
                "correct": correct,
                **{
                    name: [{"key": key, "index": i, "score": sign * size} for size, key, i in side]
                    for name, sign, side in (("supporting", 1, supporting), ("refuting", -1, refuting))
                },
            }
            for (label, correct), (supporting, refuting) in sorted(groups.items(), key=lambda g: str(g[0]))
        ]
        return {"method": method, "target": target, "slides": slides, "groups": entries}


def _picture(evidence: Evidence, scores: npt.NDArray[np.float32], high: float) -> bytes:
    """Average the patches whose centres fall into each pixel; pixels without any are transparent."""
    pixels = np.zeros((1, 1, 4), dtype=np.uint8)
    if evidence.coords is not None and evidence.n:
        edge = evidence.patch_size or 1
        corner = evidence.coords.min(axis=0)
        places = evidence.coords - corner + edge // 2
        span = (evidence.coords.max(axis=0) - corner + edge).astype(np.float64)
        pixel = max(float(span.max()) / SMALL, float(edge))
        width, height = (max(1, int(np.ceil(length / pixel))) for length in span)
        cell = (places[:, 1] // pixel).astype(np.int64) * width + (places[:, 0] // pixel).astype(np.int64)
        counts = np.bincount(cell, minlength=width * height)
        mean = np.bincount(cell, weights=scores, minlength=width * height) / np.maximum(counts, 1)
        grey = np.round(127.5 * (1 + np.clip(mean / (high or 1.0), -1, 1)))
        shades = np.stack([grey, grey, grey, np.where(counts > 0, 255, 0)], axis=1)
        pixels = shades.astype(np.uint8).reshape(height, width, 4)
    return encode(pixels, "PNG")
