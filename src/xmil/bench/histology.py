"""Problems from published histology: nuclei of colon tissue, and the slides of CAMELYON16.

Colon (Sirinukunwattana et al. 2016): images are bags, labelled nuclei instances.

CAMELYON16: slides are bags of encoded patches, with lesions outlined by pathologists. A folder holds
`features/` (any layout `read_bag` reads: CLAM, TRIDENT, ...), `annotations/` (ASAP's XML, one for each tumour
slide) and `slides.csv` with the columns `slide_id`, `split` (train, validation, test), for slides without a
file `label`, and `case_id` if patients have several slides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from xmil.bench.digits import for_and_against
from xmil.bench.problems import SPLITS, LabelledBag, ListedProblem, read_arrays, read_table
from xmil.bench.tissue import HOLDS, MORE, STATISTICS, embedder
from xmil.core.budget import open_picture
from xmil.core.errors import FileError, InputError, refuse_damage
from xmil.core.text import parse_xml
from xmil.data import read_bag
from xmil.evaluate import covered_by_polygons
from xmil.evaluate.statistics import Floats

CELLS = ("epithelial", "inflammatory", "fibroblast", "others")
EPITHELIAL, INFLAMMATORY = 0, 1
PATCH, FOLDS = 48, 5  # pixels around a nucleus; parts of the images
COLON = {
    "colon_epithelial": ("Epithelial nuclei", "it holds an epithelial nucleus", HOLDS),
    "colon_balance": ("More epithelial", "epithelial outnumber inflammatory nuclei", MORE),
}
EXCLUDED = ("_2", "Exclusion", "None")  # groups of the XML that are not tumour
SHARE = 0.1  # of a patch's area in a lesion that makes the patch part of it
Rows = npt.NDArray[np.int64]
Nuclei = dict[str, tuple[Floats, Rows]]


def nuclei(folder: Path) -> Nuclei:
    """Read the nuclei's centres (n, 2) in pixels and cell types (n,) by the image's name."""
    by_image: dict[str, list[tuple[float, float, int]]] = {}
    for row in read_table(folder / "nuclei.csv", "image", "x", "y", "cell"):
        nucleus = (float(row["x"]), float(row["y"]), CELLS.index(row["cell"]))
        by_image.setdefault(row["image"], []).append(nucleus)
    tables = {name: np.array(rows) for name, rows in by_image.items()}
    return {name: (rows[:, :2], rows[:, 2].astype(np.int64)) for name, rows in tables.items()}


def folds(labels: npt.ArrayLike, *, seed: int, n_folds: int = FOLDS) -> list[Rows]:
    """Test rows of each fold, with labels spread evenly."""
    labels = np.asarray(labels)
    rng = np.random.default_rng(seed)
    fold = np.empty(len(labels), dtype=int)
    for label in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == label))
        fold[rows] = np.arange(len(rows)) % n_folds
    return [np.flatnonzero(fold == k) for k in range(n_folds)]


def colon_problems(
    folder: Path, *, features: Path | None = None, encoder: str = STATISTICS, runs: int = 10
) -> list[ListedProblem]:
    """Make both tasks: run r tests on fold r mod 5 of division r div 5 of the images.

    `features` is a file from `benchmarks.colon.features`; without it, embed the nuclei.
    """
    if features is None:
        embed, tables = embedder(encoder), nuclei(folder)
        names = list(tables)
        parts = [embed(cut(folder / f"{name}.jpg", centres)) for name, (centres, _) in tables.items()]
        cells = [kinds for _, kinds in tables.values()]
    else:
        images, kinds, titles, x = read_arrays(features, "image", "cells", "names", "features")
        rows = [np.flatnonzero(images == i) for i in range(len(titles))]
        names, parts = titles.astype(str).tolist(), [x[r].astype(np.float32) for r in rows]
        cells = [kinds[r] for r in rows]
    problems = []
    for task, (title, condition, _) in COLON.items():
        bags = [
            LabelledBag(name, x, label_of(task, kinds), evidence_of(task, kinds))
            for name, x, kinds in zip(names, parts, cells, strict=True)
        ]
        problems.append(
            ListedProblem(
                name=task,
                title=title,
                why=f"an image is positive if {condition}",
                n_classes=2,
                in_dim=int(parts[0].shape[1]),
                family="tissue",
                repetitions=runs,
                n_bags=len(bags),
                bag=bags.__getitem__,
                splits=[_split([bag.label for bag in bags], run) for run in range(runs)],
                about={"encoder": encoder if features is None else features.name},
                scaled=features is None,
            )
        )
    return problems


def label_of(task: str, cells: Rows) -> int:
    """colon_epithelial: contains an epithelial nucleus. colon_balance: more epithelial than inflammatory."""
    return int(COLON[task][2].label(cells == EPITHELIAL, cells == INFLAMMATORY))


def evidence_of(task: str, cells: Rows) -> npt.NDArray[np.int8]:
    """The evidence of each nucleus for both classes, (2, n)."""
    return for_and_against(COLON[task][2].support(cells == EPITHELIAL, cells == INFLAMMATORY))


def _split(labels: Sequence[int], run: int) -> dict[str, Rows]:
    test = folds(labels, seed=run // FOLDS)[run % FOLDS]
    others = np.random.default_rng(run).permutation(np.setdiff1d(np.arange(len(labels)), test))
    cut = max(1, len(others) // FOLDS)
    return {"train": np.sort(others[cut:]), "validation": np.sort(others[:cut]), "test": test}


def cut(image: Path, centres: Floats, *, patch: int = PATCH) -> npt.NDArray[np.uint8]:
    """Cut squares around the centres (n, patch, patch, 3), reflected at the border."""
    with open_picture(image, width=7) as opened:
        pixels = np.asarray(opened.convert("RGB"))
    half = patch // 2
    padded = np.pad(pixels, ((half, half), (half, half), (0, 0)), mode="reflect")
    limit = [pixels.shape[1] - 1, pixels.shape[0] - 1]
    corners = np.clip(np.rint(centres).astype(int), 0, limit)
    return np.stack([padded[y : y + patch, x : x + patch] for x, y in corners])


@dataclass(frozen=True, eq=False)
class Outline:
    """A polygon (k, 2) in level-0 pixels; `tumour` is False for holes in lesions."""

    points: Floats
    tumour: bool


def read_asap(path: Path) -> list[Outline]:
    """Read the polygons of an ASAP annotation."""
    try:
        root = parse_xml(path.read_bytes())
    except OSError as error:
        raise FileError(f"{path}: cannot be read ({error.strerror}).") from None
    except ValueError as error:
        raise FileError(f"{path}: not an ASAP annotation ({error}).") from None
    outlines = []
    for node in root.iter("Annotation"):
        with refuse_damage(f"{path}: the annotation {node.get('Name')!r} is damaged"):
            corners = sorted(node.iter("Coordinate"), key=lambda c: float(c.get("Order", "0")))
            points = [[float(c.attrib[axis].replace(",", ".")) for axis in ("X", "Y")] for c in corners]
        if len(points) >= 3:  # points and lines mark no area
            outlines.append(Outline(np.array(points), node.get("PartOfGroup", "") not in EXCLUDED))
    return outlines


def lesions_of(outlines: Sequence[Outline], coords: npt.ArrayLike, patch_size: int) -> Rows:
    """The lesion of each patch, -1 for none: the one that covers most of it, if at least `SHARE`."""
    tumours = [o for o in outlines if o.tumour]
    holes = [[o.points] for o in outlines if not o.tumour]
    xy0 = np.asarray(coords, dtype=np.float64)
    if not tumours:
        return np.full(len(xy0), -1, dtype=np.int64)
    shares = np.stack([covered_by_polygons([[o.points]], xy0, patch_size, without=holes) for o in tumours])
    return np.where(shares.max(axis=0) >= SHARE, shares.argmax(axis=0), -1).astype(np.int64)


def _read_slide(folder: Path, row: dict[str, str]) -> LabelledBag:
    """Read a slide with its lesions; without a label it is positive if it has annotations."""
    name = row["slide_id"]
    files = sorted((folder / "features").glob(f"{name}.*"))
    if not files:
        raise FileError(f"{folder / 'features'}: has no features of the slide {name!r}; add them.")
    bag = read_bag(files[0])
    if bag.coords is None or bag.patch_size is None:
        raise InputError(f"{name}: its features have no coordinates, which lesions need; embed it again.")
    path = folder / "annotations" / f"{name}.xml"
    lesions = lesions_of(read_asap(path) if path.is_file() else [], bag.coords, bag.patch_size)
    label = int(row["label"]) if row.get("label") else int(path.is_file())
    evidence = for_and_against((lesions >= 0).astype(np.int8))
    return LabelledBag(name, bag.features, label, evidence, lesions, row.get("case_id") or "")


def camelyon_problem(folder: Path) -> ListedProblem:
    """Make one problem of a folder's slides; its one repetition is the published split."""
    table = folder / "slides.csv"
    rows = read_table(table, "slide_id", "split")
    splits = {s: np.array([i for i, row in enumerate(rows) if row["split"] == s], np.int64) for s in SPLITS}
    if not len(splits["test"]):
        raise InputError(f"{table}: no slide has the split 'test'; add some.")
    return ListedProblem(
        name="camelyon16",
        title="CAMELYON16",
        why="lesions outlined by pathologists: does a slide's evidence lie in them?",
        n_classes=2,
        in_dim=int(_read_slide(folder, rows[0]).features.shape[1]),
        family="tissue",
        repetitions=1,
        n_bags=len(rows),
        bag=lambda i: _read_slide(folder, rows[i]),
        splits=[splits],
        about={"folder": folder.name, "share": SHARE},
    )
