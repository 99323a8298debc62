"""Similar patches over all slides: short codes of the features of every slide, in bounded memory.

Unit features are projected at random to a few numbers (their cosines stay about the same), slide by slide; of
large cohorts an even sample of each slide's patches. The best by code are compared by their features.
"""

from __future__ import annotations

import time
from contextlib import suppress
from heapq import nlargest
from threading import Lock, Thread
from typing import Any

import numpy as np
import numpy.typing as npt

from xmil.core.errors import XmilError
from xmil.core.task import TASKS
from xmil.data import read_bag
from xmil.viewer.cache import Cache, Stamp, stamp
from xmil.viewer.collection import PATIENCE, Collection, MissingError
from xmil.viewer.deepzoom import encode
from xmil.viewer.layers import Evidence
from xmil.viewer.whatif import CaseBags

DIMS = 64  # numbers of a code
ROWS = 2_000_000  # codes in all: 256 MB
K = 12  # patches that are shown
TRIED = 96  # best by code, whose features are compared
OPENED = 12  # slides whose features are read for one question
Floats = npt.NDArray[np.float32]


class CohortIndex:
    """Codes of the patches of all slides, made in the background on the first question."""

    def __init__(self, collection: Collection, bags: CaseBags) -> None:
        self._collection, self._bags = collection, bags
        self._lock = Lock()
        self._builds: dict[int, _Codes] = {}

    def ask(self, key: int, run: int, index: int) -> dict[str, Any]:
        """The patches of other slides most like one, or how far the index is."""
        own = self._bags.features(key, run, index)
        with self._lock:
            codes = self._builds.get(run)
            slides = self._collection.refresh()
            if codes is None or (codes.ready and codes.of != len(slides)):
                codes = self._builds[run] = _Codes(len(slides))
                Thread(target=codes.build, args=(self._collection, run), daemon=True).start()
        if not codes.ready:
            return {"done": codes.done, "of": codes.of, "neighbours": None}
        near = codes.nearest(_unit(own[index : index + 1])[0], key)
        return {"done": codes.done, "of": codes.of, "neighbours": self._compare(own[index], near, run)}

    def _compare(self, feature: Floats, near: list[tuple[int, int]], run: int) -> list[dict[str, Any]]:
        """The nearest by the cosine of their features, of the slides that come first."""
        unit, neighbours = _unit(feature[None])[0], []
        for key in list(dict.fromkeys(key for key, _ in near))[:OPENED]:
            rows = [row for other, row in near if other == key]
            with suppress(XmilError):
                cosines = _unit(self._bags.get(key, run).own[rows]) @ unit
                neighbours += [
                    {"key": key, "index": row, "similarity": float(cosine)}
                    for row, cosine in zip(rows, cosines, strict=True)
                ]
        return sorted(neighbours, key=lambda each: (-each["similarity"], each["key"], each["index"]))[:K]


class _Codes:
    """The codes of all slides, grown one slide at a time."""

    def __init__(self, slides: int) -> None:
        self.of, self.done, self.ready = slides, 0, False
        self._parts: list[npt.NDArray[np.float16]] = []
        self._places: list[npt.NDArray[np.int32]] = []
        self._projection: Floats | None = None

    def build(self, collection: Collection, run: int) -> None:
        """Read slide by slide; those that cannot be read are left out."""
        most = max(1, ROWS // max(1, self.of))
        for key in range(self.of):
            with suppress(XmilError):
                features = read_bag(collection.feature_file(key, run), collection.layout).features
                if self._projection is None:
                    normal = np.random.default_rng(0).normal(size=(features.shape[1], DIMS))
                    self._projection = normal.astype(np.float32) / np.float32(DIMS**0.5)
                if features.shape[1] == len(self._projection):  # else other features than the rest
                    places = np.linspace(0, len(features) - 1, min(most, len(features)))
                    rows = np.unique(places.astype(np.int64))
                    self._parts.append((_unit(features[rows]) @ self._projection).astype(np.float16))
                    self._places.append(np.stack([np.full(len(rows), key), rows], axis=1).astype(np.int32))
            self.done = key + 1
        self.ready = True

    def nearest(self, unit: Floats, key: int) -> list[tuple[int, int]]:
        """Slide and row of the patches whose codes are nearest, nearest first; not those of one slide."""
        if self._projection is None or len(unit) != len(self._projection):
            return []
        code = unit @ self._projection
        best: list[tuple[float, int, int]] = []
        for part, places in zip(self._parts, self._places, strict=True):
            if places[0, 0] == key:
                continue
            likeness = part.astype(np.float32) @ code
            first = np.argsort(-likeness)[:TRIED]
            best += [(-float(likeness[i]), int(places[i, 0]), int(places[i, 1])) for i in first]
        return [(slide, row) for _, slide, row in sorted(best)[:TRIED]]


def _unit(features: Floats) -> Floats:
    lengths = np.linalg.norm(features, axis=1, keepdims=True)
    return np.asarray(features / np.maximum(lengths, np.finfo(np.float32).tiny), dtype=np.float32)


PER_SLIDE = 3  # of them from one slide: a wall of one slide says little of the cohort
SMALL = 64  # pixels of the longer edge of a small picture
POOLED = 4_000_000  # scores of a column that a cohort's scale is made from: of large cohorts, even samples
Key = tuple[str | None, bool | None]
Strong = tuple[float, int, int]  # strength, slide, patch


class CohortWall:
    """The strongest patches by label and by right and wrong; slides are read one by one."""

    def __init__(self, collection: Collection) -> None:
        self._collection = collection
        self._walls: Cache[dict[str, Any]] = Cache(32)
        self._scales: Cache[dict[str, Any]] = Cache(8)
        self._checked: dict[int, tuple[float, dict[str, Any]]] = {}
        self._small: Cache[bytes] = Cache(16 << 20, len)
        self._lock = Lock()  # one wall is built at a time

    def columns(self, run: int) -> dict[str, Any]:
        """The signed methods and targets of a run, by number, from its first slide that can be read."""
        task = TASKS[self._collection.run(run).task]
        _, first = next(self._collection.readable(run), (0, None))
        signed = [(c["method"], c["target"]) for c in first.columns if c["signed"]] if first else []
        ends = [task.short_ends(target) for _, target in signed]
        return {
            "columns": [{"method": m, "target": t, "ends": e} for (m, t), e in zip(signed, ends, strict=True)]
        }

    def wall(self, run: int, column: int) -> dict[str, Any]:
        """The strongest patches for and against, for each label and for right and wrong predictions."""
        method, target = self._name_column(run, column)
        with self._lock:
            key = (run, method, target, self._stamps(run))
            return self._walls.fetch(key, lambda: self._build(run, method, target))

    def scales(self, run: int) -> dict[str, Any]:
        """Where each method's colours end over the cohort: 99 % of all patches' scores lie within."""
        self._collection.run(run)
        checked, scales = self._checked.get(run, (0.0, {}))
        if time.monotonic() - checked > PATIENCE:  # every small picture asks
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
        """A slide's scores as a small grey PNG on the cohort's scale, from 0 to 255; the page colours it."""
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
            raise MissingError(f"There are no scores {column}; the run has {len(columns)} with signs.")
        return columns[column]["method"], columns[column]["target"]

    def _stamps(self, run: int) -> tuple[tuple[str, Stamp | None], ...]:
        """What changes when a file of the run's explanations does."""
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
    """One pixel is the mean of the patches whose centres fall into it; clear where there are none."""
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
