"""What a reading study found: accuracy, agreement, over-reliance, regions against evidence, time, and tests.

Intervals and tests are over patients, drawn and flipped with all their cases. Practice does not count, and
repeats only for the agreement of readers with themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from xmil.core.errors import refuse_damage
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
from xmil.viewer.study.readings import CASE, PRACTICE, REPEAT, Case, Study, find_column

DRAWS, DRAWS_OF_CHANCE, SEED = 2000, 5000, 0
ALL = "all readers"
LAST = "last"  # the stage after which nothing more is shown
ATTENTION = "attention"
SHARE = 0.5  # of a patch that a region must cover to mark it
POINTING = "pointing"
CHANCE = "chance"
REGION_MEASURES = ("auroc", "dice", POINTING)
Row = dict[str, Any]


@dataclass(frozen=True)
class Estimate:
    """A measure with its interval over patients: of a reader or all of them, in an arm and a stage.

    `n` readings of `patients` patients are what it is a share or a mean of.
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
    """A comparison with patients as the unit: the mean difference, and a test of it."""

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
    """All that a study found, and the tables it was found in."""

    study: Study
    readings: list[Row]
    regions: list[Row]
    estimates: list[Estimate]
    tests: list[Test]

    def find(self, measure: str, arm: str, stage: str, reader: str = ALL) -> Estimate | None:
        """An estimate by its name."""
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
    """A row for each committed stage of each reading of each reader, those for practice among them."""
    for reader in study.readers:
        stored = study.stored(reader)
        for reading, stages in zip(study.worklist(stored), stored["readings"], strict=False):
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
    """The rows of each arm, stage and reader, and of all readers; those without any are left out."""
    for arm in study.plan.arms:
        for stage in arm.stages:
            here = [row for row in rows if (row["arm"], row["stage"]) == (arm.name, stage)]
            for reader in (ALL, *study.readers):
                if own := [row for row in here if reader in (ALL, row["reader"])]:
                    yield arm, stage, reader, own


def _column(rows: Iterable[Row], name: str) -> Floats:
    """A column as numbers; nan where there is none."""
    return np.array([np.nan if row[name] is None else row[name] for row in rows], dtype=np.float64)


class Measure(NamedTuple):
    """A statistic, the rows (n,) that it is of, and whether it is a share."""

    statistic: Statistic
    chosen: Floats
    is_share: bool = True


def _estimates(
    arm: str, stage: str, reader: str, units: Sequence[str], measures: dict[str, Measure]
) -> Iterator[Estimate]:
    """Measures over rows of these patients with their intervals, each with the rows that it is of."""
    measures = {name: measure for name, measure in measures.items() if measure.chosen.any()}
    if not measures:
        return
    statistics = {name: measure.statistic for name, measure in measures.items()}
    for name, value in bootstrap(statistics, units=units, draws=DRAWS, seed=SEED).items():
        chosen = measures[name].chosen
        patients = len({unit for unit, own in zip(units, chosen, strict=True) if own})
        value = _claimed(value, patients, is_share=measures[name].is_share)
        yield Estimate(name, arm, stage, reader, value, int(chosen.sum()), patients)


def _patients(rows: Iterable[Row]) -> list[str]:
    return [row["patient"] for row in rows]


def _claimed(value: Interval, patients: int, *, is_share: bool = False) -> Interval:
    """The interval that so many patients allow: few have none.

    Patients who are all alike vary in no draw: a share then has the exact interval, another measure none.
    """
    if patients >= FEWEST and (value.low < value.high or not value.exists):
        return value
    if patients >= FEWEST and is_share:
        return exact_share(value.estimate, patients)
    return Interval(value.estimate, float("nan"), float("nan"))


def _mean(values: Floats, *, is_share: bool = True) -> Measure:
    """The mean of the values (n,) of all rows."""
    return Measure(partial(mean, values=values), np.ones(len(values)), is_share)


def _among(chosen: Floats, values: Floats) -> Measure:
    """The share of the rows that are chosen (n,)."""
    return Measure(lambda weights: mean(weights * chosen, values), chosen)


def _performance(study: Study, rows: Sequence[Row]) -> Iterator[Estimate]:
    """Accuracy, and for each positive class sensitivity and specificity."""
    for arm, stage, reader, own in _cells(study, rows):
        right = _column(own, "right")
        measures = {"accuracy": _mean(right)}
        for name in study.plan.positive:
            ill = np.array([row["label"] == name for row in own], dtype=np.float64)
            called = np.array([row[DIAGNOSIS] == name for row in own], dtype=np.float64)
            measures[f"sensitivity {name}"] = _among(ill, called)
            measures[f"specificity {name}"] = _among(1 - ill, 1 - called)
        yield from _estimates(arm.name, stage, reader, _patients(own), measures)


