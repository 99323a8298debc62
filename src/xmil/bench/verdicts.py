"""Verdicts of a run: intervals over bags and repetitions, the best row of each column and its lead.

On tissue, patients are the unit: all bags of a patient are drawn and tested together, over all repetitions.
If bags mix images of many patients, all bags of a repetition share them and form one unit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from xmil.bench.entries import CONTROLS, ORACLE
from xmil.bench.measures import Measure
from xmil.bench.protocol import Protocol, paper_figure
from xmil.bench.suites import LEARNED, SUITES
from xmil.bench.units import Unit
from xmil.core.explanation import card_of
from xmil.core.text import counted
from xmil.evaluate.statistics import (
    ALPHA,
    SMALLEST,
    Floats,
    Interval,
    compare,
    count_units,
    draw_weights,
    nan_mean,
    percentile_interval,
    ratio,
    why_no_interval,
)

DRAWS, SEED = 1000, 0
ENOUGH = 6  # repetitions at least for tests over repetitions; with fewer, tests are over bags
NOT_LEARNED = "model did not learn"
PERFECT = 1.0 - 1e-6
ROUNDING = 9  # decimals of a mean that exceed rounding errors
OURS = "lrp"  # the package's default; the report names the columns where it is behind


@dataclass(frozen=True, eq=False)
class Draws:
    """Means of rows and measures: overall, (m, k), by repetition, (r, m, k), and redrawn, (D, m, k).

    A draw takes repetitions with replacement and, within each, bags with replacement; with patients, it draws
    patients with all their bags. There are `n` such units.
    """

    methods: tuple[str, ...]
    measures: tuple[str, ...]
    means: Floats
    by_repetition: Floats
    redrawn: Floats
    n: int

    def interval(self, method: str, measure: str) -> Interval:
        """A row's mean with its percentile interval."""
        i, k = self.methods.index(method), self.measures.index(measure)
        return percentile_interval(self.means[i, k], self.redrawn[:, i, k], units=self.n)

    def difference(self, first: str, second: str, measure: str) -> Interval:
        """First minus second, drawn in pairs."""
        i, j = self.methods.index(first), self.methods.index(second)
        k = self.measures.index(measure)
        drawn = self.redrawn[:, i, k] - self.redrawn[:, j, k]
        return percentile_interval(self.means[i, k] - self.means[j, k], drawn, units=self.n)

    def mean(self, method: str, measure: str) -> float:
        """A row's mean."""
        return float(self.means[self.methods.index(method), self.measures.index(measure)])


def draws_of(unit: Unit, repetitions: Sequence[int], *, draws: int = DRAWS) -> Draws:
    """Draw a column's repetitions and their bags; a row may lack some repetitions.

    The mean of a row is the mean of its repetitions' means over bags with a value.
    """
    methods, cases = tuple(unit.methods), cases_of(unit, repetitions)
    single = repetition_means(unit, repetitions, methods)
    grids = [_grid(unit, r, methods) for r in repetitions]  # (bags, m * k) each
    if cases is None:
        redrawn, n = _redraw_bags(grids, draws), sum(map(len, grids))
    else:
        redrawn, n = _redraw_cases(grids, cases, draws), count_units(cases)
    means = redrawn.reshape(draws, *single.shape[1:])
    return Draws(methods, unit.measures, nan_mean(list(single)), single, means, n)


def cases_of(unit: Unit, repetitions: Sequence[int]) -> list[str] | None:
    """The patients of each bag of these repetitions, in order; None if the bags were drawn at random.

    Older tissue results without patients count by repetition.
    """
    cases: list[str] = []
    for r in repetitions:
        facts = unit.facts[r]
        own = facts.get("cases")
        if not own and unit.suite != "tissue":
            return None
        cases += own or [f"patients of repetition {r}"] * len(facts["bags"])
    return cases


def _redraw_bags(grids: Sequence[Floats], draws: int) -> Floats:
    """Means (draws, m * k) over repetitions drawn with replacement, and bags within each."""
    rng, redrawn = np.random.default_rng(SEED), []
    for grid in grids:
        weights = rng.multinomial(len(grid), np.full(len(grid), 1 / len(grid)), size=draws)
        redrawn.append(_means(weights.astype(np.float64), grid))
    picks = rng.integers(len(grids), size=(draws, len(grids)))
    chosen = np.stack(redrawn)[picks, np.arange(draws)[:, None]]  # (draws, r, m * k)
    return nan_mean(list(chosen.swapaxes(0, 1)))


