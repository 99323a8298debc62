"""Reading studies: plans, worklists, who may answer what and when, and what the report recovers."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime, timedelta
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.viewer.given_scores import grid, write_run
from tests.viewer.reading_room import (
    CLASSES,
    COLUMNS,
    EDGE,
    ROWS,
    Simulated,
    answers_to,
    commit,
    in_block,
    read_all,
    region,
    study_of,
    write_cases,
)
from xmil.cli._app import run as main
from xmil.core.errors import InputError, XmilError
from xmil.runs.verify import verify_run
from xmil.storage import Run, open_folder
from xmil.viewer.study import Study, make_study, open_study, read_plan, sample_size, write_report
from xmil.viewer.study.analysis import analyse
from xmil.viewer.study.plan import make_plan
from xmil.viewer.study.readings import BlindedError, StaleError
from xmil.viewer.study.report import report_page

PLAN = """
title = "Evidence"
readers = ["anna", "ben"]
cases = 6
practice = ["case-000"]
repeats = 2
washout_days = 0

[[arms]]
name = "tissue"

[[arms]]
name = "attention"
method = "attention"
target = "tumour"
"""

SEALED, MODES = ("study.json", "readers.csv"), [0o700, 0o600, 0o600]
LRP = {"name": "lrp", "method": "lrp", "prediction": True}


@pytest.fixture(autouse=True)
def _unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XMIL_SYNC", "0")


@pytest.mark.parametrize(
    ("plan", "fault"),
    [
        ({}, "readers"),
        ({"readers": []}, "readers"),
        ({"readers": ["anna", "Anna"]}, "anna"),
        ({"readers": ["../x"]}, "../x"),
        ({"readers": 2, "colour": 1}, "colour"),
        ({"readers": 2, "arms": [{"name": "a"}, {"name": "a"}]}, "arms"),
        ({"readers": 2, "arms": [{"name": "a", "how": "lrp"}]}, "how"),
        ({"readers": 2, "questions": []}, "diagnosis"),
        ({"readers": 2, "questions": [{"id": "x", "text": "?", "options": ["one"]}]}, "'x'"),
        ({"readers": 2, "washout_days": -1}, "washout_days"),
        ({"readers": 2, "design": "parallel"}, "design"),
        ({"readers": 2, "assumptions": {"power": 2}}, "power"),
    ],
)  # fmt: skip
def test_a_plan_that_cannot_be_followed_is_refused_by_its_fault(plan: dict[str, Any], fault: str) -> None:
    with pytest.raises(InputError, match=fault):
        make_plan(plan)


@pytest.mark.parametrize(
    ("plan", "fault"),
    [
        ({"cases": 99}, "cases"),
        ({"cases": ["nobody"]}, "nobody"),
        ({"cases": ["case-001"], "practice": ["case-001"]}, "case-001"),
        ({"repeats": 7}, "repeats"),
        ({"positive": ["cyst"]}, "cyst"),
        ({"arms": [{"name": "ig", "method": "ig"}]}, "'ig'"),
        ({"arms": [{"name": "b", "method": "lrp", "run": "other"}]}, "other"),
        ({"arms": [{"name": "b", "method": "lrp", "target": "cyst"}]}, "cyst"),
    ],
)
def test_a_plan_that_the_run_cannot_serve_is_refused(
    tmp_path: Path, plan: dict[str, Any], fault: str
) -> None:
    with pytest.raises(XmilError, match=fault):
        study_of(tmp_path, n=12, **plan)
    assert not (tmp_path / "study").exists()


def explained_for(folder: Path, targets: dict[str, str], **facts: Any) -> Study:
    """A study of a run with right predictions that explains each case for the one target of its label."""
    run, slides = write_cases(folder, 6)
    for i in range(6):
        columns = {("lrp", targets[CLASSES[i % 2]]): np.ones(COLUMNS * ROWS, np.float32)}
        write_run(run, f"case-{i:03d}", columns, coords=grid(COLUMNS, ROWS, EDGE), edge=EDGE)
    about = {"class_names": CLASSES} if not all(map(str.isdigit, targets.values())) else {}
    (run / "run.json").write_text(json.dumps({"kind": "explain", **about}))
    table = run / "slides.csv"
    wrong = {",benign,tumour,False": ",benign,benign,True", ",tumour,benign,False": ",tumour,tumour,True"}
    for before, after in wrong.items():
        table.write_text(table.read_text().replace(before, after))
    arms = [{"name": "shown", "method": "lrp", **facts}]
    plan = {"readers": ["anna"], "practice": 0, "washout_days": 0.0, "arms": arms}
    return make_study([run], slides=slides, plan=make_plan(plan), out=folder / "study")


@pytest.mark.parametrize("prediction", [False, True])
def test_scores_for_another_class_are_not_shown_for_the_predicted_one(
    tmp_path: Path, *, prediction: bool
) -> None:
    for_tumour = dict.fromkeys(CLASSES, "tumour")
    with pytest.raises(InputError, match="explains tumour, not benign"):
        explained_for(tmp_path, for_tumour, prediction=prediction)
    assert not (tmp_path / "study").exists()


@pytest.mark.parametrize("asked", ["tumour", "tumour-vs-benign"])
def test_an_arm_may_name_the_target_that_the_run_explains(tmp_path: Path, asked: str) -> None:
    study = explained_for(tmp_path, dict.fromkeys(CLASSES, asked), target=asked)
    for case in study.cases:
        evidence, column = study.shown(case, study.plan.arms[0])
        assert evidence.columns[column]["target"] == asked


def test_numbers_of_a_model_without_class_names_are_the_classes(tmp_path: Path) -> None:
    study = explained_for(tmp_path, {name: str(i) for i, name in enumerate(CLASSES)})
    for case in study.cases:
        evidence, column = study.shown(case, study.plan.arms[0])
        assert CLASSES[int(evidence.columns[column]["target"])] == case.answers["run"].predicted == case.label


def test_regions_are_measured_against_the_class_that_a_contrast_supports(tmp_path: Path) -> None:
    contrast = dict.fromkeys(CLASSES, "tumour-vs-benign")
    study = explained_for(tmp_path, contrast, target="tumour-vs-benign")
    read_all(study, Simulated("anna", 1.0))
    folder = write_report(study)
    with (folder / "regions.csv").open(encoding="utf-8") as stream:
        counted = {(row["diagnosis"], row["counted"]) for row in csv.DictReader(stream)}
    assert counted == {("benign", "0"), ("tumour", "1")}


def test_a_run_without_labels_is_refused_with_the_way_out(tmp_path: Path) -> None:
    run, slides = write_cases(tmp_path, 4)
    table = run / "slides.csv"
    table.write_text(re.sub(r",(benign|tumour),(benign|tumour),", r",,\2,", table.read_text()))
    (run / "run.json").write_text(json.dumps({"kind": "explain", "class_names": CLASSES}))
    with pytest.raises(InputError, match=r"no slide has a label; explain with `cohort=`"):
        make_study([run], slides=slides, plan=make_plan({"readers": ["anna"]}), out=tmp_path / "study")


def test_worklists_are_seeded_balanced_and_each_readers_own(tmp_path: Path) -> None:
    study = study_of(tmp_path, n=12, readers=("anna", "ben", "chloé"), repeats=3)
    lists = {reader: study.deal(reader) for reader in study.readers}
    assert lists == {reader: open_study(study.folder).deal(reader) for reader in study.readers}
    orders = {
        reader: [r.case for r in own if r.period == 0 and r.kind == "case"] for reader, own in lists.items()
    }
    assert len(set(map(tuple, orders.values()))) == 3
    for own in lists.values():
        assert [r.number for r in own] == list(range(2 + 12 + 3 + 12))
        assert [r.kind for r in own[:2]] == ["practice"] * 2
        cases = [r for r in own if r.kind == "case"]
        assert sorted((r.case, r.arm) for r in cases) == [
            (case, arm) for case in range(12) for arm in range(2)
        ]
        for period in range(2):
            dealt = Counter((study.cases[r.case].label, r.arm) for r in cases if r.period == period)
            assert max(dealt.values()) - min(dealt.values()) <= 1
        for repeat in (r for r in own if r.kind == "repeat"):
            assert repeat.repeats is not None
            first = own[repeat.repeats]
            assert (first.case, first.arm, first.period) == (repeat.case, repeat.arm, 0)
            assert first.number < repeat.number
    arms = {(r.case, r.arm) for r in lists["anna"] if r.period == 0 and r.kind == "case"}
    assert not arms & {(r.case, r.arm) for r in lists["ben"] if r.period == 0 and r.kind == "case"}


def test_a_split_study_reads_each_case_once_under_arms_dealt_evenly(tmp_path: Path) -> None:
    study = study_of(tmp_path, n=12, design="split")
    cases = [r for r in study.deal("ben") if r.kind == "case"]
    assert sorted(r.case for r in cases) == list(range(12))
    assert Counter(r.arm for r in cases) == {0: 6, 1: 6}


def test_nobody_looks_ahead_back_or_twice(tmp_path: Path) -> None:
    study = study_of(tmp_path, n=4, practice=0, design="split")
    _, reading, stage = study.current("anna")
    assert stage == "before"
    with pytest.raises(BlindedError):
        study.current("anna", reading.number + 1)
    with pytest.raises(InputError, match="Diagnosis"):
        commit(study, "anna", {"confidence": 3})
    for answers in ({"diagnosis": "cyst"}, {"confidence": 9}, {"sense": 1}, {"diagnosis": True}):
        with pytest.raises(XmilError):
            commit(study, "anna", answers)
    assert study.stored("anna")["revision"] == 0
    draft = {"revision": 0, "number": 0, "stage": "before", "answers": {"confidence": 2}, "seconds": 3}
    study.answer("anna", draft)
    with pytest.raises(StaleError):
        study.answer("anna", draft)
    assert open_study(study.folder).stored("anna")["draft"]["answers"] == {"confidence": 2}
    while (here := study.place(study.stored("anna"))) is not None:
        commit(study, "anna", answers_to(study, *here, "tumour"))
    with pytest.raises(BlindedError):
        study.current("anna")
    assert len(study.stored("anna")["readings"]) == 4
    assert study.stored("ben")["readings"] == []
    with pytest.raises(BlindedError):
        study.reader("guess")


def test_the_next_period_opens_after_the_washout(tmp_path: Path) -> None:
    folder, now = (
        study_of(tmp_path, n=2, practice=0, washout_days=14.0).folder,
        [datetime(2030, 1, 1, tzinfo=UTC)],
    )
    study = Study(folder, clock=lambda: now[0])
    while study.place(study.stored("anna"))[0].period == 0:  # type: ignore[index]
        _, reading, stage = study.current("anna")
        commit(study, "anna", answers_to(study, reading, stage, "benign"))
    for days, is_open in ((13.9, False), (14.0, True)):
        now[0] = datetime(2030, 1, 1, tzinfo=UTC) + timedelta(days=days)
        assert (study.opens(study.stored("anna")) is None) == is_open
    study.current("anna")


def test_the_sample_size_is_mcnemars() -> None:
    plan = make_plan({"readers": 1, "assumptions": {"accuracy": 0.8, "gain": 0.1, "correlation": 0}})
    assert "202 cases" in sample_size(plan, 202)  # (1.96 sqrt(0.26) + 0.8416 sqrt(0.25))² / 0.01
    assert "80 %" in sample_size(plan, 202).rpartition("power of")[2]
    split = plan.model_copy(update={"design": "split"})
    assert "398 cases" in sample_size(split, 398)  # 2 (1.96 sqrt(0.255) + 0.8416 sqrt(0.25))² / 0.01
    assert "80 %" in sample_size(split, 398).rpartition("power of")[2]


def test_the_report_recovers_what_was_planted(tmp_path: Path) -> None:
    readers = [
        Simulated("anna", 0.9, pulled=0.5, corrected=0.9),
        Simulated("ben", 0.8, pulled=0.5, corrected=0.9),
        Simulated("chloé", 0.75, pulled=0.5, corrected=0.9),
    ]
    study = study_of(tmp_path, n=40, readers=tuple(r.name for r in readers), repeats=10)
    for reader in readers:
        read_all(study, reader)
    findings = analyse(study)

    def inside(truth: float, measure: str, *place: str) -> None:
        estimate = findings.find(measure, *place)
        assert estimate is not None
        assert estimate.value.low <= truth <= estimate.value.high, (measure, place, estimate)

    for reader in readers:
        for arm in ("tissue", "lrp"):
            inside(reader.skill, "accuracy", arm, "before", reader.name)
        after = 0.75 * (reader.skill + (1 - reader.skill) * 0.9) + 0.25 * reader.skill * 0.5
        inside(after, "accuracy", "lrp", "after", reader.name)
    mean = np.mean([reader.skill for reader in readers])
    inside(float(mean), "accuracy", "tissue", "before")
    inside(0.5, "over-reliance", "lrp", "after")
    inside(0.9, "correction", "lrp", "after")
    kappas = {
        f"{a.name} and {b.name}": (2 * a.skill - 1) * (2 * b.skill - 1) for a, b in combinations(readers, 2)
    }
    for pair, kappa in kappas.items():
        inside(kappa, "kappa", "tissue", "before", pair)
    inside(float(np.mean(list(kappas.values()))), "kappa", "tissue", "before")
    own = float(np.mean([(2 * reader.skill - 1) ** 2 for reader in readers]))
    inside(own, "kappa with oneself", "all arms", "last")

    lrp, attention = (findings.find("region auroc", method, "before") for method in ("lrp", "attention"))
    assert lrp is not None
    assert attention is not None
    assert lrp.value.low > attention.value.high > 0.5
    tests = {(t.measure, t.first, t.second): t for t in findings.tests}
    assert tests["region dice", "lrp", "chance"].p_holm < 0.01
    assert tests["region dice", "lrp", "attention"].difference.low > 0
    assert tests["accuracy", "lrp, after", "lrp, before"].patients == 40
    assert "above chance" in report_page(findings)


def test_readings_are_measured_as_by_hand(tmp_path: Path) -> None:
    study = study_of(tmp_path, n=8, readers=("anna", "ben"), practice=0)
    for name, skill in (("anna", 0.7), ("ben", 0.6)):
        read_all(study, Simulated(name, skill, pulled=0.5, corrected=0.5))
    findings = analyse(study)
    own = [r for r in findings.readings if (r["arm"], r["stage"]) == ("lrp", "after")]
    assert len(own) == 16
    accuracy = findings.find("accuracy", "lrp", "after")
    assert accuracy is not None
    assert accuracy.value.estimate == pytest.approx(np.mean([r["diagnosis"] == r["label"] for r in own]))
    ill = [r for r in own if r["label"] == "tumour"]
    sensitivity = findings.find("sensitivity tumour", "lrp", "after")
    assert sensitivity is not None
    assert sensitivity.value.estimate == pytest.approx(np.mean([r["diagnosis"] == "tumour" for r in ill]))
    from sklearn.metrics import cohen_kappa_score

    said = {n: {r["slide"]: r["diagnosis"] for r in own if r["reader"] == n} for n in ("anna", "ben")}
    expected = cohen_kappa_score(*([said[n][c.slide] for c in study.cases] for n in ("anna", "ben")))
    kappa = findings.find("kappa", "lrp", "after", "anna and ben")
    assert kappa is not None
    assert kappa.value.estimate == pytest.approx(expected)
    before = {
        (r["reader"], r["slide"]): r for r in findings.readings if (r["arm"], r["stage"]) == ("lrp", "before")
    }
    led = [r for r in own if before[r["reader"], r["slide"]]["right"] and not r["model_right"]]
    pulled = findings.find("over-reliance", "lrp", "after")
    assert pulled is not None
    assert pulled.n == len(led)
    assert pulled.value.estimate == pytest.approx(np.mean([not r["right"] for r in led]))


def test_a_figure_has_the_patients_it_is_of_and_no_interval_below_eight(tmp_path: Path) -> None:
    study = study_of(tmp_path, n=10, readers=("anna", "ben"))
    for name in study.readers:
        read_all(study, Simulated(name, 1.0, pulled=1.0))
    findings = analyse(study)
    right = findings.find("accuracy", "tissue", "before")
    assert right is not None
    assert (right.n, right.patients) == (20, 10)
    assert (right.value.low, right.value.high) == (pytest.approx(0.025 ** (1 / 10)), 1.0)  # exact, of 10
    ill = findings.find("sensitivity tumour", "tissue", "before")
    pulled = findings.find("over-reliance", "lrp", "after")
    assert ill is not None
    assert pulled is not None
    assert (ill.n, ill.patients) == (10, sum(case.label == "tumour" for case in study.cases))
    wrong = sum(not case.answers["run"].is_right(case.label) for case in study.cases)
    assert (pulled.n, pulled.patients) == (2 * wrong, wrong)
    assert not ill.value.exists
    assert not pulled.value.exists
    folder = write_report(study)
    with (folder / "estimates.csv").open(encoding="utf-8") as stream:
        rows = [row for row in csv.DictReader(stream) if row["measure"] == "over-reliance"]
    assert [(row["estimate"], row["low"], row["patients"]) for row in rows] == [("1.0", "", str(wrong))] * 3
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert f"100 % (no interval: {wrong} patients, and 8 are needed) of {2 * wrong} readings" in text
    assert "[100, 100]" not in text


def test_few_misses_are_what_chance_gives(tmp_path: Path) -> None:
    """The model's answer, and a block that never has the highest score: nine misses at a chance of 1 / 8."""
    study = study_of(tmp_path, n=9, readers=("anna",), practice=0, design="split", arms=[LRP])
    while (here := study.place(study.stored("anna"))) is not None:
        case = study.case(here[0])
        own = in_block(int(case.slide[-3:]))
        apart = next(j for j in range(20) if not (own & in_block(j)).any())
        answers = answers_to(study, *here, case.answers["run"].predicted)
        commit(study, "anna", answers, regions=[region(apart)])
    findings = analyse(study)
    tests = {(t.measure, t.first): t for t in findings.tests if t.second == "chance"}
    pointing = tests["region pointing", "lrp"]
    assert pointing.difference.estimate == -1 / 8
    assert pointing.difference.high == pytest.approx(1 - 0.025 ** (1 / 9) - 1 / 8)
    assert pointing.p == pytest.approx(2 * (7 / 8) ** 9, abs=0.03)
    assert tests["region dice", "lrp"].p > 0.05


