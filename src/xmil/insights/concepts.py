"""Concepts and strategies: the concepts in a cohort's patches, and the mix of them that decides each slide.

A dictionary decomposes features exactly into codes @ atoms + offset + residual. `kmeans` gives each patch its
nearest centre; `nmf` (for non-negative features) and `topk` (a sparse autoencoder with k active units) give
it several concepts. Every patch score is split into the concepts and a rest. If there are more concepts than
kinds of patches, every seed groups patches differently, so the agreement between seeds shows how many
concepts the cohort has.

Strategies are groups of cases that are decided for different reasons. Each slide has a profile of relevance
over concepts, each case the mean of its slides. Profiles are scaled to unit length, so that only the mix
counts, and clustered. Any cloud can be split, so a split counts only if its silhouette is convincing and
better than those of single Gaussian clouds with the same mean and covariance, drawn and clustered alike
(parametric bootstrap); of several, the one with the best silhouette. A cluster has at least three cases, and
at least a fiftieth of all. After Lapuschkin et al., "Unmasking Clever Hans predictors", Nature Communications
2019; for the test, Liu et al., "Statistical significance of clustering", JASA 2008.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from os import PathLike
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from xmil.core.bag import FloatArray, IntArray
from xmil.core.errors import InputError, bad_parameter, check_names
from xmil.evaluate.statistics import FEWEST, permutation_share, unit_codes
from xmil.storage import load_arrays, save_arrays

KINDS = ("kmeans", "nmf", "topk")
SAMPLE = 50_000  # the most patches to fit a dictionary on
COMPARED_PATCHES, SEEDS = 2048, 3  # patches and dictionaries that judge the number of concepts
STABLE = 0.9  # agreement over seeds at which concepts count as the cohort's own
STEP, SMALLEST = 1.37, 3  # ratio of the numbers of concepts to try, and the smallest one
ACTIVE = 4  # active units of a sparse autoencoder per patch
STEPS, BATCH, RATE = 2_000, 256, 1e-3
REMOVAL = ("concept", "relevance", "predicted", "measured")
MOST = 8
CONVINCING = 0.25  # the least silhouette for a split
SMALLEST_GROUP, LEAST_SHARE = 3, 0.02  # cases of a strategy: a single odd case does not form one
RESTARTS = 3  # of k-means
COMPARED = 1_000  # cases of a silhouette, which takes quadratic time
CLOUDS, CLOUD_BLOCK = 99, 11  # single clouds that a split is compared with, and how many are drawn at a time
LEVEL = 0.01  # the largest p of a split that counts, as for shortcuts
LEADERS = 3  # concepts to name for a strategy


@dataclass(frozen=True, eq=False)
class Dictionary:
    """Atoms (k, d) with an offset (d,); `weights` and `biases` of the encoder for `topk`.

    >>> x = np.repeat(np.eye(3, dtype=np.float32), 20, axis=0)
    >>> dictionary = fit_dictionary(x, concepts=3, seed=0)
    >>> dictionary.codes(x).shape, float(np.abs(dictionary.residual(x)).max()) < 1e-5
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
        """Compute how much of each concept each patch has (n, k)."""
        x = np.asarray(features, dtype=np.float32)
        if x.ndim != 2 or x.shape[1] != self.atoms.shape[1]:
            raise InputError(
                f"The dictionary was fitted on features of width {self.atoms.shape[1]}. Got {x.shape}."
            )
        if self.kind == "kmeans":
            far = (self.atoms**2).sum(axis=1) - 2 * x @ self.atoms.T
            return np.asarray(np.eye(len(self), dtype=np.float32)[far.argmin(axis=1)])
        if self.kind == "nmf":  # codes that lower the squared error, by multiplicative steps; the atoms stay
            gram, target = self.atoms @ self.atoms.T, np.maximum(x, 0) @ self.atoms.T
            codes = target / np.maximum(np.diag(gram), 1e-12)
            for _ in range(200):
                codes *= target / np.maximum(codes @ gram, 1e-12)
            return codes.astype(np.float32)
        assert self.weights is not None and self.biases is not None  # noqa: S101, PT018
        active = np.maximum((x - self.offset) @ self.weights.T + self.biases, 0)
        keep = min(ACTIVE, len(self))
        top = np.argpartition(-active, keep - 1, axis=1)[:, :keep]
        codes = np.zeros_like(active)
        np.put_along_axis(codes, top, np.take_along_axis(active, top, axis=1), axis=1)
        return codes.astype(np.float32)

    def residual(self, features: npt.ArrayLike, codes: FloatArray | None = None) -> FloatArray:
        """Compute the part of the features that the dictionary misses (n, d)."""
        x = np.asarray(features, dtype=np.float32)
        rest = (self.codes(x) if codes is None else codes) @ self.atoms
        rest += self.offset
        np.subtract(x, rest, out=rest)
        return np.asarray(rest, dtype=np.float32)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the dictionary as one NumPy file, whole or not at all."""
        arrays = {"atoms": self.atoms, "offset": self.offset, "weights": self.weights, "biases": self.biases}
        save_arrays(path, {k: v for k, v in arrays.items() if v is not None}, {"kind": self.kind})

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Dictionary:
        """Read a file written by `save`."""

        def build(arrays: dict[str, Any], facts: Any) -> Dictionary:
            optional = {key: arrays[key] for key in ("weights", "biases") if key in arrays}
            return cls(facts["kind"], arrays["atoms"], arrays["offset"], **optional)

        return load_arrays(path, build, "dictionary of concepts", "fit it again")


def even_counts(sizes: npt.ArrayLike, *, limit: int = SAMPLE, seed: int = 0) -> IntArray:
    """Count the patches to draw from slides of these sizes: all, or `limit` in proportion.

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
    """Fit a dictionary to the sample (n, d); the same sample and seed give the same dictionary."""
    x = np.ascontiguousarray(sample, dtype=np.float32)
    check_names("dictionary", [kind], KINDS)
    if x.ndim != 2 or len(x) < 2:
        raise InputError(f"A dictionary is fitted on features (n, d) of two patches or more. Got {x.shape}.")
    if not 1 <= concepts <= len(x):
        raise bad_parameter("concepts", "fit_dictionary", f"an int in the range [1, {len(x)}]", concepts)
    if kind == "topk":
        return _fit_topk(x, concepts, seed)
    from sklearn.cluster import MiniBatchKMeans
    from sklearn.decomposition import MiniBatchNMF
    from sklearn.exceptions import ConvergenceWarning

    if kind == "kmeans":
        size = max(1024, 4 * concepts)
        atoms = (
            MiniBatchKMeans(concepts, random_state=seed, batch_size=size, n_init=5).fit(x).cluster_centers_
        )
    elif float(x.min()) < 0:
        raise InputError("NMF needs features that are never negative, and these are; use kmeans or topk.")
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            atoms = (
                MiniBatchNMF(concepts, random_state=seed, max_iter=100, batch_size=1024).fit(x).components_
            )
    return Dictionary(kind, atoms.astype(np.float32), np.zeros(x.shape[1], np.float32))


