"""MIL tasks with known evidence from any set of class-labelled tissue images with patients.

A source is a folder of class folders, a folder with `images.csv` (path, class, patient), or a table of
features (`.npz` with `x`, `y`, `patient`; `.csv` with `class`, `patient` and numbers). Pools of images for
training, validation and test never share a patient.
"""

from __future__ import annotations

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

from xmil.bench.digits import BAG_SIZE, draw_kinds, draw_rows, for_and_against
from xmil.bench.problems import SHARES, SPLITS, Block, Problem, read_arrays, read_table
from xmil.core.bag import FloatArray
from xmil.core.budget import open_picture
from xmil.core.errors import FileError, InputError, absent, check_names, refuse_damage

SUFFIXES = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp")
EDGE, TOP_FOLDER = 96, "folder"
TRIES = 200  # attempts to split patients so that every pool has every class
Rows = npt.NDArray[np.int64]
Patches = npt.NDArray[np.uint8]  # (n, h, w, 3)
Flags = npt.NDArray[np.bool_]
Embed = Callable[[Patches], FloatArray]
STATISTICS = "statistics"
RINGS, CELLS, BATCH = 4, 6, 256


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
        """Rows of each split, without shared patients, and with every class in each.

        With two groups, such as two cohorts, the smaller is the test set; images of the larger are split for
        training and validation.
        """
        patients = np.unique(self.patients)
        rng = np.random.default_rng(seed)
        if len(patients) == 2:
            return self._two_groups(rng)
        if len(patients) < len(SPLITS):
            raise InputError(f"{self.name}: has only one patient; name the patients of the images.")
        sizes = np.maximum(1, np.rint(np.cumsum(SHARES) * len(patients)).astype(int))
        ends = [min(int(sizes[0]), len(patients) - 2), min(int(sizes[1]), len(patients) - 1)]
        ends[1] = max(ends[1], ends[0] + 1)
        for _ in range(TRIES):
            parts = np.split(rng.permutation(patients), ends)
            rows = [np.flatnonzero(np.isin(self.patients, part)) for part in parts]
            if all(set(self.classes[r].tolist()) == set(self.class_names) for r in rows):
                return dict(zip(SPLITS, rows, strict=True))
        raise InputError(
            f"{self.name}: no split of the {len(patients)} patients gives training, validation and test "
            "every class; leave out rare classes."
        )

    def _two_groups(self, rng: np.random.Generator) -> dict[str, Rows]:
        names, counts = np.unique(self.patients, return_counts=True)
        large, test = (
            np.flatnonzero(self.patients == names[pick(counts)]) for pick in (np.argmax, np.argmin)
        )
        shuffled = rng.permutation(large)
        cut = max(1, round(len(large) * SHARES[1] / (SHARES[0] + SHARES[1])))
        rows = (np.sort(shuffled[cut:]), np.sort(shuffled[:cut]), test)
        if counts[0] == counts[1] or any(set(self.classes[r]) != set(self.class_names) for r in rows):
            raise InputError(
                f"{self.name}: its two groups of patients must differ in size and have every class; name the "
                "patients in images.csv."
            )
        return dict(zip(SPLITS, rows, strict=True))


def embedder(name: str, device: str = "cpu") -> Embed:
    """Make the function from patches of one size to vectors: an encoder by name, or `statistics`."""
    if name == STATISTICS:
        return statistics
    from xmil.encoders import load_encoder

    encoder = load_encoder(name, device=device)

    def embed(patches: Patches) -> FloatArray:
        parts = [patches[i : i + BATCH] for i in range(0, len(patches), BATCH)]
        batches = [torch.stack([encoder.transform(p) for p in part]) for part in parts]
        return np.concatenate([encoder(batch).cpu().numpy() for batch in batches]).astype(np.float32)

    return embed


