"""Shortcuts: does what the model looks at go with how a slide was made?

Two questions. Per slide: does the explained output, or a concept's relevance, go with a column of acquisition
(site, scanner, stain)? Per patch: within slides, does relevance go with a property of the picture
(brightness, saturation, focus, ink)? Effects are rank correlations or the share of rank variance between
groups; p-values come from permutations and are corrected over all questions (Holm).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.stats import rankdata

from xmil.core.errors import InputError, bad_parameter
from xmil.evaluate.statistics import holm

DRAWS = 2000
LEVEL = 0.05
LEAST = {"slide": 0.1, "patch": 0.1}  # effects below are not called a shortcut, however sure
FEWEST = 8  # slides that a question needs
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Association:
    """How strongly a cause goes with what the model looks at.

    `effect` is in the range [-1, 1] for numbers (rank correlation) and [0, 1] for groups (share of rank
    variance). `slides` are those that show it most.
    """

    cause: str
    level: str
    measure: str
    effect: float
    p: float
    n: int
    corrected: float = float("nan")
    slides: tuple[str, ...] = ()

    @property
    def found(self) -> bool:
        """Whether it is both sure and large enough to be called a shortcut."""
        return self.corrected < LEVEL and abs(self.effect) >= LEAST[self.level]

    def __str__(self) -> str:
        return (
            f"{self.cause}: {self.measure} {self.effect:.2f} over {self.n} slides "
            f"(p = {self.corrected:.3g}, corrected)"
        )


def slide_associations(
    values: npt.ArrayLike,
    columns: Mapping[str, Sequence[Any]],
    slides: Sequence[str],
    *,
    draws: int = DRAWS,
    seed: int = 0,
) -> list[Association]:
    """Columns of the cohort against one number per slide, such as the explained output.

    >>> found = slide_associations(range(20), {"site": ["a"] * 10 + ["b"] * 10}, [str(i) for i in range(20)])
    >>> found[0].cause, round(found[0].effect, 2)
    ('site', 0.74)
    """
    y = np.asarray(values, dtype=np.float64)
    if draws < 100:
        raise bad_parameter("draws", "slide_associations", "an int in the range [100, inf)", draws)
    if y.ndim != 1 or len(y) != len(slides):
        raise InputError(f"There must be one value per slide ({len(slides)}). Got shape {y.shape}.")
    found = []
    for name, cells in columns.items():
        known = np.array([cell is not None and cell == cell and cell != "" for cell in cells]) & np.isfinite(
            y
        )
        if known.sum() < FEWEST:
            continue
        picked = [cell for cell, here in zip(cells, known, strict=True) if here]
        made = _against(y[known], picked, name, draws=draws, seed=seed)
        if made is not None:
            names = [slide for slide, here in zip(slides, known, strict=True) if here]
            found.append(replace(made, slides=_telling(y[known], names)))
    return found


def patch_correlations(relevance: npt.ArrayLike, statistics: Mapping[str, npt.ArrayLike]) -> dict[str, float]:
    """Rank correlation of a slide's relevance with each property of its patches; nan for constants."""
    return {name: _rank_correlation(relevance, values) for name, values in statistics.items()}


def patch_associations(
    correlations: Sequence[Mapping[str, float]], slides: Sequence[str], *, draws: int = DRAWS, seed: int = 0
) -> list[Association]:
    """Properties of the picture against relevance, from the correlations within each slide.

    Where a property does not vary inside a slide, that slide says nothing. The null hypothesis is that the
    sign of a slide's correlation is a coin's: signs are flipped at random.
    """
    names = list(dict.fromkeys(name for row in correlations for name in row))
    rng = np.random.default_rng(seed)
    found = []
    for name in names:
        pairs = [(row[name], slide) for row, slide in zip(correlations, slides, strict=True) if name in row]
        rows = [(value, slide) for value, slide in pairs if np.isfinite(value)]
        if len(rows) < FEWEST:
            continue
        values = np.array([value for value, _ in rows])
        p = _sign_flip_p(values, rng, draws)
        named = tuple(slide for _, slide in sorted(rows, key=lambda row: -abs(row[0]))[:5])
        mean = float(values.mean())
        found.append(Association(name, "patch", "mean rank correlation", mean, p, len(values), slides=named))
    return found


