"""The verdict on the maps of a run, and the method of `--methods auto`: SRGs over cases in seeded order.

The verdict measures a case's map on at most 2,048 of its patches. The method is chosen on other cases
than those that judge it; with fewer than 16 cases, each half judges the method that the other half chose.
How much is measured depends on counts of cases and patches, never on seconds: a run on a busy machine has
the same verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from xmil.core.bag import Bag
from xmil.core.errors import InputError, XmilError, bad_parameter
from xmil.core.task import Target
from xmil.core.verdict import RunVerdict
from xmil.data.bags import Case
from xmil.evaluate import Choice, Flips, Judge, choose, judge_cohort, measure_bag
from xmil.evaluate.choice import Parameters, cross_fitted, draw_part, find_candidates
from xmil.evaluate.verdict import FEWEST, FEWEST_CASES, MOST
from xmil.models import MILModel

ALL, NONE, SOME = "all", "none", "auto"
CASES = 16  # number that judge a run, or choose its method, unless the user sets it
MAX_TRIES = 2 * CASES  # cases that auto reads, because some may be impossible to measure
Scores = npt.NDArray[np.float32]
ONE_ADDED = "one_added"  # runs a model that does not pool eight times for each patch
RIVALS = ("lrp", ONE_ADDED)  # tried beside the methods of a run
MAX_RIVAL_PATCHES = 4096  # of all measured cases, above which auto does not try one_added on such a model
Maps = Callable[[Case], tuple[Bag, Target, dict[str, Scores]]]  # a case's bag, and scores by method
Bags = Callable[[Case], tuple[Bag, Any]]  # a case's bag with the target to explain


@dataclass(frozen=True)
class Check:
    """How many cases judge a run: a number, all, none, or 16 without the costliest rivals (auto)."""

    text: str = SOME

    def __post_init__(self) -> None:
        if self.text not in (ALL, NONE, SOME) and not (self.text.isdigit() and int(self.text)):
            choices = "a number of cases, all, none or auto"
            raise bad_parameter("check", "explain", choices, self.text)

    @property
    def most(self) -> float:
        """The most cases to measure."""
        limits = {ALL: float("inf"), NONE: 0.0, SOME: float(CASES)}
        return limits[self.text] if self.text in limits else float(self.text)

    @property
    def is_bounded(self) -> bool:
        """Whether the work per case is bounded, too; a number that the user sets has no such bound."""
        return self.text == SOME


@dataclass
class Measured:
    """SRGs of methods on bags, in units of the output's scale, with the case of each bag."""

    srgs: dict[str, list[float]] = field(default_factory=dict)
    cases: list[Case] = field(default_factory=list)
    patches: int = 0  # of the bags of a verdict, at most 2,048 of each

    @property
    def units(self) -> list[str]:
        """The case of each bag."""
        return [case.case_id or case.name for case in self.cases]

    @property
    def unit(self) -> str:
        """The word for a unit: "case", or "slide" if no cohort names cases."""
        return "slide" if all(case.case_id is None for case in self.cases) else "case"

    def add(self, case: Case, srgs: dict[str, float]) -> None:
        """Add the SRGs of a case's bag; nan for methods that it, or an earlier case, lacks."""
        unknown = float("nan")
        for name in dict.fromkeys([*self.srgs, *srgs]):
            self.srgs.setdefault(name, [unknown] * len(self.cases)).append(srgs.get(name, unknown))
        self.cases.append(case)


def in_seeded_order(cases: Sequence[Case], seed: int) -> list[Case]:
    """Shuffle the cases by the seed, independent of their original order."""
    by_name = sorted(cases, key=lambda case: case.name)
    return [by_name[i] for i in np.random.default_rng([seed, 0x5E9]).permutation(len(by_name))]


def judge_run(
    check: Check, models: Sequence[MILModel], cases: Iterable[Case], maps: Maps, *, seed: int
) -> RunVerdict | None:
    """Judge the maps of cases in the given order, then rivals on the same cases.

    If the verdict is not "better", it names a better method, or says which rival was not tried.
    """
    if not check.most:
        return None
    measured, why = _measure_cases(check, models, cases, maps, seed=seed)
    if not measured.cases:
        return RunVerdict("cannot tell", f"Cannot tell whether the maps show what the model uses: {why}.", "")
    units = measured.units
    if len(set(units)) < FEWEST_CASES:  # a mean over so few would be no rival
        return judge_cohort(measured.srgs, units=units, unit=measured.unit, seed=seed)

    others = [name for name in RIVALS if name not in measured.srgs]
    has_closed_form = all(isinstance(model, MILModel) and model.pooling for model in models)
    is_costly = check.is_bounded and not has_closed_form and measured.patches > MAX_RIVAL_PATCHES
    tried = [name for name in others if not (is_costly and name == ONE_ADDED)]
    rivals = _measure_rivals(tried, models, measured.cases, maps, seed=seed)
    verdict = judge_cohort({**measured.srgs, **rivals}, units=units, unit=measured.unit, seed=seed)
    if len(tried) < len(others) and verdict.kind != "better":
        return verdict.with_note(f"check={CASES} tries {ONE_ADDED}, too, which takes long on this model")
    return verdict


