"""Analyse a reading study: accuracy, agreement, over-reliance, regions against evidence, time, and tests.

Intervals and tests are over patients, drawn and flipped with all their cases. Practice does not count;
repeats count only for the agreement of readers with themselves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from xmil.core.errors import InputError, refuse_damage
from xmil.evaluate.marks import covered_by_polygons, parse_polygons, score_regions
from xmil.evaluate.statistics import (
    FEWEST,
    Floats,
    Interval,
    Ints,
    Statistic,
    bootstrap,
    bootstrap_mean,
    draw_blocks,
    exact_share,
    holm,
    kappa,
    mean,
    median,
    nan_mean,
    permutation_share,
    sign_flip_p,
    unit_codes,
    unit_means,
)
from xmil.viewer.layers import Evidence
from xmil.viewer.study.plan import AFTER, BEFORE, DIAGNOSIS, Arm
from xmil.viewer.study.readings import (
    CASE,
    PRACTICE,
    REPEAT,
    Case,
    Study,
    name_target,
    readings_of,
    supported_class,
)

DRAWS, DRAWS_OF_CHANCE, SEED = 2000, 5000, 0
ALL = "all readers"
LAST = "last"  # the last stage of an arm
ATTENTION = "attention"
SHARE = 0.5  # of a patch that a region must cover to mark it
POINTING = "pointing"
CHANCE = "chance"
REGION_MEASURES = ("auroc", "dice", POINTING)
Row = dict[str, Any]


@dataclass(frozen=True)
class Estimate:
    """A measure with its interval over patients: of one reader or all, in an arm and a stage.

    It is a share or a mean over `n` readings of `patients` patients.
    """

    measure: str
    arm: str
    stage: str
    reader: str
    value: Interval
    n: int
    patients: int


@dataclass(frozen=True)
class Test:
    """A comparison with patients as the unit: the mean difference and its test."""

    measure: str
    first: str
    second: str
    difference: Interval
    p: float
    p_holm: float
    n: int
    patients: int


@dataclass(frozen=True)
class Findings:
    """All results of a study, and the tables behind them."""

    study: Study
    readings: list[Row]
    regions: list[Row]
    estimates: list[Estimate]
    tests: list[Test]

    def find(self, measure: str, arm: str, stage: str, reader: str = ALL) -> Estimate | None:
        """Find an estimate by its name."""
        key = (measure, arm, stage, reader)
        return next((e for e in self.estimates if (e.measure, e.arm, e.stage, e.reader) == key), None)


def analyse(study: Study) -> Findings:
    """Read every reader's answers and measure them."""
    readings = list(list_readings(study))
    counted = [row for row in readings if row["kind"] == CASE]
    regions = list(measure_regions(study, counted))
    estimates = [
        *_performance(study, counted),
        *_reliance(study, counted),
        *_agreement(study, readings),
        *_region_means(regions),
        *_times(study, counted),
        *_answers(study, counted),
    ]
    return Findings(study, readings, regions, estimates, _tests(study, counted, regions))


def list_readings(study: Study) -> Iterator[Row]:
    """Yield a row for each committed stage of every reading, including practice."""
    for reader in study.readers:
        stored = study.stored(reader)
        for reading, stages in zip(readings_of(stored), stored["readings"], strict=False):
            case, arm = study.case(reading), study.arm(reading)
            answer = case.answers[study.run_of(arm)]
            for stage, entry in stages.items():
                diagnosis = entry["answers"].get(DIAGNOSIS)
                yield {
                    "reader": reader,
                    "position": reading.number + 1,
                    "period": reading.period + 1,
                    "kind": reading.kind,
                    "repeats": None if reading.repeats is None else reading.repeats + 1,
                    "slide": case.slide,
                    "patient": case.patient,
                    "label": case.label,
                    "arm": arm.name,
                    "method": arm.method,
                    "run": study.run_of(arm) if AFTER in arm.stages else None,
                    "stage": stage,
                    "last": stage == arm.stages[-1],
                    "predicted": answer.predicted,
                    "model_right": int(answer.is_right(case.label)),
                    "right": int(diagnosis == case.label),
                    **{question.id: entry["answers"].get(question.id) for question in study.plan.questions},
                    "seconds": entry["seconds"],
                    "regions": len(entry["regions"]),
                    "committed": entry["committed"],
                    "drawn": entry["regions"],
                }


