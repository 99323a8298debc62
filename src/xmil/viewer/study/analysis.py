"""What a reading study found: accuracy, agreement, over-reliance, regions against evidence, time, and tests.

Intervals and tests are over patients, drawn and flipped with all their cases. Practice does not count, and
repeats only for the agreement of readers with themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np

from xmil.core.errors import FileError
from xmil.evaluate.marks import covered_by_polygons, parse_polygons, score_regions
from xmil.evaluate.statistics import (
    Floats,
    Interval,
    Statistic,
    bootstrap,
    bootstrap_mean,
    holm,
    kappa,
    mean,
    median,
    nan_mean,
    sign_flip_p,
    unit_means,
)
from xmil.viewer.layers import Evidence
from xmil.viewer.study.plan import AFTER, BEFORE, DIAGNOSIS
from xmil.viewer.study.readings import CASE, PRACTICE, REPEAT, Case, Study, find_column

DRAWS, SEED = 2000, 0
ALL = "all readers"
LAST = "last"  # the stage after which nothing more is shown
ATTENTION = "attention"
SHARE = 0.5  # of a patch that a region must cover to mark it
REGION_MEASURES = ("auroc", "dice", "pointing")
Row = dict[str, Any]


@dataclass(frozen=True)
class Estimate:
    """A measure with its interval over patients: of a reader or all of them, in an arm and a stage."""

    measure: str
    arm: str
    stage: str
    reader: str
    value: Interval
    n: int
    patients: int


@dataclass(frozen=True)
class Test:
    """A paired comparison with patients as the unit: the mean difference, and a sign-flip test of it."""

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
                    "run": study.run_of(arm) if arm.shows else None,
                    "stage": stage,
                    "last": stage == (AFTER if arm.shows else BEFORE),
                    "predicted": answer.predicted,
                    "model_right": int(answer.is_right(case.label)),
                    "right": int(diagnosis == case.label),
                    **{question.id: entry["answers"].get(question.id) for question in study.plan.questions},
                    "seconds": entry["seconds"],
                    "regions": len(entry["regions"]),
                    "committed": entry["committed"],
                    "drawn": entry["regions"],
                }


def _cells(study: Study, rows: Sequence[Row]) -> Iterator[tuple[str, str, str, list[Row]]]:
    """The rows of each arm, stage and reader, and of all readers; those without any are left out."""
    for arm in study.plan.arms:
        for stage in (BEFORE, AFTER) if arm.shows else (BEFORE,):
            for reader in (ALL, *study.readers):
                own = [
                    row
                    for row in rows
                    if (row["arm"], row["stage"]) == (arm.name, stage) and reader in (ALL, row["reader"])
                ]
                if own:
                    yield arm.name, stage, reader, own


def _column(rows: Iterable[Row], name: str) -> Floats:
    """A column as numbers; nan where there is none."""
    return np.array([np.nan if row[name] is None else row[name] for row in rows], dtype=np.float64)


def _estimates(
    arm: str, stage: str, reader: str, rows: Sequence[Row], statistics: dict[str, tuple[Statistic, int]]
) -> Iterator[Estimate]:
    """Measures over the rows with their intervals, each with the number of rows that it is of."""
    patients = [row["patient"] for row in rows]
    measures = {name: statistic for name, (statistic, n) in statistics.items() if n}
    if not measures:
        return
    values = bootstrap(measures, units=patients, draws=DRAWS, seed=SEED)
    for name, value in values.items():
        yield Estimate(name, arm, stage, reader, value, statistics[name][1], len(set(patients)))


def _among(chosen: Floats, values: Floats) -> Statistic:
    """The mean of the values of the rows that are chosen (n,)."""
    return lambda weights: mean(weights * chosen, values)


def _performance(study: Study, rows: Sequence[Row]) -> Iterator[Estimate]:
    """Accuracy, and for each positive class sensitivity and specificity."""
    for arm, stage, reader, own in _cells(study, rows):
        right = _column(own, "right")
        statistics: dict[str, tuple[Statistic, int]] = {"accuracy": (partial(mean, values=right), len(own))}
        for name in study.plan.positive:
            ill = np.array([row["label"] == name for row in own], dtype=np.float64)
            called = np.array([row[DIAGNOSIS] == name for row in own], dtype=np.float64)
            statistics[f"sensitivity {name}"] = (_among(ill, called), int(ill.sum()))
            statistics[f"specificity {name}"] = (_among(1 - ill, 1 - called), int((1 - ill).sum()))
        yield from _estimates(arm, stage, reader, own, statistics)


def _pairs(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    """The two stages of each reading that has both."""
    before = {(row["reader"], row["position"]): row for row in rows if row["stage"] == BEFORE}
    return [(before[row["reader"], row["position"]], row) for row in rows if row["stage"] == AFTER]


def _reliance(study: Study, rows: Sequence[Row]) -> Iterator[Estimate]:
    """How often a wrong model pulls a right reader over, and a right model corrects a wrong reader."""
    for arm in (arm.name for arm in study.plan.arms if arm.shows):
        for reader in (ALL, *study.readers):
            pairs = [
                pair for pair in _pairs(rows) if pair[1]["arm"] == arm and reader in (ALL, pair[1]["reader"])
            ]
            if not pairs:
                continue
            own = [after for _, after in pairs]
            first, model = _column([b for b, _ in pairs], "right"), _column(own, "model_right")
            follows = np.array([row[DIAGNOSIS] == row["predicted"] for row in own], dtype=np.float64)
            led, wrong = first * (1 - model), (1 - first) * model
            statistics = {
                "over-reliance": (_among(led, follows), int(led.sum())),
                "correction": (_among(wrong, follows), int(wrong.sum())),
            }
            yield from _estimates(arm, AFTER, reader, own, statistics)


def _agreement(study: Study, readings: Sequence[Row]) -> Iterator[Estimate]:
    """Cohen's kappa of pairs of readers with its mean over pairs, and of readers with themselves."""
    code = {name: i for i, name in enumerate(study.plan.diagnoses)}
    counted = [row for row in readings if row["kind"] == CASE]
    for arm in study.plan.arms:
        for stage in (BEFORE, AFTER) if arm.shows else (BEFORE,):
            said = {
                reader: {
                    row["slide"]: code[row[DIAGNOSIS]]
                    for row in counted
                    if (row["arm"], row["stage"], row["reader"]) == (arm.name, stage, reader)
                }
                for reader in study.readers
            }
            pairs = {f"{a} and {b}": (said[a], said[b]) for a, b in combinations(study.readers, 2)}
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
    statistics: dict[str, Statistic] = {}
    shared: dict[str, int] = {}
    for name, (one, other) in pairs.items():
        both = np.array([case.slide in one and case.slide in other for case in cases])
        if both.any():
            first, second = (
                np.array([answers.get(case.slide, 0) for case in cases], dtype=np.int64)
                for answers in (one, other)
            )
            statistics[name] = partial(_kappa_among, both=both.astype(np.float64), first=first, second=second)
            shared[name] = int(both.sum())
    if not statistics:
        return
    every = list(statistics.values())
    if len(every) > 1:
        statistics[ALL] = lambda weights: nan_mean([one(weights) for one in every])
        shared[ALL] = sum(shared.values())
    values = bootstrap(statistics, units=[case.patient for case in cases], draws=DRAWS, seed=SEED)
    patients = len({case.patient for case in cases})
    for name, value in values.items():
        yield Estimate(measure, arm, stage, name, value, shared[name], patients)


