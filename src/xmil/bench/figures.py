"""A run in figures: every column with its rows, verdicts, controls and agreement between measures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from xmil.bench.entries import CONTROLS, ORACLE
from xmil.bench.folder import Folder, Unit
from xmil.bench.measuring import Measure
from xmil.bench.resampling import Draws, draws_of
from xmil.bench.suites import LEARNED, SUITES
from xmil.bench.verdicts import Verdict, places, upward, verdict_of
from xmil.toy.protocol import paper_figure

NOT_LEARNED = "model did not learn"
PERFECT = 1.0 - 1e-6
OURS = "lrp"  # the package's own default: where it is behind is named


@dataclass(frozen=True, eq=False)
class Column:
    """A problem and a model: repetitions whose model learned the task, their draws and verdicts."""

    unit: Unit
    measures: tuple[Measure, ...]
    repetitions: tuple[int, ...]
    draws: Draws | None
    verdicts: tuple[Verdict, ...]

    @property
    def leader(self) -> str | None:
        """The best row by the leading measure; None where no row has a value in it."""
        return next((v.best for v in self.verdicts if v.measure == self.measures[0].name), None)

    @property
    def learned(self) -> bool:
        """Whether any model did."""
        return self.draws is not None

    def as_dict(self) -> dict[str, Any]:
        """The column in plain types."""
        unit, facts = self.unit, self.unit.facts
        measured = unit.repetitions
        return {
            "suite": unit.suite,
            "problem": unit.problem,
            "model": unit.model,
            "status": "measured" if self.learned else NOT_LEARNED,
            "auroc": {r: facts[r]["auroc"] for r in measured},
            "repetitions": len(measured),
            "counted": len(self.repetitions),
            "bags": {r: len(facts[r]["bags"]) for r in measured},
            "seeds": {r: facts[r]["seed"] for r in measured},
            "checksums": {r: facts[r]["checksum"] for r in measured},
            "settings": unit.settings,
            "rows": [self._row(m) for m in unit.methods],
            "verdicts": [{**asdict(v), "sentence": v.sentence} for v in self.verdicts],
        }

    def _row(self, method: str) -> dict[str, Any]:
        found = [r for r in self.unit.repetitions if (r, method) in self.unit.rows]
        seconds = [self.unit.rows[r, method]["seconds"] for r in found]
        bags = [max(1, len(self.unit.facts[r]["bags"])) for r in found]
        forward = [max(self.unit.facts[r]["forward"], 1e-9) for r in found]
        return {
            "method": method,
            "kind": ORACLE if method == ORACLE else "control" if method in CONTROLS else "method",
            "digest": self.unit.rows[found[0], method]["digest"],
            "seconds_per_bag": float(np.mean(np.divide(seconds, bags))),
            "forward_passes": float(np.mean(np.divide(seconds, forward))),
            "cells": {m.name: self._cell(method, m) for m in self.measures} if self.learned else {},
        }

    def _cell(self, method: str, measure: Measure) -> dict[str, Any]:
        draws = self.draws
        assert draws is not None  # noqa: S101  # asked for columns that learned only
        interval = draws.interval(method, measure.name)
        by_repetition = draws.by_repetition[
            :, draws.methods.index(method), draws.measures.index(measure.name)
        ]
        return {
            **{key: _known(value) for key, value in asdict(interval).items()},
            "std": _known(float(np.std(by_repetition))),
            "place": places(draws, measure).get(method),
            "paper": _paper(self.unit, method, measure.name),
        }


def column_of(unit: Unit, *, threshold: float = LEARNED) -> Column:
    """A column's figures, from the repetitions whose model reached the threshold."""
    measures = SUITES[unit.suite].measures
    counted = tuple(r for r in unit.repetitions if unit.facts[r]["auroc"] >= threshold)
    if not counted:
        return Column(unit, measures, (), None, ())
    draws = draws_of(unit, counted)
    verdicts = [verdict_of(unit, draws, measure, counted) for measure in measures]
    return Column(unit, measures, counted, draws, tuple(v for v in verdicts if v is not None))


def summary_of(folder: Folder, about: dict[str, Any]) -> dict[str, Any]:
    """Everything a run came to, in plain types."""
    columns = [column_of(unit) for unit in folder.units() if unit.rows]
    suites = [name for name in SUITES if any(c.unit.suite == name for c in columns)]
    return {
        **about,
        "threshold": {"auroc": LEARNED, "below": NOT_LEARNED},
        "suites": [_suite(name, [c for c in columns if c.unit.suite == name]) for name in suites],
        "across": across(columns),
    }


def _suite(name: str, columns: Sequence[Column]) -> dict[str, Any]:
    suite = SUITES[name]
    return {
        "name": name,
        "title": suite.title,
        "measures": [asdict(measure) for measure in suite.measures],
        "columns": [column.as_dict() for column in columns],
        "controls": [asdict(check) for check in checks(columns)],
        "agreement": agreement(columns),
        "weak_spots": weak_spots(columns),
    }


@dataclass(frozen=True)
class Check:
    """A test of the suite on itself."""

    what: str
    passed: bool
    detail: str


def checks(columns: Sequence[Column]) -> list[Check]:
    """The oracle is perfect; what is wrong on purpose is behind the best everywhere, and last overall."""
    learned = [c for c in columns if c.learned]
    found = [_oracle(c) for c in learned if ORACLE in c.unit.methods]
    for c in learned:
        found += [_behind(c, name) for name in CONTROLS if name in c.unit.methods and c.leader]
    return found + _last(learned)