def test_a_side_of_chance_is_named_only_where_the_test_tells(tmp_path: Path) -> None:
    study = study_of(tmp_path, n=6, readers=("anna",), practice=0)
    read_all(study, Simulated("anna", 1.0))
    text = (write_report(study) / "report.html").read_text(encoding="utf-8")
    assert "cannot be told apart from chance" in text
    assert "above chance" not in text


def test_regions_count_only_against_evidence_for_the_readers_diagnosis(tmp_path: Path) -> None:
    study = study_of(tmp_path, n=12, readers=("anna",), practice=0, design="split", arms=[LRP])
    read_all(study, Simulated("anna", 1.0))
    findings = analyse(study)
    wrong = sum(not case.answers["run"].is_right(case.label) for case in study.cases)
    assert 0 < wrong < 12
    auroc = findings.find("region auroc", "lrp", "before")
    assert auroc is not None
    assert auroc.n == 12 - wrong
    folder = write_report(study)
    with (folder / "regions.csv").open(encoding="utf-8") as stream:
        rows = [row for row in csv.DictReader(stream) if row["method"] == "lrp"]
    assert len(rows) == 12
    for row in rows:
        assert row["diagnosis"] == row["label"]
        assert row["counted"] == str(int(row["diagnosis"] == row["target"]))
    assert f"Regions of {wrong} readings are left out" in (folder / "report.html").read_text(encoding="utf-8")


