"""A study in the browser: readers at once by keys alone, killed and resumed; axe; what is sent."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.viewer.browser import expect_count, expect_text, opened, wait_until
from tests.viewer.given_scores import grid, write_run
from tests.viewer.make_run import Made
from tests.viewer.reading_room import CLASSES, COLUMNS, ROWS, TISSUE, Simulated, write_cases
from tests.viewer.study_pages import ANSWERED, READY, AtThePage, read_in_turns, serving
from tests.viewer.test_page_access import AXE, violations
from xmil.viewer.study import Study, make_study
from xmil.viewer.study.analysis import analyse
from xmil.viewer.study.plan import make_plan

LOADED = "() => window.study.reading?.pane?.viewer.world.getItemAt(0)?.getFullyLoaded()"
READERS = [
    Simulated("anna", 1.0, pulled=1.0, corrected=1.0),
    Simulated("ben", 0.0, pulled=0.0, corrected=1.0),
]


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Study:
    monkeypatch.setenv("XMIL_SYNC", "0")
    run, slides = write_cases(tmp_path, 5, edge=TISSUE)
    settings = {"readers": ["anna", "ben"], "practice": 1, "washout_days": 0.0, "repeats": 1, "seed": 0}
    return make_study([run], slides=slides, plan=make_plan(settings), out=tmp_path / "study")


@pytest.mark.full
def test_readers_who_were_killed_and_resumed_are_found_again_in_the_report(
    browser: Any, study: Study
) -> None:
    read_in_turns(browser, study, READERS, killed_at=3)
    findings = analyse(study)
    values = {(e.measure, e.arm, e.stage, e.reader): e.value.estimate for e in findings.estimates}
    wrong = sum(not case.answers["run"].is_right(case.label) for case in study.cases)
    assert 0 < wrong < 4
    assert values["accuracy", "tissue", "before", "anna"] == 1.0
    assert values["accuracy", "lrp", "before", "ben"] == 0.0
    assert values["accuracy", "lrp", "after", "anna"] == (4 - wrong) / 4  # follows the model into its faults
    assert values["accuracy", "lrp", "after", "ben"] == (4 - wrong) / 4  # and out of the reader's own
    assert values["over-reliance", "lrp", "after", "anna"] == 1.0
    assert values["correction", "lrp", "after", "ben"] == 1.0
    assert values["kappa", "tissue", "before", "anna and ben"] == pytest.approx(-1.0)
    assert values["region auroc", "lrp", "before", "anna"] > 0.95
    marked = {row["marked"] for row in findings.regions}
    assert marked == {6}  # the block that was drawn by hand
    assert all(row["seconds"] >= 0 for row in findings.readings)
    assert len(findings.readings) == 2 * (1 + 4 + 4 + 1) + sum(
        row["stage"] == "after" for row in findings.readings
    )


def test_the_page_says_nothing_that_the_server_did_not(browser: Any, study: Study) -> None:
    """Everything that came over the wire before the first answer: the page's files, the state, tiles."""
    with serving(study) as (url, _):
        desk = AtThePage(browser, study, READERS[0])
        asked: list[str] = []
        desk.page.on("request", lambda request: asked.append(request.url.removeprefix(url).split("?")[0]))
        desk.enter(url)
        desk.page.wait_for_function(LOADED)
        api = {name for name in asked if name.startswith("api/")}
        assert api == {"api/state.json", "api/enter"}
        assert all(name.startswith("tiles/0/") for name in asked if name.startswith("tiles/"))
        status = desk.page.evaluate("async () => (await fetch('api/slides/0/evidence-0.bin')).status")
        assert status == 403
        assert desk.page.evaluate("() => document.cookie") == ""
        desk.faults.clear()  # the refusal that was asked for
        desk.close()