def _right_before(rows: Sequence[Row], after: Sequence[Row]) -> Floats:
    """Whether the first answers to the readings of these second ones were right."""
    right = {(row["reader"], row["position"]): row["right"] for row in rows if row["stage"] == BEFORE}
    return np.array([right[row["reader"], row["position"]] for row in after], dtype=np.float64)


def _reliance(study: Study, rows: Sequence[Row]) -> Iterator[Estimate]:
    """How often a wrong model pulls a right reader over, and a right model corrects a wrong reader.

    Only an arm that shows the model's answer can do either.
    """
    for arm, stage, reader, own in _cells(study, rows):
        if arm.prediction and stage == AFTER:
            first, model = _right_before(rows, own), _column(own, "model_right")
            follows = np.array([row[DIAGNOSIS] == row["predicted"] for row in own], dtype=np.float64)
            led, wrong = first * (1 - model), (1 - first) * model
            measures = {"over-reliance": _among(led, follows), "correction": _among(wrong, follows)}
            yield from _estimates(arm.name, stage, reader, _patients(own), measures)


def _agreement(study: Study, readings: Sequence[Row]) -> Iterator[Estimate]:
    """Cohen's kappa of pairs of readers with its mean over pairs, and of readers with themselves."""
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
    """The kappa of each pair of answers by slide, and their mean; the same patients are drawn for all."""
    measures = {}
    for name, (one, other) in pairs.items():
        both = np.array([case.slide in one and case.slide in other for case in cases], dtype=np.float64)
        codes = np.array([[own.get(case.slide, 0) for case in cases] for own in (one, other)])
        if both.any():
            statistic = partial(_kappa_among, both=both, codes=codes)
            measures[name] = Measure(statistic, both, is_share=False)
    every = list(measures.values())
    if len(every) > 1:
        measures[ALL] = Measure(
            lambda weights: nan_mean([one.statistic(weights) for one in every]),
            np.sum([one.chosen for one in every], axis=0),
            is_share=False,
        )
    patients = [case.patient for case in cases]
    for estimate in _estimates(arm, stage, ALL, patients, measures):
        yield replace(estimate, measure=measure, reader=estimate.measure)


def _kappa_among(weights: Floats, *, both: Floats, codes: Ints) -> Floats:
    return kappa(weights * both, *codes)


def measure_regions(study: Study, rows: Sequence[Row]) -> Iterator[Row]:
    """Regions drawn before any evidence was seen, against the scores of every method of the study.

    Attention of the same runs is measured, too, whether or not an arm shows it. A region says what decides
    for the reader's diagnosis: it counts only against evidence for that class.
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
        target = evidence.columns[column]["target"]
        explained = target if target in study.classes else answer.predicted
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
    """The evidence of each run of the arms, with the column of each method to compare."""
    for run in dict.fromkeys(study.run_of(arm) for arm in study.plan.arms if arm.method is not None):
        evidence = study.evidence(case, run)
        arms = [arm for arm in study.plan.arms if arm.method is not None and study.run_of(arm) == run]
        predicted = case.answers[run].predicted
        methods = [str(arm.method) for arm in arms]
        columns = {
            arm.name if methods.count(method) > 1 else method: find_column(
                evidence, arm, predicted, case.slide
            )
            for arm, method in zip(arms, methods, strict=True)
        }
        if ATTENTION not in columns:
            other = arms[0].model_copy(update={"method": ATTENTION, "target": "predicted"})
            if any(column["method"] == ATTENTION for column in evidence.columns):
                columns[ATTENTION] = find_column(evidence, other, predicted, case.slide)
        yield run, evidence, columns


def _by_method(regions: Sequence[Row]) -> dict[str, list[Row]]:
    """The measured regions of each method that count; of several runs, each has its name."""
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
    for arm, stage, reader, own in _cells(study, rows):
        middle = partial(median, values=_column(own, "seconds"))
        seconds = Measure(middle, np.ones(len(own)), is_share=False)
        yield from _estimates(arm.name, stage, reader, _patients(own), {"seconds": seconds})


def _answers(study: Study, rows: Sequence[Row]) -> Iterator[Estimate]:
    """The mean of each scale, and the share of yes."""
    for question in study.plan.questions:
        if question.kind not in ("scale", "yes-no"):
            continue
        for arm, stage, reader, own in _cells(study, rows):
            answered = [row for row in own if row[question.id] is not None]
            if not answered:
                continue
            values = np.array([row[question.id] == "yes" for row in answered], dtype=np.float64)
            if question.kind == "scale":
                values = _column(answered, question.id)
            measures = {f"answer {question.id}": _mean(values, is_share=question.kind == "yes-no")}
            yield from _estimates(arm.name, stage, reader, _patients(answered), measures)


def _tests(study: Study, rows: Sequence[Row], regions: Sequence[Row]) -> list[Test]:
    """Stages of an arm, arms, and methods against chance and attention; Holm's correction over each kind."""
    tests = []
    for family in (_stage_tests(study, rows), _arm_tests(study, rows), _region_tests(regions)):
        own = list(family)
        corrected = holm([test.p for test in own]).tolist()
        tests += [replace(test, p_holm=p) for test, p in zip(own, corrected, strict=True)]
    return tests


