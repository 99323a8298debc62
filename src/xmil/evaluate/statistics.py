"""Paired comparisons of methods over slides, corrected for their number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from xmil.core.errors import InputError, bad_parameter, unknown_name

Floats = npt.NDArray[np.float64]
ALPHA = 0.05


@dataclass(frozen=True)
class Comparison:
    """Two methods on the same slides: mean difference first - second, tests, and effect sizes.

    `cohens_d` is the mean difference over its standard deviation; `rank_biserial` the share of rank sums
    in favour of the first being larger minus the rest. `_bonferroni` and `_holm` are corrected p-values.
    """

    first: str
    second: str
    n: int
    difference: float
    t_p: float
    wilcoxon_p: float
    cohens_d: float
    rank_biserial: float
    t_bonferroni: float = float("nan")
    t_holm: float = float("nan")
    wilcoxon_bonferroni: float = float("nan")
    wilcoxon_holm: float = float("nan")


def compare(values: Mapping[str, npt.ArrayLike], pairs: Sequence[tuple[str, str]]) -> list[Comparison]:
    """Paired t-tests and Wilcoxon tests of the pairs, corrected over all of them.

    `values` holds one number for each slide and method, in the same order of slides; slides with a nan in
    either method are left out of a pair.

    >>> found = compare({"lrp": [0.1, 0.2, 0.3], "random": [0.8, 0.7, 0.9]}, [("lrp", "random")])
    >>> found[0].n, round(found[0].difference, 3), found[0].t_p < 0.05
    (3, -0.6, True)
    """
    arrays = _checked(values)
    for name in {name for pair in pairs for name in pair}:
        if name not in arrays:
            raise unknown_name("method", name, arrays)
    raw = [_pair(a, b, arrays[a], arrays[b]) for a, b in pairs]
    return _corrected(raw)


def paper_pairs(
    methods: Sequence[str], *, reference: str = "lrp", baseline: str = "random"
) -> list[tuple[str, str]]:
    """The paper's comparisons: the baseline against all others, the reference against all others.

    >>> paper_pairs(["random", "ig", "lrp"])
    [('ig', 'random'), ('lrp', 'random'), ('lrp', 'ig')]
    """
    against_random = [(name, baseline) for name in methods if name != baseline] if baseline in methods else []
    others = [name for name in methods if name not in (reference, baseline)]
    return against_random + ([(reference, name) for name in others] if reference in methods else [])


@dataclass(frozen=True)
class BestMethod:
    """The method with the lowest mean, and whether every other is significantly higher.

    `p` is the largest Holm-corrected p-value of the paired t-tests against the others, the runner-up's
    most often.
    """

    method: str
    mean: float
    runner_up: str | None
    p: float
    significant: bool
    n: int

    def __str__(self) -> str:
        lead = f"{self.method} has the lowest mean AUPC, {self.mean:.3f} over {self.n} slides"
        if self.runner_up is None:
            return f"{lead}; there is nothing to compare it with."
        tail = "significantly lower than" if self.significant else "not significantly lower than"
        chance = "too few slides to test" if np.isnan(self.p) else f"paired t-tests, Holm: p = {self.p:.2g}"
        return f"{lead}; {tail} {'every other' if self.significant else self.runner_up} ({chance})."


def best_method(values: Mapping[str, npt.ArrayLike], *, alpha: float = ALPHA) -> BestMethod:
    """The method to trust for a model: the lowest mean AUPC, tested against all others.

    >>> print(best_method({"lrp": [0.1, 0.2, 0.3], "ig": [0.8, 0.7, 0.9]}))
    lrp has the lowest mean AUPC, 0.200 over 3 slides; significantly lower than every other
    (paired t-tests, Holm: p = 0.0091).
    """
    arrays = _checked(values)
    means = {name: _mean(array) for name, array in arrays.items()}
    ranked = sorted((name for name in means if not np.isnan(means[name])), key=lambda name: means[name])
    if not ranked:
        raise InputError("There is no method with a value on any slide.")
    n = int(np.isfinite(arrays[ranked[0]]).sum())
    if len(ranked) == 1:
        return BestMethod(ranked[0], means[ranked[0]], None, float("nan"), False, n)
    found = compare(arrays, [(ranked[0], other) for other in ranked[1:]])
    p = float(np.max([c.t_holm for c in found]))
    worst = max(found, key=lambda c: (np.isnan(c.t_holm), c.t_holm))
    return BestMethod(ranked[0], means[ranked[0]], worst.second, p, bool(p < alpha), n)


def bonferroni(p: npt.ArrayLike) -> Floats:
    """p-values times their number, at most 1; nan is not counted.

    >>> bonferroni([0.01, 0.04, float("nan")])
    array([0.02, 0.08,  nan])
    """
    values = _checked_p(p)
    return np.asarray(np.minimum(values * np.isfinite(values).sum(), 1.0))


def holm(p: npt.ArrayLike) -> Floats:
    """Holm's step-down correction: the i-th smallest of m times m - i, never below a smaller one's.

    >>> holm([0.01, 0.04, 0.03])
    array([0.03, 0.06, 0.06])
    """
    values = _checked_p(p)
    out = np.full(values.shape, np.nan)
    order = [i for i in np.argsort(values) if np.isfinite(values[i])]
    highest = 0.0
    for rank, i in enumerate(order):
        highest = max(highest, min(1.0, float(values[i]) * (len(order) - rank)))
        out[i] = highest
    return out


def _pair(a: str, b: str, first: Floats, second: Floats) -> Comparison:
    both = np.isfinite(first) & np.isfinite(second)
    d = first[both] - second[both]
    n = len(d)
    if n < 2:
        nothing = float("nan")
        return Comparison(a, b, n, float(d.mean()) if n else nothing, nothing, nothing, nothing, nothing)
    spread = float(d.std(ddof=1))
    effect = float(d.mean()) / spread if spread > 0 else float(np.sign(d.mean()) * np.inf if d.any() else 0.0)
    return Comparison(a, b, n, float(d.mean()), _t_test(d, spread), _wilcoxon(d), effect, _rank_biserial(d))


def _t_test(d: Floats, spread: float) -> float:
    """Two-sided; without spread the test is decided: 1 for no difference, 0 for a constant one."""
    from scipy.stats import ttest_1samp

    if spread == 0:
        return 0.0 if d.any() else 1.0
    return float(ttest_1samp(d, 0.0).pvalue)


def _wilcoxon(d: Floats) -> float:
    from scipy.stats import wilcoxon

    return float(wilcoxon(d).pvalue) if d.any() else 1.0


def _rank_biserial(d: Floats) -> float:
    from scipy.stats import rankdata

    moved = d[d != 0]
    if not len(moved):
        return 0.0
    ranks = rankdata(np.abs(moved))
    return float((ranks[moved > 0].sum() - ranks[moved < 0].sum()) / ranks.sum())


def _corrected(raw: list[Comparison]) -> list[Comparison]:
    t, w = [c.t_p for c in raw], [c.wilcoxon_p for c in raw]
    columns = np.stack([bonferroni(t), holm(t), bonferroni(w), holm(w)], axis=1).tolist()
    return [
        replace(c, t_bonferroni=row[0], t_holm=row[1], wilcoxon_bonferroni=row[2], wilcoxon_holm=row[3])
        for c, row in zip(raw, columns, strict=True)
    ]


def _checked(values: Mapping[str, npt.ArrayLike]) -> dict[str, Floats]:
    arrays = {name: np.asarray(column, dtype=np.float64) for name, column in values.items()}
    if len({array.shape for array in arrays.values()}) > 1 or any(a.ndim != 1 for a in arrays.values()):
        shapes = {name: array.shape for name, array in arrays.items()}
        raise InputError(f"Methods must have one value for each slide, in the same order. Got {shapes}.")
    return arrays


def _checked_p(p: npt.ArrayLike) -> Floats:
    values = np.asarray(p, dtype=np.float64)
    known = values[np.isfinite(values)]
    if values.ndim != 1 or np.any((known < 0) | (known > 1)):
        raise bad_parameter("p", "a correction", "a vector of chances in the range [0, 1]", p)
    return values


def _mean(values: Floats) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else float("nan")
