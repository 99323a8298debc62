"""Annotations on the server: kept per slide and reader, never lost, never outside the run's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.viewer.asking import ask
from tests.viewer.browser import chromium, open_slide, opened, served
from tests.viewer.given_scores import grid, write_run
from xmil.core.errors import InputError, WriteError
from xmil.viewer.annotation_files import AnnotationFiles, ConflictError
from xmil.viewer.app import create_app
from xmil.viewer.collection import Collection

JSON = {"content-type": "application/json"}
BOX = {
    "type": "Feature",
    "id": "one",
    "geometry": {"type": "Polygon", "coordinates": [[[0, 0], [64, 0], [64, 64], [0, 64], [0, 0]]]},
    "properties": {"objectType": "annotation", "name": "", "classification": {"name": "Tumor"}},
}


def run_of(folder: Path, *names: str) -> Path:
    rng = np.random.default_rng(0)
    for name in names or ("s",):
        scores = {("lrp", "tumour"): rng.normal(size=20).astype(np.float32)}
        write_run(folder, name, scores, coords=grid(5, 4, 64))
    return folder


def document(*features: dict[str, Any]) -> dict[str, Any]:
    return {"type": "FeatureCollection", "features": list(features), "xmil": {"origin": [0, 0]}}


def test_what_is_written_is_read_and_revisions_rise(tmp_path: Path) -> None:
    files = AnnotationFiles(run_of(tmp_path))
    assert files.read("s", "ann")["revision"] == 0
    assert files.write("s", "ann", {"revision": 0, "document": document(BOX)}) == {"revision": 1}
    held = files.read("s", "ann")
    assert (held["revision"], held["features"], held["readers"]) == (1, [BOX], ["ann"])
    stored = json.loads((tmp_path / "annotations" / "s" / "ann.geojson").read_text())
    assert stored["xmil"] == {"origin": [0, 0], "slide": "s", "reader": "ann", "revision": 1}
    with pytest.raises(ConflictError) as caught:
        files.write("s", "ann", {"revision": 0, "document": document()})
    assert caught.value.held["features"] == [BOX]
    assert files.read("s", "ann")["features"] == [BOX]


@pytest.mark.parametrize("reader", ["", "../x", "a/b", "a" * 41, "ü", "a b"])
def test_readers_cannot_leave_the_folder(reader: str, tmp_path: Path) -> None:
    files = AnnotationFiles(run_of(tmp_path))
    with pytest.raises(InputError, match="reader's name"):
        files.write("s", reader, {"revision": 0, "document": document()})


def test_links_are_not_followed(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run")
    outside = tmp_path / "outside"
    outside.mkdir()
    (run / "annotations").mkdir()
    (run / "annotations" / "s").symlink_to(outside)
    with pytest.raises(InputError, match="leads elsewhere"):
        AnnotationFiles(run).write("s", "ann", {"revision": 0, "document": document()})
    assert not list(outside.iterdir())


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{}", b'{"revision": 0}', b'{"revision": -1, "document": {"features": []}}',
     b'{"revision": true, "document": {"features": []}}', b'{"revision": 0, "document": {"features": 5}}',
     b"[" * 100_000],
)  # fmt: skip
def test_bad_bodies_are_one_sentence(body: bytes, tmp_path: Path) -> None:
    app = create_app(Collection([run_of(tmp_path)]))
    answer = ask(app, "/api/slides/0/annotations-ann.json", method="POST", headers=JSON, body=body)
    assert answer.status == 400
    assert "\n" not in answer.json["error"]
    assert not (tmp_path / "annotations").exists()


def test_a_conflict_is_answered_with_what_is_there(tmp_path: Path) -> None:
    app = create_app(Collection([run_of(tmp_path)]))
    place = "/api/slides/0/annotations-ann.json"
    first = json.dumps({"revision": 0, "document": document(BOX)}).encode()
    assert ask(app, place, method="POST", headers=JSON, body=first).json == {"revision": 1}
    again = ask(app, place, method="POST", headers=JSON, body=first)
    assert (again.status, again.json["revision"], again.json["features"]) == (409, 1, [BOX])
    assert ask(app, place, method="POST", body=first).status == 415
    assert ask(app, "/api/slides/7/annotations-ann.json").status == 404


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    (run / "annotations").write_text("in the way")
    with pytest.raises(WriteError, match="cannot be kept"):
        AnnotationFiles(run).write("s", "ann", {"revision": 0, "document": document()})


ADD = """([x, kind]) => {
  const view = window.xmil.view;
  view.region([[[[x, 10], [x + 60, 10], [x + 60, 60], [x, 60], [x, 10]]]], null);
  view.notes.add();
}"""
COUNT = "() => window.xmil.view.marks.annotations.length"


@pytest.fixture(scope="module")
def browser() -> Any:
    with chromium() as found:
        yield found


def kept(run: Path) -> list[Any]:
    return list(json.loads((run / "annotations" / "s" / "reader.geojson").read_text())["features"])


def test_item_17_fault_03_two_windows_on_one_slide_lose_nothing(browser: Any, tmp_path: Path) -> None:
    run = run_of(tmp_path)
    with (
        served(Collection([run])) as url,
        opened(browser, url, expect_errors=True) as first,  # a conflict is logged by the browser
        opened(browser, url, expect_errors=True) as second,
    ):
        for page in (first, second):
            open_slide(page, url)
        for k in range(3):
            first.evaluate(ADD, [10 + 70 * k, "a"])
            second.evaluate(ADD, [15 + 70 * k, "b"])
        first.wait_for_timeout(1500)
        second.evaluate("() => window.xmil.view.keeping.keep(window.xmil.view.keeping.notes, true)")
        second.wait_for_timeout(1000)
        assert len(kept(run)) == 6
        first.reload()
        first.wait_for_function("() => window.xmil.view?.firstPaint")
        assert first.evaluate(COUNT) == 6


def test_item_17_fault_03_annotations_belong_to_their_run_not_to_a_name_or_port(
    browser: Any, tmp_path: Path
) -> None:
    one, other = run_of(tmp_path / "a" / "run"), run_of(tmp_path / "b" / "run")
    with served(Collection([one])) as url, opened(browser, url) as page:
        open_slide(page, url)
        page.evaluate(ADD, [10, "a"])
        page.wait_for_timeout(1000)
    with served(Collection([other])) as url, opened(browser, url) as page:
        open_slide(page, url)
        assert page.evaluate(COUNT) == 0
    with served(Collection([one])) as url, opened(browser, url) as page:  # another port, another visit
        open_slide(page, url)
        assert page.evaluate(COUNT) == 1


def test_item_17_fault_03_a_deletion_is_undone(browser: Any, tmp_path: Path) -> None:
    run = run_of(tmp_path)
    with served(Collection([run])) as url, opened(browser, url) as page:
        open_slide(page, url)
        page.evaluate(ADD, [10, "a"])
        page.keyboard.press("Escape")
        page.locator("[data-panel=notes]").click()
        page.locator(".note-row button", has_text="Delete").click()
        assert page.evaluate(COUNT) == 0
        page.locator("[data-action=undo-note]").click()
        assert page.evaluate(COUNT) == 1
        page.wait_for_timeout(1000)
        assert len(kept(run)) == 1


def test_fault_07_the_page_goes_on_when_the_server_is_back(browser: Any, tmp_path: Path) -> None:
    from xmil.viewer.security import Rules
    from xmil.viewer.serve import BackgroundServer, address, open_socket

    run = run_of(tmp_path)
    rules = Rules("127.0.0.1", None)
    listening = open_socket("127.0.0.1", 0)
    port = listening.getsockname()[1]
    server = BackgroundServer(create_app(Collection([run]), rules=rules), listening)
    url = address(listening, rules)
    with opened(browser, url, expect_errors=True) as page:
        open_slide(page, url)
        server.stop()
        page.evaluate(ADD, [10, "a"])
        page.locator(".message.problem").wait_for()
        assert "server" in page.locator(".message.problem").first.inner_text().lower()
        again = open_socket("127.0.0.1", port)
        server = BackgroundServer(create_app(Collection([run]), rules=rules), again)
        for _ in range(40):
            if (run / "annotations" / "s" / "reader.geojson").exists():
                break
            page.wait_for_timeout(250)
        assert len(kept(run)) == 1
    server.stop()