def _cells(study: Study, rows: Sequence[Row]) -> Iterator[tuple[Arm, str, str, list[Row]]]:
    """Group rows by arm, stage and reader, and over all readers; skip empty groups."""
    for arm in study.plan.arms:
        for stage in arm.stages:
            in_stage = [row for row in rows if (row["arm"], row["stage"]) == (arm.name, stage)]
            for reader in (ALL, *study.readers):
                if group := [row for row in in_stage if reader in (ALL, row["reader"])]:
                    yield arm, stage, reader, group


def _column(rows: Iterable[Row], name: str) -> Floats:
    """Convert a column to numbers, with nan for missing values."""
    return np.array([np.nan if row[name] is None else row[name] for row in rows], dtype=np.float64)


class Measure(NamedTuple):
    """A statistic, the rows (n,) it uses, and whether it is a share."""

    statistic: Statistic
    chosen: Floats
    is_share: bool = True


def _estimates(
    arm: str, stage: str, reader: str, units: Sequence[str], measures: dict[str, Measure]
) -> Iterator[Estimate]:
    """Estimate measures with their intervals over patients; skip measures without rows."""
    measures = {name: measure for name, measure in measures.items() if measure.chosen.any()}
    if not measures:
        return
    statistics = {name: measure.statistic for name, measure in measures.items()}
    for name, value in bootstrap(statistics, units=units, draws=DRAWS, seed=SEED).items():
        chosen = measures[name].chosen
        patients = len({unit for unit, is_used in zip(units, chosen, strict=True) if is_used})
        value = _claimed(value, patients, is_share=measures[name].is_share)
        yield Estimate(name, arm, stage, reader, value, int(chosen.sum()), patients)


def _patients(rows: Iterable[Row]) -> list[str]:
    return [row["patient"] for row in rows]


def _claimed(value: Interval, patients: int, *, is_share: bool = False) -> Interval:
    """Restrict an interval to what the number of patients allows: few patients get none.

    If all patients are alike, draws do not vary: a share gets the exact interval, other measures none.
    """
    if patients >= FEWEST and (value.low < value.high or not value.exists):
        return value
    if patients >= FEWEST and is_share:
        return exact_share(value.estimate, patients)
    return Interval(value.estimate, float("nan"), float("nan"))


def _mean(values: Floats, *, is_share: bool = True) -> Measure:
    """Make the measure of the mean of the values (n,) of all rows."""
    return Measure(partial(mean, values=values), np.ones(len(values)), is_share)


def _among(chosen: Floats, values: Floats) -> Measure:
    """Make the measure of the share of the chosen rows (n,)."""
    return Measure(lambda weights: mean(weights * chosen, values), chosen)


def _performance(study: Study, rows: Sequence[Row]) -> Iterator[Estimate]:
    """Estimate accuracy, and sensitivity and specificity for each positive class."""
    for arm, stage, reader, group in _cells(study, rows):
        right = _column(group, "right")
        measures = {"accuracy": _mean(right)}
        for name in study.plan.positive:
            ill = np.array([row["label"] == name for row in group], dtype=np.float64)
            called = np.array([row[DIAGNOSIS] == name for row in group], dtype=np.float64)
            measures[f"sensitivity {name}"] = _among(ill, called)
            measures[f"specificity {name}"] = _among(1 - ill, 1 - called)
        yield from _estimates(arm.name, stage, reader, _patients(group), measures)


def _right_before(rows: Sequence[Row], after: Sequence[Row]) -> Floats:
    """Look up whether the first answers were right, for rows of second answers."""
    right = {(row["reader"], row["position"]): row["right"] for row in rows if row["stage"] == BEFORE}
    return np.array([right[row["reader"], row["position"]] for row in after], dtype=np.float64)