def _redraw_cases(grids: Sequence[Floats], cases: Sequence[str], draws: int) -> Floats:
    """Means (draws, m * k) over cases drawn with replacement, with all bags; repetitions weigh equally."""
    grid = np.concatenate(grids)
    finite = np.isfinite(grid)
    counts = [np.isfinite(own).sum(axis=0, keepdims=True) for own in grids]
    each = np.concatenate([np.repeat(n, len(own), axis=0) for n, own in zip(counts, grids, strict=True)])
    share = finite / np.maximum(each, 1)
    values = np.where(finite, grid, 0.0) * share
    if count_units(cases) < 2:
        return np.full((draws, grid.shape[1]), np.nan)
    return np.concatenate([ratio(w @ values, w @ share) for w in draw_weights(cases, draws, SEED)])


def repetition_means(unit: Unit, repetitions: Sequence[int], methods: Sequence[str]) -> Floats:
    """Means over bags with a value, (r, m, k), of methods and measures."""
    grids = [_grid(unit, r, methods) for r in repetitions]
    means = [_means(np.ones((1, len(grid))), grid)[0] for grid in grids]
    return np.stack(means).reshape(len(means), len(methods), len(unit.measures))


def _grid(unit: Unit, repetition: int, methods: Sequence[str]) -> Floats:
    """Values (bags, m * k); nan for a method that lacks the repetition."""
    example = next(v for (r, _), v in unit.values.items() if r == repetition)
    empty = np.full_like(example, np.nan)
    return np.concatenate([unit.values.get((repetition, m), empty) for m in methods], axis=1)


def _means(weights: Floats, grid: Floats) -> Floats:
    finite = np.isfinite(grid)
    return ratio(weights @ np.where(finite, grid, 0.0), weights @ finite.astype(np.float64))


@dataclass(frozen=True)
class Verdict:
    """The best row of a column by one measure, against the next and against all others.

    `lead` is the best minus the next, with the sign such that more is better, and its paired interval. The
    best is ahead of the rows in `apart`: by at least `smallest`, with a paired interval above zero and a
    paired t-test (Holm, p < 0.05). The others are in `level`. Tests are over `n` repetitions, cases or bags,
    intervals over `units` of them.
    """

    measure: str
    best: str
    mean: float
    second: str | None
    lead: Interval | None
    apart: tuple[str, ...]
    level: tuple[str, ...]
    unit: str
    n: int
    units: int
    smallest: float = SMALLEST

    @property
    def sentence(self) -> str:
        """The verdict in one sentence."""
        if self.second is None or self.lead is None:
            return f"{row_title(self.best)} has {self.mean:.3f}; there is no other row to compare it with."
        lead = f"{self.lead.estimate:.3f} above {row_title(self.second)}"
        sure = f"95 % paired interval {self.lead.low:+.3f} to {self.lead.high:+.3f}"
        if not self.lead.exists:
            sure = why_no_interval(self.units, self.unit) or "no interval: too few values"
        level = "ahead of every other row"
        if self.level:
            level = f"cannot be told apart from {', '.join(map(row_title, self.level))}"
        tests = (
            f"paired t-tests over {counted(self.n, self.unit)}, Holm; differences from {self.smallest:g} on"
        )
        return (
            f"{row_title(self.best)} has the best mean, {self.mean:.3f}, {lead} ({sure}); {level} ({tests})."
        )


