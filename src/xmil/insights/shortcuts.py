"""Shortcuts: does the model's evidence depend on how a slide was made?

There are two questions. Per slide: is the explained output associated with a column of acquisition (site,
scanner, stain), or with ink and light in the picture, among slides of one label? Per patch: within slides,
does ink carry more relevance than the rest? Effects are rank correlations or the share of rank variance
between groups; p-values come from permutations, within labels, and are corrected over all questions (Holm).

Patients are the unit: five slides of one patient are one piece of evidence, not five. All cases have the same
weight; permutations exchange whole cases, and slides within their case.

Properties that tissue also has (brightness, hue, focus) are listed but never called a shortcut, because they
are also associated with a model that knows its cells. Neither is a column that repeats the label, because it
is associated with any model that is right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from xmil.core.errors import InputError, bad_parameter
from xmil.core.text import counted
from xmil.evaluate.statistics import (
    FEWEST,
    Floats,
    Ints,
    holm,
    permutation_p,
    sign_flip_p,
    spearman,
    unit_means,
)

DRAWS = 5000
LEVEL = 0.01
LEAST = 0.1  # share of rank variance between slides, or mean correlation within, for a shortcut
UNFIXED = ", label not held fixed"
INK = ("blue ink", "green ink", "red ink", "black ink")
LIGHT = "tint of the light"
TISSUE = ("brightness", "saturation", "redness", "blueness", "focus")
LEAST_INK = 0.02  # of a patch's pixels; less is dark nuclei
BRIGHTEST, LEAST_LIGHT = 0.01, 0.6  # share of a slide's pixels; their brightness if they show no tissue
HUES = {  # range of the hue in degrees
    "blue ink": (195.0, 255.0),
    "green ink": (75.0, 175.0),
    "red ink": (345.0, 15.0),
}
Pixels = npt.NDArray[np.uint8]

# The look of a patch. Ink and the light's colour (the brightest pixels of a slide, which show no tissue) tell
# how a slide was made. Brightness, saturation, hue and focus of a patch also depend on its cells.


def appearance(patch: Pixels) -> dict[str, float]:
    """Measure properties of a patch (h, w, 3) other than its cells.

    >>> numbers = appearance(np.full((8, 8, 3), (20, 60, 200), dtype=np.uint8))
    >>> numbers["blue ink"], numbers["green ink"], round(numbers["brightness"], 2)
    (1.0, 0.0, 0.37)
    """
    from matplotlib.colors import rgb_to_hsv

    x = np.asarray(patch, dtype=np.float64) / 255
    turn, saturation, high = np.moveaxis(rgb_to_hsv(x), 2, 0)
    hue, chroma = 360 * turn, high - x.min(axis=2)
    numbers = {
        "brightness": float(x.mean()),
        "saturation": float(saturation.mean()),
        "redness": float((x[..., 0] - x[..., 1:].mean(axis=2)).mean()),
        "blueness": float((x[..., 2] - x[..., :2].mean(axis=2)).mean()),
        "focus": _focus(x.mean(axis=2)),
        "black ink": float(((high < 0.22) & (chroma < 0.12)).mean()),
    }
    for name, (start, end) in HUES.items():
        inside = (hue >= start) & (hue <= end) if start < end else (hue >= start) | (hue <= end)
        vivid = saturation > (0.65 if name == "red ink" else 0.45)
        numbers[name] = float((inside & vivid & (chroma > 0.25)).mean())
    return numbers | {name: numbers[name] if numbers[name] >= LEAST_INK else 0.0 for name in INK}


@dataclass(frozen=True)
class Light:
    """The light on a slide: red and blue relative to green, strength; and the stain relative to it.

    `stain` is the mean optical density of each colour relative to the light: it depends on tissue, not light.
    """

    colour: tuple[float, float, float]
    stain: tuple[float, float, float]


def light(patches: npt.ArrayLike) -> Light:
    """Measure the light on patches (m, h, w, 3) of a slide by its brightest pixels; nan if none is bright.

    A tint also colours the empty glass; tissue does not.

    >>> pink = light(np.full((4, 8, 8, 3), (250, 225, 250), dtype=np.uint8))
    >>> [round(part, 2) for part in pink.colour], pink.stain
    ([0.11, 0.11, 0.95], (0.0, 0.0, 0.0))
    """
    x = np.log(np.maximum(np.asarray(patches, dtype=np.float64).reshape(-1, 3) / 255, 1 / 255))
    order = np.argsort(-x.mean(axis=1), kind="stable")
    top = x[order[: max(1, round(BRIGHTEST * len(x)))]].mean(axis=0)
    strength = float(np.exp(top).mean())
    if strength < LEAST_LIGHT:
        return Light((float("nan"),) * 3, (float("nan"),) * 3)
    red, green, blue = top.tolist()
    cyan, magenta, yellow = np.maximum(top - x, 0).mean(axis=0).tolist()
    return Light((red - green, blue - green, strength), (cyan, magenta, yellow))


def _focus(grey: Floats) -> float:
    """Compute the Laplacian's deviation relative to that of the grey values, which is low for blur."""
    if min(grey.shape) < 3:
        return 0.0
    inner = grey[1:-1, 1:-1]
    laplacian = grey[:-2, 1:-1] + grey[2:, 1:-1] + grey[1:-1, :-2] + grey[1:-1, 2:] - 4 * inner
    return float(laplacian.std() / max(float(grey.std()), 1e-3))


