"""Annotations on the page: corners, class, comment, lines, points, the ruler, scores inside, import."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.viewer.browser import expect_text, open_slide, opened, place_of, wait_until, wait_until_quiet
from tests.viewer.make_run import Made
from xmil.storage import read_explanation

EDGE, COLUMNS = 256, 12
MPP = 0.5


def drag(page: Any, start: tuple[float, float], end: tuple[float, float]) -> None:
    page.mouse.move(*place_of(page, *start))
    page.mouse.down()
    page.mouse.move(*place_of(page, *end), steps=5)
    page.mouse.up()


def notes(page: Any) -> list[dict[str, Any]]:
    return list(page.evaluate("() => window.xmil.view.marks.annotations.map((n) => ({ ...n }))"))


def test_annotations_are_edited_measured_undone_and_asked(browser: Any, url: str, made: Made) -> None:
    with opened(browser, url) as page:
        open_slide(page, url, 1)
        page.keyboard.press("r")
        drag(page, (EDGE, EDGE), (4 * EDGE, 3 * EDGE))
        page.locator(".selection-bar button", has_text="Annotate").click()
        page.keyboard.press("n")
        page.keyboard.type("front")
        page.locator("select[name=note-kind]").select_option("Stroma")
        page.locator(".note-details textarea").fill("seen by two readers")
        (note,) = notes(page)
        said = (note["name"], note["kind"], note["comment"], note["colour"])
        assert said == ("front", "Stroma", "seen by two readers", [0, 130, 95])

        page.locator("[data-action=edit-corners]").click()
        drag(page, (4 * EDGE, 3 * EDGE), (6 * EDGE, 5 * EDGE))  # a corner
        ring = np.array(notes(page)[0]["polygons"][0][0])
        np.testing.assert_allclose(ring.max(axis=0), (6 * EDGE, 5 * EDGE), atol=12)
        drag(page, (EDGE, 2 * EDGE), (0.5 * EDGE, 2 * EDGE))  # the middle of an edge
        assert len(notes(page)[0]["polygons"][0][0]) == len(ring) + 1
        page.mouse.dblclick(*place_of(page, 0.5 * EDGE, 2 * EDGE))
        assert len(notes(page)[0]["polygons"][0][0]) == len(ring)
        for _ in range(3):
            page.locator("[data-action=undo-note]").click()
        np.testing.assert_allclose(
            np.array(notes(page)[0]["polygons"][0][0]).max(axis=0), (4 * EDGE, 3 * EDGE), atol=12
        )
        page.keyboard.press("Escape")

        path = made.runs[0] / "slides" / f"{made.names[1]}.parquet"
        scores = read_explanation(path, method="lrp", target="tumour").scores.astype(np.float64)
        rows, columns = np.divmod(np.arange(96), COLUMNS)
        inside = (rows >= 1) & (rows < 3) & (columns >= 1) & (columns < 4)
        share = scores[inside & (scores > 0)].sum() / scores[scores > 0].sum()
        told = page.locator(".note-details").inner_text()
        assert "6 patches" in told
        assert f"{100 * share:.1f} % of the evidence for" in told
        assert f"{share / (6 / 96):.3g} times as dense" in told
        page.locator("[data-action=note-remove]").click()
        page.locator(".whatif-result").wait_for()
        expect_text(page.locator(".whatif-result"), "90 patches left")

        page.keyboard.press("i")
        page.mouse.click(*place_of(page, 5 * EDGE, 4 * EDGE))
        page.keyboard.press("Escape")
        page.locator("[data-panel=notes]").click()
        page.keyboard.press("d")
        for x, y in ((2 * EDGE, 5 * EDGE), (6 * EDGE, 5 * EDGE)):
            page.mouse.click(*place_of(page, x, y))
        page.keyboard.press("Enter")
        page.keyboard.press("Escape")
        assert [n["shape"] for n in notes(page)] == ["area", "point", "line"]
        length = 4 * EDGE * MPP
        row = page.locator(".note-row").nth(2).inner_text()
        assert abs(float(row.split("·")[1].split("µm")[0]) - length) < 0.02 * length
        page.locator("[data-panel=evidence]").click()
        page.keyboard.press("k")
        drag(page, (2 * EDGE, 2 * EDGE), (4 * EDGE, 2 * EDGE))
        ruler = page.evaluate("() => window.xmil.view.store.state.draft.text")
        assert abs(float(ruler.removesuffix(" µm")) - 2 * EDGE * MPP) < 6
        page.keyboard.press("Escape")
        assert page.evaluate("() => window.xmil.view.store.state.draft") is None

        page.reload()
        page.wait_for_function("() => window.xmil.view?.firstPaint")
        assert [n["shape"] for n in notes(page)] == ["area", "point", "line"]
        assert notes(page)[0]["comment"] == "seen by two readers"


def test_an_import_merges_without_doubling(browser: Any, url: str, tmp_path: Path) -> None:
    square = [[[0, 0], [300, 0], [300, 300], [0, 300], [0, 0]]]
    kind = {"objectType": "annotation", "classification": {"name": "Tumor"}}
    features = [
        {"type": "Feature", "geometry": {"type": "Polygon", "coordinates": square}, "properties": kind},
        {"type": "Feature", "geometry": {"type": "Point", "coordinates": [40, 50]}, "properties": kind},
        {"type": "Feature", "geometry": {"type": "Unknown", "coordinates": []}, "properties": kind},
    ]
    path = tmp_path / "qupath.geojson"
    path.write_text(json.dumps({"type": "FeatureCollection", "features": features}))
    with opened(browser, url) as page:
        open_slide(page, url, 2)
        page.locator("[data-panel=notes]").click()
        for message in ("2 annotations read; 1 feature", "2 known already"):  # no ids: by content
            page.locator("input[type=file]").set_input_files(path)
            page.locator(".message", has_text=message).first.wait_for()
            assert len(notes(page)) == 2
        expect_text(page.locator(".messages"), "2 known already")


def test_a_note_changed_in_two_windows_keeps_both_versions(browser: Any, url: str) -> None:
    with opened(browser, url) as one:
        open_slide(one, url, 0)
        one.evaluate("() => window.xmil.view.region([[[[0, 0], [500, 0], [500, 500], [0, 0]]]], null)")
        one.evaluate("() => { const v = window.xmil.view; v.show('notes'); v.notes.add(); }")
        wait_until_quiet(one)
        with opened(browser, url, expect_errors=True) as two:  # the browser logs the 409
            open_slide(two, url, 0)
            two.keyboard.press("5")
            for page, name in ((one, "mine"), (two, "theirs")):
                page.locator(".note-row input").first.fill(name)
                wait_until_quiet(page)
            two.wait_for_function("() => window.xmil.view.marks.annotations.length === 2")
            names = {n["name"] for n in notes(two)}
            assert names == {"theirs", "mine (other window)"}


def test_annotations_drawn_while_the_server_is_away_stay_and_reach_it(
    browser: Any, url: str, made: Made
) -> None:
    with opened(browser, url, expect_errors=True) as page:
        page.route("**/annotations-*.json", lambda route: route.abort())
        open_slide(page, url, 0)
        for corner in (0, 500):
            ring = [[corner, 0], [corner + 300, 0], [corner + 300, 300], [corner, 0]]
            page.evaluate("ring => window.xmil.view.region([[ring]], null)", ring)
            page.evaluate("() => { const v = window.xmil.view; v.show('notes'); v.notes.add(); }")
            if not corner:
                page.reload()
                page.wait_for_function("() => window.xmil.view?.firstPaint")
                assert len(notes(page)) == 1
        page.unroute("**/annotations-*.json")
        stored = made.runs[0] / "annotations" / made.names[0] / "reader.geojson"
        wait_until(page, stored.is_file)
        wait_until(page, lambda: len(json.loads(stored.read_text())["features"]) == 2)
        assert len(notes(page)) == 2
        page.reload()
        page.wait_for_function("() => window.xmil.view?.firstPaint")
        assert len(notes(page)) == 2
