"""Labelled digits as feature vectors: loading, planting variants, drawing bags.

Instances belong to pools for training, validation and test. A variant (a mark, a tint, a blur, a site's
effect) changes images if they were encoded here, else the features.
"""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from os import PathLike
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from xmil.bench.digits import BAG_SIZE, DIGITS, Codes, DigitTask, draw_rows
from xmil.bench.problems import SHARES, SPLITS, read_arrays
from xmil.core.bag import FloatArray
from xmil.core.budget import check_budget
from xmil.core.errors import FileError, InputError, absent, check_names, refuse_damage
from xmil.core.registry import Registry
from xmil.evaluate.statistics import Floats

Images = npt.NDArray[np.uint8]
OnImages = Callable[[Floats], Floats]  # values between 0 and 1, (m, h, w)
OnFeatures = Callable[[FloatArray, np.random.Generator], FloatArray]
VALIDATION_SHARE = 0.2  # of the training set, if there is a separate test set
ONE_HOT_NOISE, ONE_HOT_COPIES = 0.3, 400
UNSIGNED_BYTES = 0x08  # the type of an IDX file's values
STRENGTH = 1.0  # length of a direction, in mean lengths of a feature vector's deviation
TINT, SITE, WEAK, SOFT = 0.35, 0.5, 0.25, 0.5

Encoder = Callable[[Images], FloatArray]
ENCODERS: Registry[Encoder] = Registry("encoder of digits", group="xmil.digit_encoders")


@dataclass(frozen=True)
class Instances:
    """Features (m, d) with their digits, the rows of each pool, and images (m, h, w), if any.

    `embedded` data comes with the package; the paper's figures were measured on other data. `encode` made the
    features from the images, unless they were loaded.
    """

    features: FloatArray
    digits: Codes
    pools: dict[str, Codes]
    name: str
    images: Images | None = None
    embedded: bool = False
    encode: Encoder | None = None

    def with_one_pool(self) -> Instances:
        """The same instances in one pool, as in the released code."""
        rows = np.concatenate(list(self.pools.values()))
        return replace(self, pools=dict.fromkeys(SPLITS, rows))

    def rows_of(self, pool: str) -> list[Codes]:
        """The rows of a pool by digit; a missing digit is an error."""
        rows = [self.pools[pool][self.digits[self.pools[pool]] == digit] for digit in range(DIGITS)]
        missing = [digit for digit in range(DIGITS) if not len(rows[digit])]
        if missing:
            raise InputError(
                f"{self.name}: the {pool} pool has no images of {missing[0]}; add some of every digit."
            )
        return rows


def load_instances(source: str | Path, *, encoder: str = "pixels", seed: int = 0) -> Instances:
    """Load scikit-learn's digits ("digits"), one-hot vectors with noise ("onehot"), or the data at a path.

    A path is an .npz file (`x` features, `y` digits), or a folder with such files for training and test, or
    with MNIST's IDX files, which the encoder turns into features.

    >>> load_instances("digits").features.shape
    (1797, 64)
    """
    if source == "digits":
        images, digits = sklearn_images()
        encode = ENCODERS[encoder]
        instances = _one_set(encode(images), digits, name="scikit-learn digits", seed=seed)
        return replace(instances, images=images, embedded=True, encode=encode)
    if source == "onehot":
        digits = np.repeat(np.arange(DIGITS), ONE_HOT_COPIES)
        noise = np.random.default_rng(seed).normal(scale=ONE_HOT_NOISE, size=(len(digits), DIGITS))
        features = (np.eye(DIGITS)[digits] + noise).astype(np.float32)
        return replace(_one_set(features, digits, name="one-hot digits", seed=seed), embedded=True)
    path = Path(source)
    if path.suffix == ".npz":
        return _one_set(*read_npz(path), name=path.name, seed=seed)
    if not path.is_dir():
        choices = "'digits', 'onehot', an .npz file, or a folder of .npz or IDX files"
        raise FileError(f"{source}: no such data. Data must be {choices}.")
    return _from_folder(path, encoder, seed)