def test_only_arms_that_show_the_models_answer_can_pull(tmp_path: Path) -> None:
    arms = [LRP, {"name": "att", "method": "attention"}]
    study = study_of(tmp_path, n=8, readers=("anna",), practice=0, arms=arms)
    read_all(study, Simulated("anna", 0.5, pulled=0.5))
    reliance = {e.arm for e in analyse(study).estimates if e.measure in ("over-reliance", "correction")}
    assert reliance == {"lrp"}


def test_arms_of_a_split_study_are_compared_unpaired(tmp_path: Path) -> None:
    study = study_of(tmp_path, n=24, readers=("anna", "ben", "chloé"), practice=0, design="split", seed=3)
    for name in study.readers:
        read_all(study, Simulated(name, 0.0, corrected=1.0))
    findings = analyse(study)
    tests = {(t.measure, t.first, t.second): t for t in findings.tests}
    accuracy, seconds = (tests[measure, "lrp", "tissue"] for measure in ("accuracy", "seconds"))
    shown = [r for r in findings.readings if r["arm"] == "lrp" and r["stage"] == "after"]
    assert accuracy.difference.estimate == pytest.approx(np.mean([r["model_right"] for r in shown]))
    assert accuracy.difference.low > 0
    assert accuracy.p < 0.01
    assert (accuracy.n, accuracy.patients) == (72, 24)
    assert seconds.difference.estimate == 10.0  # both stages against the one
    assert "unpaired" in report_page(findings)
    alone = study_of(tmp_path / "alike", n=12, readers=("anna",), practice=0, design="split")
    read_all(alone, Simulated("anna", 0.5))
    (found,) = (t for t in analyse(alone).tests if (t.measure, t.first) == ("accuracy", "lrp"))
    assert found.p > 0.1


