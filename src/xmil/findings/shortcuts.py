"""Shortcuts: does what the model looks at go with how a slide was made?

Two questions. Per slide: does the explained output go with a column of acquisition (site, scanner, stain), or
with ink and light in the picture, among slides of one label? Per patch: within slides, does ink carry more
relevance than the rest? Effects are rank correlations or the share of rank variance between groups; p-values
come from permutations, within labels, and are corrected over all questions (Holm).

Properties that tissue has, too (brightness, hue, focus), are listed and never called a shortcut: a model that
knows its cells goes with them as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.stats import rankdata

from xmil.core.errors import InputError, bad_parameter
from xmil.core.names import counted
from xmil.evaluate.statistics import holm
from xmil.findings.appearance import INK, TISSUE

DRAWS = 5000
LEVEL = 0.01
LEAST = 0.1  # share of rank variance between slides, or mean correlation within: less is no shortcut
AT_ONCE = 4_000_000  # values of draws that are held at a time
FEWEST = 8  # slides that a question needs
ALONE = ", label not held fixed"
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Association:
    """How strongly a cause goes with what the model looks at.

    `effect` is in the range [-1, 1] for numbers (rank correlation) and [0, 1] for groups (share of rank
    variance). `slides` are those that show it most. `tissue` has the property, too, where that is said.
    """

    cause: str
    level: str
    measure: str
    effect: float
    p: float
    n: int
    corrected: float = float("nan")
    slides: tuple[str, ...] = ()
    tissue: bool = False

    @property
    def found(self) -> bool:
        """Whether it is both sure and large enough to be called a shortcut."""
        squared = self.level == "slide" and "correlation" in self.measure
        size = self.effect**2 if squared else abs(self.effect)
        return not self.tissue and self.corrected < LEVEL and size >= LEAST

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
    labels: Sequence[Any] | None = None,
    beside: Mapping[str, Sequence[tuple[float, ...]]] | None = None,
    draws: int = DRAWS,
    seed: int = 0,
) -> list[Association]:
    """Columns of the cohort against one number per slide, such as the explained output.

    With `labels` only slides of one label are compared, so that a site with more cases is not a shortcut by
    itself; slides without a label are left out. A column that says no more than the label cannot be told from
    it: its measure says so. Cells are words, numbers, or tuples of numbers, which are asked about together.
    `beside` holds numbers by cause that may explain its effect, such as the amount of stain for the light:
    what they explain is taken out first.

    >>> found = slide_associations(range(20), {"site": ["a"] * 10 + ["b"] * 10}, [str(i) for i in range(20)])
    >>> found[0].cause, round(found[0].effect, 2)
    ('site', 0.74)
    """
    y = np.asarray(values, dtype=np.float64)
    if draws < 100:
        raise bad_parameter("draws", "slide_associations", "an int in the range [100, inf)", draws)
    if y.ndim != 1 or len(y) != len(slides):
        raise InputError(f"There must be one value per slide ({len(slides)}). Got shape {y.shape}.")
    strata = _groups([""] * len(y) if labels is None else labels)
    labelled = np.array([labels is None or _is_known(labels[i]) for i in range(len(y))])
    found = []
    for name, cells in columns.items():
        known = np.array([_is_known(cell) for cell in cells]) & np.isfinite(y) & labelled
        picked = [cell for cell, here in zip(cells, known, strict=True) if here]
        if why_unasked(picked) is not None:
            continue
        other = np.array(beside[name], dtype=np.float64)[known] if beside and name in beside else None
        who = [slide for slide, here in zip(slides, known, strict=True) if here]
        made = _asked(y[known], picked, strata[known], who, name=name, other=other, draws=draws, seed=seed)
        if made is not None:
            found.append(made)
    return found


def why_unasked(cells: Sequence[Any]) -> str | None:
    """Why nothing can be asked about a column; None where it can.

    >>> why_unasked(["north"] * 20), why_unasked(["north", None, "south"])
    ('the same on all slides', 'known of 2 slides, and 8 are needed')
    """
    known = [cell for cell in cells if _is_known(cell)]
    if len(known) < FEWEST:
        return f"known of {counted(len(known), 'slide')}, and {FEWEST} are needed"
    values = len(set(map(str, known)))
    if values == 1:
        return "the same on all slides"
    if _numbers(known) is None and values - 1 > len(known) // 2:
        return "nearly every slide has a value of its own"
    return None


def patch_correlations(relevance: npt.ArrayLike, statistics: Mapping[str, npt.ArrayLike]) -> dict[str, float]:
    """Rank correlation of a slide's relevance with each property of its patches; nan for constants.

    For ink it is the amount of relevance, whatever its sign: a model that ignores ink gives it little.
    """
    signed = np.asarray(relevance, dtype=np.float64)
    amount = np.abs(signed)
    return {
        name: _rank_correlation(amount if name in INK else signed, values)
        for name, values in statistics.items()
    }


def patch_associations(
    correlations: Sequence[Mapping[str, float]], slides: Sequence[str], *, draws: int = DRAWS, seed: int = 0
) -> list[Association]:
    """Properties of the picture against relevance, from the correlations within each slide.

    Where a property does not vary inside a slide, that slide says nothing. The null hypothesis is that the
    sign of a slide's correlation is a coin's: signs are flipped at random. Ink is a shortcut where it carries
    more relevance than the rest, so that only a positive correlation with the amount counts.
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
        tissue = name in TISSUE
        p = _sign_flip_p(values, rng, draws, both=tissue)
        named = tuple(slide for _, slide in sorted(rows, key=lambda row: -abs(row[0]))[:5])
        mean = float(values.mean())
        measure = f"mean rank correlation{'' if tissue else ' with the amount of relevance'}"
        found.append(Association(name, "patch", measure, mean, p, len(values), slides=named, tissue=tissue))
    return found


