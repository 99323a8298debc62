"""The folder of a reading study: its cases, sealed until the report, and each reader's answers.

study.json                        the plan, and the cases with label and predictions
evidence/<run>/<slide>.parquet    explanations of the runs, copied when the study was made
readers/<name>.json               a reader's worklist and answers, rewritten with every change
readers.csv                       the code of each reader, to give to them
run.json, ledger.jsonl            for `xmil verify`
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from hashlib import sha256
from os import PathLike
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from xmil._version import __version__
from xmil.core.durable import write_folder, write_text
from xmil.core.errors import FileError, InputError, XmilError, absent, refuse_damage, unknown_name
from xmil.core.ledger import opened
from xmil.core.text import counted, csv_text, is_plain, name_class, shorten
from xmil.evaluate.marks import parse_polygons
from xmil.storage import (
    Run,
    explained_run,
    make_folder,
    read_json,
    read_rows,
    seal_folder,
    write_json,
    write_run,
)
from xmil.viewer.annotations import alone
from xmil.viewer.collection import probability_in
from xmil.viewer.deepzoom import Pictures
from xmil.viewer.layers import Evidence, read_evidence
from xmil.viewer.study.plan import AFTER, BEFORE, Arm, Plan, make_plan

STUDY, READERS, EVIDENCE, CODES = "study.json", "readers", "evidence", "readers.csv"
LAYOUT = 1
LETTERS = "abcdefghjkmnpqrstuvwxyz23456789"  # of codes, without letters that look alike
CODE = 10
PRACTICE, CASE, REPEAT = "practice", "case", "repeat"
MOST = 10_000  # regions of a reading
IDENTIFIER = re.compile(r"[0-9a-zA-Z-]{1,40}")  # of what the page sends
AGAINST = "-vs-"  # between the classes of a contrast
Stored = dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """The answer of a run's model for a case."""

    predicted: str
    probability: float | None

    def is_right(self, label: str) -> bool:
        """Whether it agrees with the label."""
        return self.predicted == label


@dataclass(frozen=True)
class Case:
    """A slide to read: its patient, its label, and the answer of each run's model."""

    slide: str
    patient: str
    label: str
    answers: dict[str, Answer]
    mpp: float | None = None


@dataclass(frozen=True)
class Reading:
    """A line of a reader's worklist: a case in an arm; `repeats` is the reading that it repeats."""

    number: int
    case: int
    arm: int
    period: int = 0
    kind: str = CASE
    repeats: int | None = None


class BlindedError(XmilError):
    """A request that blinding forbids: too early, or from the wrong reader."""


class StaleError(XmilError):
    """Another window has changed this reader's answers; `stored` is the current state."""

    def __init__(self, stored: Stored) -> None:
        super().__init__("This reader continued in another window.")
        self.stored = stored


def readings_of(stored: Stored) -> list[Reading]:
    """List the readings of a reader's state in order."""
    return [Reading(**line) for line in stored["worklist"]]


def lock_answers(study: Path) -> AbstractContextManager[None]:
    """Lock out other servers of a study, and remove partial files of killed ones."""
    make_folder(study / READERS)
    return alone(study / READERS, "Answers cannot be stored in the study's folder")


