"""A dictionary of concepts: directions of the feature space that the patches of a cohort are made of.

`kmeans` gives each patch its nearest centre; `nmf` (features that are never negative) and `topk` (a sparse
autoencoder of which the k strongest units speak) give it several concepts at once. Whatever is not written
by the dictionary is the residual: features = codes @ atoms + offset + residual, exactly.
"""

from __future__ import annotations

import json
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from xmil.core.absence import absent
from xmil.core.bag import FloatArray, IntArray
from xmil.core.budget import check_archive
from xmil.core.errors import FileError, InputError, bad_parameter, unknown_name
from xmil.core.parsing import parse_json
from xmil.core.storage import write_atomically

KINDS = ("kmeans", "nmf", "topk")
SAMPLE = 50_000  # patches that a dictionary is fitted on, at most
ACTIVE = 4  # units of a sparse autoencoder that speak for one patch
STEPS, BATCH, RATE = 2_000, 256, 1e-3


@dataclass(frozen=True, eq=False)
class Dictionary:
    """Atoms (k, d) with an offset (d,); `weights` and `biases` of the encoder for `topk`.

    >>> x = np.repeat(np.eye(3, dtype=np.float32), 20, axis=0)
    >>> found = fit_dictionary(x, concepts=3, seed=0)
    >>> found.codes(x).shape, float(np.abs(found.residual(x)).max()) < 1e-5
    ((60, 3), True)
    """

    kind: str
    atoms: FloatArray
    offset: FloatArray
    weights: FloatArray | None = None
    biases: FloatArray | None = None

    def __len__(self) -> int:
        return len(self.atoms)

    def __repr__(self) -> str:
        return f"Dictionary({self.kind}, {len(self)} concepts x {self.atoms.shape[1]} features)"

    def codes(self, features: npt.ArrayLike) -> FloatArray:
        """How much of each concept each patch has (n, k)."""
        x = np.asarray(features, dtype=np.float32)
        if x.ndim != 2 or x.shape[1] != self.atoms.shape[1]:
            raise InputError(
                f"The dictionary was fitted on features of width {self.atoms.shape[1]}. Got {x.shape}."
            )
        return _CODES[self.kind](self, x)

    def residual(self, features: npt.ArrayLike, codes: FloatArray | None = None) -> FloatArray:
        """What of the features the dictionary does not write (n, d)."""
        x = np.asarray(features, dtype=np.float32)
        rest = (self.codes(x) if codes is None else codes) @ self.atoms
        rest += self.offset
        np.subtract(x, rest, out=rest)
        return np.asarray(rest, dtype=np.float32)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the dictionary as one NumPy file, whole or not at all."""
        arrays = {"atoms": self.atoms, "offset": self.offset, "weights": self.weights, "biases": self.biases}
        held = {key: value for key, value in arrays.items() if value is not None}
        held["about"] = np.frombuffer(json.dumps({"kind": self.kind}).encode(), dtype=np.uint8)
        write_atomically(path, lambda part: _write(part, held))

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Dictionary:
        """Read what `save` wrote."""
        try:
            check_archive(path)
            with Path(path).open("rb") as stream, np.load(stream, allow_pickle=False) as held:
                kind = parse_json(bytes(held["about"]).decode())["kind"]
                optional = {key: held[key] for key in ("weights", "biases") if key in held}
                return cls(kind, held["atoms"], held["offset"], **optional)
        except FileNotFoundError:
            raise FileError(absent(path)) from None
        except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
            raise FileError(f"{path}: not a dictionary of concepts ({error}); fit it again.") from None


def _write(path: str, arrays: dict[str, Any]) -> None:
    with Path(path).open("wb") as stream:
        np.savez_compressed(stream, **arrays)


def even_counts(sizes: npt.ArrayLike, *, limit: int = SAMPLE, seed: int = 0) -> IntArray:
    """How many patches to draw from slides of these sizes: all of them, or `limit` in proportion.

    >>> even_counts([100, 300], limit=8).tolist()
    [2, 6]
    """
    n = np.asarray(sizes, dtype=np.int64)
    total = int(n.sum())
    if not total:
        raise InputError("There are no patches to learn concepts from.")
    if total <= limit:
        return n
    ends = np.concatenate([[0], np.cumsum(n)]) * (limit / total)
    shifted = np.floor(ends + np.random.default_rng(seed).random())
    return np.minimum(np.diff(shifted).astype(np.int64), n)


def fit_dictionary(
    sample: npt.ArrayLike, *, concepts: int = 20, kind: str = "kmeans", seed: int = 0
) -> Dictionary:
    """A dictionary of the sample (n, d); the same sample and seed give the same dictionary."""
    x = np.ascontiguousarray(sample, dtype=np.float32)
    if kind not in KINDS:
        raise unknown_name("dictionary", kind, KINDS)
    if x.ndim != 2 or len(x) < 2:
        raise InputError(f"A dictionary is fitted on features (n, d) of two patches or more. Got {x.shape}.")
    if not 1 <= concepts <= len(x):
        raise bad_parameter("concepts", "fit_dictionary", f"an int in the range [1, {len(x)}]", concepts)
    return _FITS[kind](x, concepts, seed)


def _fit_kmeans(x: FloatArray, concepts: int, seed: int) -> Dictionary:
    from sklearn.cluster import MiniBatchKMeans

    found = MiniBatchKMeans(concepts, random_state=seed, batch_size=max(1024, 4 * concepts), n_init=5).fit(x)
    return Dictionary("kmeans", found.cluster_centers_.astype(np.float32), np.zeros(x.shape[1], np.float32))


def _fit_nmf(x: FloatArray, concepts: int, seed: int) -> Dictionary:
    from sklearn.decomposition import MiniBatchNMF
    from sklearn.exceptions import ConvergenceWarning

    if float(x.min()) < 0:
        raise InputError("NMF needs features that are never negative, and these are; use kmeans or topk.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        found = MiniBatchNMF(concepts, random_state=seed, max_iter=100, batch_size=1024).fit(x)
    return Dictionary("nmf", found.components_.astype(np.float32), np.zeros(x.shape[1], np.float32))


def _fit_topk(x: FloatArray, concepts: int, seed: int) -> Dictionary:
    import torch

    offset = x.mean(axis=0)
    scale = float(np.abs(x - offset).mean()) or 1.0
    data = torch.from_numpy((x - offset) / scale)
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(len(data), (concepts,), generator=generator)
    atoms = torch.nn.functional.normalize(data[rows] + 1e-3, dim=1).requires_grad_(True)
    weights = atoms.detach().clone().requires_grad_(True)
    biases = torch.zeros(concepts, requires_grad=True)
    optimiser = torch.optim.Adam([atoms, weights, biases], lr=RATE)
    for _ in range(STEPS):
        batch = data[torch.randint(len(data), (BATCH,), generator=generator)]
        active = torch.relu(batch @ weights.T + biases)
        top = active.topk(min(ACTIVE, concepts), dim=1)
        codes = torch.zeros_like(active).scatter(1, top.indices, top.values)
        loss = ((codes @ atoms - batch) ** 2).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    made = [part.detach().numpy().astype(np.float32) for part in (atoms * scale, weights / scale, biases)]
    return Dictionary("topk", made[0], offset.astype(np.float32), made[1], made[2])


def _codes_kmeans(found: Dictionary, x: FloatArray) -> FloatArray:
    far = (found.atoms**2).sum(axis=1) - 2 * x @ found.atoms.T
    codes = np.zeros((len(x), len(found)), dtype=np.float32)
    codes[np.arange(len(x)), far.argmin(axis=1)] = 1.0
    return codes


def _codes_nmf(found: Dictionary, x: FloatArray) -> FloatArray:
    """Codes that lower the squared error, by multiplicative steps; the atoms stay."""
    gram, target = found.atoms @ found.atoms.T, np.maximum(x, 0) @ found.atoms.T
    codes = target / np.maximum(np.diag(gram), 1e-12)
    for _ in range(200):
        codes *= target / np.maximum(codes @ gram, 1e-12)
    return codes.astype(np.float32)


def _codes_topk(found: Dictionary, x: FloatArray) -> FloatArray:
    assert found.weights is not None and found.biases is not None  # noqa: S101, PT018
    active = np.maximum((x - found.offset) @ found.weights.T + found.biases, 0)
    keep = min(ACTIVE, len(found))
    top = np.argpartition(-active, keep - 1, axis=1)[:, :keep]
    codes = np.zeros_like(active)
    np.put_along_axis(codes, top, np.take_along_axis(active, top, axis=1), axis=1)
    return codes.astype(np.float32)


_FITS: dict[str, Callable[[FloatArray, int, int], Dictionary]] = {
    "kmeans": _fit_kmeans,
    "nmf": _fit_nmf,
    "topk": _fit_topk,
}
_CODES: dict[str, Callable[[Dictionary, FloatArray], FloatArray]] = {
    "kmeans": _codes_kmeans,
    "nmf": _codes_nmf,
    "topk": _codes_topk,
}
