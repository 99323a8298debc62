"""Annotations on the server: kept per slide and reader, never lost, never outside the run's folder."""

from __future__ import annotations

import json
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.viewer.asking import ask
from tests.viewer.browser import open_slide, opened, port_of, served, wait_until, wait_until_quiet
from tests.viewer.given_scores import grid, write_run
from tests.viewer.make_inside import write_concepts
from tests.viewer.make_run import Made
from xmil.core.errors import FileError, InputError, WriteError
from xmil.runs.agreement import compare_annotations
from xmil.storage import Run
from xmil.viewer.annotations import AnnotationFiles, ConflictError, RunNames
from xmil.viewer.app import create_app
from xmil.viewer.collection import Collection
from xmil.viewer.static_copy import export

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
    assert caught.value.stored["features"] == [BOX]
    assert files.read("s", "ann")["features"] == [BOX]


@pytest.mark.parametrize("reader", ["", "../x", "a/b", "a" * 41, "u\u0308", "a b", "a.b", "\u202ea"])
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


def test_names_are_kept_with_the_run_for_all_readers(fresh: Made) -> None:
    """A concept that is called something, and a class of one's own, are there on every other server."""
    run = fresh.runs[0]
    write_concepts(fresh)
    (run / "insight" / "dictionary.npz").write_bytes(b"one")
    app, other = (create_app(Collection(fresh.runs, slides=fresh.slides)) for _ in range(2))

    def post(**names: Any) -> Any:
        body = json.dumps(names).encode()
        return ask(app, "/api/names-0.json", method="POST", headers=JSON, body=body)

    assert post(concepts={"1": " dark nuclei "}).status == 200
    assert post(classes={"Mitosis": [95, 120, 0]}).status == 200
    found = {"classes": {"Mitosis": [95, 120, 0]}, "concepts": {"1": "dark nuclei"}}
    assert post(concepts={"0": ""}).json == found
    assert ask(other, "/api/names-0.json").json == found
    assert ask(other, "/api/slides/0/slide.json").json["kinds"] == found["classes"]
    concepts = ask(other, "/api/slides/0/concepts-0.json").json["concepts"]
    assert [entry["name"] for entry in concepts] == [None, "dark nuclei"]
    assert compare_annotations(Run(run), run / "annotations").rows == []  # not taken for annotations
    export(Collection(fresh.runs, slides=fresh.slides), run / "copy", longest=64)
    copied = json.loads((run / "copy" / "api" / "slides" / "0" / "concepts-0.json").read_text())
    assert copied["concepts"] == concepts
    (run / "insight" / "dictionary.npz").write_bytes(b"another")  # its concept 1 is another one
    assert ask(other, "/api/names-0.json").json == {**found, "concepts": {}}
    (run / "insight" / "dictionary.npz").write_bytes(b"one")
    assert post(concepts={"1": ""}).json["concepts"] == {}


@pytest.mark.parametrize(
    "body",
    [{}, {"classes": []}, {"classes": {"": [0, 0, 0]}}, {"classes": {"a": [0, 0]}},
     {"classes": {"a": [0, 0, 256]}}, {"classes": {"a\n": [True, 0, 0]}}, {"concepts": {"x": "a"}},
     {"concepts": {"1": 5}}, {"concepts": {"1": "a\u202e"}},
     {"concepts": {"1": "a" * 61}}, {"concepts": {"1": "\ud800"}}],
)  # fmt: skip
def test_names_that_cannot_be_shown_are_refused(body: dict[str, Any], tmp_path: Path) -> None:
    names = RunNames(run_of(tmp_path))
    with pytest.raises(InputError):
        names.write(body)
    assert not (tmp_path / "annotations" / "names.json").exists()


def test_a_damaged_file_of_names_is_not_written_over(tmp_path: Path) -> None:
    names = RunNames(run_of(tmp_path))
    names.write({"classes": {"Mitosis": [95, 120, 0]}})
    path = tmp_path / "annotations" / "names.json"
    for text in ('{"classes": [', '{"classes": 3}', '{"concepts": []}', '{"concepts": {"": 1}}'):
        path.write_text(text)
        assert names.read() == {"classes": {}, "concepts": {}}
        with pytest.raises(FileError, match=r"names\.json"):
            names.write({"classes": {"Other": [0, 0, 0]}})
        assert path.read_text() == text


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
    with pytest.raises(WriteError, match="cannot be stored"):
        AnnotationFiles(run).write("s", "ann", {"revision": 0, "document": document()})