# Associations with the model's evidence.


@dataclass(frozen=True)
class Association:
    """The association of a cause with the model's evidence.

    `effect` is in the range [-1, 1] for numbers (rank correlation) and [0, 1] for groups (share of rank
    variance). `slides` are those that show it most. `tissue`: tissue also has the property. `confounded`: too
    few slides of one label differ in it, so the label was not held fixed. `cases` is the number of patients
    of the `n` slides; None if slides were treated as independent.
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
    cases: int | None = None
    confounded: bool = False

    @property
    def is_shortcut(self) -> bool:
        """Whether it is significant and large enough to be called a shortcut."""
        squared = self.level == "slide" and "correlation" in self.measure
        size = self.effect**2 if squared else abs(self.effect)
        return not (self.tissue or self.confounded) and self.corrected < LEVEL and size >= LEAST

    @property
    def extent(self) -> str:
        """The number of slides and cases, in words."""
        return f"{self.n} slides" + ("" if self.cases is None else f" of {counted(self.cases, 'case')}")

    def __str__(self) -> str:
        return (
            f"{self.cause}: {self.measure} {self.effect:.2f} over {self.extent} "
            f"(p = {self.corrected:.3g}, corrected)"
        )


def slide_associations(
    values: npt.ArrayLike,
    columns: Mapping[str, Sequence[Any]],
    slides: Sequence[str],
    *,
    cases: Sequence[str] | None,
    labels: Sequence[Any] | None = None,
    beside: Mapping[str, Sequence[tuple[float, ...]]] | None = None,
    draws: int = DRAWS,
    seed: int = 0,
) -> list[Association]:
    """Test columns of the cohort against one number per slide, such as the explained output.

    `cases` names the patient of each slide; None treats slides as independent. With `labels` only slides of
    one label are compared, so that a site with more cases is not a shortcut by itself; slides without a label
    are left out. A column that repeats the label is not tested; one that hardly differs among slides of one
    label is tested over all, and `confounded`. Cells are words, numbers, or tuples of numbers, which are
    tested together. `beside` has numbers by cause that may explain its effect, such as the amount of stain
    for the light: their effect is removed first.

    >>> site, names = ["a"] * 10 + ["b"] * 10, [str(i) for i in range(20)]
    >>> (site,) = slide_associations(range(20), {"site": site}, names, cases=None)
    >>> site.cause, round(site.effect, 2)
    ('site', 0.74)
    """
    y = np.asarray(values, dtype=np.float64)
    if draws < 100:
        raise bad_parameter("draws", "slide_associations", "an int in the range [100, inf)", draws)
    if y.ndim != 1 or len(y) != len(slides):
        raise InputError(f"There must be one value per slide ({len(slides)}). Got shape {y.shape}.")
    units = slides if cases is None else cases
    strata = _group_codes([""] * len(y) if labels is None else labels)
    labelled = np.array([labels is None or _has_value(labels[i]) for i in range(len(y))])
    associations = []
    for name, cells in columns.items():
        filled = np.array([_has_value(cell) for cell in cells])
        rows = np.flatnonzero(filled & np.isfinite(y) & labelled).tolist()
        tested, own = [cells[i] for i in rows], [units[i] for i in rows]
        known = None if labels is None else [labels[i] for i in rows]
        if why_untested(tested, None if cases is None else own, labels=known) is not None:
            continue
        other = np.array(beside[name], dtype=np.float64)[rows] if beside and name in beside else None
        association = _test_column(
            y[rows], tested, strata[rows], own, [slides[i] for i in rows],
            name=name, other=other, draws=draws, seed=seed,
        )  # fmt: skip
        if association is not None:
            associations.append(replace(association, cases=None if cases is None else len(set(own))))
    return associations


def why_untested(
    cells: Sequence[Any], cases: Sequence[str] | None = None, *, labels: Sequence[Any] | None = None
) -> str | None:
    """Say why a column cannot be tested; None if it can.

    >>> why_untested(["north"] * 20), why_untested(["north", None, "south"])
    ('the same on all slides', 'known for 2 slides, and 8 are needed')
    >>> why_untested(["north", "south"] * 10, cases=list("aabbc") * 4)
    'known for 3 cases, and 8 are needed'
    >>> why_untested(["tumour", "normal"] * 10, labels=[1, 0] * 10)
    'repeats the label'
    """
    filled = [cell for cell in cells if _has_value(cell)]
    unit, units = "slide", len(filled)
    if cases is not None:
        unit, units = "case", len({c for c, cell in zip(cases, cells, strict=True) if _has_value(cell)})
    if units < FEWEST:
        return f"known for {counted(units, unit)}, and {FEWEST} are needed"
    values = len(set(map(str, filled)))
    if values == 1:
        return "the same on all slides"
    if labels is not None:
        pairs = {
            (str(a), str(b)) for a, b in zip(cells, labels, strict=True) if _has_value(a) and _has_value(b)
        }
        if 1 < len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs}):
            return "repeats the label"
    if _as_numbers(filled) is None and values - 1 > units // 2:
        return f"nearly every {unit} has a value of its own"
    return None


def patch_correlations(relevance: npt.ArrayLike, statistics: Mapping[str, npt.ArrayLike]) -> dict[str, float]:
    """Correlate the ranks of a slide's relevance with each property of its patches; nan for constants.

    For ink the absolute relevance counts: a model that ignores ink gives it little.
    """
    signed = np.asarray(relevance, dtype=np.float64)
    return {
        name: spearman(np.abs(signed) if name in INK else signed, column)
        if len(signed) > 2 and np.isfinite(column).all()
        else float("nan")
        for name, column in statistics.items()
    }


def patch_associations(
    correlations: Sequence[Mapping[str, float]],
    slides: Sequence[str],
    *,
    cases: Sequence[str] | None,
    draws: int = DRAWS,
    seed: int = 0,
) -> list[Association]:
    """Test properties of the picture against relevance, from the correlations within each slide.

    A slide does not count for a property that is constant in it. `cases` names the patient of each slide,
    whose mean correlation counts; None treats slides as independent. Under the null hypothesis the sign of a
    case's correlation is random, so signs are flipped at random. Ink is a shortcut if it carries more
    relevance than the rest, so only a positive correlation with the amount counts.
    """
    names = list(dict.fromkeys(name for row in correlations for name in row))
    units = slides if cases is None else cases
    rng = np.random.default_rng(seed)
    associations = []
    for name in names:
        rows = [i for i, row in enumerate(correlations) if np.isfinite(row.get(name, np.nan))]
        values, own = np.array([correlations[i][name] for i in rows]), [units[i] for i in rows]
        if len(set(own)) < FEWEST:
            continue
        tissue = name in TISSUE
        p = sign_flip_p(values, units=own, rng=rng, draws=draws, two_sided=tissue)
        strongest = np.argsort(-np.abs(values), kind="stable")[:5]
        associations.append(
            Association(
                name, "patch", f"mean rank correlation{'' if tissue else ' with the amount of relevance'}",
                float(unit_means(values, own).mean()), p, len(values),
                slides=tuple(slides[rows[i]] for i in strongest), tissue=tissue,
                cases=None if cases is None else len(set(own)),
            )
        )  # fmt: skip
    return associations


def rank_associations(associations: Sequence[Association]) -> list[Association]:
    """Correct the p-values over all questions, and sort by shortcut and strength."""
    corrected = []
    for tissue in (False, True):
        own = [a for a in associations if a.tissue == tissue]
        adjusted = holm([a.p for a in own])
        corrected += [replace(a, corrected=float(p)) for a, p in zip(own, adjusted, strict=True)]
    return sorted(
        corrected,
        key=lambda a: (not a.is_shortcut, a.tissue, a.confounded, -abs(a.effect), a.corrected, a.cause),
    )


@dataclass(frozen=True, eq=False)
class _Design:
    """Slides (n,) in strata of one label, and their cases, each with the same total weight."""

    strata: Ints
    units: Sequence[str]

    @cached_property
    def root(self) -> Floats:
        """Square roots of the slides' weights, which add up to one per case."""
        sizes = Counter(self.units)
        return np.asarray(1 / np.sqrt([sizes[unit] for unit in self.units]))

    def centre(self, columns: Floats) -> Floats:
        """Subtract the means of strata from columns (n,) or (n, k)."""
        free, weights = columns.astype(np.float64).copy(), self.root**2
        for k in np.unique(self.strata):
            here = self.strata == k
            free[here] -= np.average(free[here], axis=0, weights=weights[here])
        return free

    def rank(self, values: Floats) -> Floats:
        """Rank within each stratum, as shares of its slides; zero in the middle."""
        from scipy.stats import rankdata

        ranks = np.zeros(len(values))
        for k in np.unique(self.strata):
            here = self.strata == k
            ranks[here] = rankdata(values[here]) / here.sum()
        return self.centre(ranks)

    def basis(self, columns: Floats) -> Floats:
        """Compute orthonormal columns that span the weighted ones."""
        left, sizes, _ = np.linalg.svd((columns.T * self.root).T, full_matrices=False)
        return np.asarray(left[:, sizes > 1e-9 * max(1.0, float(sizes.max()))])

    def without(self, other: Floats, columns: Floats) -> Floats:
        """Remove a linear fit on others from columns (n,) or (n, k)."""
        basis = self.basis(self.centre(other))
        fit = basis @ (basis.T @ (columns.T * self.root).T)
        return np.asarray(columns - (fit.T * (1 / self.root)).T)

    def can_compare(self, columns: Floats) -> bool:
        """Whether enough cases are in strata in which the columns differ."""
        varied = [k for k in np.unique(self.strata) if np.ptp(columns[self.strata == k], axis=0).max() > 1e-9]
        inside = np.flatnonzero(np.isin(self.strata, varied)).tolist()
        return len({self.units[i] for i in inside}) >= FEWEST