def seed_agreement(sample: npt.ArrayLike, *, concepts: int, kind: str = "kmeans", seed: int = 0) -> float:
    """Measure how well dictionaries of several seeds agree on groups: adjusted Rand index, mean over pairs.

    A patch belongs to its strongest concept. 1 means the same groups, 0 chance.

    >>> x = np.random.default_rng(0).normal(0, 0.1, (300, 4)) + np.repeat(np.eye(4)[:3], 100, axis=0)
    >>> seed_agreement(x, concepts=3)
    1.0
    """
    from sklearn.metrics import adjusted_rand_score

    x = np.asarray(sample, dtype=np.float32)
    groups = []
    for i in range(SEEDS):
        dictionary = fit_dictionary(x, concepts=concepts, kind=kind, seed=seed + i)
        size = np.linalg.norm(dictionary.atoms, axis=1) if kind != "kmeans" else 1.0
        groups.append((dictionary.codes(x) * size).argmax(axis=1))
    return float(np.mean([adjusted_rand_score(a, b) for a, b in combinations(groups, 2)]))


def compare_sizes(
    sample: npt.ArrayLike, *, concepts: int, kind: str = "kmeans", seed: int = 0
) -> dict[int, float]:
    """Compute the agreement over seeds for this and smaller numbers of concepts, on part of the sample."""
    x = np.asarray(sample, dtype=np.float32)
    rows = np.random.default_rng(seed).permutation(len(x))[:COMPARED_PATCHES]
    sizes, size = {min(concepts, len(rows))}, concepts / STEP
    while size > SMALLEST - 0.5:
        sizes.add(round(size))
        size /= STEP
    return {k: seed_agreement(x[rows], concepts=k, kind=kind, seed=seed) for k in sorted(sizes)}


