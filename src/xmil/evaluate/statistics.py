"""Statistics over a cohort: measures under many weightings, resampling by unit, paired comparisons.

Slides of one patient are not independent. Functions that draw, shuffle or test take `units`, the label of
each value's unit (its case), and never split a unit; `range(n)` treats n values as independent. Fewer than
eight units have no interval: percentile intervals of five to seven cover 85 to 89 % instead of 95.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from xmil.core.errors import InputError, bad_parameter, check_names
from xmil.core.text import counted

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Statistic = Callable[[Floats], Floats]  # weights (draws, n) -> values (draws,)
ALPHA = 0.05
EXACT = 12  # units with an exact test: all 2^12 sign flips
FEWEST = 8  # units that an interval needs; of each class, if it compares classes
SMALLEST = 0.01  # smaller differences do not count as better
NORMAL = NormalDist()
BLOCK = 1 << 22  # weights, or shuffled values, drawn at once
LEAST = 0.5  # a measure needs this share of defined draws for an interval

# Measures under weights (draws, n), which count how often each value was drawn: (draws,), nan if a draw
# leaves the measure undefined. With a row of ones they are as scikit-learn and SciPy define them.


@dataclass(frozen=True)
class Interval:
    """An estimate and the bounds of its interval, which are nan if there is none."""

    estimate: float
    low: float
    high: float

    @property
    def exists(self) -> bool:
        """Whether there are bounds."""
        return not np.isnan(self.low)

    def is_above(self, smallest: float) -> bool:
        """Whether the estimate is at least this large, and the interval above zero."""
        return bool(self.estimate >= smallest and self.low > 0)

    def text(
        self, form: str = ".3f", *, scale: float = 1, unit: str = "", otherwise: str = " [no interval]"
    ) -> str:
        """Write the estimate with its bounds, or with `otherwise` if there are none.

        >>> Interval(0.25, 0.2, 0.3).text(".0f", scale=100, unit=" %")
        '25 % [20, 30]'
        """
        estimate, low, high = (format(scale * v, form) for v in (self.estimate, self.low, self.high))
        return f"{estimate}{unit}" + (f" [{low}, {high}]" if self.exists else otherwise)

    def __str__(self) -> str:
        return self.text()


def why_no_interval(units: int, unit: str = "case") -> str | None:
    """Say why so few units have no interval; None if they are enough.

    >>> why_no_interval(5), why_no_interval(8)
    ('no interval: 5 cases, and 8 are needed', None)
    """
    return f"no interval: {counted(units, unit)}, and {FEWEST} are needed" if units < FEWEST else None


def auroc(weights: Floats, positive: Bools, scores: Floats) -> Floats:
    """The chance that a positive has a higher score than a negative; ties count half.

    >>> auroc(np.ones((1, 3)), np.array([True, False, True]), np.array([0.9, 0.5, 0.5]))
    array([0.75])
    """
    hits, misses = _by_score(weights, positive, scores)
    below = np.cumsum(misses, axis=1) - 0.5 * misses
    return ratio((hits * below).sum(axis=1), hits.sum(axis=1) * misses.sum(axis=1))


def auprc(weights: Floats, positive: Bools, scores: Floats) -> Floats:
    """Average precision: the mean over positives of the precision at their score; nan without negatives.

    >>> auprc(np.ones((1, 3)), np.array([True, False, True]), np.array([0.9, 0.5, 0.1])).round(4)
    array([0.8333])
    """
    hits, misses = (part[:, ::-1] for part in _by_score(weights, positive, scores))
    right = np.cumsum(hits, axis=1)
    precision = ratio(right, right + np.cumsum(misses, axis=1))
    return ratio(np.nansum(hits * precision, axis=1), hits.sum(axis=1) * (misses.sum(axis=1) > 0))


def mean(weights: Floats, values: Floats) -> Floats:
    """The weighted mean of values (n,); nan without weight."""
    return ratio(weights @ values, weights.sum(axis=1))


def median(weights: Floats, values: Floats) -> Floats:
    """The weighted median of values (n,), halfway between two if the weights balance; nan without weight.

    >>> median(np.array([[1.0, 1, 0], [1, 1, 1], [0, 0, 0]]), np.array([4.0, 1.0, 7.0]))
    array([2.5, 4. , nan])
    """
    order = np.argsort(values, kind="stable")
    running = np.cumsum(weights[:, order], axis=1)
    half = 0.5 * running[:, -1:]
    lower, upper = (running >= half) & (running > 0), running > half
    middle = 0.5 * (values[order][lower.argmax(axis=1)] + values[order][upper.argmax(axis=1)])
    return np.where(half[:, 0] > 0, middle, np.nan)


def correlation(weights: Floats, first: Floats, second: Floats) -> Floats:
    """Pearson's correlation; `first` and `second` are (n,) or (draws, n)."""
    total = weights.sum(axis=1, keepdims=True)
    a = first - ratio((weights * first).sum(axis=1, keepdims=True), total)
    b = second - ratio((weights * second).sum(axis=1, keepdims=True), total)
    spread = np.sqrt((weights * a**2).sum(axis=1) * (weights * b**2).sum(axis=1))
    return ratio((weights * a * b).sum(axis=1), np.where(spread > 1e-15, spread, 0.0))


