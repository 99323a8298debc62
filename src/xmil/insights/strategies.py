"""Strategies: groups of slides that are decided for different reasons.

Each slide is a profile of relevance over concepts. Profiles are scaled to unit length, so that what counts is
the mix and not the amount, and clustered; the number of clusters is the one with the best silhouette, or one
where no split is convincing. No cluster has fewer slides than three, or a fiftieth of all. After Lapuschkin
et al., "Unmasking Clever Hans predictors", Nature Communications 2019.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from xmil.core.bag import IntArray
from xmil.core.errors import InputError

MOST = 8
CONVINCING = 0.25  # silhouette below which slides are not split
FEWEST, LEAST_SHARE = 3, 0.02  # slides of a strategy: a single odd slide is none
COMPARED = 2_000  # slides of a silhouette, whose time goes with their square
LEADERS = 3  # concepts named for a strategy


@dataclass(frozen=True, eq=False)
class Strategies:
    """Cluster of each slide (m,), an embedding in the plane (m, 2), and the slide nearest to each centre.

    `leaders` are the concepts with the largest part in each cluster's mean profile, strongest first.
    """

    labels: IntArray
    embedding: npt.NDArray[np.float64]
    representatives: IntArray
    silhouette: float
    leaders: tuple[tuple[int, ...], ...] = ()

    @property
    def count(self) -> int:
        """How many strategies there are."""
        return int(self.labels.max()) + 1

    def accuracy(self, correct: npt.ArrayLike) -> list[float]:
        """The share of right decisions in each cluster; nan where none is known."""
        right = np.asarray(correct, dtype=np.float64)
        groups = [right[(self.labels == k) & np.isfinite(right)] for k in range(self.count)]
        return [float(group.mean()) if len(group) else float("nan") for group in groups]


def find_strategies(profiles: npt.ArrayLike, *, seed: int = 0) -> Strategies:
    """Cluster slides by their profiles (m, k).

    >>> profiles = [[1, 0.1]] * 5 + [[0.1, 1]] * 5
    >>> find_strategies(profiles).count
    2
    """
    from sklearn.cluster import KMeans
    from sklearn.metrics import silhouette_score

    raw = np.asarray(profiles, dtype=np.float64)
    if raw.ndim != 2 or not len(raw) or not np.isfinite(raw).all():
        raise InputError(f"Strategies need finite profiles (slides, concepts). Got {raw.shape}.")
    x = raw / np.maximum(np.linalg.norm(raw, axis=1, keepdims=True), 1e-12)
    labels, centres, silhouette = (
        np.zeros(len(x), dtype=np.int64),
        x.mean(axis=0, keepdims=True),
        float("nan"),
    )
    sample = COMPARED if len(x) > COMPARED else None
    distinct = len(np.unique(x.round(9), axis=0))
    for k in range(2, min(MOST, distinct, len(x) - 1) + 1):
        fitted = KMeans(k, n_init=10, random_state=seed).fit(x)
        if np.bincount(fitted.labels_).min() < max(FEWEST, LEAST_SHARE * len(x)):
            continue
        value = float(silhouette_score(x, fitted.labels_, sample_size=sample, random_state=seed))
        if value > np.fmax(CONVINCING, silhouette):
            labels, centres, silhouette = fitted.labels_, fitted.cluster_centers_, value
    order = np.argsort(-np.abs(centres), axis=1, kind="stable")[:, :LEADERS]
    leaders = tuple(tuple(int(k) for k in row) for row in order)
    left, sizes, _ = np.linalg.svd(x - x.mean(axis=0), full_matrices=False)
    plane = (left * sizes)[:, :2]  # the two main directions of the profiles
    plane = np.pad(plane, ((0, 0), (0, 2 - plane.shape[1])))
    far = ((x[:, None] - centres[None]) ** 2).sum(axis=-1)
    far[labels[:, None] != np.arange(len(centres))] = np.inf
    nearest = np.asarray(far.argmin(axis=0), dtype=np.int64)
    return Strategies(labels.astype(np.int64), plane, nearest, silhouette, leaders)