def statistics(patches: Patches) -> FloatArray:
    """Describe optical densities: mean and spread in rings around the centre, means of a coarse grid.

    >>> statistics(np.full((2, 48, 48, 3), 200, dtype=np.uint8)).shape
    (2, 132)
    """
    density = -np.log((patches.astype(np.float32) + 1) / 256)
    n, h, w, _ = density.shape
    y, x = np.mgrid[:h, :w]
    away = np.hypot((y - (h - 1) / 2) / h, (x - (w - 1) / 2) / w) * 2
    parts: list[Any] = []
    for ring in range(RINGS):
        inside = (away >= ring / RINGS) & ((away < (ring + 1) / RINGS) | (ring == RINGS - 1))
        values = density[:, inside]
        parts += [values.mean(axis=1), values.std(axis=1)]
    rows, columns = (np.array_split(np.arange(length), CELLS) for length in (h, w))
    parts += [density[:, r[0] : r[-1] + 1, c[0] : c[-1] + 1].mean(axis=(1, 2)) for r in rows for c in columns]
    return np.concatenate(parts, axis=1).reshape(n, -1).astype(np.float32)


def read_tissue(source: Path, *, patient: str = "", encoder: str = STATISTICS, device: str = "cpu") -> Tissue:
    """Read the images of a source as vectors.

    In a folder of class folders, `patient` is a regular expression whose first group in a file's name is the
    patient, or `folder` if there is a folder of class folders for each group of patients.
    """
    if source.suffix in (".npz", ".csv"):
        return _read_features(source)
    if not source.is_dir():
        raise FileError(absent(source, "folder or table of tissue images"))
    listing = _list_images(source, patient)
    embed = embedder(encoder, device)
    paths = [path for path, _, _ in listing]
    starts = range(0, len(paths), BATCH)
    features = np.concatenate([_embed_files(embed, paths[i : i + BATCH]) for i in starts])
    classes, patients = (np.array([row[k] for row in listing], dtype=str) for k in (1, 2))
    return Tissue(source.name, features, classes, patients)


def _list_images(source: Path, patient: str) -> list[tuple[Path, str, str]]:
    """List path, class and patient of each image."""
    if (source / "images.csv").is_file():
        rows = read_table(source / "images.csv", "path", "class", "patient")
        return [(source / row["path"], row["class"], row["patient"]) for row in rows]
    files = sorted(path for path in source.rglob("*") if path.suffix.lower() in SUFFIXES)
    if not files:
        raise FileError(f"{source}: has no images ({', '.join(SUFFIXES)}) and no images.csv.")
    if not patient:
        raise InputError(
            f"{source}: unknown patients. Name them in images.csv (path, class, patient), "
            "or pass `patient=`, a regular expression for the file name, or 'folder'."
        )
    if patient == TOP_FOLDER:
        return [(path, path.parent.name, path.parent.parent.name) for path in files]
    listing = []
    for path in files:
        match = re.search(patient, path.name)
        if match is None:
            raise InputError(
                f"{path}: the expression {patient!r} for the patient does not match this file name."
            )
        listing.append((path, path.parent.name, match.group(1) if match.groups() else match.group(0)))
    return listing


def _embed_files(embed: Embed, paths: Sequence[Path]) -> FloatArray:
    patches = []
    for path in paths:
        fault, kinds = f"{path}: not a readable image", (SyntaxError,)  # Pillow's, for a broken PNG
        with refuse_damage(fault, kinds=kinds), open_picture(path, width=7) as image:  # its pixels and a copy
            patches.append(np.asarray(image.convert("RGB").resize((EDGE, EDGE))))
    return embed(np.stack(patches))


def _read_features(path: Path) -> Tissue:
    with refuse_damage(f"{path}: features (columns beside class, patient and path) must hold numbers"):
        if path.suffix == ".npz":
            x, classes, patients = read_arrays(path, "x", "y", "patient")
        else:
            rows = read_table(path, "class", "patient")
            numbers = [name for name in rows[0] if name not in ("class", "patient", "path")]
            x = np.array([[float(row[name]) for name in numbers] for row in rows])
            classes, patients = (np.array([row[name] for row in rows]) for name in ("class", "patient"))
        x = x.astype(np.float32)
    if x.ndim != 2 or x.shape[1] == 0 or len({len(x), len(classes), len(patients)}) > 1:
        raise FileError(f"{path}: features, classes and patients must have one row per image. Got {x.shape}.")
    if not np.isfinite(x).all():
        raise FileError(f"{path}: features must be finite numbers.")
    return Tissue(path.stem, x, classes.astype(str), patients.astype(str))


