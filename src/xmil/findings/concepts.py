"""Relevance by concept: every patch score split among the dictionary's concepts and a residual."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from xmil.core.bag import FloatArray, IntArray
from xmil.core.errors import InputError
from xmil.findings.dictionary import Dictionary

EXAMPLES = 25  # patches of an atlas page


@dataclass(frozen=True, eq=False)
class ConceptShares:
    """A patch's score is the sum of its row in `concepts` (n, k), `offset` (n,) and `residual` (n,)."""

    concepts: FloatArray
    offset: FloatArray
    residual: FloatArray

    @property
    def profile(self) -> FloatArray:
        """Relevance of each concept over the whole slide (k,)."""
        return np.asarray(self.concepts.sum(axis=0, dtype=np.float64), dtype=np.float32)


def feature_weights(features: npt.ArrayLike, relevance: npt.ArrayLike) -> FloatArray:
    """g = R / x: what a unit of each feature is worth (n, d); a feature of zero carries nothing.

    >>> feature_weights([[2.0, 0.0]], [[1.0, 0.0]]).tolist()
    [[0.5, 0.0]]
    """
    x, r = np.asarray(features, dtype=np.float64), np.asarray(relevance, dtype=np.float64)
    if x.shape != r.shape:
        raise InputError(f"Features {x.shape} and relevance {r.shape} must have one shape.")
    tiny = np.abs(x) <= 1e-7 * np.abs(x).max(axis=1, keepdims=True, initial=0.0)
    return np.where(tiny, 0.0, r / np.where(tiny, 1.0, x)).astype(np.float32)


def split_scores(dictionary: Dictionary, features: npt.ArrayLike, weights: npt.ArrayLike) -> ConceptShares:
    """Relevance through the dictionary: concept k of patch i gets code_ik * (atom_k . g_i).

    With features = codes @ atoms + offset + residual the shares of a patch add up to x_i . g_i exactly.
    """
    x, g = np.asarray(features, dtype=np.float32), np.asarray(weights, dtype=np.float32)
    codes = dictionary.codes(x)
    concepts = codes * (g @ dictionary.atoms.T)
    residual = (dictionary.residual(x, codes) * g).sum(axis=1)
    return ConceptShares(concepts, g @ dictionary.offset, residual)


def without_concept(dictionary: Dictionary, features: npt.ArrayLike, concept: int) -> FloatArray:
    """The features with one concept's part taken out of every patch (n, d)."""
    x = np.asarray(features, dtype=np.float32)
    return np.asarray(x - dictionary.codes(x)[:, [concept]] * dictionary.atoms[concept])


@dataclass(frozen=True)
class Removal:
    """What deleting a concept did to a slide's output, and what its relevance had predicted."""

    slide: str
    concept: int
    predicted: float
    measured: float

    @property
    def agrees(self) -> bool:
        """Whether the output moved in the predicted direction."""
        return self.predicted * self.measured > 0


def remove_concepts(
    slide: str,
    output: Callable[[FloatArray], float],
    dictionary: Dictionary,
    features: FloatArray,
    shares: ConceptShares,
    *,
    concepts: Sequence[int],
) -> list[Removal]:
    """Delete each of the concepts from the slide and ask the model."""
    before = output(np.asarray(features, dtype=np.float32))
    found = []
    for k in concepts:
        after = output(without_concept(dictionary, features, k))
        found.append(Removal(slide, int(k), -float(shares.profile[k]), after - before))
    return found


def leading(profiles: npt.ArrayLike, top: int = 5) -> IntArray:
    """The concepts with the most relevance of either sign over the slides (m, k), strongest first."""
    total = np.abs(np.asarray(profiles, dtype=np.float64)).mean(axis=0)
    return np.argsort(-total, kind="stable")[:top].astype(np.int64)


@dataclass
class Atlas:
    """The patches that speak most for each concept, over slides that are seen once."""

    size: int = EXAMPLES
    per_slide: int = 5
    held: dict[int, list[tuple[float, str, int]]] = field(default_factory=dict)

    def add(self, slide: str, shares: ConceptShares) -> None:
        """Take in a slide."""
        strength = np.abs(shares.concepts)
        rows = np.argsort(-strength, axis=0, kind="stable")[: self.per_slide]
        for k in range(strength.shape[1]):
            new = [(float(strength[i, k]), slide, int(i)) for i in rows[:, k] if strength[i, k] > 0]
            merged = sorted([*self.held.get(k, []), *new], key=lambda item: (-item[0], item[1], item[2]))
            self.held[k] = merged[: self.size]

    def examples(self, concept: int) -> list[tuple[str, int]]:
        """Slides and rows of a concept's strongest patches."""
        return [(slide, row) for _, slide, row in self.held.get(concept, [])]
