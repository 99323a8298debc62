"""The cohort at a glance: the patches that say most over all slides, and small pictures of the scores."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import nlargest
from io import BytesIO
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from xmil.core.errors import XmilError
from xmil.viewer.collection import Collection, MissingError
from xmil.viewer.kept import Kept, Stamp, stamp
from xmil.viewer.score_block import Evidence

K = 12  # patches of each group and side
PER_SLIDE = 3  # of them from one slide: a wall of one slide says little of the cohort
SMALL = 64  # pixels of the longer edge of a small picture
Key = tuple[str | None, bool | None]
Found = tuple[float, int, int]  # strength, slide, patch


class CohortWall:
    """The strongest patches by label and by right and wrong; slides are read one by one."""

    def __init__(self, collection: Collection) -> None:
        self._collection = collection
        self._walls: Kept[dict[str, Any]] = Kept(32)
        self._small: Kept[bytes] = Kept(16 << 20, len)
        self._lock = Lock()  # one wall is built at a time

    def columns(self, run: int) -> list[tuple[str, str]]:
        """The signed methods and targets of a run, by number, from its first slide that can be read."""
        for key in range(len(self._collection.refresh())):
            try:
                columns = self._collection.evidence(key, run).columns
            except XmilError:
                continue
            return [(c["method"], c["target"]) for c in columns if c["signed"]]
        return []

    def wall(self, run: int, column: int) -> dict[str, Any]:
        """The patches that say most for and against, for each label and for right and wrong predictions."""
        method, target = self._named(run, column)
        with self._lock:
            known = (run, method, target, self._stamps(run))
            found = self._walls.get(known)
            return found if found is not None else self._walls.put(known, self._built(run, method, target))

    def small(self, key: int, run: int, column: int) -> bytes:
        """A slide's scores as a small PNG in the colours of the heatmaps; no scores are transparent."""
        method, target = self._named(run, column)
        path = self._collection.run(run).explanation(self._collection.slide(key))
        known = (key, run, method, target, stamp(path) if path else None)
        found = self._small.get(known)
        if found is None:
            evidence = self._collection.evidence(key, run)
            found = self._small.put(known, _picture(evidence, _scores(evidence, method, target)))
        return found

    def _named(self, run: int, column: int) -> tuple[str, str]:
        self._collection.run(run)
        columns = self.columns(run)
        if not 0 <= column < len(columns):
            raise MissingError(f"There are no scores {column}; the run has {len(columns)} with signs.")
        return columns[column]

    def _stamps(self, run: int) -> tuple[Stamp | None, ...]:
        return tuple(self._stamp(run, slide) for slide in self._collection.refresh())

    def _stamp(self, run: int, slide: str) -> Stamp | None:
        try:
            path = self._collection.run(run).explanation(slide)
        except XmilError:
            return None
        return None if path is None else stamp(path)

    def _built(self, run: int, method: str, target: str) -> dict[str, Any]:
        groups: dict[Key, tuple[list[Found], list[Found]]] = {}
        slides = 0
        for key, group, scores in self._each(run, method, target):
            slides += 1
            sides = groups.setdefault(group, ([], []))
            for side, sign in zip(sides, (1, -1), strict=True):
                side[:] = nlargest(K, [*side, *_strongest(sign * scores, key)])
        return {
            "method": method,
            "target": target,
            "slides": slides,
            "groups": [_group(key, *sides) for key, sides in sorted(groups.items(), key=lambda g: str(g[0]))],
        }

    def _each(self, run: int, method: str, target: str) -> Iterator[tuple[int, Key, npt.NDArray[np.float32]]]:
        for key in range(len(self._collection.refresh())):
            try:
                scores = _scores(self._collection.evidence(key, run), method, target)
            except XmilError:
                continue  # the list says what is wrong with it
            about = self._collection.facts(key)
            yield key, (about["label"], about["correct"]), scores


def _scores(evidence: Evidence, method: str, target: str) -> npt.NDArray[np.float32]:
    for place, column in enumerate(evidence.columns):
        if (column["method"], column["target"]) == (method, target):
            return np.asarray(evidence.scores[place])
    raise MissingError(f"This slide has no scores of {method} for {target}.")


def _strongest(scores: npt.NDArray[np.float32], key: int) -> list[Found]:
    known = np.flatnonzero(scores > 0)
    best = known[np.argsort(-scores[known], kind="stable")[:PER_SLIDE]]
    return [(float(scores[i]), key, int(i)) for i in best]


def _group(key: Key, supporting: list[Found], refuting: list[Found]) -> dict[str, Any]:
    def listed(found: list[Found], sign: int) -> list[dict[str, Any]]:
        return [{"key": slide, "index": index, "score": sign * size} for size, slide, index in found]

    label, correct = key
    sides = {"supporting": listed(supporting, 1), "refuting": listed(refuting, -1)}
    return {"label": label, "correct": correct, **sides}


def _picture(evidence: Evidence, scores: npt.NDArray[np.float32]) -> bytes:
    """One pixel is the mean of the patches whose centres fall into it."""
    from PIL import Image

    if evidence.coords is None or not evidence.n:
        raise MissingError("The positions of this slide's patches are not known.")
    edge = evidence.patch_size or 1
    corner = evidence.coords.min(axis=0)
    places = evidence.coords - corner + edge // 2
    span = (evidence.coords.max(axis=0) - corner + edge).astype(np.float64)
    pixel = max(float(span.max()) / SMALL, float(edge))
    width, height = (max(1, int(np.ceil(length / pixel))) for length in span)
    cell = (places[:, 1] // pixel).astype(np.int64) * width + (places[:, 0] // pixel).astype(np.int64)
    counts = np.bincount(cell, minlength=width * height)
    mean = np.bincount(cell, weights=scores, minlength=width * height) / np.maximum(counts, 1)
    stream = BytesIO()
    Image.fromarray(_coloured(mean, counts > 0).reshape(height, width, 4)).save(stream, "PNG")
    return stream.getvalue()


def _coloured(values: npt.NDArray[np.float64], known: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint8]:
    from xmil.heatmaps.scale import SIGNED, Scale

    size = np.abs(values[known])
    limit = float(np.quantile(size, 0.95)) if size.any() else 1.0
    painted = Scale(-1, 1, True, SIGNED).paint(np.clip(values / (limit or 1.0), -1, 1))
    colours = np.zeros((len(values), 4), dtype=np.uint8)
    colours[:, :3] = painted[:, :3]
    colours[:, 3] = np.where(known, 255, 0)
    return colours