class Study:
    """A study's folder. Readers identify by code, and see only what blinding allows."""

    def __init__(self, folder: Path, *, clock: Callable[[], datetime] | None = None) -> None:
        self.folder, self._clock = folder, clock or (lambda: datetime.now(UTC))
        stored = read_json(folder / STUDY)
        with refuse_damage(f"{folder / STUDY}: damaged", way="restore a copy of it"):
            if stored["layout"] != LAYOUT:
                raise FileError(f"{folder / STUDY}: has layout {stored['layout']}; update xmil.")
            self.plan = make_plan(stored["plan"], source=str(folder / STUDY))
            self._seed = int(stored["plan"]["seed"])
            self.classes = tuple(map(str, stored["classes"]))
            self.slides = Path(stored["slides"])
            self.runs = tuple(map(str, stored["runs"]))
            self.made = str(stored["made"])
            self.practice, self.cases = (
                [
                    Case(**{**case, "answers": {run: Answer(**own) for run, own in case["answers"].items()}})
                    for case in stored[kind]
                ]
                for kind in ("practice", "cases")
            )
        rows = read_rows(folder / CODES, "reader")
        self.readers = self.plan.readers
        self.codes = {reader: row.get("code", "") for reader, row in rows.items() if reader in self.readers}
        self._locks = {reader: Lock() for reader in self.readers}

    def reader(self, code: str) -> str:
        """Find the reader with a code."""
        for name, own in self.codes.items():
            if secrets.compare_digest(own.encode(), code.encode()):
                return name
        raise BlindedError("No reader has this code; ask the study's organiser.")

    def case(self, reading: Reading) -> Case:
        """The case of a reading."""
        return (self.practice if reading.kind == PRACTICE else self.cases)[reading.case]

    def arm(self, reading: Reading) -> Arm:
        """The arm of a reading."""
        return self.plan.arms[reading.arm]

    def run_of(self, arm: Arm) -> str:
        """The run whose model and evidence an arm shows."""
        return arm.run or self.runs[0]

    def evidence(self, case: Case, run: str) -> Evidence:
        """Read the evidence of a run for a case, copied when the study was made."""
        return read_evidence(self.folder / EVIDENCE / run / f"{case.slide}.parquet").at(case.mpp)

    def shown(self, case: Case, arm: Arm) -> tuple[Evidence, int]:
        """Read the evidence that an arm shows for a case, and the number of its column of scores."""
        run = self.run_of(arm)
        evidence = self.evidence(case, run)
        return evidence, self.column(evidence, case, arm)

    def column(self, evidence: Evidence, case: Case, arm: Arm) -> int:
        """Find the column of a case's evidence for an arm's method and target."""
        predicted = case.answers[self.run_of(arm)].predicted
        return find_column(evidence, arm, predicted=predicted, slide=case.slide, classes=self.classes)

    def stratum(self, case: Case) -> tuple[str, bool]:
        """The stratum of a case, by label and correctness, within which arms are dealt evenly."""
        return case.label, case.answers[self.runs[0]].is_right(case.label)

    @cached_property
    def _groups(self) -> list[int]:
        """The group of each case, dealt evenly within each stratum."""
        rng = np.random.default_rng([self._seed, 1])
        strata: dict[tuple[str, bool], list[int]] = {}
        for i, case in enumerate(self.cases):
            strata.setdefault(self.stratum(case), []).append(i)
        order = [i for key in sorted(strata) for i in rng.permutation(strata[key]).tolist()]
        groups = [0] * len(self.cases)
        for place, i in enumerate(order):
            groups[i] = place % len(self.plan.arms)
        return groups

    def deal(self, reader: str) -> list[Reading]:
        """Make a reader's worklist: practice, then each period's cases, in a random order per reader."""
        plan, arms = self.plan, len(self.plan.arms)
        offset, drawn = plan.readers.index(reader), int(sha256(reader.encode()).hexdigest()[:15], 16)
        lines: list[tuple[int, int, int, str]] = [
            (i, i % arms, 0, PRACTICE) for i in range(len(self.practice))
        ]
        for period in range(plan.periods):
            rng = np.random.default_rng([self._seed, drawn, period])
            order = [(i, CASE) for i in rng.permutation(len(self.cases)).tolist()]
            if period == 0 and plan.repeats:
                half = len(order) // 2
                for i in rng.choice(half, size=plan.repeats, replace=False).tolist():
                    place = int(rng.integers(half + 1, len(order) + 1))
                    order.insert(place, (order[i][0], REPEAT))
            lines += [(i, (self._groups[i] + offset + period) % arms, period, kind) for i, kind in order]
        first = {(i, period): n for n, (i, _, period, kind) in enumerate(lines) if kind == CASE}
        return [
            Reading(n, i, arm, period, kind, first[i, period] if kind == REPEAT else None)
            for n, (i, arm, period, kind) in enumerate(lines)
        ]

    def stored(self, reader: str) -> Stored:
        """Read a reader's state; a new worklist if there is none."""
        path = self.folder / READERS / f"{reader}.json"
        if not path.is_file() or path.is_symlink():
            worklist = [asdict(reading) for reading in self.deal(reader)]
            about = {"layout": LAYOUT, "reader": reader, "revision": 0}
            return {**about, "worklist": worklist, "readings": [], "draft": None}
        stored = read_json(path)
        with refuse_damage(f"{path}: damaged", way="restore a copy of it"):
            here = self.place(stored)  # it must fit the plan
            if here is not None:
                self.case(here[0]), self.arm(here[0])
            if not isinstance(stored["revision"], int) or not isinstance(stored["draft"], dict | None):
                raise TypeError("revision or draft")
        return stored

    def place(self, stored: Stored) -> tuple[Reading, str] | None:
        """Find a reader's current reading and stage; None at the end."""
        worklist, done = readings_of(stored), stored["readings"]
        if done and self.arm(worklist[len(done) - 1]).stages[-1] not in done[-1]:
            return worklist[len(done) - 1], AFTER
        return (worklist[len(done)], BEFORE) if len(done) < len(worklist) else None

    def opens(self, stored: Stored) -> datetime | None:
        """When a new period opens, after the washout; None if the reader may continue now."""
        here, done = self.place(stored), stored["readings"]
        if here is None or not done or here[1] == AFTER:
            return None
        worklist = readings_of(stored)
        if worklist[len(done) - 1].period == here[0].period:
            return None
        last = datetime.fromisoformat(list(done[-1].values())[-1]["committed"])
        opens = last + timedelta(days=self.plan.washout_days)
        return opens if self._clock() < opens else None

    def current(self, reader: str, number: int | None = None) -> tuple[Stored, Reading, str]:
        """Find the reading that is open to a reader; refuse others, so that nobody looks ahead or back."""
        stored = self.stored(reader)
        here, opens = self.place(stored), self.opens(stored)
        if here is None:
            raise BlindedError("All cases are read.")
        if opens is not None:
            raise BlindedError(f"The next part opens on {opens:%Y-%m-%d %H:%M} UTC.")
        if number is not None and number != here[0].number:
            raise BlindedError("This case is not open now.")
        return stored, *here

    def reading_in_sight(self, reader: str, number: int) -> Reading:
        """Find the reading whose tissue may be sent: the open one or the last, whose tiles may still load."""
        stored = self.stored(reader)
        if number == len(stored["readings"]) - 1:
            return readings_of(stored)[number]
        return self.current(reader, number)[1]

    def answer(self, reader: str, body: Any) -> Stored:
        """Store a reader's answers to the open stage, as a draft or final; return the new state."""
        if not isinstance(body, dict):
            raise InputError(
                'The body must be {"revision": 0, "number": 0, "stage": "before", "answers": {}}.'
            )
        with self._locks[reader], lock_answers(self.folder):
            stored = self.stored(reader)
            if body.get("revision") != stored["revision"]:
                raise StaleError({"revision": stored["revision"]})
            stored, reading, stage = self.current(reader)
            if (body.get("number"), body.get("stage")) != (reading.number, stage):
                raise StaleError({"revision": stored["revision"]})
            is_final = body.get("commit") is True
            entry = self._check(reading, stage, body, is_final=is_final)
            stored["revision"] += 1
            stored["entry"] = _identifier(body.get("id"))
            stored["draft"] = None if is_final else {"number": reading.number, "stage": stage, **entry}
            if is_final and stage == BEFORE:
                stored["readings"].append({})
            if is_final:
                committed = self._clock().isoformat(timespec="seconds")
                stored["readings"][-1][stage] = {**entry, "committed": committed}
            text = json.dumps(stored, ensure_ascii=False) + "\n"
            write_text(self.folder / READERS / f"{reader}.json", text)
        return stored

    def _check(self, reading: Reading, stage: str, body: Stored, *, is_final: bool) -> Stored:
        """Convert the answers, regions and time of a stage to stored values; final ones must be complete."""
        answers, seconds, regions = body.get("answers"), body.get("seconds"), body.get("regions", [])
        if not isinstance(answers, dict) or not isinstance(regions, list):
            raise InputError("answers must be an object and regions a list of GeoJSON features.")
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < 1e7:
            raise InputError("seconds must be a number: the time spent on this stage.")
        if len(regions) > (0 if self.plan.regions == "off" else MOST):
            raise InputError(f"regions must be at most {MOST:,} GeoJSON polygons.")
        regions = [_region(feature) for feature in regions]
        questions = {question.id: question for question in self.plan.asked(stage, self.arm(reading))}
        for name in answers:
            if name not in questions:
                raise unknown_name("question", name, questions)
        checked = {name: questions[name].check(answer) for name, answer in answers.items()}
        filled = {name: answer for name, answer in checked.items() if answer is not None}
        missing = [q for q in questions.values() if q.required and q.id not in filled]
        if is_final and missing:
            raise InputError(f"Answer first: {missing[0].text}")
        if is_final and stage == BEFORE and self.plan.regions == "required" and not regions:
            raise InputError("Mark the deciding region before you commit.")
        return {"answers": filled, "regions": regions, "seconds": round(float(seconds), 1)}