def _measure_cases(
    check: Check, models: Sequence[MILModel], cases: Iterable[Case], maps: Maps, *, seed: int
) -> tuple[Measured, str]:
    """Measure the maps of as many cases as the check takes; also say why the last one failed, if one did."""
    measured, why = Measured(), "no case could be measured"
    read: set[str] = set()
    for case in cases:
        unit = case.case_id or case.name
        read.add(unit)
        if len({*measured.units, unit}) > check.most or (check.is_bounded and len(read) > MAX_TRIES):
            break
        try:
            bag, target, scores = maps(case)
            srgs = _srgs(models, bag, target, scores, seed=seed)
        except XmilError as error:  # a slide that failed, or a model that takes no sub-bags
            why = f"no case could be measured ({str(error).rstrip('.')})"
            continue
        if srgs:
            measured.add(case, srgs)
            measured.patches += min(len(bag), MOST)
        else:
            why = f"bags of fewer than {FEWEST} patches have too few orders"
    return measured, why


def _measure_rivals(
    names: Sequence[str], models: Sequence[MILModel], cases: Sequence[Case], maps: Maps, *, seed: int
) -> dict[str, list[float]]:
    """Measure other methods on the bags of cases; leave out those that the model refuses."""
    able = find_candidates(models[0], names, n=0) if names else {}
    rivals: dict[str, list[float]] = {name: [] for name in able}
    for case in cases if able else ():
        bag, target, _ = maps(case)
        part = draw_part(bag, seed)
        each = [measure_bag(model, part, able, target=target, seed=seed) for model in models]
        for name, own in rivals.items():
            own.append(float(np.mean([srgs[name] for srgs in each])))
    return {name: own for name, own in rivals.items() if not np.isnan(own).all()}


def _srgs(
    models: Sequence[MILModel], bag: Bag, target: Target, maps: dict[str, Scores], *, seed: int
) -> dict[str, float]:
    """Measure the SRG of each map of a bag, the mean over models; none if the bag has too few patches."""
    totals: dict[str, float] = {}
    for model in models:
        flips = Flips(model, bag, target=target)
        if flips.n < FEWEST or not flips.scale:
            return {}
        srgs = Judge(flips, seed=seed).srgs(list(maps.values())) / flips.scale / len(models)
        for method, srg in zip(maps, srgs.tolist(), strict=True):
            totals[method] = totals.get(method, 0.0) + srg
    return totals


@dataclass(frozen=True)
class RunChoice:
    """The method of a run, and the cases that chose it; they also judge it if the choice has a verdict."""

    choice: Choice
    cases: frozenset[str]

    def as_dict(self) -> dict[str, Any]:
        """Convert to a dict for run.json, from which a resumed run takes its method."""
        return {**self.choice.as_dict(), "cases": sorted(self.cases)}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> RunChoice:
        """Convert from the dict in run.json."""
        return cls(Choice.from_dict(stored), frozenset(stored.get("cases", ())))


def choose_for_run(
    models: Sequence[MILModel], cases: Sequence[Case], bags: Bags, *, params: Parameters, seed: int
) -> RunChoice:
    """Choose the method of a run on up to 16 of its cases, at most half of them if there are 16 or more.

    With fewer, all cases choose; the verdict is then that of a method chosen on one half, on the other half.
    `params` are the run's parameters of methods, so that it compares the maps that the run would write.
    """
    order = in_seeded_order(cases, seed)
    units = list(dict.fromkeys(case.case_id or case.name for case in order))
    choosing = set(units if len(units) < CASES else units[: min(CASES, len(units) // 2)])
    measured, why = Measured(), ""
    tried: dict[str, tuple[str, dict[str, Any]]] = {}
    for case in (case for case in order if (case.case_id or case.name) in choosing):
        try:
            bag, target = bags(case)
            part = draw_part(bag, seed)
            tried = tried or find_candidates(models[0], None, n=len(bag), params=params)  # as the first bag's
            each = [measure_bag(model, part, tried, target=target, seed=seed) for model in models]
            if all(each):
                measured.add(case, {label: float(np.mean([srgs[label] for srgs in each])) for label in tried})
        except XmilError as error:  # the run reports the slide's fault
            why = str(error).rstrip(".")
    if not measured.cases and why:
        raise InputError(f"No case could be used to choose a method ({why}); name one in `methods=`.")
    srgs = {label: np.array(measured.srgs.get(label, ())) for label in tried}
    names = [case.name for case in measured.cases]
    chosen = choose(srgs, tried, names=names, cases=measured.units, seed=seed)
    if len(units) < CASES and chosen.n_cases > 1:
        chosen = cross_fitted(chosen, tried, measured.units, unit=measured.unit)
    return RunChoice(chosen, frozenset(measured.units))
