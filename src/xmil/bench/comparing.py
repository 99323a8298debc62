"""Two runs side by side: rows on the same bags, their differences with paired intervals."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from xmil.bench.folder import Folder, Unit
from xmil.bench.resampling import draws_of
from xmil.bench.suites import LEARNED
from xmil.core.errors import FileError
from xmil.core.interval import Interval


@dataclass(frozen=True)
class Change:
    """A row in two runs: the second less the first, or why it cannot be told."""

    suite: str
    problem: str
    model: str
    method: str
    measure: str
    first: float
    second: float
    difference: Interval | None
    reason: str = ""

    @property
    def sure(self) -> bool:
        """Whether the interval keeps to one side of zero."""
        d = self.difference
        return d is not None and bool(d.low > 0 or d.high < 0)


def compare_runs(first: Path, second: Path) -> list[Change]:
    """Every row that both runs have, by every measure."""
    units = [_units(path) for path in (first, second)]
    return [
        change for key in units[0] if key in units[1] for change in _changes(units[0][key], units[1][key])
    ]


def _units(path: Path) -> dict[tuple[str, str, str], Unit]:
    found = {(u.suite, u.problem, u.model): u for u in Folder(path).units() if u.rows}
    if not found:
        raise FileError(f"{path}: holds no results of 'xmil bench'.")
    return found


def _changes(a: Unit, b: Unit) -> list[Change]:
    counted = [r for r in a.repetitions if r in b.repetitions and _learned(a, r) and _learned(b, r)]
    same = [r for r in counted if a.facts[r]["checksum"] == b.facts[r]["checksum"] and _same_bags(a, b, r)]
    methods = [m for m in a.methods if m in b.methods]
    if not counted or not methods:
        return []
    if len(same) == len(counted):
        return _paired(a, b, same, methods)
    reason = "the bags differ" if not same else "some repetitions have other bags"
    means = [draws_of(u, counted, draws=2) for u in (a, b)]
    return [
        Change(a.suite, a.problem, a.model, m, k, means[0].mean(m, k), means[1].mean(m, k), None, reason)
        for m in methods
        for k in a.measures
        if k in b.measures
    ]


def _paired(a: Unit, b: Unit, repetitions: list[int], methods: list[str]) -> list[Change]:
    """Both runs' rows as rows of one column, so that they share their draws."""
    joined = Unit(a.path, a.settings, a.measures)
    joined.facts = a.facts
    for r in repetitions:
        for m in methods:
            for mark, unit in (("A", a), ("B", b)):
                if (r, m) in unit.values:
                    joined.values[r, f"{mark} {m}"] = unit.values[r, m]
                    joined.rows[r, f"{mark} {m}"] = unit.rows[r, m]
    draws = draws_of(joined, repetitions)
    found = []
    for m in (m for m in methods if f"A {m}" in draws.methods and f"B {m}" in draws.methods):
        for k in a.measures:
            means = (draws.mean(f"A {m}", k), draws.mean(f"B {m}", k))
            gap = draws.difference(f"B {m}", f"A {m}", k)
            if np.isfinite(gap.estimate):
                found.append(Change(a.suite, a.problem, a.model, m, k, *means, gap))
    return found


def _learned(unit: Unit, repetition: int) -> bool:
    return bool(unit.facts[repetition]["auroc"] >= LEARNED)


def _same_bags(a: Unit, b: Unit, repetition: int) -> bool:
    """Faithfulness looks at the bags a model has right, which another model may not."""
    return bool(a.facts[repetition]["bags"] == b.facts[repetition]["bags"])


def as_rows(changes: list[Change]) -> list[dict[str, Any]]:
    """The changes in plain types."""
    return [
        {
            **{key: getattr(c, key) for key in ("suite", "problem", "model", "method", "measure")},
            "first": c.first,
            "second": c.second,
            "difference": None if c.difference is None else vars(c.difference),
            "sure": c.sure,
            "reason": c.reason,
        }
        for c in changes
    ]