@dataclass(frozen=True)
class TissueQuestion:
    """A question about bags, given the instances (..., n) of the positive class and of the one against.

    `label` gives the answers (...), `support` the evidence of each instance (..., n) for "yes".
    """

    name: str
    title: str
    label: Callable[[Flags, Flags], Flags]
    support: Callable[[Flags, Flags], npt.NDArray[np.int8]]


HOLDS = TissueQuestion(
    "holds",
    "holds {0}",
    lambda positive, _: np.asarray(positive.any(axis=-1)),
    lambda positive, _: positive.astype(np.int8),
)
MORE = TissueQuestion(
    "more",
    "more {0} than {1}",
    lambda positive, against: positive.sum(axis=-1) > against.sum(axis=-1),
    lambda positive, against: positive.astype(np.int8) - against.astype(np.int8),
)
BOTH: TissueQuestion = TissueQuestion(
    "both",
    "{0} beside {1}",
    lambda positive, against: np.asarray(positive.any(axis=-1) & against.any(axis=-1)),
    lambda positive, against: (
        (positive.astype(np.int8) + against.astype(np.int8)) * BOTH.label(positive, against)[..., np.newaxis]
    ),
)


@dataclass(frozen=True, eq=False, kw_only=True)
class TissueProblem(Problem):
    """Bags of tissue images: each class enters with probability one half, then `size` draws from these."""

    tissue: Tissue
    question: TissueQuestion
    positive: str
    against: str
    sizes: tuple[int, int, int]
    seed: int
    size: int = BAG_SIZE

    def blocks(self, split: str, repetition: int, device: str = "cpu") -> list[Block]:
        """One block: bags of one size from the split's patients."""
        pools = self.tissue.pools(self.seed * 1000 + repetition)
        features = _scale(self.tissue, self.seed * 1000 + repetition)
        split_index = SPLITS.index(split)
        rng = np.random.default_rng((self.seed, repetition, split_index))
        classes, pool = self.tissue.class_names, pools[split]
        codes = draw_kinds(rng, self.sizes[split_index], self.size, len(classes))
        rows = draw_rows(rng, codes, [pool[self.tissue.classes[pool] == name] for name in classes])
        pair = [codes == classes.index(name) for name in (self.positive, self.against)]
        evidence = for_and_against(self.question.support(*pair)).astype(np.int8)
        labels = self.question.label(*pair).astype(np.int64)
        names = tuple(f"{self.name}-{split}-{repetition}-{i}" for i in range(len(labels)))
        cases = (f"patients of repetition {repetition}",) * len(labels)  # a bag has images of many patients
        x = torch.from_numpy(features[rows]).to(device)
        return [Block(x, labels, evidence, names, cases=cases)]

    def settings(self) -> dict[str, Any]:
        """The checksum of the source, the question and the numbers of bags."""
        t = self.tissue
        crc = zlib.crc32(t.features.tobytes() + "".join(t.classes).encode() + "".join(t.patients).encode())
        about = {"positive": self.positive, "against": self.against, "sizes": list(self.sizes)}
        return {"name": self.name, "crc32": crc, "seed": self.seed, "bag_size": self.size, **about}


@lru_cache(maxsize=4)
def _scale(tissue: Tissue, seed: int) -> FloatArray:
    """Scale features to mean 0 and deviation 1 over a training pool."""
    rows = tissue.pools(seed)["train"]
    mean, std = tissue.features[rows].mean(axis=0), tissue.features[rows].std(axis=0)
    return np.asarray((tissue.features - mean) / np.where(std > 1e-6, std, 1.0), dtype=np.float32)


def tissue_problems(
    tissue: Tissue, *, positive: str, against: str, sizes: tuple[int, int, int], seed: int
) -> list[TissueProblem]:
    """Make a problem of each question about two classes."""
    check_names(f"class of {tissue.name}", [positive, against], tissue.class_names)
    problems = []
    for question in (HOLDS, MORE, BOTH):
        title = f"{tissue.name}: {question.title.format(positive, against)}"
        problems.append(
            TissueProblem(
                name=f"{tissue.name}_{question.name}",
                title=title,
                why=title,
                n_classes=2,
                in_dim=int(tissue.features.shape[1]),
                family="tissue",
                tissue=tissue,
                question=question,
                positive=positive,
                against=against,
                sizes=sizes,
                seed=seed,
            )
        )
    return problems