def test_the_label_stands_beside_its_own_case_until_the_reader_goes_on(browser: Any, study: Study) -> None:
    with serving(study) as (url, _):
        desk = AtThePage(browser, study, READERS[0])
        page, tiles = desk.page, set[str]()
        page.on("request", lambda r: tiles.update(re.findall(r"tiles/(\d+)/", r.url)))
        desk.enter(url)
        page.wait_for_function(LOADED)
        for key in ("1", "4", "Enter", "2"):  # a practice case on the tissue alone, and a key too many
            page.keyboard.press(key)
        page.wait_for_function(ANSWERED)
        expect_text(page.locator("[data-shown=label]"), study.practice[0].label)
        expect_text(page.locator("h1"), "Practice case 1")
        before = study.stored("anna")
        for key in ("2", "r", "u"):  # nothing of the answered case can be changed
            page.keyboard.press(key)
        page.wait_for_function("() => window.study.isSaved")
        assert page.locator("[data-tool], [data-action=commit]").count() == 0
        assert tiles == {"0"}
        assert study.stored("anna") == before
        page.get_by_role("button", name="Next case").click()
        page.wait_for_function("() => window.study.reading.open.number === 1")
        expect_text(page.locator("h1"), "Case 2")
        page.wait_for_function(LOADED)
        assert tiles == {"0", "1"}
        assert page.locator("[data-shown=label]").inner_text() == ""
        assert page.locator(".message").count() == 0
        desk.close()


def test_readers_see_no_weak_scatter_in_full_colour(browser: Any, tmp_path: Path) -> None:
    """A reader cannot choose the scale: it ends at the strongest score if that is far beyond the whiskers."""
    run, slides = write_cases(tmp_path, 3, edge=TISSUE)
    scores = np.linspace(-1e-3, 1e-3, COLUMNS * ROWS, dtype=np.float32)
    scores[0] = 2.0
    for i in range(3):
        columns = {("lrp", name): scores for name in CLASSES}
        write_run(run, f"case-{i:03d}", columns, coords=grid(COLUMNS, ROWS, TISSUE), edge=TISSUE)
    settings = {
        "readers": ["anna"],
        "practice": 0,
        "washout_days": 0.0,
        "seed": 0,
        "arms": [{"name": "a", "method": "lrp"}],
    }
    study = make_study([run], slides=slides, plan=make_plan(settings), out=tmp_path / "study")
    with serving(study) as (url, _):
        desk = AtThePage(browser, study, READERS[0])
        desk.enter(url)
        expect_text(desk.page.locator("[data-shown=missing]"), "Answer first: Diagnosis")
        desk.step()
        desk.page.wait_for_function(LOADED)
        assert desk.page.evaluate("() => window.study.reading.display.clip") == "max"
        assert desk.page.locator(".bar-warning").count() == 0
        desk.close()


def refuse_answers(page: Any) -> list[str]:
    """Let no answer reach the server, as if it were away; list what was sent."""
    sent: list[str] = []
    page.route("**/api/answer", lambda route: (sent.append(route.request.post_data), route.abort()))
    return sent


def test_a_draft_waits_in_the_browser_until_the_server_is_back(browser: Any, study: Study) -> None:
    with serving(study) as (url, _):
        desk = AtThePage(browser, study, READERS[0])
        page, dialogs = desk.page, list[str]()
        page.on("dialog", lambda dialog: (dialogs.append(dialog.type), dialog.accept()))
        desk.enter(url)
        page.wait_for_function(LOADED)
        sent = refuse_answers(page)
        page.keyboard.press("1")
        wait_until(page, lambda: len(sent) > 1)  # and again
        page.keyboard.press("4")
        wait_until(page, lambda: '"confidence":4' in sent[-1])
        assert study.stored("anna")["revision"] == 0
        page.reload()
        assert dialogs == ["beforeunload"]
        page.wait_for_function(READY)
        form = "() => window.study.reading.form.answers"
        assert page.evaluate(form) == {"diagnosis": "benign", "confidence": 4}
        page.unroute("**/api/answer")
        page.wait_for_function("() => window.study.isSaved")
        assert study.stored("anna")["draft"]["answers"] == page.evaluate(form)
        page.reload()
        page.wait_for_function(READY)
        assert page.evaluate(form) == study.stored("anna")["draft"]["answers"]
        assert study.stored("anna")["revision"] == 1  # nothing was sent again
        desk.faults.clear()  # of requests that failed
        desk.close()


