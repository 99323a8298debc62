"""CAMELYON16: slides as bags of encoded patches, lesions outlined by pathologists.

A folder holds `features/` (any layout `read_bag` reads: CLAM, TRIDENT, ...), `annotations/` (ASAP's XML, one
for each tumour slide) and `slides.csv` with the columns `slide_id`, `split` (train, validation, test) and,
for slides without a file, `label`.
"""

from __future__ import annotations

import csv
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from xmil.bench.measuring import Measure, Values
from xmil.bench.problems import SPLITS, LabelledBag, ListedProblem
from xmil.core.errors import FileError, InputError
from xmil.core.parsing import parse_xml
from xmil.data import read_bag
from xmil.evaluate.localisation import covered_by_polygons

EXCLUDED = ("_2", "Exclusion", "None")  # groups of the XML that are not tumour
SHARE = 0.1  # of a patch's area in a lesion, from which on it counts as part of it
FALSE_POSITIVES = (1, 2, 4, 8)
Floats = npt.NDArray[np.float64]

LESIONS = (
    Measure(
        "lesion_recall",
        "Lesions found",
        "share of lesions that the top patches touch, as many as lie in lesions",
    ),
    Measure(
        "lesion_froc",
        "Lesions before errors",
        "share of lesions found before 1, 2, 4 and 8 patches outside rank as high, averaged",
    ),
)


@dataclass(frozen=True, eq=False)
class Outline:
    """A polygon (k, 2) in level-0 pixels; `tumour` is False for what is cut out of lesions."""

    points: Floats
    tumour: bool


def read_asap(path: Path) -> list[Outline]:
    """The polygons of an ASAP annotation."""
    try:
        root = parse_xml(path.read_bytes())
    except OSError as error:
        raise FileError(f"{path}: cannot be read ({error.strerror}).") from None
    except ValueError as error:
        raise FileError(f"{path}: not an ASAP annotation ({error}).") from None
    return [outline for node in root.iter("Annotation") if (outline := _outline(node, path)) is not None]


def _outline(node: ET.Element, path: Path) -> Outline | None:
    try:
        listed = sorted(node.iter("Coordinate"), key=lambda c: float(c.get("Order", "0")))
        points = np.array(
            [[float(c.attrib["X"].replace(",", ".")), float(c.attrib["Y"].replace(",", "."))] for c in listed]
        )
    except (KeyError, ValueError) as error:
        raise FileError(f"{path}: the annotation {node.get('Name')!r} is damaged ({error}).") from None
    if len(points) < 3:  # points and lines mark no area
        return None
    return Outline(points, node.get("PartOfGroup", "") not in EXCLUDED)


def lesions_of(outlines: Sequence[Outline], coords: npt.ArrayLike, patch_size: int) -> npt.NDArray[np.int64]:
    """The lesion each patch lies in, -1 for none: the one that covers most of it, if enough of it."""
    tumours = [o for o in outlines if o.tumour]
    holes = [[o.points] for o in outlines if not o.tumour]
    xy0 = np.asarray(coords, dtype=np.float64)
    if not tumours:
        return np.full(len(xy0), -1, dtype=np.int64)
    shares = np.stack([covered_by_polygons([[o.points]], xy0, patch_size, without=holes) for o in tumours])
    return np.where(shares.max(axis=0) >= SHARE, shares.argmax(axis=0), -1).astype(np.int64)


class SlideBags(Sequence[LabelledBag]):
    """Slides of a folder, read when they are asked for."""

    def __init__(self, folder: Path, rows: Sequence[dict[str, str]]) -> None:
        self.folder, self.rows = folder, list(rows)
        self.width = int(self[0].features.shape[1])

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, at: int) -> LabelledBag: ...
    @overload
    def __getitem__(self, at: slice) -> list[LabelledBag]: ...
    def __getitem__(self, at: int | slice) -> LabelledBag | list[LabelledBag]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        return self._bag(self.rows[at])

    def _bag(self, row: dict[str, str]) -> LabelledBag:
        name = row["slide_id"]
        bag = read_bag(_feature_file(self.folder, name))
        if bag.coords is None or bag.patch_size is None:
            raise InputError(f"{name}: its features have no coordinates to lay annotations on.")
        path = self.folder / "annotations" / f"{name}.xml"
        outlines = read_asap(path) if path.is_file() else []
        lesions = lesions_of(outlines, bag.coords, bag.patch_size)
        support = (lesions >= 0).astype(np.int8)
        label = int(row["label"]) if row.get("label") else int(path.is_file())
        return LabelledBag(name, bag.features, label, np.stack([-support, support]), lesions)


def _feature_file(folder: Path, name: str) -> Path:
    found = sorted((folder / "features").glob(f"{name}.*"))
    if not found:
        raise FileError(f"{folder / 'features'}: has no features of the slide {name!r}.")
    return found[0]


def camelyon_problem(folder: Path) -> ListedProblem:
    """The slides of a folder as one problem; it has one repetition, the published division."""
    table = folder / "slides.csv"
    try:
        with table.open(newline="", encoding="utf-8") as stream:
            rows = list(csv.DictReader(stream))
    except OSError as error:
        raise FileError(f"{table}: cannot be read ({error.strerror}).") from None
    if not rows or not {"slide_id", "split"} <= set(rows[0]):
        raise FileError(f"{table}: needs the columns slide_id and split.")
    splits = {s: np.array([i for i, row in enumerate(rows) if row["split"] == s], np.int64) for s in SPLITS}
    if not len(splits["test"]):
        raise InputError(f"{table}: no slide has the split 'test'.")
    about = {"folder": folder.name, "share": SHARE}
    why = "lesions outlined by pathologists: does a slide's evidence lie in them?"
    return ListedProblem("camelyon16", "CAMELYON16", why, 2, SlideBags(folder, rows), [splits], about)


def grade_lesions(lesions: npt.NDArray[np.int64], scores: Floats) -> dict[str, float]:
    """Both measures of one slide from its lesions (n,) and scores for the tumour class; nan without lesions.

    Equal scores are taken together: a lesion counts as found only where its patches rank above those outside.

    >>> grade_lesions(np.array([0, 1, -1]), np.array([0.9, 0.1, 0.5]))
    {'lesion_recall': 0.5, 'lesion_froc': 0.875}
    """
    found = np.unique(lesions[lesions >= 0])
    if not len(found):
        return {measure.name: float("nan") for measure in LESIONS}
    inside = lesions >= 0
    peaks = np.array([scores[lesions == one].max() for one in found])
    top = np.sort(scores)[::-1][int(inside.sum()) - 1]
    outside = np.sort(scores[~inside])[::-1]
    bars = [outside[k - 1] if k <= len(outside) else -np.inf for k in FALSE_POSITIVES]
    held = scores >= top
    recall = float(np.mean(peaks >= top)) if held.sum() == inside.sum() else float(np.mean(peaks > top))
    return {"lesion_recall": recall, "lesion_froc": float(np.mean([np.mean(peaks > bar) for bar in bars]))}


def lesion_values(blocks: Sequence[Any], scores: Sequence[Any]) -> Values:
    """Both measures of every bag."""
    rows: list[dict[str, float]] = []
    for block, given in zip(blocks, scores, strict=True):
        s = given[:, 1].detach().double().cpu().numpy()
        for i in range(len(block)):
            none = block.lesions is None
            rows.append(grade_lesions(np.full(s.shape[1], -1) if none else block.lesions[i], s[i]))
    return {measure.name: np.array([row[measure.name] for row in rows]) for measure in LESIONS}