def _identifier(value: Any) -> str | None:
    """Check the page's name of an entry, by which it knows its own after a lost reply."""
    if value is None or (isinstance(value, str) and IDENTIFIER.fullmatch(value)):
        return value
    raise InputError("id must be 1 to 40 letters or digits.")


def _region(feature: Any) -> Stored:
    """Convert a region to the stored value: only its outline in level-0 pixels, as numbers."""
    try:
        geometry = feature["geometry"]
        kind = geometry["type"]
        if kind not in ("Polygon", "MultiPolygon"):
            raise ValueError("not a polygon")
        polygons = [[ring.tolist() for ring in rings] for rings in parse_polygons([geometry])]
        if not polygons:
            raise ValueError("no polygon")
        outline = {"type": kind, "coordinates": polygons[0] if kind == "Polygon" else polygons}
    except (ValueError, TypeError, LookupError, RecursionError, OverflowError):
        raise InputError("regions must be GeoJSON polygons of finite numbers.") from None
    about = {"objectType": "annotation", "classification": {"name": "Region"}}
    return {"type": "Feature", "geometry": outline, "properties": about}


def find_column(evidence: Evidence, arm: Arm, *, predicted: str, slide: str, classes: Sequence[str]) -> int:
    """Find the column of an arm's method with the scores for the arm's target.

    Scores for another class are never used instead: they would say the opposite of their title.
    """
    columns = [
        i for i, c in enumerate(evidence.columns) if c["method"] == arm.method and c["kind"] == "scores"
    ]
    if not columns:
        raise InputError(
            f"arm {arm.name!r}: the run has no {arm.method!r} of {slide!r}; it has "
            f"{', '.join(sorted({column['method'] for column in evidence.columns}))}."
        )
    targets = [name_target(evidence.columns[i]["target"], classes) for i in columns]
    target = predicted if arm.target == "predicted" else arm.target
    if target not in targets:
        raise InputError(
            f"arm {arm.name!r}: {arm.method!r} of {slide!r} explains {', '.join(targets)}, not {target}; "
            "explain it with `target='all'`, or name another target in the plan."
        )
    return columns[targets.index(target)]