def recommend_size(agreement: Mapping[int, float]) -> int:
    """Find the largest number of concepts that seeds agree on, else the one with the best agreement.

    >>> recommend_size({3: 0.9, 6: 0.99, 20: 0.4}), recommend_size({3: 0.5, 20: 0.4})
    (6, 3)
    """
    stable = [k for k, value in agreement.items() if value >= STABLE]
    return max(stable, default=max(agreement, key=lambda k: agreement[k]))


def _fit_topk(x: FloatArray, concepts: int, seed: int) -> Dictionary:
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
    parts = [part.detach().numpy().astype(np.float32) for part in (atoms * scale, weights / scale, biases)]
    return Dictionary("topk", parts[0], offset.astype(np.float32), parts[1], parts[2])


@dataclass(frozen=True, eq=False)
class ConceptShares:
    """Shares of patch scores, which sum up `concepts` (n, k), `offset` (n,) and `residual` (n,) in each row.

    `codes` (n, k) is how much of each concept a patch has.
    """

    concepts: FloatArray
    offset: FloatArray
    residual: FloatArray
    codes: FloatArray

    @property
    def profile(self) -> FloatArray:
        """Relevance of each concept over the whole slide (k,)."""
        return np.asarray(self.concepts.sum(axis=0, dtype=np.float64), dtype=np.float32)


def feature_weights(features: npt.ArrayLike, relevance: npt.ArrayLike) -> FloatArray:
    """g = R / x: the relevance per unit of each feature (n, d); a feature of zero has none.

    >>> feature_weights([[2.0, 0.0]], [[1.0, 0.0]]).tolist()
    [[0.5, 0.0]]
    """
    x, r = np.asarray(features, dtype=np.float32), np.asarray(relevance, dtype=np.float32)
    if x.shape != r.shape:
        raise InputError(f"Features {x.shape} and relevance {r.shape} must have the same shape.")
    size = np.abs(x)
    large = size > np.float32(1e-7) * size.max(axis=1, keepdims=True, initial=0.0)
    return np.divide(r, x, out=np.zeros_like(x), where=large)


def split_scores(
    dictionary: Dictionary, features: npt.ArrayLike, weights: npt.ArrayLike, baseline: npt.ArrayLike = 0.0
) -> ConceptShares:
    """Split relevance over the dictionary: concept k of patch i gets code_ik * (atom_k . g_i).

    With features = codes @ atoms + offset + residual the shares of a patch add up to exactly x_i . g_i minus
    the `baseline` (n,), the relevance of patches that equal the baseline, which the offset subtracts.
    """
    x, g = np.asarray(features, dtype=np.float32), np.asarray(weights, dtype=np.float32)
    codes = dictionary.codes(x)
    concepts = codes * (g @ dictionary.atoms.T)
    residual = np.einsum("nd,nd->n", dictionary.residual(x, codes), g)
    offset = g @ dictionary.offset - np.asarray(baseline, dtype=np.float32)
    return ConceptShares(concepts, offset, residual, codes)


def remove_concepts(
    output: Callable[[FloatArray], float],
    dictionary: Dictionary,
    features: FloatArray,
    shares: ConceptShares,
    *,
    slope: npt.ArrayLike,
    concepts: Sequence[int],
) -> list[dict[str, Any]]:
    """Delete each of the concepts from a slide and run the model; `slope` (n, d) is its gradient there.

    A row has the entries `REMOVAL`: `relevance` is minus the concept's share of the score, `predicted` the
    change of the output by the slope, `measured` its actual change.
    """
    x, g = np.asarray(features, dtype=np.float32), np.asarray(slope, dtype=np.float32)
    before, profile, rows = output(x), shares.profile, []
    for k in concepts:
        code, atom = shares.codes[:, k], dictionary.atoms[k]
        rest = np.outer(-code, atom)
        rest += x
        predicted = -float((code * (g @ atom)).sum(dtype=np.float64))
        values = (int(k), -float(profile[k]), predicted, output(rest) - before)
        rows.append(dict(zip(REMOVAL, values, strict=True)))
    return rows


