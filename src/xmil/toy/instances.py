"""Labelled digits as feature vectors, in pools for training, validation and test."""

from __future__ import annotations

import gzip
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from xmil.core.absence import absent
from xmil.core.bag import FloatArray
from xmil.core.errors import FileError, InputError
from xmil.core.registry import Registry
from xmil.toy.digit_tasks import DIGITS, Codes

T = TypeVar("T")
Images = npt.NDArray[np.uint8]
POOLS = ("train", "validation", "test")
SHARES = (0.6, 0.15, 0.25)  # of one set of instances, for training, validation and test
VALIDATION_SHARE = 0.2  # of the training set, where the test set is apart
ONE_HOT_NOISE = 0.3

Encoder = Callable[[Images], FloatArray]
ENCODERS: Registry[Encoder] = Registry("encoder of digits", group="xmil.digit_encoders")


@dataclass(frozen=True)
class Instances:
    """Features (m, d) with their digits, and the rows of each pool; images (m, h, w) where there are any.

    `embedded` data comes with the package: it is not what the paper's figures were measured on. `encode` made
    the features from the images, where that was here.
    """

    features: FloatArray
    digits: Codes
    pools: dict[str, Codes]
    name: str
    images: Images | None = None
    embedded: bool = False
    encode: Encoder | None = None

    def pooled(self) -> Instances:
        """The same with one pool for everything, as in the released code."""
        rows = np.concatenate(list(self.pools.values()))
        return replace(self, pools=dict.fromkeys(POOLS, rows))

    def rows_of(self, pool: str) -> list[Codes]:
        """The rows of a pool for each digit; a digit without any is an error."""
        rows = [self.pools[pool][self.digits[self.pools[pool]] == digit] for digit in range(DIGITS)]
        missing = [digit for digit in range(DIGITS) if not len(rows[digit])]
        if missing:
            raise InputError(
                f"{self.name}: the {pool} pool has no images of {missing[0]}; every digit needs some."
            )
        return rows


def load_instances(source: str | Path, *, encoder: str = "pixels", seed: int = 0) -> Instances:
    """Instances from scikit-learn's digits ("digits"), one-hot vectors with noise ("onehot"), or a path.

    A path is an .npz file (`x` features, `y` digits), or a folder with such files for training and test, or
    with MNIST's IDX files, which the encoder turns into features.

    >>> load_instances("digits").features.shape
    (1797, 64)
    """
    if source == "digits":
        return _sklearn_digits(encoder, seed)
    if source == "onehot":
        return _one_hot(seed)
    path = Path(source)
    if path.suffix == ".npz":
        return _one_set(*read_npz(path), name=path.name, seed=seed)
    if not path.is_dir():
        known = "'digits', 'onehot', an .npz file, or a folder of .npz or IDX files"
        raise FileError(f"{source}: no such data. Data must be {known}.")
    return _from_folder(path, encoder, seed)


def read_npz(path: Path) -> tuple[FloatArray, Codes]:
    """Features (m, d) and digits (m,) of a file of cached features."""
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            x, y = file["x"].astype(np.float32), file["y"].astype(np.int64)
    except FileNotFoundError:
        raise FileError(absent(path)) from None
    except KeyError:
        raise FileError(f"{path}: needs the arrays 'x' (features) and 'y' (digits).") from None
    except (OSError, ValueError, TypeError, EOFError, zlib.error, zipfile.BadZipFile) as error:
        raise FileError(f"{path}: not a readable .npz file ({error}).") from None
    _check(x, y, path)
    return x, y


def _check(x: FloatArray, y: Codes, path: Path) -> None:
    if x.ndim != 2 or y.shape != x.shape[:1]:
        raise FileError(f"{path}: 'x' must be (m, d) and 'y' (m,). Got {x.shape} and {y.shape}.")
    if not np.isfinite(x).all():
        raise FileError(f"{path}: 'x' contains values that are not finite; extract the features again.")
    if len(y) and not (y.min() >= 0 and y.max() < DIGITS):
        raise FileError(f"{path}: 'y' must hold digits from 0 to 9. Got {y.min()} to {y.max()}.")


@ENCODERS.register("pixels")
def pixels(images: Images) -> FloatArray:
    """The image's own values between 0 and 1, row by row."""
    flat = images.reshape(len(images), -1).astype(np.float32)
    return flat / max(1.0, float(flat.max(initial=0.0)))


def _sklearn_digits(encoder: str, seed: int) -> Instances:
    images, digits = sklearn_images()
    found = _one_set(ENCODERS[encoder](images), digits, name="scikit-learn digits", seed=seed)
    return replace(found, images=images, embedded=True, encode=ENCODERS[encoder])


def sklearn_images() -> tuple[Images, Codes]:
    """Scikit-learn's images (1797, 8, 8) of handwritten digits, and the digits."""
    from sklearn.datasets import load_digits

    data = load_digits()
    return data.images.astype(np.uint8), data.target.astype(np.int64)


def _one_hot(seed: int, per_digit: int = 400) -> Instances:
    digits = np.repeat(np.arange(DIGITS), per_digit)
    noise = np.random.default_rng(seed).normal(scale=ONE_HOT_NOISE, size=(len(digits), DIGITS))
    features = (np.eye(DIGITS)[digits] + noise).astype(np.float32)
    return replace(_one_set(features, digits, name="one-hot digits", seed=seed), embedded=True)