def verdict_of(unit: Unit, draws: Draws, measure: Measure, repetitions: Sequence[int]) -> Verdict | None:
    """Judge a column by a measure, without controls; None if no method has a value."""
    contenders = [m for m in draws.methods if m not in (ORACLE, *CONTROLS)]
    values = {m: draws.mean(m, measure.name) for m in contenders}
    order = sorted((m for m in values if np.isfinite(values[m])), key=lambda m: -measure.better * values[m])
    if not order:
        return None
    best, *rest = order
    k = draws.measures.index(measure.name)
    bags = np.concatenate([_grid(unit, r, draws.methods) for r in repetitions])
    kind, table, units = "bag", bags[:, k :: len(draws.measures)], cases_of(unit, repetitions)  # (bags, m)
    if units is not None:
        names = [name for r in repetitions for name in unit.facts[r]["bags"]]
        by_repetition = count_units(units) <= len(repetitions)  # all bags of a repetition form one unit
        kind = "repetition" if by_repetition else "bag" if units == names else "case"
    elif len(repetitions) >= ENOUGH:
        kind, table = "repetition", draws.by_repetition[:, :, k]  # (r, m)
    own = [str(i) for i in range(len(table))] if units is None else units
    samples = dict(zip(draws.methods, table.T, strict=True))
    n = count_units([own[i] for i in np.flatnonzero(np.isfinite(samples[best]))])
    if not rest:
        return Verdict(measure.name, best, values[best], None, None, (), (), kind, n, draws.n)
    ranked, pairs = {m: samples[m] for m in order}, [(best, other) for other in rest]
    tests = compare(ranked, pairs, units=own)
    gaps = {m: upward(draws.difference(best, m, measure.name), measure) for m in rest}
    ahead = {c.second: bool(c.t_holm < ALPHA) and gaps[c.second].is_above(SMALLEST) for c in tests}
    apart, level = (tuple(m for m in rest if ahead[m] is sure) for sure in (True, False))
    lead = gaps[rest[0]]
    return Verdict(measure.name, best, values[best], rest[0], lead, apart, level, kind, n, draws.n)


def upward(gap: Interval, measure: Measure) -> Interval:
    """Give a difference the sign for which more is better."""
    return gap if measure.better > 0 else Interval(-gap.estimate, -gap.high, -gap.low)


def places(draws: Draws, measure: Measure) -> dict[str, int]:
    """The rank of each row but the oracle's, 1 for the best; equal means share the better rank."""
    return rank({m: measure.better * draws.mean(m, measure.name) for m in draws.methods if m != ORACLE})


def rank(means: Mapping[str, float]) -> dict[str, int]:
    """The rank of each finite mean, 1 for the largest; means that differ only by rounding share it."""
    finite = {m: round(float(v), ROUNDING) for m, v in means.items() if np.isfinite(v)}
    return {m: 1 + sum(other > v for other in finite.values()) for m, v in finite.items()}


@dataclass(frozen=True, eq=False)
class Column:
    """A problem and a model: the repetitions that count, their draws and verdicts."""

    unit: Unit
    measures: tuple[Measure, ...]
    repetitions: tuple[int, ...]
    draws: Draws | None
    verdicts: tuple[Verdict, ...]

    @property
    def where(self) -> str:
        """The problem and the model."""
        return f"{self.unit.problem}, {self.unit.model}"

    @property
    def leader(self) -> str | None:
        """The best row by the first measure; None if no row has a value."""
        return next((v.best for v in self.verdicts if v.measure == self.measures[0].name), None)

    def as_dict(self) -> dict[str, Any]:
        """The column in plain types."""
        unit, measured = self.unit, self.unit.repetitions
        return {
            "suite": unit.suite,
            "problem": unit.problem,
            "model": unit.model,
            "status": "measured" if self.draws else NOT_LEARNED,
            "auroc": {r: unit.facts[r]["auroc"] for r in measured},
            "repetitions": len(measured),
            "counted": len(self.repetitions),
            "bags": {r: len(unit.facts[r]["bags"]) for r in measured},
            "seeds": {r: unit.facts[r]["seed"] for r in measured},
            "checksums": {r: unit.facts[r]["checksum"] for r in measured},
            "settings": unit.settings,
            "rows": [self._row(m) for m in unit.methods],
            "verdicts": [
                {**asdict(v), "lead": v.lead and _bounds(v.lead), "sentence": v.sentence}
                for v in self.verdicts
            ],
        }

    def _row(self, method: str) -> dict[str, Any]:
        measured = [r for r in self.unit.repetitions if (r, method) in self.unit.rows]
        seconds = [self.unit.rows[r, method]["seconds"] for r in measured]
        bags = [max(1, len(self.unit.facts[r]["bags"])) for r in measured]
        forward = [max(self.unit.facts[r]["forward"], 1e-9) for r in measured]
        return {
            "method": method,
            "kind": ORACLE if method == ORACLE else "control" if method in CONTROLS else "method",
            "digest": self.unit.rows[measured[0], method]["digest"],
            "seconds_per_bag": float(np.mean(np.divide(seconds, bags))),
            "forward_passes": float(np.mean(np.divide(seconds, forward))),
            "cells": {m.name: self._cell(self.draws, method, m) for m in self.measures if self.draws},
        }

    def _cell(self, draws: Draws, method: str, measure: Measure) -> dict[str, Any]:
        interval = draws.interval(method, measure.name)
        i, k = draws.methods.index(method), draws.measures.index(measure.name)
        return {
            **_bounds(interval),
            "std": _or_none(np.std(draws.by_repetition[:, i, k])),
            "place": places(draws, measure).get(method),
            "paper": paper_cell(self.unit, base_of(method)) if measure.name == "auprc2" else None,
        }