def draw_often(run: Path, who: int) -> None:
    files = AnnotationFiles(run)
    for number in range(30):
        while True:
            stored = files.read("s", "ann")
            features = [*stored["features"], {"id": f"{who}-{number}"}]
            with suppress(ConflictError):
                files.write("s", "ann", {"revision": stored["revision"], "document": document(*features)})
                break


def test_two_servers_lose_nothing_that_they_acknowledged(tmp_path: Path) -> None:
    servers = [get_context("fork").Process(target=draw_often, args=(tmp_path, who)) for who in range(2)]
    for server in servers:
        server.start()
    for server in servers:
        server.join()
    stored = AnnotationFiles(tmp_path).read("s", "ann")
    assert stored["revision"] == len({one["id"] for one in stored["features"]}) == 60


def test_what_a_killed_server_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / "annotations" / "s").mkdir(parents=True)
    (tmp_path / "annotations" / "s" / ".ann.geojson.x1.part").write_text("half")
    AnnotationFiles(tmp_path)
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.parametrize(
    "value", ["[" * 800 + "]" * 800, '{"a":' * 800 + "1" + "}" * 800, "NaN", '"\\ud800"']
)
def test_what_could_not_be_sent_again_is_refused(value: str, tmp_path: Path) -> None:
    app = create_app(Collection([run_of(tmp_path)]))
    place = "/api/slides/0/annotations-ann.json"
    body = f'{{"revision": 0, "document": {{"features": [{value}]}}}}'.encode()
    assert ask(app, place, method="POST", headers=JSON, body=body).status == 400
    assert ask(app, place).status == 200


ADD = """([x, kind]) => {
  const view = window.xmil.view;
  view.region([[[[x, 10], [x + 60, 10], [x + 60, 60], [x, 60], [x, 10]]]], null);
  view.notes.add();
}"""
COUNT = "() => window.xmil.view.marks.annotations.length"


def kept(run: Path) -> list[Any]:
    path = run / "annotations" / "s" / "reader.geojson"
    return list(json.loads(path.read_text())["features"]) if path.exists() else []


def test_item_17_fault_03_two_windows_on_one_slide_lose_nothing(browser: Any, tmp_path: Path) -> None:
    """Two tabs of one browser, and one of another machine, draw in turn; each of them sees it all."""
    run = run_of(tmp_path)
    with (
        served(Collection([run])) as url,
        opened(browser, url, expect_errors=True) as first,  # a conflict is logged by the browser
        opened(browser, url, expect_errors=True) as third,
    ):
        pages = [first, first.context.new_page(), third]
        for page in pages:
            open_slide(page, url)
        for k in range(2):
            for i, page in enumerate(pages):
                page.evaluate(ADD, [10 + 10 * i + 100 * k, "a"])
        wait_until(first, lambda: len(kept(run)) == 6)
        for page in pages:
            wait_until_quiet(page)
        for page in pages:
            page.reload()
            page.wait_for_function("() => window.xmil.view?.firstPaint")
            assert page.evaluate(COUNT) == 6
        assert len(kept(run)) == 6


def test_item_17_fault_03_annotations_belong_to_their_run_not_to_a_name_or_port(
    browser: Any, tmp_path: Path
) -> None:
    """One browser: another run of the same name on the same port, then the first run on another port."""
    one, other = run_of(tmp_path / "a" / "run"), run_of(tmp_path / "b" / "run")
    with served(Collection([one])) as url, opened(browser, url) as page:
        open_slide(page, url)
        page.evaluate(ADD, [10, "a"])
        wait_until_quiet(page)
        state = page.context.storage_state()
    with (
        served(Collection([other]), port=port_of(url)) as url,
        opened(browser, url, storage_state=state) as page,
    ):
        open_slide(page, url)
        assert page.evaluate(COUNT) == 0
    with served(Collection([one])) as url, opened(browser, url, storage_state=state) as page:
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
        wait_until_quiet(page)
        assert len(kept(run)) == 1