def _reliance(study: Study, rows: Sequence[Row]) -> Iterator[Estimate]:
    """Estimate how often a wrong model misleads a right reader, and a right model corrects a wrong one.

    Only arms that show the model's answer count.
    """
    for arm, stage, reader, group in _cells(study, rows):
        if arm.prediction and stage == AFTER:
            first, model = _right_before(rows, group), _column(group, "model_right")
            follows = np.array([row[DIAGNOSIS] == row["predicted"] for row in group], dtype=np.float64)
            led, wrong = first * (1 - model), (1 - first) * model
            measures = {"over-reliance": _among(led, follows), "correction": _among(wrong, follows)}
            yield from _estimates(arm.name, stage, reader, _patients(group), measures)


def _agreement(study: Study, readings: Sequence[Row]) -> Iterator[Estimate]:
    """Estimate Cohen's kappa of pairs of readers with its mean, and of readers with themselves."""
    code = {name: i for i, name in enumerate(study.plan.diagnoses)}
    counted = [row for row in readings if row["kind"] == CASE]
    for arm in study.plan.arms:
        for stage in arm.stages:
            answers = {
                reader: {
                    row["slide"]: code[row[DIAGNOSIS]]
                    for row in counted
                    if (row["arm"], row["stage"], row["reader"]) == (arm.name, stage, reader)
                }
                for reader in study.readers
            }
            pairs = {f"{a} and {b}": (answers[a], answers[b]) for a, b in combinations(study.readers, 2)}
            yield from _kappas(study.cases, "kappa", arm.name, stage, pairs)
    first = {(row["reader"], row["position"]): row for row in counted if row["last"]}
    twice: dict[str, tuple[dict[str, int], dict[str, int]]] = {name: ({}, {}) for name in study.readers}
    for row in readings:
        if row["kind"] == REPEAT and row["last"] and (row["reader"], row["repeats"]) in first:
            earlier, later = twice[row["reader"]]
            earlier[row["slide"]] = code[first[row["reader"], row["repeats"]][DIAGNOSIS]]
            later[row["slide"]] = code[row[DIAGNOSIS]]
    yield from _kappas(study.cases, "kappa with oneself", "all arms", LAST, twice)


def _kappas(
    cases: Sequence[Case],
    measure: str,
    arm: str,
    stage: str,
    pairs: dict[str, tuple[dict[str, int], dict[str, int]]],
) -> Iterator[Estimate]:
    """Estimate the kappa of each pair of answers by slide, and their mean, over the same draws."""
    measures = {}
    for name, (first, second) in pairs.items():
        both = np.array([case.slide in first and case.slide in second for case in cases], dtype=np.float64)
        codes = np.array([[answers.get(case.slide, 0) for case in cases] for answers in (first, second)])
        if both.any():
            measures[name] = _kappa(both, codes)
    kappas = list(measures.values())
    if len(kappas) > 1:
        measures[ALL] = Measure(
            lambda weights: nan_mean([each.statistic(weights) for each in kappas]),
            np.sum([each.chosen for each in kappas], axis=0),
            is_share=False,
        )
    patients = [case.patient for case in cases]
    for estimate in _estimates(arm, stage, ALL, patients, measures):
        yield replace(estimate, measure=measure, reader=estimate.measure)


def _kappa(both: Floats, codes: Ints) -> Measure:
    """Make the measure of the kappa of two answers to the cases (n,) that have both."""
    return Measure(lambda weights: kappa(weights * both, *codes), both, is_share=False)


def measure_regions(study: Study, rows: Sequence[Row]) -> Iterator[Row]:
    """Measure regions, drawn before any evidence was shown, against the scores of every method.

    Attention of the same runs is also measured, even if no arm shows it. A region marks what supports
    the reader's diagnosis, so it counts only against evidence for that class.
    """
    for case in study.cases:
        drawn = [r for r in rows if r["slide"] == case.slide and r["stage"] == BEFORE and r["drawn"]]
        for run, evidence, columns in _evidence(study, case) if drawn else ():
            for row in drawn:
                yield from _measure_region(study, row, case, run, evidence, columns)