def _test_column(
    y: Floats,
    cells: Sequence[Any],
    strata: Ints,
    units: Sequence[str],
    slides: Sequence[str],
    *,
    name: str,
    other: Floats | None,
    draws: int,
    seed: int,
) -> Association | None:
    """Test one column within labels, or over all slides if the labels leave nothing to compare."""
    rng = np.random.default_rng([seed, *name.encode()])
    numbers, codes = _as_numbers(cells), _group_codes(cells)
    together = np.zeros_like(strata)
    for within in (strata, together) if strata.max() else (together,):
        design = _Design(within, units)
        if numbers is None:
            measure, columns = "share of rank variance", design.centre(np.eye(codes.max() + 1)[codes])
        elif numbers.shape[1] == 1:
            measure, columns = "rank correlation", design.rank(numbers[:, 0])[:, None]
        else:
            scaled = numbers / np.maximum(numbers.std(axis=0), 1e-12)
            measure, columns = "multiple correlation", design.centre(scaled)
        ranks = design.rank(y)
        if other is not None:
            columns, ranks = design.without(other, columns), design.without(other, ranks)
        if not design.can_compare(columns) or np.linalg.norm(ranks) < 1e-9:
            continue
        basis, root = design.basis(columns), design.root

        def share(rows: Floats, basis: Floats = basis, root: Floats = root) -> Floats:
            """Compute the share of each row's (draws, n) squares that the columns explain."""
            weighted = rows * root
            total = np.maximum((weighted**2).sum(axis=1), 1e-12)
            return np.asarray(((weighted @ basis) ** 2).sum(axis=1) / total)

        p = permutation_p(share, ranks, units=units, rng=rng, draws=draws, strata=within.tolist())
        chance = basis.shape[1] / max(1, len(set(units)) - len(np.unique(within)))  # of meaningless columns
        effect = float(max(0.0, (share(ranks[None])[0] - chance) / max(1e-9, 1 - chance)))
        if measure == "rank correlation":
            a, b = root * columns[:, 0], root * ranks
            effect = float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))
        elif measure == "multiple correlation":
            effect = float(np.sqrt(effect))
        # The slides with the strongest association have a large fitted value and a large rank.
        strength = ranks * (basis @ (basis.T @ (root * ranks))) / root
        strongest = tuple(slides[i] for i in np.argsort(-strength, kind="stable")[:5])
        unfixed = bool(strata.max()) and within is together
        measure += UNFIXED if unfixed else ""
        return Association(name, "slide", measure, effect, p, len(y), slides=strongest, confounded=unfixed)
    return None


def _parts(cell: Any) -> tuple[Any, ...]:
    return cell if isinstance(cell, tuple) else (cell,)


def _has_value(cell: Any) -> bool:
    return all(part is not None and part == part and part != "" for part in _parts(cell))


def _group_codes(cells: Sequence[Any]) -> Ints:
    return np.asarray(np.unique([str(cell) for cell in cells], return_inverse=True)[1], dtype=np.int64)


def _as_numbers(cells: Sequence[Any]) -> Floats | None:
    """Convert cells to numbers (n, k) if all are and there are more than two different ones; else None."""
    try:
        values = np.array([[float(part) for part in _parts(cell)] for cell in cells])
    except (TypeError, ValueError):
        return None
    return values if len(np.unique(values)) > 2 and np.isfinite(values).all() else None
