"""MIL tasks with known evidence from any set of class-labelled tissue images with patients.

A source is a folder of class folders, a folder with `images.csv` (path, class, patient), or a table of
features (`.npz` with `x`, `y`, `patient`; `.csv` with `class`, `patient` and numbers). Pools of images for
training, validation and test never share a patient.
"""

from __future__ import annotations

import csv
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from xmil.bench.colour_statistics import STATISTICS, Embed, embedder, scaled
from xmil.bench.problems import SPLITS, Block
from xmil.core.absence import absent
from xmil.core.bag import FloatArray
from xmil.core.errors import FileError, InputError, unknown_name

SUFFIXES = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp")
SHARES = (0.6, 0.15, 0.25)  # of the patients
BAG_SIZE, EDGE, TOP_FOLDER = 30, 96, "folder"
TRIES = 200  # divisions of the patients that are tried until every pool has every class
Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Tissue:
    """Images as vectors (m, d), with their class and patient."""

    name: str
    features: FloatArray
    classes: npt.NDArray[np.str_]
    patients: npt.NDArray[np.str_]

    @property
    def class_names(self) -> list[str]:
        """The classes, sorted."""
        return sorted(set(self.classes.tolist()))

    def pools(self, seed: int) -> dict[str, Rows]:
        """Rows of each split, patients apart, every class in each.

        Of two groups, such as two cohorts, the smaller is the test; images of the larger are divided for
        training and validation.
        """
        patients = np.unique(self.patients)
        rng = np.random.default_rng(seed)
        if len(patients) == 2:
            return self._two_groups(rng)
        if len(patients) < len(SPLITS):
            raise InputError(f"{self.name}: one patient cannot be split; name the patients of the images.")
        sizes = np.maximum(1, np.rint(np.cumsum(SHARES) * len(patients)).astype(int))
        ends = [min(int(sizes[0]), len(patients) - 2), min(int(sizes[1]), len(patients) - 1)]
        ends[1] = max(ends[1], ends[0] + 1)
        for _ in range(TRIES):
            parts = np.split(rng.permutation(patients), ends)
            rows = [np.flatnonzero(np.isin(self.patients, part)) for part in parts]
            if all(set(self.classes[r].tolist()) == set(self.class_names) for r in rows):
                return dict(zip(SPLITS, rows, strict=True))
        raise InputError(
            f"{self.name}: no split of the {len(patients)} patients gives every class to training, "
            "validation and test; leave out classes that few patients have."
        )

    def _two_groups(self, rng: np.random.Generator) -> dict[str, Rows]:
        names, counts = np.unique(self.patients, return_counts=True)
        large, test = (np.flatnonzero(self.patients == names[at(counts)]) for at in (np.argmax, np.argmin))
        shuffled = rng.permutation(large)
        cut = max(1, round(len(large) * SHARES[1] / (SHARES[0] + SHARES[1])))
        rows = (np.sort(shuffled[cut:]), np.sort(shuffled[:cut]), test)
        if counts[0] == counts[1] or any(set(self.classes[r]) != set(self.class_names) for r in rows):
            raise InputError(
                f"{self.name}: its two groups of patients must differ in size and hold every class; name the "
                "patients in images.csv."
            )
        return dict(zip(SPLITS, rows, strict=True))


def read_tissue(source: Path, *, patient: str = "", encoder: str = STATISTICS, device: str = "cpu") -> Tissue:
    """The images of a source as vectors.

    `patient` says who is who in a folder of class folders: an expression whose first group is found in the
    file's name, or `folder` where the class folders lie in one folder for each group of patients.
    """
    if source.suffix == ".npz":
        return _from_npz(source)
    if source.suffix == ".csv":
        return _from_table(source)
    if not source.is_dir():
        raise FileError(absent(source, "folder or table of tissue images"))
    listed = _listed(source, patient)
    embed = embedder(encoder, device)
    paths = [path for path, _, _ in listed]
    features = np.concatenate([_embedded(embed, paths[i : i + 256]) for i in range(0, len(paths), 256)])
    classes, patients = (np.array([row[k] for row in listed], dtype=str) for k in (1, 2))
    return Tissue(source.name, features, classes, patients)