def _measure_region(
    study: Study, row: Row, case: Case, run: str, evidence: Evidence, columns: dict[str, int]
) -> Iterator[Row]:
    if evidence.coords is None or evidence.patch_size is None:
        return
    with refuse_damage(f"readers/{row['reader']}.json: a region is damaged"):
        polygons = parse_polygons([feature["geometry"] for feature in row["drawn"]])
    marked = covered_by_polygons(polygons, evidence.coords.astype(np.float64), evidence.patch_size) >= SHARE
    about = {key: row[key] for key in ("reader", "slide", "patient", "label", "arm", DIAGNOSIS, "right")}
    answer = case.answers[run]
    for method, column in columns.items():
        target = name_target(evidence.columns[column]["target"], study.classes)
        explained = supported_class(target, study.classes)
        yield {
            **about,
            "model_right": int(answer.is_right(case.label)),
            "run": run,
            "method": method,
            "target": target,
            "counted": int(row[DIAGNOSIS] == explained),
            "patches": evidence.n,
            "marked": int(marked.sum()),
            **score_regions(marked, evidence.scores[column]),
        }


def _evidence(study: Study, case: Case) -> Iterator[tuple[str, Evidence, dict[str, int]]]:
    """Yield the evidence of each run of the arms, with the columns of the methods to compare."""
    for run in dict.fromkeys(study.run_of(arm) for arm in study.plan.arms if arm.method is not None):
        evidence = study.evidence(case, run)
        arms = [arm for arm in study.plan.arms if arm.method is not None and study.run_of(arm) == run]
        methods = [str(arm.method) for arm in arms]
        columns = {
            arm.name if methods.count(method) > 1 else method: study.column(evidence, case, arm)
            for arm, method in zip(arms, methods, strict=True)
        }
        attention = _attention(study, evidence, case, arms[0])
        if ATTENTION not in columns and attention is not None:
            columns[ATTENTION] = attention
        yield run, evidence, columns


def _attention(study: Study, evidence: Evidence, case: Case, arm: Arm) -> int | None:
    """Find attention for the predicted class, else for the arm's target; None if the run has neither."""
    for target in ("predicted", arm.target):
        with suppress(InputError):
            return study.column(
                evidence, case, arm.model_copy(update={"method": ATTENTION, "target": target})
            )
    return None


def _by_method(regions: Sequence[Row]) -> dict[str, list[Row]]:
    """Group the regions that count by method, or by run and method if there are several runs."""
    several = len({row["run"] for row in regions}) > 1
    methods: dict[str, list[Row]] = {}
    for row in regions:
        if row["counted"] and np.isfinite(row["auroc"]):
            methods.setdefault(f"{row['run']}: {row['method']}" if several else row["method"], []).append(row)
    return methods


def _region_means(regions: Sequence[Row]) -> Iterator[Estimate]:
    for method, own in _by_method(regions).items():
        for reader in (ALL, *dict.fromkeys(row["reader"] for row in own)):
            rows = [row for row in own if reader in (ALL, row["reader"])]
            measures = {
                f"region {name}": _mean(_column(rows, name), is_share=name == POINTING)
                for name in (*REGION_MEASURES, CHANCE)
            }
            yield from _estimates(method, BEFORE, reader, _patients(rows), measures)


def _times(study: Study, rows: Sequence[Row]) -> Iterator[Estimate]:
    for arm, stage, reader, group in _cells(study, rows):
        middle = partial(median, values=_column(group, "seconds"))
        seconds = Measure(middle, np.ones(len(group)), is_share=False)
        yield from _estimates(arm.name, stage, reader, _patients(group), {"seconds": seconds})


def _answers(study: Study, rows: Sequence[Row]) -> Iterator[Estimate]:
    """Estimate the mean of each scale, and the share of yes."""
    for question in study.plan.questions:
        if question.kind not in ("scale", "yes-no"):
            continue
        for arm, stage, reader, group in _cells(study, rows):
            answered = [row for row in group if row[question.id] is not None]
            if not answered:
                continue
            values = np.array([row[question.id] == "yes" for row in answered], dtype=np.float64)
            if question.kind == "scale":
                values = _column(answered, question.id)
            measures = {f"answer {question.id}": _mean(values, is_share=question.kind == "yes-no")}
            yield from _estimates(arm.name, stage, reader, _patients(answered), measures)