def ranked(associations: Sequence[Association]) -> list[Association]:
    """All questions with their corrected p-values, the surest and strongest first."""
    if not associations:
        return []
    told = []
    for tissue in (False, True):  # what can be no shortcut costs the other questions nothing
        asked = [a for a in associations if a.tissue == tissue]
        if asked:
            corrected = holm([a.p for a in asked])
            told += [replace(a, corrected=float(p)) for a, p in zip(asked, corrected, strict=True)]
    return sorted(told, key=lambda a: (not a.found, a.tissue, -abs(a.effect), a.corrected, a.cause))


def _is_known(cell: Any) -> bool:
    parts = cell if isinstance(cell, tuple) else (cell,)
    return all(part is not None and part == part and part != "" for part in parts)


def _groups(cells: Sequence[Any]) -> Ints:
    return np.asarray(np.unique([str(cell) for cell in cells], return_inverse=True)[1], dtype=np.int64)


def _asked(
    y: Floats,
    cells: Sequence[Any],
    strata: Ints,
    slides: Sequence[str],
    *,
    name: str,
    other: Floats | None,
    draws: int,
    seed: int,
) -> Association | None:
    """One column within labels; over all slides where the labels leave nothing to compare."""
    rng = np.random.default_rng([seed, *name.encode()])
    numbers = _numbers(cells)
    codes = _groups(cells)
    whole = np.zeros(len(y), dtype=np.int64)
    for within in (strata, whole) if strata.max() else (whole,):
        parts = _member(codes, within) if numbers is None else _held(numbers, within)
        ranks = _centred(y, within)
        if other is not None:
            parts, ranks = (_without(_member_free(other, within), part) for part in (parts, ranks))
        made = _explained_by(parts, ranks, within, draws=draws, rng=rng)
        if made is not None:
            effect, p = made if numbers is None else _correlation(made, parts, ranks)
            measure = _measure(numbers) + ("" if within is strata or not strata.max() else ALONE)
            told = _telling(parts, ranks, slides)
            return Association(name, "slide", measure, effect, p, len(y), slides=told)
    return None


def _measure(numbers: Floats | None) -> str:
    if numbers is None:
        return "share of rank variance"
    return "rank correlation" if numbers.shape[1] == 1 else "multiple correlation"


def _held(numbers: Floats, strata: Ints) -> Floats:
    """Columns (n, k) without their strata's means: ranks of a single number, values of several."""
    if numbers.shape[1] == 1:
        return _centred(numbers[:, 0], strata)[:, None]
    return _member_free(numbers / np.maximum(numbers.std(axis=0), 1e-12), strata)


def _member(codes: Ints, strata: Ints) -> Floats:
    return _member_free(np.eye(codes.max() + 1)[codes], strata)


def _member_free(columns: Floats, strata: Ints) -> Floats:
    free = columns.astype(np.float64).copy()
    for k in np.unique(strata):
        free[strata == k] -= free[strata == k].mean(axis=0)
    return free


def _without(other: Floats, columns: Floats) -> Floats:
    """What is left of columns (n,) or (n, k) once a linear fit on others is taken out."""
    basis = _basis(other)
    return np.asarray(columns - basis @ (basis.T @ columns))


def _correlation(made: tuple[float, float], parts: Floats, y: Floats) -> tuple[float, float]:
    """The share as a correlation: with its sign for a single number."""
    share, p = made
    if parts.shape[1] == 1:
        return float(parts[:, 0] @ y / (np.linalg.norm(parts) * np.linalg.norm(y))), p
    return float(np.sqrt(share)), p


