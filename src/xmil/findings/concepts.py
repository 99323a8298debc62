"""Relevance by concept: every patch score split among the dictionary's concepts and a residual."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from xmil.core.bag import FloatArray, IntArray
from xmil.core.errors import InputError
from xmil.findings.dictionary import Dictionary


@dataclass(frozen=True, eq=False)
class ConceptShares:
    """A patch's score is the sum of its row in `concepts` (n, k), `offset` (n,) and `residual` (n,).

    `codes` (n, k) say how much of each concept a patch has.
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
    """g = R / x: what a unit of each feature is worth (n, d); a feature of zero carries nothing.

    >>> feature_weights([[2.0, 0.0]], [[1.0, 0.0]]).tolist()
    [[0.5, 0.0]]
    """
    x, r = np.asarray(features, dtype=np.float32), np.asarray(relevance, dtype=np.float32)
    if x.shape != r.shape:
        raise InputError(f"Features {x.shape} and relevance {r.shape} must have one shape.")
    size = np.abs(x)
    known = size > np.float32(1e-7) * size.max(axis=1, keepdims=True, initial=0.0)
    return np.divide(r, x, out=np.zeros_like(x), where=known)


def split_scores(
    dictionary: Dictionary,
    features: npt.ArrayLike,
    weights: npt.ArrayLike,
    baseline: npt.ArrayLike = 0.0,
) -> ConceptShares:
    """Relevance through the dictionary: concept k of patch i gets code_ik * (atom_k . g_i).

    With features = codes @ atoms + offset + residual the shares of a patch add up to x_i . g_i exactly, less
    the `baseline` (n,): what patches that equal the baseline would have, which the offset gives up.
    """
    x, g = np.asarray(features, dtype=np.float32), np.asarray(weights, dtype=np.float32)
    codes = dictionary.codes(x)
    concepts = codes * (g @ dictionary.atoms.T)
    residual = np.einsum("nd,nd->n", dictionary.residual(x, codes), g)
    offset = g @ dictionary.offset - np.asarray(baseline, dtype=np.float32)
    return ConceptShares(concepts, offset, residual, codes)


@dataclass(frozen=True)
class Removal:
    """What deleting a concept did to a slide's output, and what had been expected.

    `relevance` is minus the concept's share of the score; `predicted` is what the slope of the output at the
    slide as it is says of the deletion.
    """

    slide: str
    concept: int
    relevance: float
    predicted: float
    measured: float


def remove_concepts(
    slide: str,
    output: Callable[[FloatArray], float],
    dictionary: Dictionary,
    features: FloatArray,
    shares: ConceptShares,
    *,
    slope: npt.ArrayLike,
    concepts: Sequence[int],
) -> list[Removal]:
    """Delete each of the concepts from the slide and ask the model; `slope` (n, d) is its gradient there."""
    x, g = np.asarray(features, dtype=np.float32), np.asarray(slope, dtype=np.float32)
    before = output(x)
    found = []
    for k in concepts:
        code, atom = shares.codes[:, k], dictionary.atoms[k]
        left = np.outer(-code, atom)
        left += x
        after = output(left)
        predicted = -float((code * (g @ atom)).sum(dtype=np.float64))
        found.append(Removal(slide, int(k), -float(shares.profile[k]), predicted, after - before))
    return found


def removal_agreement(expected: npt.ArrayLike, measured: npt.ArrayLike) -> dict[str, float]:
    """How often the output moved in the expected direction, and the correlation of the two.

    >>> removal_agreement([-1.0, -2.0, 1.0], [-2.0, -4.0, 2.0])
    {'agreement': 1.0, 'correlation': 1.0}
    """
    x, y = np.asarray(expected, dtype=np.float64), np.asarray(measured, dtype=np.float64)
    varied = x.std() > 0 and y.std() > 0
    correlation = float(np.corrcoef(x, y)[0, 1]) if varied else float("nan")
    return {"agreement": float((x * y > 0).mean()), "correlation": correlation}


def leading(profiles: npt.ArrayLike, top: int = 5) -> IntArray:
    """The concepts with the most relevance of either sign over the slides (m, k), strongest first."""
    total = np.abs(np.asarray(profiles, dtype=np.float64)).mean(axis=0)
    return np.argsort(-total, kind="stable")[:top].astype(np.int64)