def _tests(study: Study, rows: Sequence[Row], regions: Sequence[Row]) -> list[Test]:
    """Test stages, arms, and methods against chance and attention, with Holm's correction in each family."""
    tests = []
    for family in (_stage_tests(study, rows), _arm_tests(study, rows), _region_tests(regions)):
        tests_of_family = list(family)
        corrected = holm([test.p for test in tests_of_family]).tolist()
        tests += [replace(test, p_holm=p) for test, p in zip(tests_of_family, corrected, strict=True)]
    return tests


def _stage_tests(study: Study, rows: Sequence[Row]) -> Iterator[Test]:
    for arm, stage, reader, group in _cells(study, rows):
        if stage == AFTER and reader == ALL:
            gain = _column(group, "right") - _right_before(rows, group)
            after, before = f"{arm.name}, after", f"{arm.name}, before"
            yield from _paired("accuracy", after, before, gain, _patients(group))


def _arm_tests(study: Study, rows: Sequence[Row]) -> Iterator[Test]:
    """Test arms against each other, paired if every case is read in each; seconds are of all stages."""
    last = _total_times(rows)
    for measure, name in (("accuracy", "right"), ("seconds", "seconds")):
        values = _case_means(study, last, name)
        for first, second in combinations(values, 2):
            if study.plan.design == "split":
                yield from _unpaired(study, measure, second, first, last, name)
                continue
            gap = values[second] - values[first]
            both = np.isfinite(gap)
            patients = [case.patient for case, in_both in zip(study.cases, both, strict=True) if in_both]
            yield from _paired(measure, second, first, gap[both], patients)


def _region_tests(regions: Sequence[Row]) -> Iterator[Test]:
    methods = _by_method(regions)
    for name, group in methods.items():
        yield from _paired("region auroc", name, CHANCE, _column(group, "auroc") - 0.5, _patients(group))
        for measure in REGION_MEASURES[1:]:
            yield _against_chance(measure, name, group)
    for name, group in methods.items():
        run, _, method = name.rpartition(": ")
        rival = f"{run}: {ATTENTION}" if run else ATTENTION
        if method == ATTENTION or rival not in methods:
            continue
        key = {(row["reader"], row["slide"], row["arm"]): row for row in methods[rival]}
        both = [(row, key[k]) for row in group if (k := (row["reader"], row["slide"], row["arm"])) in key]
        for measure in REGION_MEASURES:
            gap = np.array([row[measure] - other[measure] for row, other in both])
            yield from _paired(f"region {measure}", name, rival, gap, _patients(row for row, _ in both))


def _paired(measure: str, first: str, second: str, gap: Floats, patients: list[str]) -> Iterator[Test]:
    """Test paired differences (n,), if there are any, by sign flips of whole patients."""
    if not len(gap):
        return
    n = len(set(patients))
    difference = _claimed(bootstrap_mean(gap, units=patients, draws=DRAWS, seed=SEED), n)
    p = float("nan")  # one patient allows no test
    if n > 1:
        alike = not unit_means(gap, patients).any()
        p = 1.0 if alike else sign_flip_p(gap, units=patients, rng=np.random.default_rng(SEED))
    yield Test(measure, first, second, difference, p, p, len(gap), n)


def _unpaired(
    study: Study, measure: str, first: str, second: str, rows: Sequence[Row], name: str
) -> Iterator[Test]:
    """Test two arms with separate cases by dealing whole cases to the arms again, as the study did.

    Cases of the same stratum exchange their arms, with all their readings.
    """
    group = [row for row in rows if row["arm"] in (first, second)]
    patients = [set(_patients(row for row in group if row["arm"] == arm)) for arm in (first, second)]
    if not all(patients):
        return
    values = _column(rows, name)

    def gap(arms: Any, weights: Floats) -> Floats:
        means = [mean(weights * (arms == arm), values) for arm in (first, second)]
        return means[0] - means[1]

    null = [gap(arms, np.ones((1, len(rows)))) for arms in _deal_again(study, rows)]
    gaps = np.abs(np.concatenate(null))
    read = np.array([row["arm"] for row in rows])
    interval = bootstrap({name: partial(gap, read)}, units=_patients(rows), draws=DRAWS, seed=SEED)[name]
    p = permutation_share(abs(interval.estimate), gaps[np.isfinite(gaps)])
    interval, n = _claimed(interval, min(map(len, patients))), len(patients[0] | patients[1])
    yield Test(measure, first, second, interval, p, p, len(group), n)