def _centred(values: Floats, strata: Ints) -> Floats:
    """Ranks within each stratum, between -1/2 and 1/2; zero in the middle."""
    ranks = np.zeros(len(values))
    for k in np.unique(strata):
        here = strata == k
        own = rankdata(values[here])
        ranks[here] = (own - own.mean()) / len(own)
    return ranks


def _explained_by(
    parts: Floats, y: Floats, strata: Ints, *, draws: int, rng: np.random.Generator
) -> tuple[float, float] | None:
    """The share of y's rank variance that columns explain beyond chance, and how likely as much is."""
    varied = [k for k in np.unique(strata) if np.ptp(parts[strata == k], axis=0).max() > 1e-9]
    if np.isin(strata, varied).sum() < FEWEST or np.linalg.norm(y) < 1e-9:
        return None
    basis = _basis(parts)
    share = float(_explained(y[None], basis)[0])
    null = [_explained(_shuffled(y, strata, rng, some), basis) for some in _blocks(draws, len(y))]
    p = _p(share, np.concatenate(null))
    chance = basis.shape[1] / max(1, len(y) - len(np.unique(strata)))  # what columns without meaning explain
    return float(max(0.0, (share - chance) / max(1e-9, 1 - chance))), p


def _basis(member: npt.NDArray[Any]) -> Floats:
    """Orthonormal columns that span the groups, strata taken out."""
    left, sizes, _ = np.linalg.svd(member, full_matrices=False)
    return np.asarray(left[:, sizes > 1e-9 * max(1.0, float(sizes.max()))])


def _explained(rows: npt.NDArray[Any], basis: Floats) -> Floats:
    """The share of each row's (draws, n) squares that the groups explain."""
    total = (rows**2).sum(axis=1)
    return np.asarray(((rows @ basis) ** 2).sum(axis=1) / np.maximum(total, 1e-12))


def _numbers(cells: Sequence[Any]) -> Floats | None:
    """Cells as numbers (n, k) where all are and there are more than two different ones; else groups."""
    try:
        rows = [[float(part) for part in (cell if isinstance(cell, tuple) else (cell,))] for cell in cells]
        values = np.array(rows)
    except (TypeError, ValueError):
        return None
    return values if len(np.unique(values)) > 2 and np.isfinite(values).all() else None


def _shuffled(y: Floats, strata: Ints, rng: np.random.Generator, draws: int) -> Floats:
    """Rows (draws, n) of the values, shuffled within strata."""
    rows = np.tile(y, (draws, 1))
    for k in np.unique(strata):
        here = strata == k
        rows[:, here] = rng.permuted(rows[:, here], axis=1)
    return rows


def _blocks(draws: int, slides: int) -> list[int]:
    """Draws in blocks, so that memory does not grow with the cohort.

    >>> _blocks(5000, 100), _blocks(5000, 2000)
    ([5000], [2000, 2000, 1000])
    """
    most = max(100, AT_ONCE // max(1, slides))
    return [min(most, draws - start) for start in range(0, draws, most)]


def _unit(values: npt.NDArray[Any]) -> Floats:
    centred = values - values.mean()
    return np.asarray(centred / max(float(np.linalg.norm(centred)), 1e-12))


def _rank_correlation(a: npt.ArrayLike, b: npt.ArrayLike) -> float:
    x, y = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if len(x) < 3 or not np.isfinite(y).all() or np.ptp(x) == 0 or np.ptp(y) == 0:
        return float("nan")
    return float(_unit(rankdata(x)) @ _unit(rankdata(y)))


def _sign_flip_p(values: Floats, rng: np.random.Generator, draws: int, *, both: bool) -> float:
    flips = (rng.choice([-1.0, 1.0], size=(some, len(values))) for some in _blocks(draws, len(values)))
    null = np.concatenate([signs @ values / len(values) for signs in flips])
    return _p(abs(values.mean()), np.abs(null)) if both else _p(values.mean(), null)


def _p(observed: float, null: npt.NDArray[Any]) -> float:
    """The share of draws at least as far out, the observed one counted in."""
    return float((1 + (null >= observed - 1e-12).sum()) / (1 + len(null)))


def _telling(parts: Floats, y: Floats, slides: Sequence[str], top: int = 5) -> tuple[str, ...]:
    """The slides that carry the association: where what is fitted and what is there are far out together."""
    basis = _basis(parts)
    share = y * (basis @ (basis.T @ y))
    return tuple(slides[i] for i in np.argsort(-share, kind="stable")[:top])