def _stage_tests(study: Study, rows: Sequence[Row]) -> Iterator[Test]:
    for arm, stage, reader, own in _cells(study, rows):
        if stage == AFTER and reader == ALL:
            gain = _column(own, "right") - _right_before(rows, own)
            after, before = f"{arm.name}, after", f"{arm.name}, before"
            yield from _paired("accuracy", after, before, gain, _patients(own))


def _arm_tests(study: Study, rows: Sequence[Row]) -> Iterator[Test]:
    """Arms against each other, paired where every case is read under each; seconds are of all stages."""
    last = _whole_times(rows)
    for measure, name in (("accuracy", "right"), ("seconds", "seconds")):
        values = _case_means(study, last, name)
        for one, other in combinations(values, 2):
            if study.plan.design == "split":
                yield from _unpaired(study, measure, other, one, last, name)
                continue
            gap = values[other] - values[one]
            both = np.isfinite(gap)
            patients = [case.patient for case, own in zip(study.cases, both, strict=True) if own]
            yield from _paired(measure, other, one, gap[both], patients)


def _region_tests(regions: Sequence[Row]) -> Iterator[Test]:
    methods = _by_method(regions)
    for name, own in methods.items():
        yield from _paired("region auroc", name, CHANCE, _column(own, "auroc") - 0.5, _patients(own))
        for measure in REGION_MEASURES[1:]:
            yield _against_chance(measure, name, own)
    for name, own in methods.items():
        run, _, method = name.rpartition(": ")
        rival = f"{run}: {ATTENTION}" if run else ATTENTION
        if method == ATTENTION or rival not in methods:
            continue
        key = {(row["reader"], row["slide"], row["arm"]): row for row in methods[rival]}
        both = [(row, key[k]) for row in own if (k := (row["reader"], row["slide"], row["arm"])) in key]
        for measure in REGION_MEASURES:
            gap = np.array([row[measure] - other[measure] for row, other in both])
            yield from _paired(f"region {measure}", name, rival, gap, _patients(row for row, _ in both))


def _paired(measure: str, first: str, second: str, gap: Floats, patients: list[str]) -> Iterator[Test]:
    """The test of paired differences (n,), where there are any: a sign flip of whole patients."""
    if not len(gap):
        return
    n = len(set(patients))
    difference = _claimed(bootstrap_mean(gap, units=patients, draws=DRAWS, seed=SEED), n)
    p = float("nan")  # fewer than two patients cannot differ
    if n > 1:
        alike = not unit_means(gap, patients).any()
        p = 1.0 if alike else sign_flip_p(gap, units=patients, rng=np.random.default_rng(SEED))
    yield Test(measure, first, second, difference, p, p, len(gap), n)


def _unpaired(
    study: Study, measure: str, first: str, second: str, rows: Sequence[Row], name: str
) -> Iterator[Test]:
    """The test of two arms that share out the cases: deal whole cases to the arms again, as the study did.

    Cases of a label, and right or wrong, exchange their places with all their readings.
    """
    own = [row for row in rows if row["arm"] in (first, second)]
    patients = [set(_patients(row for row in own if row["arm"] == arm)) for arm in (first, second)]
    if not all(patients):
        return
    values = _column(rows, name)

    def gap(arms: Any, weights: Floats) -> Floats:
        one, other = (mean(weights * (arms == arm), values) for arm in (first, second))
        return one - other

    null = [gap(arms, np.ones((1, len(rows)))) for arms in _deal_again(study, rows)]
    drawn = np.abs(np.concatenate(null))
    read = np.array([row["arm"] for row in rows])
    interval = bootstrap({name: partial(gap, read)}, units=_patients(rows), draws=DRAWS, seed=SEED)[name]
    p = permutation_share(abs(interval.estimate), drawn[np.isfinite(drawn)])
    interval, n = _claimed(interval, min(map(len, patients))), len(patients[0] | patients[1])
    yield Test(measure, first, second, interval, p, p, len(own), n)


