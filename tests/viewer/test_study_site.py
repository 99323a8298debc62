"""A study over HTTP: what is hidden is not sent, only the open case is answered for, nothing is lost."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.viewer.asking import Answer, ask
from tests.viewer.given_scores import write_run
from tests.viewer.reading_room import (
    CLASSES,
    Simulated,
    answers_to,
    commit,
    read_all,
    study_of,
    write_cases,
)
from xmil.viewer.server import Rules
from xmil.viewer.study import Study, make_study, open_study
from xmil.viewer.study.plan import make_plan
from xmil.viewer.study.site import COOKIE, create_study_app

ARMS = [{"name": "secret-plain"}, {"name": "secret-shown", "method": "lrp", "prediction": True}]


@pytest.fixture(autouse=True)
def _unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XMIL_SYNC", "0")


@pytest.fixture
def study(tmp_path: Path) -> Study:
    return study_of(tmp_path, n=4, arms=ARMS, repeats=1)


def get(app: Any, study: Study, target: str, reader: str = "anna") -> Answer:
    return ask(app, target, headers={"cookie": f"{COOKIE}={study.codes[reader]}"})


def post(
    app: Any, study: Study, body: dict[str, Any], reader: str = "anna", target: str = "/api/answer"
) -> Answer:
    headers = {"content-type": "application/json", "cookie": f"{COOKIE}={study.codes[reader]}"}
    return ask(app, target, method="POST", headers=headers, body=json.dumps(body).encode())


def committed(study: Study, state: dict[str, Any], diagnosis: str = "tumour") -> dict[str, Any]:
    """The body that commits the open case."""
    case = state["case"]
    given = {"diagnosis": diagnosis, "confidence": 3, "sense": 4}
    answers = {q["id"]: given[q["id"]] for q in case["questions"] if q["id"] in given}
    about = {"revision": state["revision"], "number": case["number"], "stage": case["stage"]}
    return {**about, "answers": answers, "seconds": 5, "commit": True}


def everything(app: Any, study: Study, reader: str) -> list[tuple[str, int, bytes]]:
    """All that the server says to a reader now, headers and all, whatever the reader asks for."""
    n = len(study.deal(reader))
    targets = ["/api/state.json"]
    for number in range(n + 1):
        targets += [f"/api/slides/{number}/evidence-{run}.bin" for run in (0, 1)]
        targets += [f"/tiles/{number}/8/0_0.jpeg", f"/api/slides/{number}/slide.json"]
    targets += [
        "/api/run.json",
        "/study.json",
        "/readers.csv",
        f"/readers/{reader}.json",
        "/api/openapi.json",
    ]
    answers = [(target, get(app, study, target, reader)) for target in targets]
    return [(t, a.status, json.dumps(a.headers).encode() + a.body) for t, a in answers]


def twist(study: Study, folder: Path) -> Study:
    """The same study with other labels, predictions, evidence and arms."""
    shutil.copytree(study.folder, folder)
    about = json.loads((folder / "study.json").read_text(encoding="utf-8"))
    for case in (*about["practice"], *about["cases"]):
        case["label"] = CLASSES[1 - CLASSES.index(case["label"])]
        for answer in case["answers"].values():
            answer |= {"predicted": CLASSES[1 - CLASSES.index(answer["predicted"])], "probability": 0.6}
    about["plan"]["arms"] = [
        {"name": "other", "prediction": True},
        {"name": "another", "method": "attention", "target": "benign"},
    ]
    (folder / "study.json").write_text(json.dumps(about), encoding="utf-8")
    files = sorted((folder / "evidence" / "run").iterdir())
    contents = [path.read_bytes() for path in files]
    for path, content in zip(files, contents[1:] + contents[:1], strict=True):
        path.write_bytes(content)
    return open_study(folder)


def test_before_the_first_answer_nothing_depends_on_what_is_hidden(study: Study, tmp_path: Path) -> None:
    """A study with another truth, model, evidence and arms sends the very same bytes."""
    other = twist(study, tmp_path / "other")
    for reader in study.readers:
        sent = everything(create_study_app(study), study, reader)
        assert sent == everything(create_study_app(other), other, reader)
        served = {target for target, status, _ in sent if status == 200}
        assert served == {"/api/state.json", "/tiles/0/8/0_0.jpeg"}


def test_a_reader_never_learns_arm_method_slide_or_label(study: Study) -> None:
    app, seen = create_study_app(study), []
    while (state := get(app, study, "/api/state.json").json)["case"] is not None:
        seen += [body for _, status, body in everything(app, study, "anna") if status != 404]
        answer = post(app, study, committed(study, state))
        assert answer.status == 200
        reading = study.deal("anna")[state["case"]["number"]]
        is_last = state["case"]["stage"] == study.arm(reading).stages[-1]
        label = study.case(reading).label if reading.kind == "practice" and is_last else None
        assert answer.json.get("label") == label
        seen.append(answer.body)
    text = b"".join(seen)
    for secret in ("secret", "lrp", "attention", "case-0", "patient", "repeat", str(study.folder)):
        assert secret.encode() not in text, secret


def test_what_is_wrong_with_a_file_tells_neither_slide_nor_arm(study: Study) -> None:
    """Slides and evidence that are gone, damaged or of other methods: readers learn that, and no name."""
    slides, evidence = study.slides, study.folder / "evidence" / "run"
    whole = {path: path.read_bytes() for path in (*slides.iterdir(), *evidence.iterdir())}

    def damage(how: str) -> None:
        for path, content in whole.items():
            path.unlink(missing_ok=True)
            path.write_bytes(b"II*\0" + content[4:64] if how == "damaged" else content)
            if how == "gone":
                path.unlink()
            elif how == "foreign" and path.parent == evidence:
                write_run(study.folder, path.stem, {("ig", "cyst"): np.ones(48, np.float32)}, coords=None)
                (study.folder / "slides" / path.name).rename(path)

    seen = b""
    while (state := get(create_study_app(study), study, "/api/state.json").json)["case"] is not None:
        for how in ("gone", "damaged", "foreign"):
            damage(how)
            answers = everything(create_study_app(study), study, "anna")
            seen += b"".join(body for _, status, body in answers if status != 404)
            body = {**committed(study, state), "commit": False}
            answer = post(create_study_app(study), study, body)
            seen += answer.body
            state["revision"] += answer.status == 200 or state["case"]["stage"] == "after"
        damage("whole")
        post(create_study_app(study), study, committed(study, state))
    assert b"cannot be" in seen
    for secret in ("secret", "lrp", "attention", "cyst", "case-0", "parquet", ".tif", str(study.folder)):
        assert secret.encode() not in seen, secret


def test_a_prediction_that_an_arm_does_not_show_is_not_sent_with_its_evidence(tmp_path: Path) -> None:
    """Evidence for the predicted class: the same bytes whatever the prediction, where scores are the same."""
    study = study_of(tmp_path, n=2, practice=0, arms=[{"name": "evidence", "method": "lrp"}])
    folder = tmp_path / "other"
    shutil.copytree(study.folder, folder)
    about = json.loads((folder / "study.json").read_text(encoding="utf-8"))
    for answer in (case["answers"]["run"] for case in about["cases"]):
        answer["predicted"] = CLASSES[1 - CLASSES.index(answer["predicted"])]
    (folder / "study.json").write_text(json.dumps(about), encoding="utf-8")
    sent = []
    for each in (study, open_study(folder)):
        app = create_study_app(each)
        state = post(app, each, committed(each, get(app, each, "/api/state.json").json)).json
        assert state["case"]["info"]["sets"][0]["columns"][0]["target"] == "the model's answer"
        sent.append(everything(app, each, "anna"))
    assert sent[0] == sent[1]


def test_the_order_cannot_be_worked_out_from_the_program(tmp_path: Path) -> None:
    """Without a seed a secret one is drawn; a seed of the plan gives the same orders again."""
    run, slides = write_cases(tmp_path, 12)
    plans = [{"readers": ["anna"], "practice": 0}] * 2 + [{"readers": ["anna"], "practice": 0, "seed": 7}] * 2
    studies = [
        make_study([run], slides=slides, plan=make_plan(plan), out=tmp_path / f"study-{i}")
        for i, plan in enumerate(plans)
    ]
    drawn, again, *named = [[study.case(r).slide for r in study.deal("anna")] for study in studies]
    assert drawn != again
    assert named[0] == named[1]
    assert open_study(studies[0].folder).deal("anna") == studies[0].deal("anna")


def test_over_the_network_nothing_is_sent_without_the_token(study: Study) -> None:
    app = create_study_app(study, rules=Rules("0.0.0.0", "a-long-token"))  # noqa: S104  # not bound
    assert {status for _, status, _ in everything(app, study, "anna")} == {401}
    code = json.dumps({"code": study.codes["anna"]}).encode()
    headers = {"content-type": "application/json"}
    assert ask(app, "/api/enter", method="POST", headers=headers, body=code).status == 401
    headers |= {"authorization": "Bearer a-long-token"}
    assert ask(app, "/api/enter", method="POST", headers=headers, body=code).json["reader"] == "anna"


def test_tissue_is_sent_for_the_open_case_and_the_one_just_answered(study: Study) -> None:
    """A tile that the page asked for as the reader committed is no refusal, also at the end."""
    app, n = create_study_app(study), len(study.deal("anna"))
    while (state := get(app, study, "/api/state.json").json)["case"] is not None:
        post(app, study, committed(study, state))
        last = state["case"]["number"]
        state = get(app, study, "/api/state.json").json
        here = n - 1 if state["case"] is None else state["case"]["number"]
        sent = [i for i in range(n) if get(app, study, f"/tiles/{i}/8/0_0.jpeg").status == 200]
        assert sent == sorted({last, here})


def test_evidence_and_prediction_come_after_the_first_answer(study: Study) -> None:
    app = create_study_app(study)
    state = get(app, study, "/api/state.json").json
    stages = {}
    while state["case"] is not None:
        case = state["case"]
        reading = study.deal("anna")[case["number"]]
        evidence = get(app, study, f"/api/slides/{case['number']}/evidence-0.bin")
        if case["stage"] == "before":
            assert (case["prediction"], case["info"]["sets"], evidence.status) == (None, [], 403)
        else:
            own = study.case(reading)
            shown, column = study.shown(own, study.arm(reading))
            scores = shown.scores[column]
            assert case["prediction"] == {"name": own.answers["run"].predicted, "probability": 0.9}
            assert case["before"]["diagnosis"] == "tumour"
            sent = np.frombuffer(evidence.body, dtype="<f4")[-len(scores) :]
            np.testing.assert_array_equal(sent, scores)
        stages[case["number"]] = case["stage"]
        state = post(app, study, committed(study, state)).json
    assert set(stages.values()) == {"before", "after"}
    assert [line["done"] for line in state["worklist"]] == [True] * len(stages)


def test_drafts_and_commits_are_refused_out_of_turn(study: Study) -> None:
    app = create_study_app(study)
    state = get(app, study, "/api/state.json").json
    body = committed(study, state)
    assert post(app, study, {**body, "stage": "after"}).status == 409
    assert post(app, study, {**body, "number": 1}).status == 409
    assert post(app, study, {**body, "revision": 7}).status == 409
    assert post(app, study, {**body, "answers": {}}).status == 400
    assert post(app, study, {**body, "answers": {"diagnosis": "x"}}).status == 400
    assert post(app, study, {**body, "seconds": "soon"}).status == 400
    for ring in ([], [[0, 0], [1, "x"], [1, 1], [0, 0]], [[0, 0], [None, 1], [1, 1]], {}):
        region = {"type": "Feature", "geometry": {"type": "Polygon", "coordinates": [ring]}}
        assert post(app, study, {**body, "regions": [region]}).status == 400
    assert post(app, study, {**body, "regions": [{"type": "Point"}]}).status == 400
    assert post(app, study, {**body, "answers": {"comment": "\ud800"}}).status == 400
    ring = [["0", "0"], ["9", "0"], ["9", "\ud800"]]
    region = {"type": "Feature", "geometry": {"type": "Polygon", "coordinates": [ring]}}
    assert post(app, study, {**body, "regions": [region]}).status == 400
    headers = {"content-type": "application/json"}
    assert ask(app, "/api/answer", method="POST", headers=headers, body=b"{}").status == 403
    assert ask(app, "/api/state.json").json == {
        "title": "Reading study",
        "version": state["version"],
        "reader": None,
    }
    draft = post(app, study, {**body, "commit": False, "answers": {"confidence": 2}}).json
    assert draft["case"]["answers"] == {"confidence": 2}
    assert post(app, study, body).status == 409  # drawn over an older state
    assert post(app, study, {**body, "revision": draft["revision"]}).status == 200


def test_a_code_opens_one_readers_list(study: Study) -> None:
    app = create_study_app(study)
    entered = post(app, study, {"code": f" {study.codes['ben'].upper()} "}, target="/api/enter")
    assert entered.json["reader"] == "ben"
    assert "HttpOnly" in entered.headers["set-cookie"]
    assert post(app, study, {"code": "guess"}, target="/api/enter").status == 403
    for code in (3, "\ud800"):
        assert post(app, study, {"code": code}, target="/api/enter").status == 400


def test_a_region_is_stored_as_numbers(study: Study) -> None:
    app = create_study_app(study)
    body = {**committed(study, get(app, study, "/api/state.json").json), "commit": False}
    ring = [["0", 0, "x" * 9], [4, 0, "y"], [4, 4, None]]
    for points, status in ((ring, 400), ([point[:2] for point in ring], 200)):
        region = {"type": "Feature", "geometry": {"type": "Polygon", "coordinates": [points]}}
        assert post(app, study, {**body, "regions": [region]}).status == status
    (stored,) = study.stored("anna")["draft"]["regions"]
    assert stored["geometry"]["coordinates"] == [[[0.0, 0.0], [4.0, 0.0], [4.0, 4.0]]]


def test_what_strangers_send_is_not_parsed(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anybody is known, only the few bytes of a code are read; a reader's answers are bounded."""
    parsed: list[int] = []
    monkeypatch.setattr(
        "xmil.viewer.app.parse_json", lambda text: parsed.append(len(text)) or json.loads(text)
    )
    app, headers = create_study_app(study), {"content-type": "application/json"}
    known = {**headers, "cookie": f"{COOKIE}={study.codes['anna']}"}
    parts = [b"[" + b"[]," * 20_000] * 100  # 6 MB that come bit by bit
    requests = [("/api/enter", headers, 413), ("/api/answer", headers, 403), ("/api/answer", known, 413)]
    for target, about, status in requests:
        assert ask(app, target, method="POST", headers=about, body=list(parts)).status == status
    assert parsed == []


def test_a_server_that_is_killed_loses_no_answer(study: Study) -> None:
    """Answers are whole on disk when they are acknowledged: a process that dies at once leaves them all."""
    code = (
        "import os, sys; from tests.viewer.reading_room import commit, answers_to;"
        "from xmil.viewer.study import open_study; s = open_study(sys.argv[1]);\n"
        "for _ in range(3):\n"
        "    stored, reading, stage = s.current('anna')\n"
        "    commit(s, 'anna', answers_to(s, reading, stage, 'benign'))\n"
        "os._exit(9)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(study.folder)], env={**os.environ}, check=False)
    assert done.returncode == 9
    stored = open_study(study.folder).stored("anna")
    assert stored["revision"] == 3
    assert sum(map(len, stored["readings"])) == 3
    commit(study, "anna", answers_to(study, *study.current("anna")[1:], "benign"))
    read_all(study, Simulated("anna", 0.9))
    assert study.place(study.stored("anna")) is None