def _from_folder(folder: Path, encoder: str, seed: int) -> Instances:
    files = sorted(folder.glob("*.npz"))
    if files:
        return _from_npz_files(folder, files, seed)
    images = sorted(folder.glob("*images*ubyte*"))
    if not images:
        raise FileError(
            f"{folder}: holds neither .npz files of features nor IDX files (*-images-idx3-ubyte)."
        )
    encode = ENCODERS[encoder]
    stacks = [_read_images(path) for path in images]
    both = [(encode(pictures), digits) for pictures, digits in stacks]
    found = _joined(images, both, folder, seed)
    ordered = stacks if len(stacks) == 1 else _in_order(images, stacks)
    return replace(found, images=np.concatenate([pictures for pictures, _ in ordered]), encode=encode)


def _from_npz_files(folder: Path, files: list[Path], seed: int) -> Instances:
    return _joined(files, [read_npz(path) for path in files], folder, seed)


def _joined(paths: list[Path], sets: list[tuple[FloatArray, Codes]], folder: Path, seed: int) -> Instances:
    """One file is split in three; of a training and a test file, the first gives the validation pool too."""
    if len(paths) == 1:
        return _one_set(*sets[0], name=paths[0].name, seed=seed)
    (x, y), (x_test, y_test) = _in_order(paths, sets)
    if x.shape[1] != x_test.shape[1]:
        raise InputError(
            f"{folder}: training features have width {x.shape[1]}, test features {x_test.shape[1]}; "
            "use one encoder for both."
        )
    train, validation = _split(y, (1 - VALIDATION_SHARE, VALIDATION_SHARE), seed)
    test = len(y) + np.arange(len(y_test))
    pools = dict(zip(POOLS, (train, validation, test), strict=True))
    return Instances(np.concatenate([x, x_test]), np.concatenate([y, y_test]), pools, folder.name)


def _in_order(paths: list[Path], sets: list[T]) -> list[T]:
    """The training set, then the test set, by the files' names."""
    found = []
    for names in (("train",), ("test", "t10k")):
        at = [i for i, path in enumerate(paths) if any(name in path.name for name in names)]
        if len(at) != 1:
            listed = ", ".join(path.name for path in paths)
            raise FileError(f"{paths[0].parent}: needs one file named *{names[0]}*. Found: {listed}.")
        found.append(sets[at[0]])
    return found


def _read_images(path: Path) -> tuple[Images, Codes]:
    images = read_idx(path)
    label_path = path.with_name(path.name.replace("images", "labels").replace("idx3", "idx1"))
    labels = read_idx(label_path).astype(np.int64)
    if images.ndim != 3 or labels.shape != images.shape[:1]:
        raise FileError(
            f"{path}: {images.shape} images do not go with {labels.shape} labels in {label_path.name}."
        )
    if len(labels) and labels.max() >= DIGITS:
        raise FileError(f"{label_path}: labels must be digits from 0 to 9. Got {labels.max()}.")
    return images, labels


def _one_set(features: FloatArray, digits: Codes, *, name: str, seed: int) -> Instances:
    return Instances(features, digits, dict(zip(POOLS, _split(digits, SHARES, seed), strict=True)), name)


def _split(digits: Codes, shares: tuple[float, ...], seed: int) -> list[Codes]:
    """Rows in disjoint parts, each digit in the same shares."""
    rng = np.random.default_rng(seed)
    parts: list[list[Codes]] = [[] for _ in shares]
    ends = np.cumsum(shares)[:-1]
    for digit in range(DIGITS):
        rows = rng.permutation(np.flatnonzero(digits == digit))
        for part, piece in zip(parts, np.split(rows, np.rint(ends * len(rows)).astype(int)), strict=True):
            part.append(piece)
    return [np.sort(np.concatenate(part)).astype(np.int64) for part in parts]


def tagged(images: Images) -> Images:
    """The images with a bright corner, as a mark is drawn."""
    marked = images.copy()
    edge = max(1, images.shape[1] // 5)
    marked[:, :edge, :edge] = images.max(initial=1)
    return marked


UNSIGNED_BYTES = 0x08


def read_idx(path: str | PathLike[str]) -> npt.NDArray[np.uint8]:
    """The array of an IDX file of unsigned bytes, plain or gzipped."""
    data = _read(Path(path))
    if len(data) < 4 or data[:2] != b"\x00\x00":
        raise FileError(f"{path}: not an IDX file (its first two bytes must be zero); download it again.")
    if data[2] != UNSIGNED_BYTES:
        raise FileError(
            f"{path}: an IDX file of type 0x{data[2]:02x}; only unsigned bytes (0x08) are images or labels."
        )
    start = 4 + 4 * data[3]
    if len(data) < start:
        raise FileError(f"{path}: cut off within the header; download it again.")
    shape = tuple(int(n) for n in np.frombuffer(data, dtype=">u4", count=data[3], offset=4))
    expected = int(np.prod(shape, dtype=np.int64))
    if len(data) - start != expected:
        raise FileError(
            f"{path}: {shape} declares {expected:,} bytes, but {len(data) - start} follow the header; "
            "the file is damaged, download it again."
        )
    return np.frombuffer(data, dtype=np.uint8, offset=start).reshape(shape)


def _read(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    except FileNotFoundError:
        raise FileError(absent(path)) from None
    except (OSError, EOFError, zlib.error) as error:
        raise FileError(f"{path}: cannot be read ({error}).") from None