def test_the_command_line_makes_and_reports_a_study(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, slides = write_cases(tmp_path, 8, patients=4)
    plan, out = tmp_path / "plan.toml", tmp_path / "study"
    plan.write_text(PLAN, encoding="utf-8")
    words = ["study", "init", str(run), "--slides", str(slides), "--plan", str(plan), "--out", str(out)]
    assert main([*words, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    study = open_study(out)
    assert (made["cases"], made["practice"], made["readers"]) == (6, 1, study.codes)
    assert main(words) == 2  # never written over
    assert [out.stat().st_mode & 0o777] + [(out / name).stat().st_mode & 0o777 for name in SEALED] == MODES
    assert main(["view", str(out), "--export", str(tmp_path / "copy")]) == 2
    assert not (tmp_path / "copy").exists()
    assert main(["study", "report", str(out)]) == 2  # nobody has read anything
    read_all(study, Simulated("anna", 0.8))
    assert main(["study", "report", str(out)]) == 0
    with (out / "report" / "readings.csv").open(encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    assert Counter(row["kind"] for row in rows) == {"practice": 1, "case": 18, "repeat": 2 + sum(
        row["kind"] == "repeat" and row["stage"] == "after" for row in rows)}  # fmt: skip
    assert {row["patient"] for row in rows if row["kind"] == "case"} <= {f"patient-{i:03d}" for i in range(4)}
    text = (out / "report" / "report.html").read_text(encoding="utf-8")
    assert "ben" in text
    assert "<script" not in text
    assert "seed" not in text
    assert str(study.plan.seed) not in text
    assert re.search(r"Attention, after minus Attention, before", text)
    assert not re.search(r"\b(lrp|attention)\b", text)
    assert (
        main(["study", "init", str(tmp_path), "--slides", str(slides), "--plan", str(plan), "--out", "x"])
        == 2
    )
    plan.write_text("readers = [", encoding="utf-8")
    capsys.readouterr()
    assert main([*words[:-1], str(tmp_path / "other")]) == 2
    assert str(plan) in capsys.readouterr().err
    mine = tmp_path / "mine" / "tests.csv"
    mine.parent.mkdir()
    mine.write_text("mine")
    assert main(["study", "report", str(out), "--out", str(mine.parent)]) == 2
    assert [path.name for path in mine.parent.iterdir()] == ["tests.csv"]
    assert mine.read_text() == "mine"
    assert main(["study", "report", str(out)]) == 0  # its own, again


@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL"])
def test_a_killed_study_leaves_no_labels_and_codes(tmp_path: Path, how: str) -> None:
    """Ended as all is written, before the folder has its name: nothing stays, at the latest after a retry."""
    run, slides = write_cases(tmp_path, 4)
    plan = tmp_path / "plan.toml"
    plan.write_text('readers = ["anna"]\npractice = 0\n', encoding="utf-8")
    out = tmp_path / "out" / "study"
    words = ["study", "init", str(run), "--slides", str(slides), "--plan", str(plan), "--out", str(out)]
    code = (
        "import os, signal, sys, xmil.viewer.study.readings as readings; from xmil.cli._app import run\n"
        f"readings.seal_folder = lambda _: os.kill(os.getpid(), signal.{how})\n"
        "sys.exit(run(sys.argv[1:]))"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], check=False, capture_output=True)
    assert done.returncode in (130, -9)
    if how == "SIGKILL":
        assert list(out.parent.rglob("study.json"))
        assert main(words) == 0
    assert [path.name for path in out.parent.iterdir()] == (["study"] if how == "SIGKILL" else [])


def test_a_study_that_another_process_is_writing_is_left_alone(tmp_path: Path) -> None:
    other = tmp_path / ".study.abcd_123.part"
    (other / "new").mkdir(parents=True)
    code = (
        "import fcntl, os, sys; handle = os.open(sys.argv[1], os.O_RDONLY)\n"
        "fcntl.flock(handle, fcntl.LOCK_EX); print(flush=True); sys.stdin.read()"
    )
    words = [sys.executable, "-c", code, str(other)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        study_of(tmp_path, n=4)
        assert other.is_dir()
        writer.communicate()


def test_a_study_is_verified_with_its_answers_and_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = study_of(tmp_path, n=4, practice=0)
    assert main(["verify", str(study.folder)]) == 0
    read_all(study, Simulated("anna", 0.8))
    write_report(study)
    assert main(["verify", str(study.folder)]) == 0
    answers = study.folder / "readers" / "anna.json"
    answers.write_text(answers.read_text().replace("tumour", "benign"))
    capsys.readouterr()
    assert main(["verify", str(study.folder)]) == 1
    assert "readers/anna.json" in capsys.readouterr().out


def test_answers_do_not_go_through_a_link(tmp_path: Path) -> None:
    study = study_of(tmp_path, n=4, practice=0)
    (study.folder / "readers").rmdir()
    (tmp_path / "outside").mkdir()
    (study.folder / "readers").symlink_to(tmp_path / "outside")
    with pytest.raises(XmilError, match="link"):
        read_all(study, Simulated("anna", 0.8))
    assert not list((tmp_path / "outside").iterdir())


def test_a_study_inside_a_run_is_a_run_of_its_own(tmp_path: Path) -> None:
    with open_folder(tmp_path / "run", "explain"):
        pass
    write_cases(tmp_path, 4)
    plan = make_plan({"readers": ["anna"], "practice": 0, "washout_days": 0.0})
    out = tmp_path / "run" / "study"
    study = make_study([tmp_path / "run"], slides=tmp_path / "slides", plan=plan, out=out)
    read_all(study, Simulated("anna", 0.8))
    faults = {fault.what for fault in verify_run(Run(tmp_path / "run"))}
    assert not {name for name in faults if name.startswith("study")}


def test_studies_are_made_and_reported_without_torch(tmp_path: Path) -> None:
    study = study_of(tmp_path, n=4, practice=0)
    read_all(study, Simulated("anna", 0.8))
    code = (
        "import sys; from xmil.viewer.study import open_study, write_report; "
        f"write_report(open_study({str(study.folder)!r})); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_plan_of_the_file_is_the_studys(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(PLAN, encoding="utf-8")
    run, slides = write_cases(tmp_path, 8)
    study = make_study([run], slides=slides, plan=read_plan(path), out=tmp_path / "study")
    assert study.plan.diagnoses == CLASSES
    assert study.plan.positive == ("tumour",)
    assert make_plan({"readers": 1, "positive": "benign"}).with_classes(CLASSES).positive == ("benign",)
    assert study.practice[0].slide == "case-000"