def rank_correlation(weights: Floats, first: Floats, second: Floats) -> Floats:
    """Spearman's correlation: Pearson's of the ranks among the drawn values."""
    return correlation(weights, _ranks(weights, first), _ranks(weights, second))


def kappa(weights: Floats, first: Ints, second: Ints) -> Floats:
    """Cohen's kappa of two answers (n,): agreement beyond what is expected by chance.

    nan if both always give one and the same answer.

    >>> kappa(np.ones((1, 4)), np.array([0, 0, 1, 1]), np.array([0, 0, 1, 0]))
    array([0.5])
    """
    agreed = mean(weights, (first == second).astype(np.float64))
    chance = np.zeros(len(weights))
    for answer in np.union1d(first, second):
        chance += np.prod(
            [mean(weights, (own == answer).astype(np.float64)) for own in (first, second)], axis=0
        )
    return ratio(agreed - chance, np.where(1 - chance > 1e-12, 1 - chance, 0.0))


def nan_mean(columns: list[Floats]) -> Floats:
    """The mean over the columns that are finite; nan where none is."""
    stacked = np.stack(columns)
    defined = np.isfinite(stacked)
    return ratio(np.where(defined, stacked, 0.0).sum(axis=0), defined.sum(axis=0))


def spearman(a: npt.ArrayLike, b: npt.ArrayLike) -> float:
    """Rank correlation of two vectors; nan if one is constant or has fewer than two values.

    >>> spearman([1, 2, 3], [3, 2, 1])
    -1.0
    """
    first, second = np.asarray(a), np.asarray(b)
    if len(first) < 2:
        return float("nan")
    return float(np.round(rank_correlation(np.ones((1, len(first))), first, second)[0], 12))


# Resampling by unit.


