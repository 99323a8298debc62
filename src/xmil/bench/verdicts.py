"""What a column says: which row leads, by how much, and what can be told from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from xmil.bench.entries import CONTROLS, ORACLE
from xmil.bench.folder import Unit
from xmil.bench.measuring import Measure
from xmil.bench.resampling import Draws
from xmil.core.interval import Interval
from xmil.evaluate.statistics import ALPHA, compare

SAME = 0.0005  # a lead below this is none, as printed
ENOUGH = 6  # repetitions from which on tests are over repetitions; with fewer they are over bags


@dataclass(frozen=True)
class Verdict:
    """The best row of a column by one measure, against the next and against all others.

    `lead` is the best less the next, turned so that more is better, with its paired interval. `apart` are the
    rows that the best is ahead of, by a paired interval above zero and a paired t-test (Holm, p < 0.05),
    `level` those it is not; the tests are over `n` repetitions or bags.
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

    @property
    def sentence(self) -> str:
        """No more than the figures say."""
        if self.second is None or self.lead is None:
            return f"{self.best} has {self.mean:.3f}; there is no other row to compare it with."
        low, high = self.lead.low, self.lead.high
        if self.lead.estimate < SAME:
            ahead = f"{self.best} has the best mean, {self.mean:.3f}, level with {self.second}"
        else:
            ahead = f"{self.best} leads with {self.mean:.3f}, {self.lead.estimate:.3f} ahead of {self.second}"
        sure = f" (95 % paired interval {low:+.3f} to {high:+.3f})"
        level = ", ".join(self.level)
        tail = f"; not distinguishable from {level}" if level else "; ahead of every other row"
        return f"{ahead}{sure}{tail} (paired t-tests over {self.n} {self.unit}s, Holm)."


def verdict_of(unit: Unit, draws: Draws, measure: Measure, repetitions: Sequence[int]) -> Verdict | None:
    """The verdict of a column by a measure; None where no method has a value. Controls cannot win."""
    values = {m: draws.mean(m, measure.name) for m in contenders(draws.methods)}
    order = sorted((m for m in values if np.isfinite(values[m])), key=lambda m: -measure.better * values[m])
    if not order:
        return None
    best, *rest = order
    kind, samples = _samples(unit, draws, measure.name, repetitions, order)
    n = int(np.isfinite(samples[best]).sum())
    if not rest:
        return Verdict(measure.name, best, values[best], None, None, (), (), kind, n)
    found = compare(samples, [(best, other) for other in rest])
    gaps = {m: upward(draws.difference(best, m, measure.name), measure) for m in rest}
    ahead = {c.second: c.t_holm < ALPHA and gaps[c.second].low > 0 for c in found}
    lead = gaps[rest[0]]
    apart = tuple(m for m in rest if ahead[m])
    level = tuple(m for m in rest if not ahead[m])
    return Verdict(measure.name, best, values[best], rest[0], lead, apart, level, kind, n)


def upward(gap: Interval, measure: Measure) -> Interval:
    """A difference turned so that more is better."""
    return gap if measure.better > 0 else Interval(-gap.estimate, -gap.high, -gap.low)


def contenders(methods: Sequence[str]) -> list[str]:
    """Rows that may win: neither the truth nor what is wrong on purpose."""
    return [m for m in methods if m not in (ORACLE, *CONTROLS)]


def places(draws: Draws, measure: Measure) -> dict[str, int]:
    """The place of each row but the oracle's, 1 for the best; equal means share the better place."""
    values = {m: measure.better * draws.mean(m, measure.name) for m in draws.methods if m != ORACLE}
    known = {m: v for m, v in values.items() if np.isfinite(v)}
    return {m: 1 + sum(other > v for other in known.values()) for m, v in known.items()}


def _samples(
    unit: Unit, draws: Draws, measure: str, repetitions: Sequence[int], methods: Sequence[str]
) -> tuple[str, dict[str, npt.NDArray[np.float64]]]:
    """What is compared in pairs: the means of repetitions, or the bags where repetitions are few."""
    k = draws.measures.index(measure)
    if len(repetitions) >= ENOUGH:
        return "repetition", {m: draws.by_repetition[:, draws.methods.index(m), k] for m in methods}
    lengths = {r: len(next(v for (q, _), v in unit.values.items() if q == r)) for r in repetitions}
    parts = {
        m: [
            unit.values[r, m][:, k] if (r, m) in unit.values else np.full(lengths[r], np.nan)
            for r in repetitions
        ]
        for m in methods
    }
    return "bag", {m: np.concatenate(part) for m, part in parts.items()}