def ranked(associations: Sequence[Association]) -> list[Association]:
    """All questions with their corrected p-values, the surest and strongest first."""
    if not associations:
        return []
    corrected = holm([a.p for a in associations])
    told = [replace(a, corrected=float(p)) for a, p in zip(associations, corrected, strict=True)]
    return sorted(told, key=lambda a: (not a.found, -abs(a.effect), a.corrected, a.cause))


def _against(y: Floats, cells: Sequence[Any], name: str, *, draws: int, seed: int) -> Association | None:
    rng = np.random.default_rng([seed, *name.encode()])
    numbers = _numbers(cells)
    ranks = rankdata(y)
    if numbers is not None:
        other = rankdata(numbers)
        if np.ptp(other) == 0 or np.ptp(ranks) == 0:
            return None
        effect = float(np.corrcoef(ranks, other)[0, 1])
        null = _shuffled(ranks, rng, draws) @ _unit(other) / np.linalg.norm(ranks - ranks.mean())
        return Association(name, "slide", "rank correlation", effect, _p(abs(effect), np.abs(null)), len(y))
    groups = np.unique([str(cell) for cell in cells], return_inverse=True)[1]
    if groups.max() == 0 or groups.max() > len(y) // 2 or np.ptp(ranks) == 0:
        return None
    effect = float(_between(ranks[None], groups)[0])
    p = _p(effect, _between(_shuffled(ranks, rng, draws) + ranks.mean(), groups))
    chance = groups.max() / (len(y) - 1)  # what groups without meaning share on average
    adjusted = float(max(0.0, (effect - chance) / (1 - chance)))
    return Association(name, "slide", "share of rank variance", adjusted, p, len(y))


def _numbers(cells: Sequence[Any]) -> Floats | None:
    """Cells as numbers where all are and there are more than two different ones; else they are groups."""
    try:
        values = np.array([float(cell) for cell in cells])
    except (TypeError, ValueError):
        return None
    return values if len(np.unique(values)) > 2 and np.isfinite(values).all() else None


def _between(ranks: npt.NDArray[Any], groups: npt.NDArray[Any]) -> Floats:
    """The share of rank variance between groups, for each row of ranks (draws, n)."""
    member = np.eye(groups.max() + 1)[groups]  # (n, groups)
    sizes = member.sum(axis=0)
    means = ranks @ member / sizes
    whole = ranks.mean(axis=1, keepdims=True)
    total = ((ranks - whole) ** 2).sum(axis=1)
    return np.asarray((sizes * (means - whole) ** 2).sum(axis=1) / np.maximum(total, 1e-12))


def _shuffled(ranks: Floats, rng: np.random.Generator, draws: int) -> Floats:
    return rng.permuted(np.tile(ranks - ranks.mean(), (draws, 1)), axis=1)


def _unit(values: npt.NDArray[Any]) -> Floats:
    centred = values - values.mean()
    return np.asarray(centred / max(float(np.linalg.norm(centred)), 1e-12))


def _rank_correlation(a: npt.ArrayLike, b: npt.ArrayLike) -> float:
    x, y = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if len(x) < 3 or not np.isfinite(y).all() or np.ptp(x) == 0 or np.ptp(y) == 0:
        return float("nan")
    return float(_unit(rankdata(x)) @ _unit(rankdata(y)))


def _sign_flip_p(values: Floats, rng: np.random.Generator, draws: int) -> float:
    signs = rng.choice([-1.0, 1.0], size=(draws, len(values)))
    return _p(abs(values.mean()), np.abs(signs @ values / len(values)))


def _p(observed: float, null: npt.NDArray[Any]) -> float:
    """The share of draws at least as far out, the observed one counted in."""
    return float((1 + (null >= observed - 1e-12).sum()) / (1 + len(null)))


def _telling(y: Floats, slides: Sequence[str], top: int = 5) -> tuple[str, ...]:
    return tuple(slides[i] for i in np.argsort(-np.abs(y - np.median(y)), kind="stable")[:top])