def removal_agreement(expected: npt.ArrayLike, measured: npt.ArrayLike) -> dict[str, float]:
    """Compute how often the output moved in the expected direction, and the correlation of the two.

    >>> removal_agreement([-1.0, -2.0, 1.0], [-2.0, -4.0, 2.0])
    {'agreement': 1.0, 'correlation': 1.0}
    """
    x, y = np.asarray(expected, dtype=np.float64), np.asarray(measured, dtype=np.float64)
    varies = x.std() > 0 and y.std() > 0
    correlation = float(np.corrcoef(x, y)[0, 1]) if varies else float("nan")
    return {"agreement": float((x * y > 0).mean()), "correlation": correlation}


def leading_concepts(profiles: npt.ArrayLike, top: int = 5) -> IntArray:
    """Find the concepts with the most absolute relevance over the slides (m, k), strongest first."""
    total = np.abs(np.asarray(profiles, dtype=np.float64)).mean(axis=0)
    return np.argsort(-total, kind="stable")[:top].astype(np.int64)


@dataclass(frozen=True, eq=False)
class Strategies:
    """The cluster of each slide (m,), an embedding in the plane (m, 2), the slide nearest to each centre.

    Slides of one case share cluster and place. `silhouette` and `p` are those of the split into `tested`
    groups that comes nearest to the level or passes it; nan and 1 if no split is convincing. There is one
    cluster if none passes. `leaders` are the concepts with the largest share of each cluster's mean profile,
    strongest first.
    """

    labels: IntArray
    embedding: npt.NDArray[np.float64]
    representatives: IntArray
    silhouette: float
    leaders: tuple[tuple[int, ...], ...] = ()
    p: float = 1.0
    tested: int = 1

    @property
    def count(self) -> int:
        """The number of strategies."""
        return int(self.labels.max()) + 1

    def accuracy(self, correct: npt.ArrayLike) -> list[float]:
        """Compute the share of right decisions in each cluster; nan where none is known."""
        right = np.asarray(correct, dtype=np.float64)
        groups = [right[(self.labels == k) & np.isfinite(right)] for k in range(self.count)]
        return [float(group.mean()) if len(group) else float("nan") for group in groups]


@dataclass(frozen=True, eq=False)
class _Split:
    """A clustering into k groups: labels (m,), centres (k, d), and whether it is worth testing."""

    labels: IntArray
    centres: npt.NDArray[np.float64]
    silhouette: float
    is_convincing: bool


def find_strategies(
    profiles: npt.ArrayLike, *, cases: Sequence[Any] | None = None, seed: int = 0
) -> Strategies:
    """Cluster cases by the mean profiles of their slides (m, k); without `cases`, each slide is one.

    >>> profiles = [[1, 0.1]] * 5 + [[0.1, 1]] * 5
    >>> find_strategies(profiles).count
    2
    >>> find_strategies(profiles, cases=["a"] * 5 + ["b"] * 5).count
    1
    """
    raw = np.asarray(profiles, dtype=np.float64)
    if raw.ndim != 2 or not len(raw) or not np.isfinite(raw).all():
        raise InputError(f"Strategies need finite profiles (slides, concepts). Got {raw.shape}.")
    codes = unit_codes(range(len(raw)) if cases is None else cases, len(raw))
    means = np.zeros((int(codes.max()) + 1, raw.shape[1]))
    np.add.at(means, codes, raw)
    means /= np.bincount(codes)[:, None]
    x = _unit_length(means)

    split = _Split(np.zeros(len(x), dtype=np.int64), x.mean(axis=0, keepdims=True), float("nan"), False)
    silhouette, p, tested = float("nan"), 1.0, 1
    splits = _split_all(x, seed=seed)
    convincing = [i for i, each in enumerate(splits) if each.is_convincing]
    if convincing:
        chances = _compare_with_clouds(means, splits, seed=seed)
        passing = [i for i in convincing if chances[i] <= LEVEL]
        if passing:
            best = max(passing, key=lambda i: splits[i].silhouette)
            split = splits[best]
        else:
            best = min(convincing, key=lambda i: chances[i])
        silhouette, p, tested = splits[best].silhouette, chances[best], len(splits[best].centres)

    order = np.argsort(-np.abs(split.centres), axis=1, kind="stable")[:, :LEADERS]
    leaders = tuple(tuple(int(k) for k in row) for row in order)
    labels = split.labels[codes]
    far = ((_unit_length(raw)[:, None] - split.centres[None]) ** 2).sum(axis=-1)
    far[labels[:, None] != np.arange(len(split.centres))] = np.inf
    nearest = np.asarray(far.argmin(axis=0), dtype=np.int64)
    return Strategies(labels, _main_plane(x)[codes], nearest, silhouette, leaders, p, tested)