def read_npz(path: Path) -> tuple[FloatArray, Codes]:
    """Read features (m, d) and digits (m,) from a file of cached features."""
    x, y = read_arrays(path, "x", "y")
    with refuse_damage(f"{path}: 'x' and 'y' must hold numbers"):
        x, y = x.astype(np.float32), y.astype(np.int64)
    if x.ndim != 2 or y.shape != x.shape[:1]:
        raise FileError(f"{path}: 'x' must be (m, d) and 'y' (m,). Got {x.shape} and {y.shape}.")
    if not np.isfinite(x).all():
        raise FileError(f"{path}: 'x' contains values that are not finite; extract the features again.")
    if len(y) and not (y.min() >= 0 and y.max() < DIGITS):
        raise FileError(f"{path}: 'y' must hold digits from 0 to 9. Got {y.min()} to {y.max()}.")
    return x, y


@ENCODERS.register("pixels")
def pixels(images: Images) -> FloatArray:
    """Use the pixels, scaled to between 0 and 1, as features."""
    flat = images.reshape(len(images), -1).astype(np.float32)
    return flat / max(1.0, float(flat.max(initial=0.0)))


@lru_cache(maxsize=1)
def sklearn_images() -> tuple[Images, Codes]:
    """Load scikit-learn's images (1797, 8, 8) of handwritten digits, and the digits."""
    from sklearn.datasets import load_digits

    data = load_digits()
    return data.images.astype(np.uint8), data.target.astype(np.int64)


def _from_folder(folder: Path, encoder: str, seed: int) -> Instances:
    files = _in_order(folder.glob("*.npz"))
    if files:
        return _join(files, [read_npz(path) for path in files], seed)
    files = _in_order(folder.glob("*images*ubyte*"))
    if not files:
        raise FileError(f"{folder}: has neither .npz files of features nor IDX files (*-images-idx3-ubyte).")
    encode = ENCODERS[encoder]
    stacks = [_read_images(path) for path in files]
    instances = _join(files, [(encode(images), digits) for images, digits in stacks], seed)
    return replace(instances, images=np.concatenate([images for images, _ in stacks]), encode=encode)


def _in_order(files: Iterable[Path]) -> list[Path]:
    """Find the training and the test file among several, in this order; or return the only file."""
    paths = sorted(files)
    if len(paths) < 2:
        return paths
    ordered = []
    for names in (("train",), ("test", "t10k")):
        matches = [path for path in paths if any(name in path.name for name in names)]
        if len(matches) != 1:
            listing = ", ".join(path.name for path in paths)
            raise FileError(f"{paths[0].parent}: needs one file named *{names[0]}*. Found: {listing}.")
        ordered += matches
    return ordered


def _join(paths: list[Path], sets: list[tuple[FloatArray, Codes]], seed: int) -> Instances:
    """Split one file in three; with a test file, split only the training file in two."""
    if len(paths) == 1:
        return _one_set(*sets[0], name=paths[0].name, seed=seed)
    (x, y), (x_test, y_test) = sets
    folder = paths[0].parent
    if x.shape[1] != x_test.shape[1]:
        raise InputError(
            f"{folder}: training features have width {x.shape[1]}, test features {x_test.shape[1]}; "
            "use one encoder for both."
        )
    train, validation = _split(y, (1 - VALIDATION_SHARE, VALIDATION_SHARE), seed)
    pools = {"train": train, "validation": validation, "test": len(y) + np.arange(len(y_test))}
    return Instances(np.concatenate([x, x_test]), np.concatenate([y, y_test]), pools, folder.name)


def _read_images(path: Path) -> tuple[Images, Codes]:
    images = read_idx(path)
    label_path = path.with_name(path.name.replace("images", "labels").replace("idx3", "idx1"))
    labels = read_idx(label_path).astype(np.int64)
    if images.ndim != 3 or labels.shape != images.shape[:1]:
        raise FileError(
            f"{path}: {images.shape} images do not match {labels.shape} labels in {label_path.name}."
        )
    if len(labels) and labels.max() >= DIGITS:
        raise FileError(f"{label_path}: labels must be digits from 0 to 9. Got {labels.max()}.")
    return images, labels


def _one_set(features: FloatArray, digits: Codes, *, name: str, seed: int) -> Instances:
    return Instances(features, digits, dict(zip(SPLITS, _split(digits, SHARES, seed), strict=True)), name)


