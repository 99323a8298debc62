"""The report of a reading study: one HTML page, and tables that R and Python read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from xmil.core.durable import write_text
from xmil.core.errors import InputError
from xmil.core.explanation import card_of
from xmil.core.text import counted
from xmil.evaluate.statistics import ALPHA, FEWEST, SMALLEST, Interval, why_no_interval
from xmil.heatmaps.pages import Html, bullets, join, page, small, table, tag
from xmil.storage import open_folder, write_table
from xmil.viewer.study.analysis import ALL, CHANCE, Estimate, Findings, Test, analyse, progress
from xmil.viewer.study.plan import AFTER, BEFORE, sample_size
from xmil.viewer.study.readings import Study

REPORT, PAGE = "report", "report.html"
NO_VALUE = "-"
REGIONS = (  # the columns of the tables
    *("reader", "slide", "patient", "label", "arm", "diagnosis", "right", "model_right", "run", "method"),
    *("target", "counted", "patches", "marked", "auroc", "dice", "pointing", "chance"),
)
ESTIMATES = ("measure", "arm", "stage", "reader", "estimate", "low", "high", "n", "patients")
TESTS = ("measure", "first", "second", "difference", "low", "high", "p", "p_holm", "n", "patients")
STYLE = """
svg.plot { width: 100%; max-width: 38rem; height: auto; }
svg.plot text { fill: currentColor; font-size: 13px; }
svg.plot .axis { stroke: var(--line); } svg.plot .range { stroke: var(--dim); stroke-width: 2; }
svg.plot .dim { fill: var(--dim); } svg.plot circle { fill: currentColor; }
svg.plot circle.hollow { fill: Canvas; stroke: currentColor; stroke-width: 2; }
td:not(:first-child) { white-space: nowrap; }
.lead { font-size: 1.05rem; } .lead li { margin: .35rem 0; }
"""


def write_report(study: Study, out: str | PathLike[str] | None = None) -> Path:
    """Analyse a study, and write report.html and its tables; return the folder."""
    findings = analyse(study)
    if not findings.readings:
        raise InputError(f"{study.folder}: there is nothing to report, because no answer is committed yet.")
    folder = Path(out) if out is not None else study.folder / REPORT
    settings = {"study": str(study.folder.resolve())}
    with open_folder(folder, "study report", settings, compared=False):
        readings = [name for name in findings.readings[0] if name != "drawn"]
        _write_rows(folder / "readings.csv", readings, findings.readings)
        _write_rows(folder / "regions.csv", REGIONS, findings.regions)
        estimates = ({**vars(e), **vars(e.value)} for e in findings.estimates)
        _write_rows(folder / "estimates.csv", ESTIMATES, estimates)
        tests = (
            {**vars(t), **vars(t.difference), "difference": t.difference.estimate} for t in findings.tests
        )
        _write_rows(folder / "tests.csv", TESTS, tests)
        write_text(folder / PAGE, report_page(findings))
    return folder


def _write_rows(path: Path, names: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    write_table(path, names, ([_cell(row[name]) for name in names] for row in rows))


def _cell(value: object) -> object:
    """Convert to a cell of a table, empty for an unknown number, which R reads as NA."""
    return None if isinstance(value, float) and not np.isfinite(value) else value


def report_page(findings: Findings) -> str:
    """Make the report as one self-contained page."""
    study = findings.study
    lines = progress(study, findings.readings)
    unfinished = [reader for reader, done, of in lines if done < of]
    n = len({case.patient for case in study.cases})
    parts = [
        tag("h1", study.plan.title),
        small(
            f"{counted(len(study.cases), 'case')} of {counted(n, 'patient')}, "
            f"{counted(len(study.readers), 'reader')}, {counted(len(study.plan.arms), 'arm')} "
            f"({study.plan.design})."
        ),
        unfinished
        and tag(
            "p", f"Not all readings are done: {', '.join(unfinished)}. Figures will change.", kind="marked"
        ),
        tag("ul", *(tag("li", line) for line in _in_short(findings)), kind="lead"),
        *_accuracy(findings),
        *_reliance(findings),
        *_agreement(findings),
        *_regions(findings),
        *_time(findings),
        *_tests(findings),
        *_made(findings, lines),
    ]
    return page(f"{study.plan.title}: report", *(part for part in parts if part), style=STYLE)


def _in_short(findings: Findings) -> Iterator[Html]:
    """Write the main results."""
    for arm in findings.study.plan.arms:
        if AFTER in arm.stages:
            before, after = (findings.find("accuracy", arm.name, stage) for stage in (BEFORE, AFTER))
            test = next((t for t in findings.tests if t.first == f"{arm.name}, after"), None)
            if before and after and test:
                yield join(
                    [
                        tag("b", _title(arm.name)), ": ", _percent(before.value.estimate),
                        " right on tissue alone, ", _percent(after.value.estimate),
                        f" afterwards ({_judged(test)}).",
                    ]
                )  # fmt: skip
            pulled = findings.find("over-reliance", arm.name, AFTER)
            if pulled is not None:
                yield join(
                    [
                        tag("b", _title(arm.name)), ": when the model was wrong and the reader right, the "
                        f"reader followed it in {_in_words(pulled)} of {counted(pulled.n, 'reading')}.",
                    ]
                )  # fmt: skip
    for test in findings.tests:
        if test.measure == "region auroc" and test.second == CHANCE:
            value = findings.find("region auroc", test.first, BEFORE)
            if value is not None:
                yield join(
                    [
                        tag("b", _title(test.first)), " against readers' regions: AUROC ",
                        f"{_in_words(value, plain=True)}; {_beside_chance(test)}.",
                    ]
                )  # fmt: skip


def _title(name: str) -> str:
    """Write the title of an arm or method, with its run and stage."""
    run, colon, rest = name.rpartition(": ")
    method, comma, stage = rest.partition(", ")
    return run + colon + card_of(method).title + comma + stage


def _judged(test: Test) -> str:
    if not np.isfinite(test.p_holm):
        return "too few patients to test"
    sure = test.p_holm < ALPHA and abs(test.difference.estimate) >= SMALLEST
    change = "a change" if sure else "no clear change"
    points = test.difference.text("+.3g", scale=100)
    return f"{change}: {points} percentage points, p = {_p(test.p_holm)}"


def _beside_chance(test: Test) -> str:
    """Write whether a measure is better or worse than chance, if the test shows it."""
    if not np.isfinite(test.p_holm):
        return "too few patients to test"
    side = "above chance" if test.difference.estimate > 0 else "below chance"
    return f"{side if test.p_holm < ALPHA else 'cannot be told apart from chance'} (p = {_p(test.p_holm)})"


def _in_words(estimate: Estimate, *, plain: bool = False) -> str:
    """Write an estimate with its interval, or why there is none."""
    few = why_no_interval(estimate.patients, "patient") or "no interval: the patients are all alike"
    return _interval(estimate.value, plain=plain).replace("[no interval]", f"({few})")


def _accuracy(findings: Findings) -> Iterator[Html]:
    study = findings.study
    yield tag("h2", "Right answers")
    yield small(
        "Before: tissue alone; after: with what the arm shows. "
        f"Intervals are 95 %, from draws of the patients of each figure. Fewer than {FEWEST} patients get "
        "none. If all patients are alike, shares get the exact interval and other measures none. "
        "Rows below an arm are its readers."
    )
    yield _plot(study, [e for e in findings.estimates if e.measure == "accuracy" and e.reader == ALL])
    measures = ["accuracy"]
    for name in study.plan.positive:
        measures += [f"sensitivity {name}", f"specificity {name}"]
    rows = []
    for arm in study.plan.arms:
        for stage in arm.stages:
            for reader in (ALL, *study.readers):
                values = [findings.find(measure, arm.name, stage, reader) for measure in measures]
                if values[0] is not None:
                    named = _row_name(_place(study, arm.name, stage), reader)
                    rows.append([named, values[0].n, *map(_share, values)])
    yield table(rows, head=["arm", "readings", *measures])


def _row_name(name: str, reader: str) -> str:
    """Name a row: the arm or method, or a reader in the rows below it."""
    return name if reader == ALL else tag("span", reader, kind="small")


def _plot(study: Study, estimates: Sequence[Estimate]) -> Html:
    """Plot accuracies with their intervals, a line each; hollow before, filled after."""
    names = [_place(study, e.arm, e.stage) for e in estimates]
    height, left, width = 30 * len(estimates) + 34, 24 + 7 * max(map(len, names), default=0), 300

    def at(share: float) -> str:
        return f"{left + width * share:.1f}"

    parts = []
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(tag("line", kind="axis", x1=at(tick), x2=at(tick), y1="6", y2=str(height - 24)))
        words = {"text-anchor": "middle"}
        parts.append(tag("text", f"{100 * tick:.0f} %", kind="dim", x=at(tick), y=str(height - 6), **words))
    for i, e in enumerate(estimates):
        y, value = str(22 + 30 * i), e.value
        parts.append(tag("text", names[i], x="0", y=str(26 + 30 * i)))
        if np.isfinite(value.low):
            parts.append(tag("line", kind="range", x1=at(value.low), x2=at(value.high), y1=y, y2=y))
        look = "hollow" if e.stage == BEFORE else ""
        parts.append(tag("circle", kind=look, cx=at(value.estimate), cy=y, r="5"))
    about = {"aria-label": "Share of right answers by arm and stage, with intervals"}
    box = f"0 0 {left + width + 40} {height}"
    return tag("figure", tag("svg", *parts, kind="plot", viewBox=box, role="img", **about))


def _reliance(findings: Findings) -> Iterator[Html]:
    rows = []
    for arm in findings.study.plan.arms:
        for reader in (ALL, *findings.study.readers):
            pulled, saved = (
                findings.find(m, arm.name, AFTER, reader) for m in ("over-reliance", "correction")
            )
            if pulled or saved:
                cells = [cell for one in (pulled, saved) for cell in ((one.n if one else 0), _share(one))]
                rows.append([_row_name(_title(arm.name), reader), *cells])
    yield tag("h2", "Reliance on the model")
    yield small(
        "Over-reliance: the model was wrong, the reader right before seeing it, and changed to the model's "
        "answer. Correction: the model was right, the reader wrong before, and changed to it. Arms that do "
        "not show the model's answer allow neither."
    )
    head = ["arm", "model wrong, reader right", "over-reliance", "model right, reader wrong", "correction"]
    yield table(rows, head=head) if rows else tag("p", "No arm shows the model's answer.")


def _agreement(findings: Findings) -> Iterator[Html]:
    yield tag("h2", "Agreement between and within readers")
    yield small("Cohen's kappa: 0 is agreement by chance, 1 is perfect agreement.")
    rows = []
    for e in findings.estimates:  # within readers last
        if e.measure in ("kappa", "kappa with oneself"):
            twice = e.measure != "kappa"
            place = "the same case twice" if twice else _place(findings.study, e.arm, e.stage)
            readers = "mean" if e.reader == ALL else e.reader
            rows.append([place, readers, e.n, _interval(e.value, plain=True)])
    head = ["arm", "readers", "cases read by both", "kappa"]
    yield table(rows, head=head) if rows else tag("p", "There is one reader, and no repeats.")


def _regions(findings: Findings) -> Iterator[Html]:
    rows = []
    for e in (e for e in findings.estimates if e.measure == "region auroc"):
        others = [
            findings.find(f"region {m}", e.arm, BEFORE, e.reader) for m in ("dice", "pointing", "chance")
        ]
        named, auroc = _row_name(_title(e.arm), e.reader), _interval(e.value, plain=True)
        rows.append([named, e.n, auroc, *map(_share, others)])
    left_out = {(r["reader"], r["slide"], r["arm"]) for r in findings.regions if not r["counted"]}
    if not rows and not left_out:
        return
    yield tag("h2", "Readers' regions against the evidence")
    yield small(
        "Regions drawn before any evidence, against the scores of their patches. AUROC: 0.5 is chance. "
        "Dice compares the region with the same number of highest-scored patches; pointing asks whether the "
        "highest one lies in it. By chance, both equal the share of the slide that was marked."
    )
    if left_out:
        yield small(
            f"Regions of {counted(len(left_out), 'reading')} are left out: the reader's diagnosis was "
            "not the class that the evidence is for (counted = 0 in regions.csv)."
        )
    if rows:
        yield table(rows, head=["method", "readings", "AUROC", "Dice", "pointing", "chance"])


def _time(findings: Findings) -> Iterator[Html]:
    study = findings.study
    questions = [q for q in study.plan.questions if q.kind in ("scale", "yes-no")]
    rows = []
    for arm in study.plan.arms:
        for stage in arm.stages:
            seconds = findings.find("seconds", arm.name, stage)
            if seconds is None:
                continue
            cells: list[object] = []
            for question in questions:
                value = findings.find(f"answer {question.id}", arm.name, stage)
                scale = NO_VALUE if value is None else value.value.text(".1f", otherwise="")
                cells.append(_share(value) if question.kind == "yes-no" else scale)
            rows.append([_place(study, arm.name, stage), seconds.value.text(".1f", otherwise=""), *cells])
    yield tag("h2", "Time and further answers")
    yield small("Median seconds at each stage of the case; mean of scales, share of yes.")
    yield table(rows, head=["arm", "seconds", *(question.text for question in questions)])


def _tests(findings: Findings) -> Iterator[Html]:
    split = "Arms have separate cases, so they are compared unpaired, by dealing whole cases again. "
    split = split if findings.study.plan.design == "split" else ""
    yield tag("h2", "Tests")
    yield small(
        "Paired, with patients as the unit: each counts once, with the mean of its readings. p is from a "
        "sign-flip test, corrected by Holm over the tests of the same kind. "
        f"{split}Seconds are the mean over readings of all stages together. Dice and pointing are tested "
        "against chance by simulation: all regions of a patient are hit or missed together, with the share "
        "of the slide that was marked as probability."
    )
    rows = []
    for t in findings.tests:
        comparison = f"{_title(t.first)} minus {_title(t.second)}"
        measure = "seconds, all stages together" if t.measure == "seconds" else t.measure
        rows.append([measure, comparison, t.difference.text("+.3g"), _p(t.p), _p(t.p_holm), t.patients])
    yield table(rows, head=["measure", "comparison", "difference", "p", "p (Holm)", "patients"])


def _made(findings: Findings, lines: Sequence[tuple[str, int, int]]) -> Iterator[Html]:
    study = findings.study
    yield tag("h2", "How it was made")
    yield table([[r, done, of] for r, done, of in lines], head=["reader", "readings done", "of"])
    arms = [
        join([tag("b", _title(arm.name)), ": ", "tissue alone" if AFTER not in arm.stages else ", ".join(
            [*([f"{_title(arm.method)} of {study.run_of(arm)} for {arm.target}"] if arm.method else []),
             *(["the model's prediction"] if arm.prediction else [])])])
        for arm in study.plan.arms
    ]  # fmt: skip
    washout = f"; {study.plan.washout_days:g} days between them" if study.plan.periods > 1 else ""
    yield bullets(
        [
            *arms,
            f"{counted(study.plan.periods, 'period')}{washout}; {counted(study.plan.repeats, 'case')} "
            f"repeated, {counted(len(study.practice), 'practice case')}; "
            f"made {study.made[:10]}.",
            sample_size(study.plan, len({case.patient for case in study.cases})),
            "Label, prediction, evidence and arm were not sent to the page before the first answer was "
            "committed.",
            "readings.csv has a row for each committed answer, regions.csv for each region and method; "
            "estimates.csv and tests.csv have the figures of this page.",
        ]
    )


def _place(study: Study, arm: str, stage: str) -> str:
    """Write an arm, with its stage if it has two."""
    has_two = any(other.name == arm and AFTER in other.stages for other in study.plan.arms)
    return f"{_title(arm)}, {stage}" if has_two else _title(arm)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if np.isfinite(share) else NO_VALUE


def _interval(value: Interval, *, plain: bool = False) -> str:
    """Write an estimate with its bounds, in percent unless plain."""
    if not np.isfinite(value.estimate):
        return NO_VALUE
    return value.text(".2f") if plain else value.text(".0f", scale=100, unit=" %")


def _share(estimate: Estimate | None) -> str:
    return NO_VALUE if estimate is None else _interval(estimate.value)


def _p(p: float) -> str:
    return NO_VALUE if not np.isfinite(p) else "< 0.001" if p < 0.001 else f"{p:.3f}"