def _listed(source: Path, patient: str) -> list[tuple[Path, str, str]]:
    """Path, class and patient of each image."""
    if (source / "images.csv").is_file():
        with (source / "images.csv").open(newline="", encoding="utf-8") as stream:
            rows = list(csv.DictReader(stream))
        _need(source / "images.csv", rows, ("path", "class", "patient"))
        return [(source / row["path"], row["class"], row["patient"]) for row in rows]
    files = sorted(path for path in source.rglob("*") if path.suffix.lower() in SUFFIXES)
    if not files:
        raise FileError(f"{source}: holds no images ({', '.join(SUFFIXES)}) and no images.csv.")
    if not patient:
        raise InputError(
            f"{source}: unknown patients. Name them in images.csv (path, class, patient), "
            "or give --patient: a regular expression for the file name, or 'folder'."
        )
    return [(path, path.parent.name, _whose(path, patient)) for path in files]


def _whose(path: Path, patient: str) -> str:
    if patient == TOP_FOLDER:
        return path.parent.parent.name
    found = re.search(patient, path.name)
    if found is None:
        raise InputError(
            f"{path}: the expression {patient!r} for the patient matches nothing in this file name."
        )
    return found.group(1) if found.groups() else found.group(0)


def _embedded(embed: Embed, paths: Sequence[Path]) -> FloatArray:
    from PIL import Image, UnidentifiedImageError

    patches = []
    for path in paths:
        try:
            with Image.open(path) as image:
                patches.append(np.asarray(image.convert("RGB").resize((EDGE, EDGE))))
        except (OSError, UnidentifiedImageError, ValueError) as error:
            raise FileError(f"{path}: not a readable image ({error}).") from None
    return embed(np.stack(patches))


def _from_npz(path: Path) -> Tissue:
    try:
        with np.load(path, allow_pickle=False) as file:
            x, y, patients = file["x"].astype(np.float32), file["y"].astype(str), file["patient"].astype(str)
    except (OSError, KeyError, ValueError) as error:
        raise FileError(f"{path}: needs the arrays x (m, d), y (m,) and patient (m,) ({error}).") from None
    return _checked(Tissue(path.stem, x, y, patients), path)


