"""The features behind a slide: read once, a few kept, checked against the explanation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from xmil.core.bag import Bag
from xmil.core.errors import InputError, XmilError
from xmil.data import read_bag
from xmil.viewer.collection import Collection, MissingError
from xmil.viewer.kept import Kept, stamp

LIMIT_BYTES = 512 << 20
K = 12  # similar patches that are shown


@dataclass(frozen=True, eq=False)
class CaseBag:
    """The features (n, d) that a prediction is made from, and the rows that are the slide's."""

    name: str
    features: npt.NDArray[np.float32]
    rows: slice
    key: tuple[object, ...]
    coords: npt.NDArray[np.int64] | None = None  # of a single slide; those of several share no plane


class CaseBags:
    """Bags by slide and run."""

    def __init__(self, collection: Collection) -> None:
        self._collection = collection
        self._kept: Kept[CaseBag] = Kept(LIMIT_BYTES, lambda bag: bag.features.nbytes)

    def get(self, key: int, run: int) -> CaseBag:
        """The bag of a slide: its own patches, or those of all slides of its case in a run by case."""
        n = self._collection.evidence(key, run).n
        mates = self._collection.mates(key, run)
        paths = [self._collection.feature_file(mate, run) for mate in mates]
        known = (key, tuple((path, stamp(path)) for path in paths))
        found = self._kept.get(known)
        if found is None:
            found = self._kept.put(known, self._joined(paths, mates.index(key), known))
        own = len(range(*found.rows.indices(len(found.features))))
        if own != n:
            name = self._collection.slide(key)
            raise InputError(
                f"The features of {name!r} have {own} patches and its explanation {n}; give the features "
                "that were explained."
            )
        return found

    def _joined(self, paths: list[Path], place: int, key: tuple[object, ...]) -> CaseBag:
        return _joined([_read(path, self._collection.layout) for path in paths], place, key)


def similar(bag: CaseBag, index: int, k: int = K) -> list[dict[str, float]]:
    """The patches of the slide nearest to one of them by the cosine of their features, nearest first."""
    features = bag.features[bag.rows]
    if not 0 <= index < len(features):
        raise MissingError(f"There is no patch {index}; the slide has {len(features)}.")
    lengths = np.linalg.norm(features, axis=1) * np.linalg.norm(features[index])
    cosines = features @ features[index] / np.maximum(lengths, np.finfo(np.float32).tiny)
    cosines[index] = -np.inf
    k = min(k, len(features) - 1)
    nearest = np.argpartition(-cosines, k - 1)[:k] if k else np.empty(0, dtype=np.int64)
    ranked = nearest[np.lexsort((nearest, -cosines[nearest]))]
    return [{"index": int(i), "similarity": float(cosines[i])} for i in ranked]


def _read(path: Path, layout: str) -> Bag:
    try:
        return replace(read_bag(path, layout), source=path.name)  # what the page is told names no folder
    except XmilError as error:
        raise type(error)(str(error).replace(str(path), path.name)) from None


def _joined(bags: list[Bag], place: int, key: tuple[object, ...]) -> CaseBag:
    from xmil.data.cases import join_bags

    name = str(bags[place].slide_id)
    joined, rows = join_bags(bags, name=name)
    return CaseBag(name, joined.features, rows[place], key, bags[0].coords if len(bags) == 1 else None)