def _deal_again(study: Study, rows: Sequence[Row]) -> Iterator[Any]:
    """Yield the arms of the readings (draws, n), with cases of a stratum permuted over the arms."""
    names = np.array([arm.name for arm in study.plan.arms])
    slides = list(dict.fromkeys(row["slide"] for row in rows))
    case = np.array([slides.index(row["slide"]) for row in rows])
    turn = np.array([study.readers.index(row["reader"]) for row in rows])
    first_arms = np.zeros(len(slides), dtype=np.int64)  # each case's arm for the first reader
    first_arms[case] = ([names.tolist().index(row["arm"]) for row in rows] - turn) % len(names)
    strata = {other.slide: study.stratum(other) for other in study.cases}
    rng = np.random.default_rng(SEED)
    for draws in draw_blocks(DRAWS_OF_CHANCE, len(rows)):
        dealt = np.tile(first_arms, (draws, 1))
        for stratum in sorted(set(strata.values())):
            members = np.array([strata[slide] == stratum for slide in slides])
            dealt[:, members] = rng.permuted(dealt[:, members], axis=1)
        yield names[(dealt[:, case] + turn) % len(names)]


def _against_chance(measure: str, method: str, rows: Sequence[Row]) -> Test:
    """Test hits, or Dice, against the share of the slide that was marked.

    A sign flip would be wrong, because these lie far more often on one side of chance than on the other.
    """
    values, chance, patients = _column(rows, measure), _column(rows, CHANCE), _patients(rows)
    n, expected = len(set(patients)), float(chance.mean())
    interval = bootstrap_mean(values, units=patients, draws=DRAWS, seed=SEED)
    interval = _claimed(interval, n, is_share=measure == POINTING)
    difference = Interval(interval.estimate - expected, interval.low - expected, interval.high - expected)
    p = _chance_p(values, chance, patients) if n > 1 else float("nan")
    return Test(f"region {measure}", method, CHANCE, difference, p, p, len(rows), n)


def _chance_p(values: Floats, chance: Floats, patients: list[str]) -> float:
    """Compute how often chance alone gives a mean over patients as extreme, twice the smaller side.

    All regions of a patient are hit or missed together, each with its own probability. No
    measure from 0 to 1 with these means has a wider spread, so the test is conservative for Dice.
    """
    codes = unit_codes(patients, len(values))
    weights = 1 / (np.bincount(codes)[codes] * (codes.max() + 1))
    rng = np.random.default_rng(SEED)
    null = np.concatenate(
        [
            (rng.random((draws, codes.max() + 1))[:, codes] < chance) @ weights
            for draws in draw_blocks(DRAWS_OF_CHANCE, len(values))
        ]
    )
    observed = float(values @ weights)
    return min(1.0, 2 * min(permutation_share(observed, null), permutation_share(-observed, -null)))


def _total_times(rows: Sequence[Row]) -> list[Row]:
    """Sum the seconds of each reading over its stages."""
    total: defaultdict[tuple[str, int], float] = defaultdict(float)
    for row in rows:
        total[row["reader"], row["position"]] += row["seconds"]
    return [{**row, "seconds": total[row["reader"], row["position"]]} for row in rows if row["last"]]


def _case_means(study: Study, rows: Sequence[Row], name: str) -> dict[str, Floats]:
    """Average each case over its readers, by arm; nan for cases without readings."""
    read: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        read.setdefault((row["arm"], row["slide"]), []).append(float(row[name]))
    return {
        arm.name: np.array([np.mean(read.get((arm.name, case.slide), np.nan)) for case in study.cases])
        for arm in study.plan.arms
    }


def progress(study: Study, readings: Sequence[Row]) -> list[tuple[str, int, int]]:
    """Count finished readings and all readings for each reader, without practice."""
    lines = []
    for reader in study.readers:
        worklist = readings_of(study.stored(reader))
        done = sum(row["reader"] == reader and row["last"] and row["kind"] != PRACTICE for row in readings)
        lines.append((reader, done, sum(reading.kind != PRACTICE for reading in worklist)))
    return lines