def _oracle(column: Column) -> Check:
    draws = column.draws
    assert draws is not None  # noqa: S101  # learned
    lowest = float(np.nanmin([draws.mean(ORACLE, m.name) for m in column.measures]))
    where = f"{column.unit.problem}, {column.unit.model}"
    return Check(f"the oracle has 1 in every measure: {where}", lowest >= PERFECT, f"lowest {lowest:.6f}")


def _behind(column: Column, control: str) -> Check:
    """By the leading measure, the best row is ahead of the control, the whole paired interval over."""
    draws, measure, best = column.draws, column.measures[0], column.leader
    assert draws is not None and best is not None  # noqa: S101, PT018  # learned, and has a leader
    gap = upward(draws.difference(best, control, measure.name), measure)
    where = f"{column.unit.problem}, {column.unit.model}"
    detail = f"{best} less {control}: {gap} by {measure.title}"
    return Check(f"{control} is behind the best: {where}", bool(gap.low > 0), detail)


def _last(columns: Sequence[Column]) -> list[Check]:
    """Over all columns, the controls have the worst mean places by the leading measure."""
    if not columns:
        return []
    found: dict[str, list[float]] = {}
    for c in columns:
        assert c.draws is not None  # noqa: S101  # learned
        n = len([m for m in c.draws.methods if m != ORACLE])
        for method, place in places(c.draws, c.measures[0]).items():
            found.setdefault(method, []).append(place / n)
    mean = {method: float(np.mean(values)) for method, values in found.items()}
    wrong = [m for m in CONTROLS if m in mean]
    honest = {m: v for m, v in mean.items() if m not in CONTROLS}
    if not wrong or not honest:
        return []
    worst = max(honest, key=lambda m: honest[m])
    passed = min(mean[m] for m in wrong) > honest[worst]
    places_ = ", ".join(f"{m} {mean[m]:.2f}" for m in [worst, *wrong])
    return [
        Check(f"{', '.join(wrong)} come last overall", bool(passed), f"mean places (1 is last): {places_}")
    ]


def agreement(columns: Sequence[Column]) -> dict[str, Any]:
    """Kendall's tau between the rankings by each pair of measures, averaged over the columns."""
    learned = [c for c in columns if c.learned]
    if not learned:
        return {"measures": [], "tau": []}
    names = [m.name for m in learned[0].measures]
    tables = np.stack([_taus(c) for c in learned])
    known = np.isfinite(tables)
    n = known.sum(axis=0)
    mean = np.where(n > 0, np.where(known, tables, 0).sum(axis=0) / np.maximum(n, 1), np.nan)
    return {
        "measures": names,
        "tau": [[_known(float(v)) for v in row] for row in mean],
        "columns": len(learned),
    }


def _taus(column: Column) -> Any:
    assert column.draws is not None  # noqa: S101  # learned
    rows = [i for i, m in enumerate(column.draws.methods) if m != ORACLE]
    values = column.draws.means[rows] * np.array([m.better for m in column.measures])
    return np.array([[kendall(a, b) for b in values.T] for a in values.T])


def kendall(a: Any, b: Any) -> float:
    """Kendall's tau-b of two vectors over what both have; nan where one does not vary."""
    from scipy.stats import kendalltau

    both = np.isfinite(a) & np.isfinite(b)
    if both.sum() < 2 or np.ptp(a[both]) == 0 or np.ptp(b[both]) == 0:
        return float("nan")
    return float(kendalltau(a[both], b[both]).statistic)


def across(columns: Sequence[Column]) -> list[dict[str, Any]]:
    """Whether evidence and faithfulness rank alike, by their leading measures, where both were measured."""
    by_key = {(c.unit.suite, c.unit.problem, c.unit.model): c for c in columns if c.learned}
    found = []
    for (suite, problem, model), first in by_key.items():
        second = by_key.get(("faithfulness", problem, model))
        if suite == "faithfulness" or second is None or first.draws is None or second.draws is None:
            continue
        shared = [m for m in first.draws.methods if m in second.draws.methods and m != ORACLE]
        a, b = (
            np.array([c.measures[0].better * c.draws.mean(m, c.measures[0].name) for m in shared])
            for c in (first, second)
            if c.draws is not None
        )
        names = [c.measures[0].name for c in (first, second)]
        found.append(
            {
                "problem": problem,
                "model": model,
                "measures": names,
                "tau": _known(kendall(a, b)),
                "rows": len(shared),
            }
        )
    return found


def weak_spots(columns: Sequence[Column]) -> list[str]:
    """Where the package's own default is behind, with the paired interval."""
    found = []
    for c in columns:
        measure, best = c.measures[0], c.leader
        if c.draws is None or OURS not in c.draws.methods or best is None:
            continue
        gap = upward(c.draws.difference(best, OURS, measure.name), measure)
        if best != OURS and gap.low > 0:
            where = f"{c.unit.problem}, {c.unit.model}"
            found.append(f"{where}: {best} is ahead of {OURS} by {gap} in {measure.title}.")
    return found


def _paper(unit: Unit, method: str, measure: str) -> float | None:
    if unit.suite != "evidence" or measure != "auprc2":
        return None
    problem = unit.settings["problem"]
    protocol = problem.get("protocol", {})
    if problem.get("data", {}).get("embedded", True):
        return None
    if list(protocol.get("sizes", ())) != [2000, 500, 1000] or protocol.get("training"):
        return None
    return paper_figure(unit.problem, unit.model, method.partition(":")[0])


def _known(value: float) -> float | None:
    return None if not np.isfinite(value) else float(value)