def _from_table(path: Path) -> Tissue:
    with path.open(newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    _need(path, rows, ("class", "patient"))
    numbers = [name for name in rows[0] if name not in ("class", "patient", "path")]
    try:
        x = np.array([[float(row[name]) for name in numbers] for row in rows], dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise FileError(
            f"{path}: columns beside class, patient and path must hold numbers ({error})."
        ) from None
    classes, patients = (np.array([row[name] for row in rows], dtype=str) for name in ("class", "patient"))
    return _checked(Tissue(path.stem, x, classes, patients), path)


def _need(path: Path, rows: list[dict[str, str]], names: Sequence[str]) -> None:
    missing = [name for name in names if not rows or name not in rows[0]]
    if missing:
        raise FileError(f"{path}: needs the column {missing[0]!r}; it must have {', '.join(names)}.")


def _checked(tissue: Tissue, path: Path) -> Tissue:
    x = tissue.features
    if x.ndim != 2 or x.shape[1] == 0 or len({len(x), len(tissue.classes), len(tissue.patients)}) > 1:
        raise FileError(f"{path}: features, classes and patients must be one row per image. Got {x.shape}.")
    if not np.isfinite(x).all():
        raise FileError(f"{path}: features must be finite numbers.")
    return tissue


@dataclass(frozen=True)
class TissueQuestion:
    """A question about a bag of classes (..., n): its label and what each instance says for class 1."""

    name: str
    title: str
    label: Callable[[Rows, int, int], npt.NDArray[np.bool_]]
    support: Callable[[Rows, int, int], npt.NDArray[np.int8]]


def _holds(codes: Rows, wanted: int, other: int) -> npt.NDArray[np.bool_]:
    del other
    return np.asarray((codes == wanted).any(axis=-1))


def _more(codes: Rows, wanted: int, other: int) -> npt.NDArray[np.bool_]:
    return np.asarray((codes == wanted).sum(axis=-1) > (codes == other).sum(axis=-1))


def _both(codes: Rows, wanted: int, other: int) -> npt.NDArray[np.bool_]:
    return _holds(codes, wanted, 0) & _holds(codes, other, 0)


def _for(codes: Rows, wanted: int, other: int) -> npt.NDArray[np.int8]:
    del other
    return np.asarray(codes == wanted, dtype=np.int8)


def _for_and_against(codes: Rows, wanted: int, other: int) -> npt.NDArray[np.int8]:
    return np.asarray(_for(codes, wanted, 0) - _for(codes, other, 0), dtype=np.int8)


def _together(codes: Rows, wanted: int, other: int) -> npt.NDArray[np.int8]:
    present = _both(codes, wanted, other)[..., np.newaxis]
    return np.asarray((_for(codes, wanted, 0) + _for(codes, other, 0)) * present, dtype=np.int8)


QUESTIONS = (
    TissueQuestion("holds", "holds {0}", _holds, _for),
    TissueQuestion("more", "more {0} than {1}", _more, _for_and_against),
    TissueQuestion("both", "{0} beside {1}", _both, _together),
)


@dataclass(frozen=True, eq=False)
class TissueProblem:
    """Bags of tissue images: each class enters with probability one half, then `size` draws from those."""

    tissue: Tissue
    question: TissueQuestion
    positive: str
    against: str
    sizes: tuple[int, int, int]
    seed: int
    size: int = BAG_SIZE

    def __post_init__(self) -> None:
        for name in (self.positive, self.against):
            if name not in self.tissue.class_names:
                raise unknown_name(f"class of {self.tissue.name}", name, self.tissue.class_names)

    @property
    def name(self) -> str:
        """The source and the question."""
        return f"{self.tissue.name}_{self.question.name}"

    @property
    def title(self) -> str:
        """The question with its classes."""
        return f"{self.tissue.name}: {self.question.title.format(self.positive, self.against)}"

    @property
    def why(self) -> str:
        """The question again: it says what is asked."""
        return self.title

    @property
    def n_classes(self) -> int:
        """Yes or no."""
        return 2

    @property
    def in_dim(self) -> int:
        """The width of the features."""
        return int(self.tissue.features.shape[1])

    @property
    def family(self) -> str:
        """Sizes and training as for other tissue."""
        return "tissue"

    def blocks(self, split: str, repetition: int, device: str = "cpu") -> list[Block]:
        """One block: bags of one size from the split's patients."""
        pools = self.tissue.pools(self.seed * 1000 + repetition)
        features = _scaled_by(self.tissue, self.seed * 1000 + repetition)
        at = SPLITS.index(split)
        rng = np.random.default_rng((self.seed, repetition, at))
        codes, rows = _draw(self.tissue, pools[split], rng, self.sizes[at], self.size)
        names = self.tissue.class_names
        asked = (names.index(self.positive), names.index(self.against))
        support = self.question.support(codes, *asked)
        evidence = np.stack([-support, support], axis=-2).astype(np.int8)
        labels = self.question.label(codes, *asked).astype(np.int64)
        named = tuple(f"{self.name}-{split}-{repetition}-{i}" for i in range(len(labels)))
        return [Block(torch.from_numpy(features[rows]).to(device), labels, evidence, named)]

    def settings(self) -> dict[str, Any]:
        """The source by its checksum, the question and the numbers of bags."""
        t = self.tissue
        crc = zlib.crc32(t.features.tobytes() + "".join(t.classes).encode() + "".join(t.patients).encode())
        about = {"positive": self.positive, "against": self.against, "sizes": list(self.sizes)}
        return {"name": self.name, "crc32": crc, "seed": self.seed, "bag_size": self.size, **about}


@lru_cache(maxsize=4)
def _scaled_by(tissue: Tissue, seed: int) -> FloatArray:
    """Features scaled by the training pool of a division."""
    return scaled(tissue.features, tissue.pools(seed)["train"])


def _draw(tissue: Tissue, pool: Rows, rng: np.random.Generator, n_bags: int, size: int) -> tuple[Rows, Rows]:
    """Classes and rows (b, n) of bags drawn from a pool."""
    names = tissue.class_names
    by_class = [pool[tissue.classes[pool] == name] for name in names]
    chosen = rng.random((n_bags, len(names))) < 0.5
    while (empty := ~chosen.any(axis=1)).any():
        chosen[empty] = rng.random((int(empty.sum()), len(names))) < 0.5
    order = np.argsort(~chosen, axis=1, kind="stable")
    picks = (rng.random((n_bags, size)) * chosen.sum(axis=1, keepdims=True)).astype(np.int64)
    codes = np.take_along_axis(order, picks, axis=1)
    which, rows = rng.random(codes.shape), np.zeros_like(codes)
    for code, candidates in enumerate(by_class):
        here = codes == code
        rows[here] = candidates[(which[here] * len(candidates)).astype(np.int64)]
    return codes, rows


def tissue_problems(
    tissue: Tissue, *, positive: str, against: str, sizes: tuple[int, int, int], seed: int
) -> list[TissueProblem]:
    """The questions that the classes allow."""
    return [TissueProblem(tissue, question, positive, against, sizes, seed) for question in QUESTIONS]