def learned_repetitions(unit: Unit) -> list[int]:
    """The repetitions whose model learned the task; only they count."""
    return [r for r in unit.repetitions if unit.facts[r]["auroc"] >= LEARNED]


def column_of(unit: Unit) -> Column:
    """Summarise a column, from the repetitions whose model learned."""
    measures = SUITES[unit.suite].measures
    counted = tuple(learned_repetitions(unit))
    if not counted:
        return Column(unit, measures, (), None, ())
    draws = draws_of(unit, counted)
    verdicts = (verdict_of(unit, draws, measure, counted) for measure in measures)
    return Column(unit, measures, counted, draws, tuple(filter(None, verdicts)))


def summary_of(units: Sequence[Unit], about: dict[str, Any]) -> dict[str, Any]:
    """Summarise the units of a run, in plain types."""
    columns = [column_of(unit) for unit in units if unit.rows]
    suites = [
        {
            "name": suite.name,
            "title": suite.title,
            "measures": [asdict(measure) for measure in suite.measures],
            "columns": [column.as_dict() for column in own],
            "controls": [asdict(check) for check in checks(own)],
            "agreement": agreement(own),
            "weak_spots": weak_spots(own),
        }
        for suite in SUITES.values()
        if (own := [c for c in columns if c.unit.suite == suite.name])
    ]
    about = {**about, "threshold": {"auroc": LEARNED, "below": NOT_LEARNED}}
    return {**about, "suites": suites, "across": across(columns)}


@dataclass(frozen=True)
class Check:
    """A test of the suite on itself."""

    what: str
    passed: bool
    detail: str


def checks(columns: Sequence[Column]) -> list[Check]:
    """Check that the oracle is perfect, and that controls are behind the best everywhere and last overall.

    By the first measure, the paired interval of the best minus the control must be above zero, or the
    difference itself if there are too few units for an interval.
    """
    oracles, controls = [], []
    shares: dict[str, list[float]] = {}  # places over the number of rows
    for c in columns:
        draws, measure, best = c.draws, c.measures[0], c.leader
        if draws is None:
            continue
        if ORACLE in draws.methods:
            lowest = float(np.nanmin([draws.mean(ORACLE, m.name) for m in c.measures]))
            what = f"the oracle has 1 in every measure: {c.where}"
            oracles.append(Check(what, lowest >= PERFECT, f"lowest {lowest:.6f}"))
        for name in CONTROLS:
            if best is not None and name in draws.methods:
                gap = upward(draws.difference(best, name, measure.name), measure)
                detail = f"{row_title(best)} less {row_title(name)}: {gap} by {measure.title}"
                behind = bool(gap.low > 0 if gap.exists else gap.estimate > 0)
                controls.append(Check(f"{row_title(name)} is behind the best: {c.where}", behind, detail))
        for method, place in places(draws, measure).items():
            shares.setdefault(method, []).append(place / sum(m != ORACLE for m in draws.methods))
    mean = {method: float(np.mean(values)) for method, values in shares.items()}
    wrong, honest = ([m for m in mean if (m in CONTROLS) == control] for control in (True, False))
    if wrong and honest:
        wrong.sort(key=CONTROLS.index)
        worst = max(honest, key=mean.__getitem__)
        listing = ", ".join(f"{row_title(m)} {mean[m]:.2f}" for m in [worst, *wrong])
        last = min(mean[m] for m in wrong) > mean[worst]
        detail = f"mean places (1 is last): {listing}"
        controls.append(Check(f"{', '.join(map(row_title, wrong))} come last overall", last, detail))
    return oracles + controls