def _unit_length(profiles: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Scale each profile (m, k) to unit length; one of zeros stays."""
    lengths = np.linalg.norm(profiles, axis=1, keepdims=True)
    return np.asarray(profiles / np.maximum(lengths, 1e-12))


def _main_plane(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Project profiles (m, k) on their two main directions (m, 2)."""
    left, sizes, _ = np.linalg.svd(x - x.mean(axis=0), full_matrices=False)
    plane = (left * sizes)[:, :2]
    return np.asarray(np.pad(plane, ((0, 0), (0, 2 - plane.shape[1]))))


def _split_all(x: npt.NDArray[np.float64], *, seed: int) -> list[_Split]:
    """Split profiles of unit length (m, k) into 2, 3, ... groups; none if there are too few."""
    from sklearn import config_context
    from sklearn.cluster import KMeans
    from sklearn.metrics import pairwise_distances, silhouette_score

    distinct = len(np.unique(x.round(9), axis=0))
    most = min(MOST, distinct, len(x) // SMALLEST_GROUP)
    if len(x) < FEWEST or most < 2:
        return []
    smallest = max(SMALLEST_GROUP, LEAST_SHARE * len(x))
    rows = np.random.default_rng(seed).permutation(len(x))[:COMPARED]
    distances = pairwise_distances(x[rows])
    splits = []
    for k in range(2, most + 1):
        with config_context(assume_finite=True, skip_parameter_validation=True):  # hundreds of small fits
            fitted = KMeans(k, n_init=RESTARTS, random_state=seed).fit(x)
            labels = fitted.labels_.astype(np.int64)
            silhouette = 0.0
            if 1 < len(np.unique(labels[rows])) < len(rows):
                silhouette = float(silhouette_score(distances, labels[rows], metric="precomputed"))
        is_large = bool(np.bincount(labels, minlength=k).min() >= smallest)
        splits.append(
            _Split(labels, fitted.cluster_centers_, silhouette, is_large and silhouette > CONVINCING)
        )
    return splits


def _compare_with_clouds(
    means: npt.NDArray[np.float64], splits: Sequence[_Split], *, seed: int
) -> list[float]:
    """Compute each split's chance in single Gaussian clouds of this mean and covariance.

    Silhouettes are compared in standard deviations of those with as many groups, and with the largest of a
    cloud over all numbers of groups, because all were tried. Drawing ends early if no split can pass.
    """
    rng = np.random.default_rng(seed)
    centre = means.mean(axis=0)
    spread = (means - centre) / np.sqrt(len(means) - 1)
    convincing = [i for i, split in enumerate(splits) if split.is_convincing]
    rows = [[split.silhouette for split in splits]]
    chances = [1.0] * len(splits)
    while len(rows) <= CLOUDS:
        for _ in range(CLOUD_BLOCK):
            cloud = centre + rng.standard_normal((len(means), len(means))) @ spread
            silhouettes = [split.silhouette for split in _split_all(_unit_length(cloud), seed=seed)]
            rows.append((silhouettes + [0.0] * len(splits))[: len(splits)])
        values = np.array(rows)
        scaled = (values - values.mean(axis=0)) / np.maximum(values.std(axis=0), 1e-9)
        largest = scaled[1:].max(axis=1)
        chances = [permutation_share(float(own), largest) for own in scaled[0]]
        if min(chances[i] for i in convincing) * len(rows) > LEVEL * (CLOUDS + 1) + 0.5:
            break
    return chances