def _kappa_among(weights: Floats, *, both: Floats, first: Any, second: Any) -> Floats:
    return kappa(weights * both, first, second)


def measure_regions(study: Study, rows: Sequence[Row]) -> Iterator[Row]:
    """Regions drawn before any evidence was seen, against the scores of every method of the study.

    Attention of the same runs is measured, too, whether or not an arm shows it.
    """
    for case in study.cases:
        drawn = [r for r in rows if r["slide"] == case.slide and r["stage"] == BEFORE and r["drawn"]]
        for run, evidence, columns in _evidence(study, case) if drawn else ():
            for row in drawn:
                yield from _measure_region(row, case, run, evidence, columns)


def _measure_region(
    row: Row, case: Case, run: str, evidence: Evidence, columns: dict[str, int]
) -> Iterator[Row]:
    if evidence.coords is None or evidence.patch_size is None:
        return
    try:
        polygons = parse_polygons([feature["geometry"] for feature in row["drawn"]])
    except (ValueError, TypeError, LookupError) as error:
        raise FileError(f"readers/{row['reader']}.json: a region is damaged ({error}).") from None
    marked = covered_by_polygons(polygons, evidence.coords.astype(np.float64), evidence.patch_size) >= SHARE
    for method, column in columns.items():
        about = {key: row[key] for key in ("reader", "slide", "patient", "label", "arm", "right")}
        yield {
            **about,
            "model_right": int(case.answers[run].is_right(case.label)),
            "run": run,
            "method": method,
            "target": evidence.columns[column]["target"],
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
    """The measured regions of each method; of several runs, each has its name."""
    several = len({row["run"] for row in regions}) > 1
    methods: dict[str, list[Row]] = {}
    for row in regions:
        if np.isfinite(row["auroc"]):
            methods.setdefault(f"{row['run']}: {row['method']}" if several else row["method"], []).append(row)
    return methods


def _region_means(regions: Sequence[Row]) -> Iterator[Estimate]:
    for method, own in _by_method(regions).items():
        for reader in (ALL, *dict.fromkeys(row["reader"] for row in own)):
            rows = [row for row in own if reader in (ALL, row["reader"])]
            statistics: dict[str, tuple[Statistic, int]] = {
                f"region {name}": (partial(mean, values=_column(rows, name)), len(rows))
                for name in (*REGION_MEASURES, "chance")
            }
            yield from _estimates(method, BEFORE, reader, rows, statistics)


def _times(study: Study, rows: Sequence[Row]) -> Iterator[Estimate]:
    for arm, stage, reader, own in _cells(study, rows):
        seconds: dict[str, tuple[Statistic, int]] = {
            "seconds": (partial(median, values=_column(own, "seconds")), len(own))
        }
        yield from _estimates(arm, stage, reader, own, seconds)


def _answers(study: Study, rows: Sequence[Row]) -> Iterator[Estimate]:
    """The mean of each scale, and the share of yes."""
    for question in study.plan.questions:
        if question.kind not in ("scale", "yes-no"):
            continue
        for arm, stage, reader, own in _cells(study, rows):
            said = [row for row in own if row[question.id] is not None]
            if not said:
                continue
            values = np.array([row[question.id] == "yes" for row in said], dtype=np.float64)
            if question.kind == "scale":
                values = _column(said, question.id)
            yield from _estimates(
                arm, stage, reader, said, {f"answer {question.id}": (partial(mean, values=values), len(said))}
            )


def _tests(study: Study, rows: Sequence[Row], regions: Sequence[Row]) -> list[Test]:
    """Stages of an arm, arms, and methods against chance and attention; Holm's correction over each kind."""
    families: list[list[tuple[str, str, str, Floats, list[str]]]] = [[], [], []]
    shown = [arm.name for arm in study.plan.arms if arm.shows]
    for arm in shown:
        pairs = [pair for pair in _pairs(rows) if pair[1]["arm"] == arm]
        gain = np.array([after["right"] - before["right"] for before, after in pairs], dtype=np.float64)
        families[0].append(
            ("accuracy", f"{arm}, after", f"{arm}, before", gain, [a["patient"] for _, a in pairs])
        )
    last = [row for row in rows if row["last"]]
    for measure, name in (("accuracy", "right"), ("seconds", "seconds")):
        values = _case_means(study, last if name == "right" else _whole_times(rows), name)
        for one, other in combinations([arm.name for arm in study.plan.arms], 2):
            gap = values[other] - values[one]
            both = np.isfinite(gap)
            patients = [case.patient for case, own in zip(study.cases, both, strict=True) if own]
            families[1].append((measure, other, one, gap[both], patients))
    methods = _by_method(regions)
    for name, own in methods.items():
        patients = [row["patient"] for row in own]
        for measure in REGION_MEASURES:
            chance = 0.5 if measure == "auroc" else _column(own, "chance")
            families[2].append(
                (f"region {measure}", name, "chance", _column(own, measure) - chance, patients)
            )
    for name, own in methods.items():
        run, _, method = name.rpartition(": ")
        rival = f"{run}: {ATTENTION}" if run else ATTENTION
        if method == ATTENTION or rival not in methods:
            continue
        key = {(row["reader"], row["slide"], row["arm"]): row for row in methods[rival]}
        both_rows = [(row, key[k]) for row in own if (k := (row["reader"], row["slide"], row["arm"])) in key]
        patients = [row["patient"] for row, _ in both_rows]
        for measure in REGION_MEASURES:
            gap = np.array([row[measure] - other[measure] for row, other in both_rows])
            families[2].append((f"region {measure}", name, rival, gap, patients))
    return [test for family in families for test in _test_family(family)]


def _test_family(family: Sequence[tuple[str, str, str, Floats, list[str]]]) -> list[Test]:
    family = [one for one in family if len(one[3])]
    chances = [_sign_flip(gap, patients) for *_, gap, patients in family]
    return [
        Test(
            measure, first, second, bootstrap_mean(gap, units=patients, draws=DRAWS, seed=SEED),
            chance, float(corrected), len(gap), len(set(patients)),
        )
        for (measure, first, second, gap, patients), chance, corrected in zip(
            family, chances, holm(chances), strict=True
        )
    ]  # fmt: skip


def _sign_flip(gap: Floats, patients: list[str]) -> float:
    """The test; nan where fewer than two patients could differ."""
    if len(set(patients)) < 2:
        return float("nan")
    if not unit_means(gap, patients).any():
        return 1.0
    return sign_flip_p(gap, units=patients, rng=np.random.default_rng(SEED))


def _whole_times(rows: Sequence[Row]) -> list[Row]:
    """The readings with the time of all their stages."""
    total: dict[tuple[str, int], float] = {}
    for row in rows:
        key = (row["reader"], row["position"])
        total[key] = total.get(key, 0.0) + row["seconds"]
    return [{**row, "seconds": total[row["reader"], row["position"]]} for row in rows if row["last"]]


def _case_means(study: Study, rows: Sequence[Row], name: str) -> dict[str, Floats]:
    """For each arm a value for each case, the mean over its readers; nan where nobody read it."""
    values = {}
    for arm in study.plan.arms:
        own: dict[str, list[float]] = {}
        for row in rows:
            if row["arm"] == arm.name:
                own.setdefault(row["slide"], []).append(float(row[name]))
        values[arm.name] = np.array(
            [np.mean(own[c.slide]) if c.slide in own else np.nan for c in study.cases]
        )
    return values


def progress(study: Study, readings: Sequence[Row]) -> list[tuple[str, int, int]]:
    """Each reader with the readings that are finished and those of the worklist, practice aside."""
    lines = []
    for reader in study.readers:
        worklist = study.worklist(study.stored(reader))
        done = sum(row["reader"] == reader and row["last"] and row["kind"] != PRACTICE for row in readings)
        lines.append((reader, done, sum(reading.kind != PRACTICE for reading in worklist)))
    return lines
