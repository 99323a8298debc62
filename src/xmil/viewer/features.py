"""Features of slides: the bag of a case, and the patches most similar to one, in its slide and in all.

For all slides, it compares short codes of the features, in bounded memory: unit features are projected at
random to a few numbers, which roughly preserves cosines; large cohorts use an even sample of
each slide's patches. The best by code are then compared by their features.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock, Thread
from typing import Any

import numpy as np
import numpy.typing as npt

from xmil.core.bag import Bag, FloatArray
from xmil.core.errors import InputError, XmilError
from xmil.data import read_bag
from xmil.viewer.cache import Cache, stamp
from xmil.viewer.collection import Collection, check_patch

BAG_BYTES = 512 << 20  # of features in memory
K = 12  # similar patches to show
DIMS = 64  # numbers of a code
ROWS = 2_000_000  # codes in all: 256 MB
TRIED = 96  # best codes, whose features are compared
OPENED = 12  # slides whose features one question reads
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class CaseBag:
    """The bag of a prediction, and the rows of the slide in it."""

    bag: Bag  # with coordinates only for a single slide, since several share no plane
    rows: slice
    key: tuple[object, ...]

    @property
    def own(self) -> FloatArray:
        """The features of the slide's patches."""
        return self.bag.features[self.rows]

    def widen(self, mask: Mask, *, rest: bool) -> Mask:
        """Extend a mask of the slide's patches to the bag; `rest` is the value for other slides."""
        wide = np.full(len(self.bag), rest)
        wide[self.rows] = mask
        return wide


class CaseBags:
    """Bags by slide and run."""

    def __init__(self, collection: Collection) -> None:
        self._collection = collection
        self._bags: Cache[CaseBag] = Cache(BAG_BYTES, lambda case: case.bag.features.nbytes)

    def get(self, key: int, run: int) -> CaseBag:
        """Read the bag of a slide: its patches, or those of all slides of its case in a run by case."""
        n = self._collection.evidence(key, run).n
        mates = self._collection.mates(key, run)
        paths = [self._collection.feature_file(mate, run) for mate in mates]
        version = (key, tuple((path, stamp(path)) for path in paths))
        bag = self._bags.fetch(version, lambda: self._join(paths, mates.index(key), version))
        if len(bag.own) != n:
            raise InputError(
                f"The features of {self._collection.slide(key)!r} have {len(bag.own)} patches, but its "
                f"explanation has {n}; pass the features that were explained."
            )
        return bag

    def features(self, key: int, run: int, index: int) -> FloatArray:
        """Read the features of a slide's patches; `index` must be one of them."""
        own = self.get(key, run).own
        check_patch(index, len(own))
        return own

    def similar(self, key: int, run: int, index: int) -> dict[str, Any]:
        """Find the patches of a slide nearest to one by cosine, nearest first."""
        features = self.features(key, run, index)
        lengths = np.linalg.norm(features, axis=1) * np.linalg.norm(features[index])
        cosines = features @ features[index] / np.maximum(lengths, np.finfo(np.float32).tiny)
        cosines[index] = -np.inf
        ranked = np.argsort(-cosines, kind="stable")[: min(K, len(features) - 1)]
        return {"neighbours": [{"index": int(i), "similarity": float(cosines[i])} for i in ranked]}

    def _join(self, paths: list[Path], place: int, version: tuple[object, ...]) -> CaseBag:
        from xmil.data.bags import join_bags

        bags = []
        for path in paths:
            try:  # the page must not show folders
                bags.append(replace(read_bag(path, self._collection.layout), source=path.name))
            except XmilError as error:
                raise type(error)(str(error).replace(str(path), path.name)) from None
        name = str(bags[place].slide_id)
        joined, rows = join_bags(bags, name=name)
        coords = bags[0].coords if len(bags) == 1 else None
        return CaseBag(Bag(joined.features, coords=coords, slide_id=name), rows[place], version)


class CohortIndex:
    """Codes of the patches of all slides, made in the background on the first question."""

    def __init__(self, collection: Collection, bags: CaseBags) -> None:
        self._collection, self._bags = collection, bags
        self._lock = Lock()
        self._builds: dict[int, _Codes] = {}

    def ask(self, key: int, run: int, index: int) -> dict[str, Any]:
        """Find the patches of other slides most similar to one, or report the progress of the index."""
        features = self._bags.features(key, run, index)
        with self._lock:
            codes = self._builds.get(run)
            slides = self._collection.refresh()
            if codes is None or (codes.ready and codes.of != len(slides)):
                codes = self._builds[run] = _Codes(len(slides))
                Thread(target=codes.build, args=(self._collection, run), daemon=True).start()
        if not codes.ready:
            return {"done": codes.done, "of": codes.of, "neighbours": None}
        near = codes.nearest(_unit(features[index : index + 1])[0], key)
        return {"done": codes.done, "of": codes.of, "neighbours": self._compare(features[index], near, run)}

    def _compare(self, feature: FloatArray, near: list[tuple[int, int]], run: int) -> list[dict[str, Any]]:
        """Find the nearest patches by cosine, within the first slides of `near`."""
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
    """The codes of all slides, added slide by slide."""

    def __init__(self, slides: int) -> None:
        self.of, self.done, self.ready = slides, 0, False
        self._parts: list[npt.NDArray[np.float16]] = []
        self._places: list[npt.NDArray[np.int32]] = []
        self._projection: FloatArray | None = None

    def build(self, collection: Collection, run: int) -> None:
        """Read slide by slide, and skip those that cannot be read."""
        most = max(1, ROWS // max(1, self.of))
        for key in range(self.of):
            with suppress(XmilError):
                features = read_bag(collection.feature_file(key, run), collection.layout).features
                if self._projection is None:
                    normal = np.random.default_rng(0).normal(size=(features.shape[1], DIMS))
                    self._projection = normal.astype(np.float32) / np.float32(DIMS**0.5)
                if features.shape[1] == len(self._projection):  # skip features of another width
                    spaced = np.linspace(0, len(features) - 1, min(most, len(features)))
                    rows = np.unique(spaced.astype(np.int64))
                    self._parts.append((_unit(features[rows]) @ self._projection).astype(np.float16))
                    self._places.append(np.stack([np.full(len(rows), key), rows], axis=1).astype(np.int32))
            self.done = key + 1
        self.ready = True

    def nearest(self, unit: FloatArray, key: int) -> list[tuple[int, int]]:
        """Find slide and row of the nearest codes, nearest first, outside the slide `key`."""
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


def _unit(features: FloatArray) -> FloatArray:
    lengths = np.linalg.norm(features, axis=1, keepdims=True)
    return np.asarray(features / np.maximum(lengths, np.finfo(np.float32).tiny), dtype=np.float32)
