"""The verdict on scores: does dropping patches in their order matter more to the model than a random order?

Certificates, runs and the viewer share this definition. The measure is the symmetric relevance gain (SRG):
the output of the best patches minus that of the worst, averaged over sizes. Reversing an order changes the
sign of its SRG, so random orders come with their reverses, and zero is chance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from xmil.core.errors import bad_parameter
from xmil.core.explanation import card_of
from xmil.core.text import counted
from xmil.core.verdict import KINDS, RunVerdict
from xmil.evaluate.curves import Flips, Scores, has_order
from xmil.evaluate.statistics import Floats, bootstrap_mean, permutation_share, unit_means

BETTER, NO_BETTER, WORSE, CANNOT_TELL = KINDS
LEVEL = 0.05  # chance of a false verdict on random scores: half of it "better", half "worse"
SMALLEST = 0.01  # a smaller SRG, as a share of the output's scale, is not a difference
ORDERS, FEWEST_ORDERS = 200, 199  # random orders of a bag: half of them drawn, the others their reverses
STEPS = 10  # of the curves to compare with random orders
MOST = 2048  # patches to sample from a larger bag
FEWEST = 5  # patches with enough orders for LEVEL: 5! = 120
FEWEST_CASES, COHORT_ORDERS = 8, 999  # cases for a verdict on a run, and random orders of all its cases
ROUNDING = 1e-6  # of the scale: closer orders are equal
NO_ORDER = "all patches have the same score, so there is no order to try"
NO_ORDERS = "its SRG is exactly 0 throughout: the scores are all equal, or the output never changes"
WORDS = {
    BETTER: "better than random",
    NO_BETTER: "no better than random",
    WORSE: "worse than random",
    CANNOT_TELL: "cannot tell",
}


@dataclass(frozen=True)
class Verdict:
    """How scores compare with random orders; `p` is the share of orders at least as good, with their own.

    `reason` is why the verdict cannot tell. `share` is the SRG relative to the best SRG of the methods judged
    together, `best` the method with that SRG. `patches` is the number of patches that were ordered.
    """

    kind: str
    method: str
    srg: float
    p: float
    orders: int
    patches: int
    reason: str = ""
    share: float | None = None
    best: str | None = None

    def __str__(self) -> str:
        if self.kind == CANNOT_TELL:
            return f"Cannot tell: {self.reason}."
        beside = ""
        if self.share is not None and self.share > 0 and self.best is not None and self.best != self.method:
            beside = f", {100 * self.share:.0f} % of the best method tried ({card_of(self.best).title})"
        chance = f"p = {self.p:.3f} against {self.orders} random orders"
        subject = f"{WORDS[self.kind].capitalize()}: {card_of(self.method).title}"
        return f"{subject} has SRG {self.srg:.2f}{beside}; {chance}."

    def as_dict(self) -> dict[str, Any]:
        """Convert to plain types for a certificate."""
        fields = ("p", "orders", "share", "best", "patches")
        return {"verdict": self.kind, **{name: getattr(self, name) for name in fields}}


def judge(srg: float, null: Floats, *, scale: float = 1.0) -> tuple[str, float]:
    """Find the kind of verdict on an SRG, and its rank p among SRGs of random orders (at least 199).

    A scale of 0 means that the output does not move at all, so that nothing can be told.

    >>> chance = np.linspace(-0.2, 0.2, 200)
    >>> [judge(srg, chance)[0] for srg in (0.4, 0.1, -0.4)], judge(0.001, chance / 100)[0]
    (['better', 'no better', 'worse'], 'cannot tell')
    """
    if len(null) < FEWEST_ORDERS:
        raise bad_parameter("orders", "a verdict", f"an int in the range [{FEWEST_ORDERS}, inf)", len(null))
    near = ROUNDING * scale
    p, p_worse = permutation_share(srg - near, null), permutation_share(-srg - near, -null)
    if not scale or max(abs(srg), float(np.abs(null).max())) < SMALLEST * scale:
        return CANNOT_TELL, p
    if abs(srg) >= SMALLEST * scale and min(p, p_worse) <= LEVEL / 2:
        return (BETTER if p < p_worse else WORSE), p
    return NO_BETTER, p


def settle(kinds: Sequence[str], ordered: Sequence[bool]) -> list[str]:
    """Settle verdicts on several maps of the same bags; `ordered` says which have an order to judge.

    A map without an order cannot be told about. "Cannot tell" becomes "no better" if another map is better or
    worse: then the order matters.

    >>> settle(["cannot tell", "better"], [True, True]), settle(["no better", "better"], [False, True])
    (['no better', 'better'], ['cannot tell', 'better'])
    """
    judged = [kind for kind, is_ordered in zip(kinds, ordered, strict=True) if is_ordered]
    settled = []
    for kind, is_ordered in zip(kinds, ordered, strict=True):
        if not is_ordered:
            settled.append(CANNOT_TELL)
        elif kind == CANNOT_TELL and (BETTER in judged or WORSE in judged):
            settled.append(NO_BETTER)
        else:
            settled.append(kind)
    return settled


class Judge:
    """Judge scores of the patches of one bag, for one target, by random orders.

    From a larger bag 2,048 patches are drawn.

    >>> import torch, xmil
    >>> net = xmil.create_model("attnmil", in_dim=8, n_classes=2, seed=0)
    >>> bag = 3 * torch.randn(60, 8, generator=torch.Generator().manual_seed(0))
    >>> e = xmil.explain(net, bag, method="single", target=1)
    >>> scores = [("single", e), ("its opposite", -e.scores)]
    >>> [verdict.kind for verdict in Judge(xmil.Flips(net, bag, target=1)).verdicts(scores)]
    ['better', 'worse']
    """

    def __init__(self, flips: Flips, *, most: int = MOST, seed: int = 0) -> None:
        self.full_bag, self.seed = flips, seed
        self._rng = np.random.default_rng([seed, 0x5E7])  # independent of the draws that break ties
        self.rows = np.arange(flips.n)
        if flips.n > most:
            self.rows = np.sort(self._rng.choice(flips.n, most, replace=False))
        self.flips = flips if flips.n <= most else flips.part(self.rows)

    @cached_property
    def random(self) -> Floats:
        """SRGs of the random orders."""
        n = len(self.rows)
        drawn = np.stack([self._rng.permutation(n) for _ in range(ORDERS // 2)])
        forth = self.flips.gains(drawn, steps=STEPS)
        return np.concatenate([forth, -forth])

    def srgs(self, scores: Sequence[Scores]) -> Floats:
        """Compute the SRGs (q,) of scores of all patches of the bag, the mean over orders of equal scores."""
        return self.flips.gains_over_ties(self._drawn(scores), steps=STEPS, seed=self.seed)

    def _drawn(self, scores: Sequence[Scores]) -> list[Floats]:
        """The scores of the drawn patches."""
        return [self.full_bag.check_scores(values)[self.rows] for values in scores]

    def verdicts(self, scores: Sequence[tuple[str, Scores]]) -> list[Verdict]:
        """Judge the scores of each method, also relative to the best of them."""
        n = len(self.rows)
        if n < FEWEST:
            reason = f"a bag of {counted(n, 'patch')} has too few orders, it takes {FEWEST} patches"
            return [Verdict(CANNOT_TELL, name, 0.0, 1.0, 0, n, reason) for name, _ in scores]
        srgs = self.srgs([values for _, values in scores])
        ordered = [has_order(own) for own in self._drawn([values for _, values in scores])]
        best = int(srgs.argmax())
        judged = [judge(srg, self.random, scale=self.flips.scale) for srg in srgs.tolist()]
        kinds, every = settle([kind for kind, _ in judged], ordered), []
        for i, (name, _) in enumerate(scores):
            kind, srg, p = kinds[i], float(srgs[i]), judged[i][1]
            reason = ""
            if kind == CANNOT_TELL:
                reason = self._flatness() if ordered[i] else NO_ORDER
            verdict = Verdict(kind, name, srg, p, len(self.random), n, reason)
            if len(scores) > 1 and srgs[best] >= SMALLEST * self.flips.scale:
                verdict = replace(verdict, share=srg / float(srgs[best]), best=scores[best][0])
            every.append(verdict)
        return every

    def _flatness(self) -> str:
        """Find why orders do not differ: nothing changes the output, or any patches change it equally."""
        ends = self.flips.values_of([np.ones(self.flips.n, dtype=bool), np.zeros(self.flips.n, dtype=bool)])
        if abs(ends[0] - ends[1]) < SMALLEST * self.flips.scale:
            return "the output hardly changes when patches leave"
        return "the evidence is evenly spread, so it hardly matters which patches leave"


def judge_cohort(
    srgs: Mapping[str, npt.ArrayLike], *, units: Sequence[Any], unit: str = "case", seed: int = 0
) -> RunVerdict:
    """Judge the SRGs (slides,) of each method over cases; the verdict is on the first method.

    SRGs are in units of the output's scale; `units` has the case of each slide, or the slide itself if cases
    are unknown: then `unit` is "slide", and the sentence says that slides count as independent. Reversing the
    order of a case changes the sign of its SRG, so a random order of all cases is a sign for each. The other
    methods may be rivals that were tried on the same slides, with nan where they were not. Scores that order
    no patches have an SRG of exactly 0 (`Judge.srgs`); a method with nothing else cannot be told about.

    >>> verdict = judge_cohort({"lrp": [0.4, 0.5, 0.3, 0.4, 0.6, 0.5, 0.4, 0.3]}, units=range(8))
    >>> print(verdict.sentence)
    LRP finds what the model uses: SRG 0.43 [0.36, 0.50] over 8 cases, random order 0.00.
    """
    first = next(iter(srgs))
    rows = [
        _judge_method(name, np.asarray(values, dtype=np.float64), units, unit, seed)
        for name, values in srgs.items()
    ]
    measured = [row for row in rows if row["p"] is not None]  # on enough cases
    kinds = settle([row["kind"] for row in measured], [row["ordered"] for row in measured])
    for row, kind in zip(measured, kinds, strict=True):
        row["kind"] = kind
    known = np.all([np.isfinite(values) for values in srgs.values()], axis=0).reshape(-1)  # by every method
    own = [each for each, is_known in zip(units, known, strict=True) if is_known]
    means = [
        float(unit_means(np.asarray(values)[known], own).mean()) if own else row["srg"]
        for row, values in zip(rows, srgs.values(), strict=True)
    ]
    best = int(np.nanargmax(means)) if np.isfinite(means).any() else 0
    top = rows[best]
    for row, value in zip(rows, means, strict=True):
        row["share"] = value / means[best] if len(rows) > 1 and means[best] >= SMALLEST else None
    return RunVerdict(
        kind=rows[0]["kind"],
        sentence=_cohort_sentence(rows, top, unit),
        method=first,
        methods=[
            {key: value for key, value in row.items() if key not in ("reason", "ordered")} for row in rows
        ],
        cases=list(dict.fromkeys(map(str, units))),
        slides=len(units),
        orders=COHORT_ORDERS,
        unit=unit,
    )


def _judge_method(name: str, values: Floats, units: Sequence[Any], unit: str, seed: int) -> dict[str, Any]:
    """Make a row of the table: SRG over cases, its interval, p and kind, with a reason if it cannot tell."""
    known = np.isfinite(values)
    own = [unit for unit, is_known in zip(units, known, strict=True) if is_known]
    cases = unit_means(values[known], own) if own else np.zeros(0)
    row: dict[str, Any] = {"method": name, "srg": float(cases.mean()) if len(cases) else float("nan")}
    row |= {"low": None, "high": None, "p": None, "kind": CANNOT_TELL, "cases": len(cases)}
    row["ordered"] = bool(values[known].any())
    if len(cases) < FEWEST_CASES:
        reason = f"{counted(len(cases), unit)} could be measured, but {FEWEST_CASES} are needed"
        return {**row, "reason": reason}
    signs = np.random.default_rng([seed, 0x5E8]).choice([-1.0, 1.0], size=(COHORT_ORDERS, len(cases)))
    kind, p = judge(row["srg"], signs @ cases / len(cases))
    interval = bootstrap_mean(cases, units=range(len(cases)), seed=seed)
    reason = "it hardly matters which patches leave: the output is flat, or the evidence evenly spread"
    if not row["ordered"]:
        reason = NO_ORDERS
    return {**row, "low": interval.low, "high": interval.high, "p": p, "kind": kind, "reason": reason}


def _cohort_sentence(rows: Sequence[Mapping[str, Any]], top: Mapping[str, Any], unit: str) -> str:
    row = rows[0]
    name, numbers = card_of(row["method"]).title, f"SRG {row['srg']:.2f}"
    if row["low"] is not None:
        note = " (taken as independent: no case_id)" if unit == "slide" else ""
        numbers += f" [{row['low']:.2f}, {row['high']:.2f}] over {counted(row['cases'], unit)}{note}"
        numbers += ", random order 0.00"
    beside = ""
    if row["kind"] == CANNOT_TELL:
        srg = f" (SRG {row['srg']:.2f})" if row["cases"] else ""
        return f"Cannot tell whether {name} finds what the model uses: {row['reason']}{srg}."
    if row["kind"] == BETTER and row["share"] is not None:
        beside = f"; {100 * min(row['share'], 1):.0f} % of the best method tried"
        beside += "" if top is row else f" ({top['method']})"
    elif top is not row and top["kind"] == BETTER:
        beside = f"; {top['method']} does better (SRG {top['srg']:.2f})"
    result = {
        BETTER: f"{name} finds what the model uses",
        NO_BETTER: f"{name} is no better than a random order here",
        WORSE: f"{name} is worse than a random order here",
    }[row["kind"]]
    return f"{result}: {numbers}{beside}."