def _deal_again(study: Study, rows: Sequence[Row]) -> Iterator[Any]:
    """The names of the arms of the readings (draws, n), where cases of a stratum exchange their places."""
    names = np.array([arm.name for arm in study.plan.arms])
    slides = list(dict.fromkeys(row["slide"] for row in rows))
    case = np.array([slides.index(row["slide"]) for row in rows])
    turn = np.array([study.readers.index(row["reader"]) for row in rows])
    places = np.zeros(len(slides), dtype=np.int64)  # of each case: its arm for the first reader
    places[case] = ([names.tolist().index(row["arm"]) for row in rows] - turn) % len(names)
    strata = {each.slide: study.stratum(each) for each in study.cases}
    rng = np.random.default_rng(SEED)
    for some in draw_blocks(DRAWS_OF_CHANCE, len(rows)):
        dealt = np.tile(places, (some, 1))
        for stratum in sorted(set(strata.values())):
            here = np.array([strata[slide] == stratum for slide in slides])
            dealt[:, here] = rng.permuted(dealt[:, here], axis=1)
        yield names[(dealt[:, case] + turn) % len(names)]


def _against_chance(measure: str, method: str, rows: Sequence[Row]) -> Test:
    """The test of hits, or of Dice, against the share of the slide that was marked.

    These lie on one side of their chance far more often than on the other, so a sign flip would be wrong.
    """
    values, chance, patients = _column(rows, measure), _column(rows, CHANCE), _patients(rows)
    n, expected = len(set(patients)), float(chance.mean())
    interval = bootstrap_mean(values, units=patients, draws=DRAWS, seed=SEED)
    interval = _claimed(interval, n, is_share=measure == POINTING)
    difference = Interval(interval.estimate - expected, interval.low - expected, interval.high - expected)
    p = _chance_p(values, chance, patients) if n > 1 else float("nan")
    return Test(f"region {measure}", method, CHANCE, difference, p, p, len(rows), n)


def _chance_p(values: Floats, chance: Floats, patients: list[str]) -> float:
    """Test: how often chance alone gives a mean over patients as far out, twice the smaller side.

    All regions of a patient are hit or missed together, each by its chance: a sum of unequal coins. No
    measure from 0 to 1 with these means spreads wider, so it is a careful test of Dice, too.
    """
    codes = unit_codes(patients, len(values))
    weights = 1 / (np.bincount(codes)[codes] * (codes.max() + 1))
    rng = np.random.default_rng(SEED)
    null = np.concatenate(
        [
            (rng.random((some, codes.max() + 1))[:, codes] < chance) @ weights
            for some in draw_blocks(DRAWS_OF_CHANCE, len(values))
        ]
    )
    observed = float(values @ weights)
    return min(1.0, 2 * min(permutation_share(observed, null), permutation_share(-observed, -null)))


def _whole_times(rows: Sequence[Row]) -> list[Row]:
    """The readings with the time of all their stages."""
    total: dict[tuple[str, int], float] = {}
    for row in rows:
        key = (row["reader"], row["position"])
        total[key] = total.get(key, 0.0) + row["seconds"]
    return [{**row, "seconds": total[row["reader"], row["position"]]} for row in rows if row["last"]]


def _case_means(study: Study, rows: Sequence[Row], name: str) -> dict[str, Floats]:
    """For each arm a value for each case, the mean over its readers; nan where nobody read it."""
    read: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        read.setdefault((row["arm"], row["slide"]), []).append(float(row[name]))
    return {
        arm.name: np.array([np.mean(read.get((arm.name, case.slide), np.nan)) for case in study.cases])
        for arm in study.plan.arms
    }


def progress(study: Study, readings: Sequence[Row]) -> list[tuple[str, int, int]]:
    """Each reader with the readings that are finished and those of the worklist, practice aside."""
    lines = []
    for reader in study.readers:
        worklist = study.worklist(study.stored(reader))
        done = sum(row["reader"] == reader and row["last"] and row["kind"] != PRACTICE for row in readings)
        lines.append((reader, done, sum(reading.kind != PRACTICE for reading in worklist)))
    return lines