def agreement(columns: Sequence[Column]) -> dict[str, Any]:
    """Kendall's tau between the rankings by each pair of measures, averaged over the columns."""
    taus = []
    for c in columns:
        if c.draws is not None:
            rows = [i for i, m in enumerate(c.draws.methods) if m != ORACLE]
            values = c.draws.means[rows] * np.array([m.better for m in c.measures])
            taus.append(np.array([[kendall(a, b) for b in values.T] for a in values.T]))
    if not taus:
        return {"measures": [], "tau": []}
    return {
        "measures": [m.name for m in columns[0].measures],
        "tau": [[_or_none(v) for v in row] for row in nan_mean(taus)],
        "columns": len(taus),
    }


def kendall(a: Any, b: Any) -> float:
    """Kendall's tau-b of two vectors over what both have; nan if one does not vary."""
    from scipy.stats import kendalltau

    both = np.isfinite(a) & np.isfinite(b)
    return float(kendalltau(a[both], b[both]).statistic) if both.sum() > 1 else float("nan")


def across(columns: Sequence[Column]) -> list[dict[str, Any]]:
    """Compare the rankings of evidence and faithfulness by their first measures, if both were measured."""
    learned = [(c, c.draws) for c in columns if c.draws is not None]
    faithful = {c.where: (c, draws) for c, draws in learned if c.unit.suite == "faithfulness"}
    pairs = []
    for c, draws in learned:
        if c.unit.suite == "faithfulness" or c.where not in faithful:
            continue
        other, others = faithful[c.where]
        shared = [m for m in draws.methods if m in others.methods and m != ORACLE]
        a, b = (
            np.array([leading.better * d.mean(m, leading.name) for m in shared])
            for leading, d in ((c.measures[0], draws), (other.measures[0], others))
        )
        pairs.append(
            {
                "problem": c.unit.problem,
                "model": c.unit.model,
                "measures": [c.measures[0].name, other.measures[0].name],
                "tau": _or_none(kendall(a, b)),
                "rows": len(shared),
            }
        )
    return pairs


def weak_spots(columns: Sequence[Column]) -> list[str]:
    """List the columns where the package's default is clearly behind, by enough to matter."""
    sentences = []
    for c in columns:
        measure, best = c.measures[0], c.leader
        if c.draws is None or OURS not in c.draws.methods or best is None:
            continue
        gap = upward(c.draws.difference(best, OURS, measure.name), measure)
        if best != OURS and gap.is_above(SMALLEST):
            sentences.append(
                f"{c.where}: {row_title(best)} is ahead of {row_title(OURS)} by {gap} in {measure.title}."
            )
    return sentences


def paper_cell(unit: Unit, row: str) -> float | None:
    """The paper's figure of a row, if comparable: the same numbers of bags and training, real MNIST."""
    problem = unit.settings["problem"]
    protocol = problem.get("protocol", {})
    comparable = (
        unit.suite == "evidence"
        and not problem.get("data", {}).get("embedded", True)
        and not protocol.get("training")
        and tuple(protocol.get("sizes", ())) == Protocol().sizes
    )
    return paper_figure(unit.problem, unit.model, row) if comparable else None


def base_of(method: str) -> str:
    """A method's name without preset and output."""
    return method.partition("@")[0].partition(":")[0]


def row_title(method: str) -> str:
    """The title of a row, with its preset and output.

    >>> row_title("lrp:paper"), row_title("one_removed")
    ('LRP paper', 'One removed')
    """
    base = base_of(method)
    return card_of(base).short + method[len(base) :].replace(":", " ")


def _bounds(interval: Interval) -> dict[str, float | None]:
    return {key: _or_none(value) for key, value in asdict(interval).items()}


def _or_none(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None