@pytest.mark.parametrize("is_stored", [False, True])
def test_a_commit_is_sent_again_until_its_reply_has_come(
    browser: Any, study: Study, *, is_stored: bool
) -> None:
    """The server goes before, or after, it has stored the answers."""
    with serving(study) as (url, _):
        desk = AtThePage(browser, study, READERS[0])
        page, sent = desk.page, list[str]()

        def lose(route: Any) -> None:
            sent.append(route.request.post_data)
            if is_stored:
                route.fetch()
            route.abort()

        desk.enter(url)
        page.wait_for_function(LOADED)
        page.route("**/api/answer", lose, times=1)
        page.keyboard.press("1")  # a draft, whose reply is lost
        wait_until(page, lambda: len(sent) == 1)
        page.keyboard.press("4")
        page.wait_for_function("() => window.study.isSaved")
        assert study.stored("anna")["draft"]["answers"] == {"diagnosis": "benign", "confidence": 4}
        page.route("**/api/answer", lose, times=1)
        page.keyboard.press("Enter")
        wait_until(page, lambda: len(sent) == 2)
        page.keyboard.press("2")  # too late to change it
        page.wait_for_function("() => window.study.isSaved")
        (reading,) = study.stored("anna")["readings"]
        assert reading["before"]["answers"] == {"diagnosis": "benign", "confidence": 4}
        expect_count(page.locator(".message", has_text="another window"), 0)
        desk.faults.clear()  # of requests that failed
        desk.close()


def test_what_the_server_refuses_stays_on_the_screen_and_can_be_sent_again(
    browser: Any, study: Study
) -> None:
    with serving(study) as (url, _):
        desk = AtThePage(browser, study, READERS[0])
        page = desk.page
        desk.enter(url)
        page.wait_for_function(LOADED)
        for key in ("1", "4"):
            page.keyboard.press(key)
        page.wait_for_function("() => window.study.isSaved")
        full = {"error": "Answers cannot be stored (No space left on device)."}
        page.route("**/api/answer", lambda route: route.fulfill(status=422, json=full), times=1)
        page.keyboard.press("Enter")
        expect_text(page.locator(".messages"), full["error"])
        assert page.evaluate("() => window.study.reading.open.stage") == "before"
        assert not page.evaluate("() => window.study.isSaved")
        page.keyboard.press("Enter")
        page.wait_for_function(ANSWERED)
        assert study.stored("anna")["readings"][0]["before"]["answers"]["diagnosis"] == "benign"
        desk.faults.clear()  # of the refusal
        desk.close()


def test_axe_finds_nothing_and_a_phone_shows_the_slide(browser: Any, study: Study) -> None:
    if not AXE.is_file():
        pytest.skip("axe-core is not installed (npm --prefix page ci)")
    with serving(study) as (url, _):
        desk = AtThePage(browser, study, READERS[0])
        page, found = desk.page, {}
        page.goto(url)
        page.get_by_label("Your code").wait_for()
        page.evaluate(AXE.read_text(encoding="utf-8"))
        found["door"] = violations(page)
        page.get_by_label("Your code").fill(study.codes["anna"])
        page.keyboard.press("Enter")
        page.wait_for_function(READY)
        found["before"] = violations(page)
        page.keyboard.press("w")
        found["worklist"] = violations(page)
        page.keyboard.press("Escape")
        while page.evaluate("() => window.study.reading.open.stage") == "before":
            desk.step()
        found["after"] = violations(page)
        page.set_viewport_size({"width": 390, "height": 844})
        page.wait_for_function("() => document.documentElement.scrollWidth <= innerWidth")
        box = page.locator(".stage").bounding_box()
        assert box is not None
        assert box["height"] > 250
        found["phone"] = violations(page)
        desk.close()
    assert {place: broken for place, broken in found.items() if broken} == {}


def test_annotations_are_set_against_the_evidence(browser: Any, url: str, made: Made) -> None:
    with opened(browser, f"{url}#/agreement") as page:
        expect_text(page.locator("main"), "no regions")
    folder = made.runs[0] / "annotations" / made.names[0]
    folder.mkdir(parents=True)
    ring = [[0, 0], [1024, 0], [1024, 1024], [0, 1024], [0, 0]]
    feature = {"type": "Feature", "geometry": {"type": "Polygon", "coordinates": [ring]}, "properties": {}}
    (folder / "anna.geojson").write_text(json.dumps({"features": [feature]}), encoding="utf-8")
    with opened(browser, url) as page:
        page.get_by_role("link", name="Annotations against evidence").click()
        row = page.locator("[data-table=by-slide] tbody tr").first
        expect_text(row, "16 of 96")
        expect_text(row, "anna")
        expect_text(row, "(no class)")
        row.get_by_role("link").click()
        page.wait_for_function("() => window.xmil.view?.row.key === 0")
