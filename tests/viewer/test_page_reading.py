"""Reading slide after slide: who reads, serial annotation, own classes, QuPath, and what is never hidden."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.viewer.browser import (
    expect_count,
    expect_text,
    expect_value,
    open_slide,
    opened,
    place_of,
    served,
    settle,
    wait_until,
    wait_until_quiet,
)
from tests.viewer.given_scores import grid, signed, write_run
from tests.viewer.make_run import Made
from xmil.core.interactions import Interactions
from xmil.core.task import Target
from xmil.storage import interactions_file
from xmil.viewer.annotations import AnnotationFiles
from xmil.viewer.collection import Collection

EDGE = 256
SQUARE = [[[0, 0], [300, 0], [300, 300], [0, 300], [0, 0]]]


def drag(page: Any, start: tuple[float, float], end: tuple[float, float]) -> None:
    page.mouse.move(*place_of(page, *start))
    page.mouse.down()
    page.mouse.move(*place_of(page, *end), steps=4)
    page.mouse.up()


def features_of(path: Path) -> list[Any]:
    return list(json.loads(path.read_text())["features"]) if path.is_file() else []


def test_the_reader_is_asked_before_the_first_annotation(browser: Any, fresh: Made) -> None:
    notes = fresh.runs[0] / "annotations" / fresh.names[0]
    region = "() => window.xmil.view.region([[[[0, 0], [90, 0], [90, 90], [0, 0]]]], null)"
    shown = Collection(fresh.runs, slides=fresh.slides)
    with served(shown) as url, opened(browser, url, reader=None) as page:
        open_slide(page, url)
        page.evaluate(region)
        page.keyboard.press("a")
        name = page.locator("dialog input[name=answer]")
        name.fill("../x")
        page.keyboard.press("Enter")
        expect_text(page.locator("dialog [role=alert]"), "letters")  # refused, and asked again
        name.fill("Dr. 黄 Zoë")
        page.keyboard.press("Enter")
        kept = notes / "Dr-黄-Zoë.geojson"
        wait_until(page, lambda: len(features_of(kept)) == 1)
        assert sorted(path.name for path in notes.iterdir()) == [".lock", kept.name]  # and no other reader's
        page.evaluate(region)
        page.keyboard.press("a")  # not asked twice
        wait_until(page, lambda: len(features_of(kept)) == 2)
        reader = page.locator("input[name=reader]")
        reader.fill("///")
        page.keyboard.press("Enter")
        page.locator(".message.problem").wait_for()
        expect_value(reader, "Dr-黄-Zoë")  # the refused name is not in force
        page.keyboard.press("Escape")
        page.evaluate(region)
        page.keyboard.press("a")
        wait_until(page, lambda: len(features_of(kept)) == 3)


def test_regions_of_other_readers_are_shown_and_stay_theirs(browser: Any, fresh: Made) -> None:
    kind = {"objectType": "annotation", "name": "nest", "classification": {"name": "Tumor"}}
    box = {"type": "Feature", "geometry": {"type": "Polygon", "coordinates": SQUARE}, "properties": kind}
    files = AnnotationFiles(fresh.runs[0])
    files.write(fresh.names[0], "bén", {"revision": 0, "document": {"features": [box]}})
    with served(Collection(fresh.runs, slides=fresh.slides)) as url, opened(browser, url) as page:
        open_slide(page, url)
        page.keyboard.press("5")
        page.locator("[data-reader='bén']").check()
        others = "() => [...window.xmil.view.marks.others].map(([name, notes]) => [name, notes.length])"
        page.wait_for_function(f"() => ({others})().length === 1")
        assert page.evaluate(others) == [["bén", 1]]
        assert page.evaluate("() => window.xmil.view.marks.annotations.length") == 0
        page.locator("[data-reader='bén']").uncheck()
        page.wait_for_function(f"() => ({others})().length === 0")


def test_one_region_after_another_without_leaving_tool_or_keys(browser: Any, url: str) -> None:
    with opened(browser, url) as page:
        open_slide(page, url, 1)
        page.keyboard.press("r")
        for column in (1, 4, 7):
            drag(page, (column * EDGE, EDGE), ((column + 2) * EDGE, 3 * EDGE))
            page.keyboard.press("a")
        assert page.evaluate("() => window.xmil.view.marks.annotations.length") == 3
        assert page.evaluate("() => window.xmil.view.tool") == "rectangle"
        page.keyboard.press("h")  # a key is a key, not part of a name
        assert page.evaluate("() => window.xmil.view.display.shown") is False
        assert page.evaluate("() => window.xmil.view.marks.annotations.map((note) => note.name)") == [""] * 3
        page.keyboard.press("n")
        page.keyboard.type("front")
        assert page.evaluate("() => window.xmil.view.marks.annotations[2].name") == "front"


def test_own_classes_are_offered_and_long_lists_are_searched(browser: Any, url: str, tmp_path: Path) -> None:
    kind = {"objectType": "annotation", "classification": {"name": "Stroma"}}
    features = [
        {
            "type": "Feature",
            "id": f"note-{i}",
            "geometry": {"type": "Point", "coordinates": [10 * i, 50]},
            "properties": {**kind, "name": f"cell {i}"},
        }
        for i in range(150)
    ]
    path = tmp_path / "many.geojson"
    path.write_text(json.dumps({"type": "FeatureCollection", "features": features}))
    with opened(browser, url) as page:
        open_slide(page, url, 2)
        page.keyboard.press("5")
        page.locator("input[type=file]").set_input_files(path)
        rows = page.locator(".note-row")
        expect_count(rows, 100)
        page.locator("[data-action=more-notes]").click()
        expect_count(rows, 150)
        page.locator("input[name=search-notes]").fill("cell 14")
        expect_count(rows, 11)
        rows.first.locator("[data-action=go-note]").click()
        page.locator("select[name=note-kind]").select_option("new")
        page.locator("dialog input[name=answer]").fill("Mitosis")
        page.keyboard.press("Enter")
        page.wait_for_function(
            "() => window.xmil.view.marks.annotations.some((note) => note.kind === 'Mitosis')"
        )
        wait_until_quiet(page)
    with opened(browser, url, reader="ben") as page:  # another browser, another slide
        open_slide(page, url, 1)
        page.keyboard.press("5")
        assert "Mitosis" in page.locator("select[name=kind] option").all_inner_texts()


def test_what_qupath_wrote_comes_back(browser: Any, url: str, tmp_path: Path) -> None:
    properties = {
        "objectType": "annotation",
        "name": "nest",
        "classification": {"name": "Tumor", "color": [200, 0, 0]},
        "isLocked": True,
        "measurements": {"Area µm^2": 5625.0, "Nucleus: Circularity": 0.83},
        "metadata": {"ANNOTATION_DESCRIPTION": "second opinion", "case": "7"},
    }
    geometry = {"type": "Polygon", "coordinates": SQUARE}
    feature = {"type": "Feature", "id": "5ad2", "geometry": geometry, "properties": properties}
    path = tmp_path / "qupath.geojson"
    path.write_text(json.dumps({"type": "FeatureCollection", "features": [feature]}))
    with opened(browser, url, accept_downloads=True) as page:
        open_slide(page, url, 2)
        page.keyboard.press("5")
        page.locator("input[type=file]").set_input_files(path)
        page.locator(".note-row").wait_for()
        wait_until_quiet(page)
        page.reload()  # through the server's file as well
        page.wait_for_function("() => window.xmil.view?.firstPaint")
        page.keyboard.press("5")
        page.locator("[data-action=go-note]").click()
        assert page.locator("[data-action=edit-corners]").is_disabled()
        with page.expect_download() as got:
            page.locator("[data-action=export-annotations]").click()
        (written,) = json.loads(Path(got.value.path()).read_text())["features"]
        assert written["properties"] == properties
        assert written["geometry"] == geometry


WHOLE = """() => {
  const { viewer } = window.xmil.view.panes[0];
  const { x, y } = viewer.viewport.getContainerSize();
  const bounds = viewer.world.getItemAt(0).getBounds();
  const place = (point) => viewer.viewport.viewportToViewerElementCoordinates(point);
  const [from, to] = [place(bounds.getTopLeft()), place(bounds.getBottomRight())];
  return Math.min(from.x, from.y, x - to.x, y - to.y);
}"""
INSIDE = """([inner, outer]) => {
  const [a, b] = [inner, outer].map((name) => document.querySelector(name)?.getBoundingClientRect());
  return a && b ? Math.max(0, Math.min(a.right, b.right) - Math.max(a.left, b.left))
    * Math.max(0, Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top)) : 0;
}"""


def test_the_first_view_is_whole_and_nothing_lies_over_it(browser: Any, url: str) -> None:
    for width, height in ((1440, 900), (1024, 768), (390, 844)):
        with opened(browser, url, viewport={"width": width, "height": height}) as page:
            open_slide(page, url, 1)
            wait_until_quiet(page)
            assert page.evaluate(WHOLE) >= -1, width
            verdict = page.locator(".slide-head .verdict").bounding_box()
            assert verdict is not None
            assert verdict["x"] >= 0
            assert verdict["x"] + verdict["width"] <= width
            head = page.locator(".slide-head").bounding_box()
            assert verdict["y"] + verdict["height"] <= head["y"] + head["height"] + 1  # not cut off
            page.locator("[data-action=copy-link]").click()
            page.locator(".message").first.wait_for()
            for over in (".messages", ".navigator", ".colour-bar"):
                assert page.evaluate(INSIDE, [over, ".stage"]) == 0, (width, over)
            assert page.evaluate(INSIDE, [".messages", ".colour-bar"]) == 0
            page.keyboard.press("s")  # still whole in two panes
            page.wait_for_function("() => window.xmil.view.panes[1]?.viewer.isOpen()")
            wait_until_quiet(page)
            assert page.evaluate(WHOLE) >= -1, width


def test_a_phone_shows_the_slide_and_all_of_a_row(browser: Any, url: str) -> None:
    with opened(browser, url, viewport={"width": 390, "height": 844}) as page:
        expect_count(page.locator("img.small-map"), 3)
        row = page.locator("table.slides tbody tr").first
        for part in ("td.column-probability", ".right, .wrong", ".verdict"):
            box = row.locator(part).first.bounding_box()
            assert box is not None
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= 390, part
        assert page.evaluate("() => document.scrollingElement.scrollWidth") <= 390
        open_slide(page, url, 1)
        wait_until_quiet(page)
        stage = page.locator(".stage").bounding_box()
        assert stage["height"] >= 422
        assert stage["y"] + stage["height"] <= 844


CONTRAST = """(node) => {
  const light = (text) => {
    const parts = text.match(/[\\d.]+/g).slice(0, 3).map((c) => c / 255);
    const [r, g, b] = parts.map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const { color, backgroundColor } = getComputedStyle(node);
  const [a, b] = [light(color), light(backgroundColor)].sort((x, y) => y - x);
  return (a + 0.05) / (b + 0.05);
}"""


def test_pressed_buttons_stay_legible_below_the_pointer(browser: Any, url: str) -> None:
    for scheme in ("light", "dark"):
        with opened(browser, url, color_scheme=scheme, reduced_motion="reduce") as page:
            open_slide(page, url, 1)
            for name in ("[data-clip=auto]", "[data-sign=both]", "[data-tool=move]"):
                button = page.locator(name)
                button.hover()
                settle(page)
                assert button.evaluate(CONTRAST) >= 4.5, (scheme, name)


def test_attention_claims_no_zero_and_has_one_row(browser: Any, url: str) -> None:
    with opened(browser, url) as page:
        open_slide(page, url, 1)
        page.locator("select[name=method]").select_option("attention")
        assert "near zero" not in page.locator(".layers").inner_text()
        page.evaluate("() => { const v = window.xmil.view; v.pick(v.panes[0], 20); }")
        rows = page.locator("table.scores tbody tr", has_text="Attention")
        expect_count(rows, 1)
        expect_text(rows, "no class")


def test_many_sets_that_decide_are_counted_and_most_are_a_warning(browser: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_run(run, "s", {("lrp", "tumour"): signed(24)}, coords=grid(6, 4, 64))
    deciding = {
        "instances": [7], "n": 24, "target": "tumour", "kind": "flip", "equal": 20, "all_equal": True,
        "caution": "Caution: 20 of 24 single patches change the prediction when removed.",
        "sentence": "The smallest set has 1 of 24. It is the strongest of 20 sets of this size. "
        "Caution: 20 of 24 single patches change the prediction when removed.",
    }  # fmt: skip
    paper = {"n": 24, "methods": [], "deciding": deciding, "random_band": {"mean": [], "low": [], "high": []}}
    (run / "certificates").mkdir()
    (run / "certificates" / "s.json").write_text(json.dumps(paper))
    with served(Collection([run])) as url, opened(browser, url) as page:
        open_slide(page, url)
        page.locator("input[name=layer-deciding]").check()
        expect_text(page.locator(".layers"), "strongest of 20 sets")
        page.evaluate("() => { window.xmil.view.run.whatif = true; window.xmil.view.show('whatif'); }")
        expect_text(page.locator("[data-action=deciding]"), "strongest of 20 sets of 1 patch")
        expect_text(page.locator(".deciding [role=alert]"), "20 of 24")


def test_pairs_state_what_is_cut_and_what_colours_mean(browser: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_run(run, "s", {("lrp", "a"): signed(24), ("lrp", "tumour"): signed(24)}, coords=grid(6, 4, 64))
    places = np.array([(i, j) for i in range(24) for j in range(i + 1, 24)][:70])
    values = np.linspace(0.01, 1, 70)  # weakest first
    error, target = np.full(70, 1e-4), Target(1, name="tumour")
    pairs = Interactions(places, values, error, values, target, 1.0, bag="s")
    path = interactions_file(run, "s", target)
    path.parent.mkdir(parents=True, exist_ok=True)
    pairs.save(path)
    with served(Collection([run])) as url, opened(browser, url) as page:
        open_slide(page, url)
        page.locator("select[name=target]").select_option("tumour")
        page.locator("input[name=layer-pairs]").check()
        expect_text(page.locator(".layers"), "strongest 60 of 70 pairs")
        expect_text(page.locator(".layers"), "Red: the two patches together support tumour")


def test_flip_curves_have_both_axes(browser: Any, url: str) -> None:
    with opened(browser, url) as page:
        open_slide(page, url, 1)
        page.keyboard.press("3")
        texts = page.locator("svg.flip text").all_text_contents()
        assert "patches removed" in texts
        assert any(text.startswith("probability of") for text in texts)