def name_target(target: str, classes: Sequence[str]) -> str:
    """Name the classes of a target; a model without class names has their numbers.

    >>> [name_target(target, ("benign", "tumour")) for target in ("1", "tumour", "1-vs-0")]
    ['tumour', 'tumour', 'tumour-vs-benign']
    """
    if target in classes:
        return target
    return AGAINST.join(name_class(part, classes) or part for part in target.split(AGAINST))


def supported_class(target: str, classes: Sequence[str]) -> str:
    """Name the class that positive scores for a target support: of a contrast, the first.

    >>> [supported_class(target, ("benign", "tumour")) for target in ("0", "tumour", "tumour-vs-benign")]
    ['benign', 'tumour', 'tumour']
    """
    name = name_target(target, classes)
    return name if name in classes else name.split(AGAINST)[0]


def open_study(folder: str | PathLike[str]) -> Study:
    """Open the folder that `xmil study init` made."""
    path = Path(folder)
    if not (path / STUDY).is_file():
        raise InputError(
            f"{path}: not a study (no {STUDY}); name a folder of `xmil study init`."
            if path.is_dir()
            else absent(path, "folder")
        )
    return Study(path)


def make_study(
    runs: Sequence[str | PathLike[str]],
    *,
    slides: str | PathLike[str],
    plan: Plan,
    out: str | PathLike[str],
    say: Callable[[str], None] = lambda _: None,
) -> Study:
    """Choose cases, copy their evidence, and make a code for each reader, in the folder `out`."""
    folder, pictures = Path(out), Path(slides)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(
            f"{folder}: exists already; choose another `out=`, as studies are never overwritten."
        )
    if not pictures.is_dir():
        raise InputError(absent(pictures, "folder"))
    explained = {Path(run).resolve().name: explained_run(run) for run in runs}
    if len(explained) < len(runs):
        raise InputError("Two runs have the same name, so arms cannot refer to them; rename a folder.")
    for arm in plan.arms:
        if arm.run is not None and arm.run not in explained:
            raise unknown_name(f"run of the arm {arm.name!r}", arm.run, explained)
    first = next(iter(explained.values()))
    labels = sorted({row["label"] for row in first.rows.values() if row.get("label")})
    classes = first.class_names or labels  # labels name the classes of a model without names
    if not labels:
        raise InputError(f"{first.path}: no slide has a label; explain with `cohort=`, a table with labels.")
    plan = plan.with_classes(classes)
    if plan.seed is None:
        plan = plan.model_copy(update={"seed": secrets.randbits(53)})
    readable = _readable_cases(explained, classes, Pictures(pictures), say)
    practice, cases = _choose(plan, readable)
    if plan.repeats > len(cases) // 2:
        raise InputError(f"repeats = {plan.repeats}: at most half of the {len(cases)} cases can be repeated.")
    _check_arms(plan, explained, [*practice, *cases], classes)
    codes = {reader: "".join(secrets.choice(LETTERS) for _ in range(CODE)) for reader in plan.readers}
    content = {
        "layout": LAYOUT,
        "version": __version__,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "plan": plan.model_dump(mode="json"),
        "classes": list(classes),
        "slides": str(pictures.resolve()),
        "runs": list(explained),
        "practice": [asdict(case) for case in practice],
        "cases": [asdict(case) for case in cases],
    }

    locks = ExitStack()

    def fill(aside: Path) -> None:
        locks.enter_context(_locked(aside.parent))
        for name, run in explained.items():
            (aside / EVIDENCE / name).mkdir(parents=True)
            for case in (*practice, *cases):
                shutil.copyfile(run.file(case.slide), aside / EVIDENCE / name / f"{case.slide}.parquet")
        (aside / READERS).mkdir()
        write_text(aside / CODES, csv_text(["reader", "code"], codes.items()))
        write_json(aside / STUDY, content)
        write_run(aside, "study", {})
        seal_folder(aside)
        for name in (CODES, STUDY):  # labels and codes are only for the organiser
            (aside / name).chmod(0o600)
        aside.chmod(0o700)

    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_unfinished(folder)
    with locks:
        write_folder(folder, fill)
    return Study(folder)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Mark a folder as being written; raise BlockingIOError if another process is writing it."""
    with opened(folder, os.O_RDONLY) as handle:
        with suppress(ImportError):
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def _remove_unfinished(folder: Path) -> None:
    """Remove what a killed `make_study` has left beside the folder: it holds labels and codes."""
    unfinished = re.compile(rf"\.{re.escape(folder.name)}\.[a-z0-9_]{{8}}\.part")
    for path in folder.parent.iterdir():
        if unfinished.fullmatch(path.name) and (path / "new").is_dir():
            with suppress(OSError), _locked(path):
                shutil.rmtree(path)


def _readable_cases(
    runs: Mapping[str, Run], classes: Sequence[str], pictures: Pictures, say: Callable[[str], None]
) -> dict[str, Case]:
    """Find the slides for the study: with a label, a picture, and an explanation in every run."""
    tables = {name: run.rows for name, run in runs.items()}
    first = next(iter(tables.values()))
    files = [set(run.files) for run in runs.values()]
    cases: dict[str, Case] = {}
    without: dict[str, list[str]] = {"label": [], "picture": [], "explanation": []}
    for slide, row in first.items():
        label = name_class(row.get("label"), classes)
        if label is None or label not in classes:
            without["label"].append(slide)
        elif not is_plain(slide) or (picture := pictures.describe(slide)[0]) is None:
            without["picture"].append(slide)
        elif not all(slide in slides for slides in (*files, *tables.values())):
            without["explanation"].append(slide)
        else:
            answers = {}
            for name, table in tables.items():
                predicted = name_class(table[slide].get("predicted"), classes) or ""
                answers[name] = Answer(predicted, probability_in(table[slide], predicted))
            cases[slide] = Case(slide, row.get("case_id") or slide, label, answers, picture["mpp"])
    pictures.close()
    for noun, names in without.items():
        if names:
            say(f"{counted(len(names), 'slide')} left out without a {noun}: {shorten(names, 3)}.")
    return cases


def _choose(plan: Plan, cases: Mapping[str, Case]) -> tuple[list[Case], list[Case]]:
    """Choose practice cases and cases: those that the plan names, or drawn evenly from the labels."""
    rng = np.random.default_rng([plan.seed or 0, 0])
    remaining = dict(cases)
    chosen: dict[str, list[Case]] = {}
    requests = {"practice": plan.practice, "cases": plan.cases}
    for kind, names in requests.items():  # named cases are not drawn
        if not isinstance(names, int):
            for name in names:
                if name not in cases:
                    raise InputError(
                        f"{kind}: the slide {name!r} cannot be read; it has no label, picture or explanation."
                    )
                if name not in remaining:
                    raise InputError(
                        f"{kind}: the slide {name!r} is named twice; practice cases cannot be cases."
                    )
                chosen.setdefault(kind, []).append(remaining.pop(name))
    for kind, number in requests.items():
        if isinstance(number, int):
            drawn = list(_draw(rng, remaining.values()))
            take = len(drawn) if kind == "cases" and not number else number
            if take > len(drawn):
                raise InputError(f"{kind} = {take}: only {counted(len(drawn), 'slide')} can be read.")
            chosen[kind] = drawn[:take]
            remaining = {name: case for name, case in remaining.items() if case not in chosen[kind]}
    if not chosen.get("cases"):
        raise InputError("No case remains: slides need a label, a picture and an explanation in every run.")
    return chosen.get("practice", []), chosen["cases"]


def _draw(rng: np.random.Generator, cases: Iterable[Case]) -> Iterator[Case]:
    """Yield all cases in random order, one of each label in turn."""
    strata: dict[str, list[Case]] = {}
    for case in cases:
        strata.setdefault(case.label, []).append(case)
    stacks = [[strata[label][i] for i in rng.permutation(len(strata[label]))] for label in sorted(strata)]
    while any(stacks):
        for stack in stacks:
            if stack:
                yield stack.pop()


def _check_arms(plan: Plan, runs: Mapping[str, Run], cases: Sequence[Case], classes: Sequence[str]) -> None:
    """Refuse an arm if a case lacks its scores."""
    for arm in plan.arms:
        run = arm.run or next(iter(runs))
        if arm.method is None and arm.target not in ("predicted", *plan.diagnoses):
            raise InputError(f"arm {arm.name!r}: the target {arm.target!r} is not a class of the run.")
        for case in cases if arm.method is not None else ():
            evidence = read_evidence(runs[run].file(case.slide))
            predicted = case.answers[run].predicted
            find_column(evidence, arm, predicted=predicted, slide=case.slide, classes=classes)