def bootstrap(
    statistics: Mapping[str, Statistic],
    *,
    units: Sequence[Any],
    draws: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> dict[str, Interval]:
    """Estimate each statistic with its percentile interval over units drawn with replacement.

    All values of a unit are drawn together. Draws for which a statistic is undefined, such as those without
    one of the classes, do not count for its interval; fewer than eight units have none.

    >>> values = np.array([1.0, 1.0, 3.0, 3.0])
    >>> print(bootstrap({"mean": lambda weights: mean(weights, values)}, units=["a", "a", "b", "b"])["mean"])
    2.000 [no interval]
    """
    n = len(units)
    if not isinstance(draws, int) or draws < 0:
        raise bad_parameter("draws", "a bootstrap", "an int in the range [0, inf)", draws)
    if not 0 < level < 1:
        raise bad_parameter("level", "a bootstrap", "a share in the range (0, 1)", level)
    if n == 0:
        raise InputError("A bootstrap needs at least one value.")
    different = count_units(units)
    drawn: dict[str, list[Floats]] = {name: [np.zeros(0)] for name in statistics}
    for weights in draw_weights(units, draws if different >= FEWEST else 0, seed):
        for name, statistic in statistics.items():
            drawn[name].append(statistic(weights))
    estimates = {name: float(statistic(np.ones((1, n)))[0]) for name, statistic in statistics.items()}
    return {
        name: percentile_interval(estimates[name], np.concatenate(drawn[name]), level, units=different)
        for name in statistics
    }


def bootstrap_mean(
    values: npt.ArrayLike, *, units: Sequence[Any], draws: int = 2000, level: float = 0.95, seed: int = 0
) -> Interval:
    """Estimate the mean of values (n,) with its percentile interval over units drawn with replacement.

    >>> print(bootstrap_mean([0.5] * 8, units=range(8)))
    0.500 [0.500, 0.500]
    """
    sample = np.asarray(values, dtype=np.float64)
    if sample.ndim != 1 or not len(sample) or not np.isfinite(sample).all():
        raise InputError(f"A bootstrap needs a vector of finite values. Got {sample.shape}.")
    unit_codes(units, len(sample))  # refuses another number of units
    statistics = {"mean": partial(mean, values=sample)}
    return bootstrap(statistics, units=units, draws=draws, level=level, seed=seed)["mean"]


def percentile_interval(estimate: float, drawn: Floats, level: float = 0.95, *, units: int) -> Interval:
    """Make the interval of an estimate from quantiles of draws.

    The bounds are nan if there are too few units, or too few draws with a defined value.
    """
    defined = drawn[np.isfinite(drawn)]
    if units < FEWEST or not len(drawn) or len(defined) < LEAST * len(drawn) or np.isnan(estimate):
        return Interval(float(estimate), float("nan"), float("nan"))
    low, high = np.quantile(defined, ((1 - level) / 2, (1 + level) / 2))
    return Interval(float(estimate), float(low), float(high))


def exact_share(share: float, units: int, level: float = 0.95) -> Interval:
    """Give a share of units its exact interval (Clopper and Pearson), for shares that no draw changes.

    >>> print(exact_share(0.0, 9))
    0.000 [0.000, 0.336]
    """
    from scipy.stats import beta

    hits, tail = share * units, (1 - level) / 2
    low = float(beta.ppf(tail, hits, units - hits + 1)) if hits > 0 else 0.0
    high = float(beta.ppf(1 - tail, hits + 1, units - hits)) if hits < units else 1.0
    return Interval(share, low, high)


def unit_means(values: npt.ArrayLike, units: Sequence[Any]) -> Floats:
    """Average each unit's values, in the order in which units first appear.

    >>> unit_means([1.0, 4.0, 3.0], ["b", "a", "b"])
    array([2., 4.])
    """
    sample = np.asarray(values, dtype=np.float64)
    codes = unit_codes(units, len(sample))
    return np.asarray(np.bincount(codes, weights=sample) / np.bincount(codes))


def sign_flip_p(
    values: npt.ArrayLike,
    *,
    units: Sequence[Any],
    rng: np.random.Generator,
    draws: int = 5000,
    two_sided: bool = True,
) -> float:
    """Test a mean against zero: the chance of one as far from zero if the sign of each unit is random.

    Each unit counts once, with the mean of its values. One-sided, only a mean above zero counts. Up to EXACT
    units all flips are enumerated; with more units, `draws` flips are drawn.

    >>> sign_flip_p([1.0] * 9, units=range(9), rng=np.random.default_rng(0))
    0.00390625
    """
    sample = unit_means(values, units)
    observed = float(sample.mean())
    if len(sample) <= EXACT:
        coins = np.arange(2 ** len(sample))[:, None] >> np.arange(len(sample)) & 1
        null = (1.0 - 2.0 * coins) @ sample / len(sample)
        null, limit = (np.abs(null), abs(observed)) if two_sided else (null, observed)
        return float((null >= limit - 1e-12 * np.abs(sample).max()).mean())
    signs = (rng.choice([-1.0, 1.0], size=(size, len(sample))) for size in draw_blocks(draws, len(sample)))
    null = np.concatenate([block @ sample / len(sample) for block in signs])
    return permutation_share(abs(observed), np.abs(null)) if two_sided else permutation_share(observed, null)


def permutation_p(
    statistic: Callable[[Floats], Floats],
    values: npt.ArrayLike,
    *,
    units: Sequence[Any],
    rng: np.random.Generator,
    draws: int = 5000,
    strata: Sequence[Any] | None = None,
) -> float:
    """Test a statistic: the chance of one as large if values are shuffled by unit, within strata.

    `statistic` takes rows of values (draws, n) and returns (draws,).

    >>> label = np.repeat([-1.0, 1.0], 6)
    >>> gap = lambda rows: rows @ label
    >>> permutation_p(gap, np.arange(12.0), units=range(12), rng=np.random.default_rng(0), draws=999) < 0.01
    True
    """
    sample = np.asarray(values, dtype=np.float64)
    observed = float(statistic(sample[None])[0])
    null = [
        statistic(shuffle_values(sample, units=units, rng=rng, draws=size, strata=strata))
        for size in draw_blocks(draws, len(sample))
    ]
    return permutation_share(observed, np.concatenate(null))


def shuffle_values(
    values: npt.ArrayLike,
    *,
    units: Sequence[Any],
    rng: np.random.Generator,
    draws: int,
    strata: Sequence[Any] | None = None,
) -> Floats:
    """Shuffle values into rows (draws, n): units of a stratum exchange means, values move within their unit.

    The stratum of a unit is the set of its values' strata. Values should be centred within strata: the mean
    of few values lies farther from zero than that of many, and is rescaled for the size of its new unit.

    >>> rows = shuffle_values([1.0, 1.0, -2.0, -2.0], units="aabb", rng=np.random.default_rng(3), draws=2)
    >>> rows.tolist()
    [[-2.0, -2.0, 1.0, 1.0], [1.0, 1.0, -2.0, -2.0]]
    """
    sample = np.asarray(values, dtype=np.float64)
    codes = unit_codes(units, len(sample))
    cells = [0] * len(sample) if strata is None else list(strata)
    sizes = np.bincount(codes)
    means = np.bincount(codes, weights=sample) / sizes
    rest = sample - means[codes]
    keys: list[set[Any]] = [set() for _ in sizes]
    for unit, cell in zip(codes.tolist(), cells, strict=True):
        keys[unit].add(cell)
    patterns = [tuple(sorted(key)) for key in keys]
    spread = np.ones(len(sizes))  # expected deviation of each unit's mean by chance
    if len(np.unique(sizes)) > 1:
        within = float((rest**2).sum() / (len(rest) - len(sizes)))
        between = max(0.0, float((means**2).mean() - within * (1 / sizes).mean()))
        spread = np.sqrt(np.maximum(between + within / sizes, 1e-12))
    shuffled = np.tile(means / spread, (draws, 1))
    for pattern in sorted(set(patterns)):
        is_same = np.array([own == pattern for own in patterns])
        shuffled[:, is_same] = rng.permuted(shuffled[:, is_same], axis=1)
    rows = (shuffled * spread)[:, codes]
    inside: dict[tuple[int, Any], list[int]] = {}
    for row, key in enumerate(zip(codes.tolist(), cells, strict=True)):
        inside.setdefault(key, []).append(row)
    for members in inside.values():
        if len(members) > 1:
            rows[:, members] += rng.permuted(np.tile(rest[members], (draws, 1)), axis=1)
        elif sizes[codes[members[0]]] > 1:  # the only value of its stratum in its unit
            rows[:, members] += rest[members]
    return np.asarray(rows)


def permutation_share(observed: float, null: Floats) -> float:
    """The share of draws at least as large as the observed value, which counts as one."""
    return float((1 + (null >= observed - 1e-12).sum()) / (1 + len(null)))


def draw_blocks(draws: int, n: int) -> list[int]:
    """Split draws into blocks, so that memory does not grow with the cohort.

    >>> draw_blocks(5000, 100), draw_blocks(5000, 2048)
    ([5000], [2048, 2048, 904])
    """
    most = max(100, BLOCK // max(1, n))
    return [min(most, draws - start) for start in range(0, draws, most)]


def unit_codes(units: Sequence[Any], n: int) -> Ints:
    """Number each value's unit (n,), in the order in which units first appear."""
    if len(units) != n:
        raise InputError(f"There must be one unit for each value ({n}). Got {len(units)}.")
    order: dict[str, int] = {}
    return np.array([order.setdefault(str(unit), len(order)) for unit in units], dtype=np.int64)


def count_units(units: Sequence[Any]) -> int:
    """The number of different units."""
    return len(set(map(str, units)))


def draw_weights(units: Sequence[Any], draws: int, seed: int) -> Iterator[Floats]:
    """Draw how often each value counts, in blocks (b, n); a single unit has no draws."""
    names = np.asarray(units)  # np.unique sorts them, so a reordered cohort has the same draws
    names = names if names.dtype.kind in "iu" else np.array([str(unit) for unit in units])
    _, codes = np.unique(names, return_inverse=True)
    rng, size = np.random.default_rng(seed), int(codes.max()) + 1
    step = max(1, BLOCK // len(codes))
    for start in range(0, draws if size > 1 else 0, step):
        counts = rng.multinomial(size, np.full(size, 1 / size), size=min(step, draws - start))
        yield counts[:, codes].astype(np.float64)


# Paired comparisons of methods.


@dataclass(frozen=True)
class Comparison:
    """Two methods on the same slides: mean difference first - second, its interval, tests, and effect sizes.

    Each unit counts once, with the mean difference of its slides: `n` slides of `units` units. `low` and
    `high` are the ends of the t-test's 95 % interval. Fewer than eight units only have the difference: no
    interval, test or effect size (nan). `cohens_d` is the mean difference over its standard deviation;
    `rank_biserial` is the share of rank sums for the first being larger, minus the other share. `_bonferroni`
    and `_holm` are corrected p-values.
    """

    first: str
    second: str
    n: int
    units: int
    difference: float = float("nan")
    low: float = float("nan")
    high: float = float("nan")
    t_p: float = float("nan")
    wilcoxon_p: float = float("nan")
    cohens_d: float = float("nan")
    rank_biserial: float = float("nan")
    t_bonferroni: float = float("nan")
    t_holm: float = float("nan")
    wilcoxon_bonferroni: float = float("nan")
    wilcoxon_holm: float = float("nan")


def compare(
    values: Mapping[str, npt.ArrayLike], pairs: Sequence[tuple[str, str]], *, units: Sequence[Any]
) -> list[Comparison]:
    """Run paired t-tests and Wilcoxon tests of the pairs over units, corrected over all pairs.

    `values` has one number for each slide and method, in the same order of slides as `units`; a pair leaves
    out slides with a nan in either method.

    >>> aupc = {"lrp": [0.1, 0.2, 0.3, 0.2] * 2, "random": [0.8, 0.7, 0.9, 0.8] * 2}
    >>> (c,) = compare(aupc, [("lrp", "random")], units=range(8))
    >>> c.n, c.units, round(c.difference, 3), c.t_p < 0.05
    (8, 8, -0.6, True)
    """
    arrays = _check_values(values)
    check_names("method", [name for pair in pairs for name in pair], arrays)
    raw = [_compare_pair(a, b, arrays[a], arrays[b], units) for a, b in pairs]
    corrected = {
        f"{test}_{correct.__name__}": correct([getattr(c, f"{test}_p") for c in raw]).tolist()
        for test in ("t", "wilcoxon")
        for correct in (bonferroni, holm)
    }
    return [replace(c, **{key: p[i] for key, p in corrected.items()}) for i, c in enumerate(raw)]


def paper_pairs(methods: Sequence[str]) -> list[tuple[str, str]]:
    """List the paper's comparisons: `random` against all others, `lrp` against all others.

    >>> paper_pairs(["random", "ig", "lrp"])
    [('ig', 'random'), ('lrp', 'random'), ('lrp', 'ig')]
    """
    against_random = [(name, "random") for name in methods if name != "random" and "random" in methods]
    return against_random + [("lrp", m) for m in methods if m not in ("lrp", "random") and "lrp" in methods]


@dataclass(frozen=True)
class BestMethod:
    """The method with the lowest mean, and whether all others are significantly and relevantly higher.

    `runner_up` is the method that differs least from it, `lead` how much higher that is, `p` the largest
    Holm-corrected p-value of the paired t-tests against the others. `better`: all others are higher by at
    least `smallest`, p < 0.05, and there are enough units for an interval. `over` is what the mean is taken
    over: "30 slides of 10 cases".
    """

    method: str
    mean: float
    runner_up: str | None
    lead: Interval
    p: float
    better: bool
    n: int
    units: int
    over: str
    smallest: float

    def __str__(self) -> str:
        first = f"{self.method} has the lowest mean AUPC, {self.mean:.3f} over {self.over}"
        if self.runner_up is None:
            return f"{first}; there is nothing to compare it with."
        test = f"paired t-tests, Holm: p = {self.p:.2g}"
        if self.better:
            second = f"{self.runner_up}, the next, is {self.lead} higher"
            return f"{first}, better than every other; {second} ({test})."
        first = f"No method can be called better: {first}"
        if few := why_no_interval(self.units, "case" if "case" in self.over else "slide"):
            return f"{first}; {self.runner_up} is {self.lead.estimate:.3f} higher ({few})."
        reason = f"below the smallest difference that counts, {self.smallest:g}"
        reason = reason if self.lead.estimate < self.smallest else "which may be chance"
        return f"{first}; {self.runner_up} is {self.lead} higher, {reason} ({test})."


def best_method(
    values: Mapping[str, npt.ArrayLike],
    *,
    units: Sequence[Any],
    bag: str = "slide",
    unit: str | None = None,
    smallest: float = SMALLEST,
) -> BestMethod:
    """Find the method to trust for a model: the lowest mean AUPC, tested against all others over units.

    `bag` names what a value belongs to: a slide, or a case with all its slides; `unit` names a unit, by
    default the bag if each is its own unit. A method is only better if it is lower by at least `smallest`.

    >>> aupc = {"lrp": [0.1, 0.2, 0.3] * 3, "ig": [0.8, 0.7, 0.9] * 3}
    >>> print(best_method(aupc, units=range(9)))
    lrp has the lowest mean AUPC, 0.200 over 9 slides, better than every other; ig, the next, is
    0.600 [0.533, 0.667] higher (paired t-tests, Holm: p = 3e-08).
    """
    if not smallest >= 0:
        raise bad_parameter("smallest", "best_method", "a number in the range [0, inf)", smallest)
    arrays = _check_values(values)
    finite = {name: np.isfinite(array) for name, array in arrays.items()}
    means = {name: float(arrays[name][own].mean()) for name, own in finite.items() if own.any()}
    ranked = sorted(means, key=lambda name: means[name])
    if not ranked:
        raise InputError("There is no method with a value on any slide.")
    first, *rest = ranked
    own = [unit for unit, value in zip(units, arrays[first], strict=True) if np.isfinite(value)]
    n, different = len(own), count_units(own)
    unit = unit or (bag if different == n else "case")
    over = counted(n, bag) if unit == bag else f"{counted(n, bag)} of {counted(different, unit)}"
    nan = float("nan")
    fields: dict[str, Any] = {"n": n, "units": different, "over": over, "smallest": smallest}
    if not rest:
        return BestMethod(first, means[first], None, Interval(nan, nan, nan), nan, False, **fields)
    tests = compare(arrays, [(first, other) for other in rest], units=units)
    leads = {c.second: Interval(-c.difference, -c.high, -c.low) for c in tests}  # by unit: sizes may differ
    p = float(np.max([c.t_holm for c in tests]))
    clear = {c.second: bool(c.t_holm < ALPHA) and leads[c.second].is_above(smallest) for c in tests}
    second = min(tests, key=lambda c: (clear[c.second], leads[c.second].estimate)).second
    return BestMethod(first, means[first], second, leads[second], p, all(clear.values()), **fields)


def bonferroni(p: npt.ArrayLike) -> Floats:
    """Bonferroni's correction: p-values times their number, at most 1; nan does not count.

    >>> bonferroni([0.01, 0.04, float("nan")])
    array([0.02, 0.08,  nan])
    """
    values = _check_p(p)
    return np.asarray(np.minimum(values * np.isfinite(values).sum(), 1.0))


def holm(p: npt.ArrayLike) -> Floats:
    """Holm's step-down correction: the i-th smallest of m times m - i, never below a smaller one's.

    >>> holm([0.01, 0.04, 0.03])
    array([0.03, 0.06, 0.06])
    """
    values = _check_p(p)
    out = np.full(values.shape, np.nan)
    order = np.argsort(values)[: np.isfinite(values).sum()]  # nan comes last
    out[order] = np.minimum(np.maximum.accumulate(values[order] * np.arange(len(order), 0, -1)), 1.0)
    return out


@dataclass(frozen=True)
class PairedDesign:
    """Two ways of answering the same cases, compared by their shares of right answers; cases are the unit.

    `correlation` is between one reader's two answers to a case, `alike` between two readers' differences of
    the answers: at 1 another reader adds nothing.

    >>> design = PairedDesign((0.8, 0.9))
    >>> design.cases(power=0.8), round(design.power(202), 3)
    (202, 0.801)
    """

    shares: tuple[float, float]
    correlation: float = 0.0
    readers: int = 1
    alike: float = 1.0
    alpha: float = ALPHA

    def __post_init__(self) -> None:
        first, second = self.shares
        if not (0 < first < 1 and 0 < second < 1 and first != second):
            must = "two different shares in the range (0, 1)"
            raise bad_parameter("shares", "a paired design", must, self.shares)
        if self._differing < abs(second - first) + 1e-9:
            raise InputError(
                f"Answers with shares right of {first:g} and {second:g} cannot correlate by "
                f"{self.correlation:g}."
            )

    @property
    def _differing(self) -> float:
        """The share of cases with one right and one wrong answer."""
        first, second = self.shares
        together = self.correlation * np.sqrt(first * (1 - first) * second * (1 - second))
        return float(first * (1 - second) + second * (1 - first) - 2 * together)

    @property
    def _deviations(self) -> tuple[float, float]:
        """Deviation of a case's mean difference over readers, without and with a gap."""
        averaged = (1 + (self.readers - 1) * self.alike) / self.readers
        gap = self.shares[1] - self.shares[0]
        return float(np.sqrt(self._differing * averaged)), float(
            np.sqrt((self._differing - gap**2) * averaged)
        )

    def power(self, cases: float) -> float:
        """Predict the power of a two-sided test from the number of cases."""
        null, spread = self._deviations
        gap = abs(self.shares[1] - self.shares[0])
        return NORMAL.cdf((gap * np.sqrt(cases) - NORMAL.inv_cdf(1 - self.alpha / 2) * null) / spread)

    def cases(self, *, power: float) -> int:
        """Find the number of cases for a power."""
        null, spread = self._deviations
        gap = abs(self.shares[1] - self.shares[0])
        root = (NORMAL.inv_cdf(1 - self.alpha / 2) * null + NORMAL.inv_cdf(power) * spread) / gap
        return max(2, int(np.ceil(root**2)))


@dataclass(frozen=True)
class UnpairedDesign(PairedDesign):
    """Two ways of answering, each with its own cases; `cases` is the number for each.

    >>> UnpairedDesign((0.8, 0.9)).cases(power=0.8)
    199
    """

    @property
    def _deviations(self) -> tuple[float, float]:
        averaged, middle = (1 + (self.readers - 1) * self.alike) / self.readers, sum(self.shares) / 2
        spread = sum(share * (1 - share) for share in self.shares)
        return float(np.sqrt(2 * middle * (1 - middle) * averaged)), float(np.sqrt(spread * averaged))


def _compare_pair(a: str, b: str, first: Floats, second: Floats, units: Sequence[Any]) -> Comparison:
    from scipy.stats import rankdata, ttest_1samp, wilcoxon
    from scipy.stats import t as student

    codes = unit_codes(units, len(first))
    both = np.isfinite(first) & np.isfinite(second)
    n = int(both.sum())
    if not n:
        return Comparison(a, b, 0, 0)
    d = unit_means(first[both] - second[both], codes[both].tolist())
    if len(d) < FEWEST:
        return Comparison(a, b, n, len(d), float(d.mean()))
    spread, middle = float(d.std(ddof=1)), float(d.mean())
    half = float(student.ppf(1 - ALPHA / 2, len(d) - 1)) * spread / np.sqrt(len(d))
    low, high = middle - half, middle + half
    if not d.any():
        return Comparison(a, b, n, len(d), middle, low, high, 1.0, 1.0, 0.0, 0.0)
    ranks = rankdata(np.abs(d[d != 0]))
    return Comparison(
        a,
        b,
        n,
        len(d),
        middle,
        low,
        high,
        t_p=float(ttest_1samp(d, 0.0).pvalue) if spread > 0 else 0.0,  # a constant difference decides
        wilcoxon_p=float(wilcoxon(d).pvalue),
        cohens_d=middle / spread if spread > 0 else float(np.sign(middle) * np.inf),
        rank_biserial=float((np.sign(d[d != 0]) * ranks).sum() / ranks.sum()),
    )


def _check_values(values: Mapping[str, npt.ArrayLike]) -> dict[str, Floats]:
    arrays = {name: np.asarray(column, dtype=np.float64) for name, column in values.items()}
    if len({array.shape for array in arrays.values()}) > 1 or any(a.ndim != 1 for a in arrays.values()):
        shapes = {name: array.shape for name, array in arrays.items()}
        raise InputError(f"Methods must have one value for each slide, in the same order. Got {shapes}.")
    return arrays


def _check_p(p: npt.ArrayLike) -> Floats:
    values = np.asarray(p, dtype=np.float64)
    finite = values[np.isfinite(values)]
    if values.ndim != 1 or np.any((finite < 0) | (finite > 1)):
        raise bad_parameter("p", "a correction", "a vector of chances in the range [0, 1]", p)
    return values


def _by_score(weights: Floats, positive: Bools, scores: Floats) -> tuple[Floats, Floats]:
    """Sum the weights (draws, u) of positives and negatives at each of the u different scores, ascending."""
    order = np.argsort(scores, kind="stable")
    starts = np.flatnonzero(np.diff(scores[order], prepend=-np.inf) > 0)
    drawn, sign = weights[:, order], positive[order]
    return np.add.reduceat(drawn * sign, starts, axis=1), np.add.reduceat(drawn * ~sign, starts, axis=1)


def _ranks(weights: Floats, values: Floats) -> Floats:
    """Rank values (draws, n) among the drawn; equal values share their mean rank."""
    distinct, group = np.unique(values, return_inverse=True)
    starts = np.searchsorted(np.sort(values), distinct)
    drawn = np.add.reduceat(weights[:, np.argsort(values, kind="stable")], starts, axis=1)
    return np.asarray((np.cumsum(drawn, axis=1) - 0.5 * drawn)[:, group])


def ratio(top: Floats, bottom: npt.NDArray[np.generic]) -> Floats:
    """Divide top by bottom, nan where the bottom is 0."""
    low = np.asarray(bottom, dtype=np.float64)
    out: Floats = np.full(np.broadcast(top, low).shape, np.nan)
    return np.divide(top, low, out=out, where=low != 0)