HELD = """when => {
  const fetched = window.fetch, never = new Promise(() => undefined);
  window.fetch = (at, init) => {
    if (init?.method !== "POST") return fetched(at, init);
    const held = () => { window.hanging = true; return never; };
    return when === "before" ? held() : fetched(at, init).then(held);
  };
}"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_what_is_changed_while_a_write_is_under_way_outlives_the_page(
    browser: Any, tmp_path: Path, when: str
) -> None:
    """A write hangs before the server has it, or before its answer; changes go on; then a reload."""
    run = run_of(tmp_path)
    with served(Collection([run])) as url, opened(browser, url, expect_errors=True) as page:
        open_slide(page, url)
        page.locator("[data-panel=notes]").click()
        for k in range(2):
            page.evaluate(ADD, [10 + 70 * k, "a"])
        wait_until_quiet(page)
        assert len(kept(run)) == 2
        page.evaluate(HELD, when)
        page.evaluate(ADD, [150, "a"])
        page.wait_for_function("() => window.hanging")
        page.locator("[data-action=delete-note]").first.click()
        page.locator(".note-row input").first.fill("renamed")
        page.reload()
        page.wait_for_function("() => window.xmil.view?.firstPaint")
        names = "() => window.xmil.view.marks.annotations.map((note) => note.name)"
        assert page.evaluate(names) == ["renamed", ""]
        wait_until_quiet(page)
        assert [feature["properties"]["name"] for feature in kept(run)] == ["renamed", ""]
        assert page.evaluate("() => Object.keys(localStorage).filter((k) => k.includes('waiting'))") == []


def test_typing_goes_on_while_another_window_writes(browser: Any, tmp_path: Path) -> None:
    run = run_of(tmp_path)
    with (
        served(Collection([run])) as url,
        opened(browser, url, expect_errors=True) as one,
        opened(browser, url) as two,
    ):
        for page in (one, two):
            open_slide(page, url)
            page.locator("[data-panel=notes]").click()
        two.evaluate(ADD, [10, "a"])
        wait_until_quiet(two)
        one.evaluate(ADD, [150, "a"])  # over a revision that is gone: theirs joins while the name is typed
        one.keyboard.press("n")
        one.keyboard.type("first half, ")
        one.wait_for_function("() => window.xmil.view.marks.annotations.length === 2")
        one.keyboard.type("second half")
        assert one.evaluate("() => document.activeElement.value") == "first half, second half"


def test_fault_07_the_page_goes_on_when_the_server_is_back(browser: Any, tmp_path: Path) -> None:
    run = run_of(tmp_path)
    with opened(browser, "about:blank", expect_errors=True) as page:
        with served(Collection([run])) as url:
            open_slide(page, url)
        page.evaluate(ADD, [10, "a"])
        page.locator(".message.problem").wait_for()
        assert "server" in page.locator(".message.problem").first.inner_text().lower()
        with served(Collection([run]), port=port_of(url)):
            wait_until(page, lambda: len(kept(run)) == 1)


def test_fault_07_tiles_are_tried_again_and_the_slide_is_not_blamed(browser: Any, made: Made) -> None:
    """The server goes away before the finer tiles are asked for, and comes back."""
    loaded = "() => window.xmil.view.panes[0].viewer.world.getItemAt(0).getFullyLoaded()"
    with opened(browser, "about:blank", expect_errors=True) as page:
        with served(Collection(made.runs, slides=made.slides)) as url:
            open_slide(page, url)
        page.evaluate("() => window.xmil.view.panes[0].viewer.viewport.zoomTo(3, undefined, true)")
        page.locator(".message.problem").wait_for()
        said = page.locator(".message.problem").first.inner_text()
        assert "server" in said
        assert "could not be read" not in said
        assert not page.evaluate(loaded)
        with served(Collection(made.runs, slides=made.slides), port=port_of(url)):
            page.wait_for_function(loaded)