def _split(digits: Codes, shares: tuple[float, ...], seed: int) -> list[Codes]:
    """Split rows in disjoint parts, with the same shares of each digit."""
    rng = np.random.default_rng(seed)
    parts: list[list[Codes]] = [[] for _ in shares]
    ends = np.cumsum(shares)[:-1]
    for digit in range(DIGITS):
        rows = rng.permutation(np.flatnonzero(digits == digit))
        for part, piece in zip(parts, np.split(rows, np.rint(ends * len(rows)).astype(int)), strict=True):
            part.append(piece)
    return [np.sort(np.concatenate(part)).astype(np.int64) for part in parts]


def mark_images(images: Images) -> Images:
    """Draw a mark on the images: a bright corner."""
    marked = images.copy()
    edge = max(1, images.shape[1] // 5)
    marked[:, :edge, :edge] = images.max(initial=1)
    return marked


def read_idx(path: str | PathLike[str]) -> npt.NDArray[np.uint8]:
    """Read an IDX file of unsigned bytes, plain or gzipped."""
    try:
        with open(path, "rb") as plain:
            packed = plain.read(2) == b"\x1f\x8b"
        with gzip.open(path) if packed else open(path, "rb") as stream:
            shape = _idx_shape(stream, path)
            expected = math.prod(shape)
            check_budget(expected, "the images", path)
            data = stream.read(expected + 1)
    except FileNotFoundError:
        raise FileError(absent(path)) from None
    except (OSError, EOFError, zlib.error) as error:
        raise FileError(f"{path}: cannot be read ({error}).") from None
    if len(data) != expected:
        actual = f"only {len(data):,}" if len(data) < expected else "more"
        raise FileError(
            f"{path}: {shape} declares {expected:,} bytes, but {actual} follow the header; "
            "the file is damaged, download it again."
        )
    try:
        return np.frombuffer(data, dtype=np.uint8).reshape(shape)
    except ValueError:  # absurd or too many axes
        raise FileError(
            f"{path}: impossible shape {shape}; the file is damaged, download it again."
        ) from None


def _idx_shape(stream: IO[bytes] | gzip.GzipFile, path: str | PathLike[str]) -> tuple[int, ...]:
    """Read the header of an IDX file: the length of each axis."""
    head = stream.read(4)
    if len(head) < 4 or head[:2] != b"\x00\x00":
        raise FileError(f"{path}: not an IDX file (its first two bytes must be zero); download it again.")
    if head[2] != UNSIGNED_BYTES:
        raise FileError(
            f"{path}: an IDX file of type 0x{head[2]:02x}; only unsigned bytes (0x08) are images or labels."
        )
    lengths = stream.read(4 * head[3])
    if len(lengths) < 4 * head[3]:
        raise FileError(f"{path}: truncated within the header; download it again.")
    return tuple(int(n) for n in np.frombuffer(lengths, dtype=">u4"))


@dataclass(frozen=True)
class Variant:
    """A change of instances; without `on_images` it only changes features, and pictures show `shown`."""

    on_features: OnFeatures
    on_images: OnImages | None = None
    shown: Callable[[Images], Images] | None = None


def with_variants(instances: Instances, names: Sequence[str], seed: int) -> Instances:
    """Append a changed copy of all instances for each variant."""
    if not names:
        return instances
    copies = [_change(instances, name, seed) for name in names]
    images = None
    if instances.images is not None:
        images = np.concatenate([instances.images, *(c.images for c in copies if c.images is not None)])
    features = np.concatenate([instances.features, *(c.features for c in copies)])
    digits = np.concatenate([instances.digits] * (1 + len(names)))
    return replace(instances, features=features, digits=digits, images=images)


def _change(instances: Instances, name: str, seed: int) -> Instances:
    check_names("variant", [name], VARIANTS)
    variant, images = VARIANTS[name], instances.images
    if variant.on_images is not None and images is not None and instances.encode is not None:
        top = max(1, int(images.max(initial=1)))
        drawn = np.rint(np.clip(variant.on_images(images / top), 0, 1) * top).astype(images.dtype)
        return replace(instances, images=drawn, features=instances.encode(drawn))
    features = variant.on_features(instances.features, np.random.default_rng(seed))
    shown = images if images is None or variant.shown is None else variant.shown(images)
    return replace(instances, features=features, images=shown)


def _along(index: int, share: float = 1.0) -> OnFeatures:
    """Add one fixed direction to the features, the index-th drawn from the seed."""

    def add(features: FloatArray, rng: np.random.Generator) -> FloatArray:
        direction = rng.standard_normal((index + 1, features.shape[1]))[index]
        deviation = features - features.mean(axis=0)
        length = share * STRENGTH * np.linalg.norm(deviation, axis=1).mean()
        step = (direction / np.linalg.norm(direction) * length).astype(np.float32)
        return np.asarray(features + step, dtype=np.float32)

    return add


def _towards_mean(features: FloatArray, _: np.random.Generator) -> FloatArray:
    mean = features.mean(axis=0)
    return np.asarray(mean + SOFT * (features - mean), dtype=np.float32)


def _blur(images: Floats) -> Floats:
    """Average each pixel with its eight neighbours, the border repeated."""
    from scipy.ndimage import uniform_filter

    return np.asarray(uniform_filter(images, size=(1, 3, 3), mode="nearest"))


def _ramp(share: float, *, across: bool) -> OnImages:
    """Add light that increases from one edge to the other, across or down."""

    def add(images: Floats) -> Floats:
        rise = np.linspace(0, SITE * share, images.shape[2 if across else 1])
        return np.asarray(images + (rise if across else rise[:, None]))

    return add


VARIANTS = {
    "mark": Variant(_along(0), shown=mark_images),
    "tint": Variant(_along(1), lambda images: images + TINT * (1 - images)),
    "blur": Variant(_towards_mean, _blur),
    "site_a_weak": Variant(_along(2, WEAK), _ramp(WEAK, across=True)),
    "site_a_strong": Variant(_along(2), _ramp(1.0, across=True)),
    "site_b_weak": Variant(_along(3, WEAK), _ramp(WEAK, across=False)),
    "site_b_strong": Variant(_along(3), _ramp(1.0, across=False)),
}


@dataclass(frozen=True)
class BagSet:
    """Bags as rows of the instance table (..., b, n), their codes (..., b, n) and labels (..., b)."""

    rows: Codes
    codes: Codes
    labels: Codes

    def __len__(self) -> int:
        return int(self.labels.shape[-1])


@dataclass(frozen=True)
class Splits:
    """The bags of each split."""

    train: BagSet
    validation: BagSet
    test: BagSet


def draw_bags(
    task: DigitTask, instances: Instances, pool: str, *, n_bags: int, n: int, seed: tuple[int, ...]
) -> BagSet:
    """Draw bags of a task from one pool of instances; the same seed gives the same bags."""
    rng = np.random.default_rng(seed)
    codes = task.draw(rng, n_bags, n)
    rows = draw_rows(rng, codes % DIGITS, instances.rows_of(pool))
    variant = codes // DIGITS  # the rows of each variant follow those of the previous one
    n_plain = len(instances.digits) // (1 + len(task.variants))
    return BagSet(rows + variant * n_plain, codes, task.label(codes).astype(np.int64))


def draw_splits(
    task: DigitTask,
    instances: Instances,
    sizes: tuple[int, int, int],
    *,
    seed: int,
    repetition: int,
    n: int = BAG_SIZE,
) -> Splits:
    """Draw the training, validation and test bags of one repetition."""
    return Splits(
        *(
            draw_bags(task, instances, pool, n_bags=size, n=n, seed=(seed, repetition, i))
            for i, (pool, size) in enumerate(zip(SPLITS, sizes, strict=True))
        )
    )


def stack_sets(sets: list[BagSet]) -> BagSet:
    """Stack the bag sets of several repetitions, repetitions first."""
    return BagSet(*(np.stack([getattr(s, key) for s in sets]) for key in ("rows", "codes", "labels")))


@dataclass(frozen=True)
class Table:
    """The instances' features (m, d) on a device, to gather bags from."""

    features: Tensor

    def bags(self, rows: Tensor) -> Tensor:
        """Features (..., n, d) of rows (..., n)."""
        return self.features.index_select(0, rows.flatten()).view(*rows.shape, -1)

    def to_rows(self, rows: Codes) -> Tensor:
        """Rows as a tensor on the table's device."""
        return torch.from_numpy(rows).to(self.features.device)
