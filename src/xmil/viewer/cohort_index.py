"""Similar patches over all slides: short codes of the features of every slide, in bounded memory.

Unit features are projected at random to a few numbers (their cosines stay about the same), slide by slide; of
large cohorts an even sample of each slide's patches is kept. The best by code are compared by their features.
"""

from __future__ import annotations

from contextlib import suppress
from threading import Lock, Thread
from typing import Any

import numpy as np
import numpy.typing as npt

from xmil.core.errors import XmilError
from xmil.data import read_bag
from xmil.viewer.case_bags import CaseBags
from xmil.viewer.collection import Collection, MissingError

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
        bag = self._bags.get(key, run)
        own = bag.features[bag.rows]
        if not 0 <= index < len(own):
            raise MissingError(f"There is no patch {index}; the slide has {len(own)}.")
        codes = self._codes(run)
        if not codes.ready:
            return {"done": codes.done, "of": codes.of, "neighbours": None}
        near = codes.nearest(_unit(own[index : index + 1])[0], key)
        return {"done": codes.done, "of": codes.of, "neighbours": self._compared(own[index], near, run)}

    def _codes(self, run: int) -> _Codes:
        with self._lock:
            found = self._builds.get(run)
            slides = self._collection.refresh()
            if found is None or (found.ready and found.of != len(slides)):
                found = self._builds[run] = _Codes(len(slides))
                Thread(target=found.build, args=(self._collection, run), daemon=True).start()
            return found

    def _compared(self, feature: Floats, near: list[tuple[int, int]], run: int) -> list[dict[str, Any]]:
        """The nearest by the cosine of their features, of the slides that come first."""
        unit, found = _unit(feature[None])[0], []
        for key in list(dict.fromkeys(key for key, _ in near))[:OPENED]:
            try:
                bag = self._bags.get(key, run)
            except XmilError:
                continue
            rows = [row for other, row in near if other == key]
            cosines = _unit(bag.features[bag.rows][rows]) @ unit
            found += [
                {"key": key, "index": row, "similarity": float(cosine)}
                for row, cosine in zip(rows, cosines, strict=True)
            ]
        return sorted(found, key=lambda each: (-each["similarity"], each["key"], each["index"]))[:K]


class _Codes:
    """The codes of all slides, grown one slide at a time."""

    def __init__(self, slides: int) -> None:
        self.of, self.done, self.ready = slides, 0, False
        self._parts: list[npt.NDArray[np.float16]] = []
        self._places: list[npt.NDArray[np.int32]] = []
        self._turn: Floats | None = None

    def build(self, collection: Collection, run: int) -> None:
        """Read slide by slide; those that cannot be read are left out."""
        most = max(1, ROWS // max(1, self.of))
        for key in range(self.of):
            with suppress(XmilError):
                self._add(key, read_bag(collection.feature_file(key, run), collection.layout).features, most)
            self.done = key + 1
        self.ready = True

    def _add(self, key: int, features: Floats, most: int) -> None:
        rows = np.unique(np.linspace(0, len(features) - 1, min(most, len(features))).astype(np.int64))
        if self._turn is None:
            rng = np.random.default_rng(0)
            self._turn = rng.normal(size=(features.shape[1], DIMS)).astype(np.float32) / np.float32(DIMS**0.5)
        if features.shape[1] != len(self._turn):
            return  # other features than the rest
        self._parts.append((_unit(features[rows]) @ self._turn).astype(np.float16))
        self._places.append(np.stack([np.full(len(rows), key), rows], axis=1).astype(np.int32))

    def nearest(self, unit: Floats, key: int) -> list[tuple[int, int]]:
        """Slide and row of the patches whose codes are nearest, nearest first; not those of one slide."""
        if self._turn is None or len(unit) != len(self._turn):
            return []
        code = unit @ self._turn
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
