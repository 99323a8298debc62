"""GeoJSON between the page, the heatmaps and QuPath, on a slide whose scanned area has an offset."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.slides.squares import boxes_of, explanation, grid, write_scn
from tests.viewer.browser import expect_count, expect_text, open_slide, opened, served
from tests.viewer.given_scores import signed, write_run
from xmil.heatmaps import write_geojson
from xmil.viewer.collection import Collection

BOUNDS, EDGE = (701, 433, 1536, 1024), 256
POLYGONS = "() => window.xmil.view.marks.annotations.map((note) => note.polygons[0][0])"
LABELS = """() => {
  const texts = [], write = CanvasRenderingContext2D.prototype.fillText;
  CanvasRenderingContext2D.prototype.fillText = function (text, ...place) {
    texts.push(text);
    return write.call(this, text, ...place);
  };
  window.written = texts;
}"""


@pytest.fixture
def shifted(browser: Any, tmp_path: Path) -> Iterator[Any]:
    """A page before an SCN slide; its patches begin at the corner of the scanned area."""
    xy = grid(6, 4, EDGE, at=BOUNDS[:2])
    (tmp_path / "slides").mkdir()
    write_scn(tmp_path / "slides" / "s1.scn", (2400, 1600), boxes_of(xy, EDGE), mpp=0.5, bounds=BOUNDS)
    write_run(tmp_path / "run", "s1", {("lrp", "tumour"): signed(24)}, coords=xy, edge=EDGE)
    shown = Collection([tmp_path / "run"], slides=tmp_path / "slides")
    with served(shown) as url, opened(browser, url, accept_downloads=True) as page:
        open_slide(page, url)
        page.keyboard.press("5")
        yield page


def exported(page: Any, action: str, path: Path) -> Any:
    with page.expect_download() as got:
        page.locator(f"[data-action={action}]").click()
    got.value.save_as(path)
    return json.loads(path.read_text())


def rings(found: Any) -> Any:
    return np.array([feature["geometry"]["coordinates"][0] for feature in found["features"]])


def heatmaps_file(path: Path, name: str = "s1", **change: Any) -> Any:
    """What `xmil heatmap` writes of the same patches."""
    xy = grid(6, 4, EDGE, at=BOUNDS[:2])
    write_geojson(path, [explanation(xy, EDGE, bag=name)], origin=BOUNDS[:2])
    found = {**json.loads(path.read_text()), **change}
    path.write_text(json.dumps(found))
    return found


def test_patches_are_written_where_the_heatmap_writes_them(shifted: Any, tmp_path: Path) -> None:
    theirs = heatmaps_file(tmp_path / "theirs.geojson")
    ours = exported(shifted, "export-patches", tmp_path / "ours.geojson")
    assert ours["xmil"] == theirs["xmil"]
    assert sorted(rings(ours).min(1).tolist()) == sorted(rings(theirs).min(1).tolist())
    assert rings(ours).min() == 0


def test_what_is_read_lies_on_its_patches_and_goes_back(shifted: Any, tmp_path: Path) -> None:
    """A file of xmil, one of QuPath, and one with level 0 as its origin, which it says."""
    xy = grid(6, 4, EDGE, at=BOUNDS[:2])
    theirs = heatmaps_file(tmp_path / "xmil.geojson")
    heatmaps_file(tmp_path / "QuPath.geojson", xmil=None)
    write_geojson(tmp_path / "level0.geojson", [explanation(xy, EDGE)], origin=(0, 0))
    for name in ("xmil", "QuPath", "level0"):
        shifted.locator("input[type=file]").set_input_files(tmp_path / f"{name}.geojson")
        expect_count(shifted.locator(".note-row"), 24)
        np.testing.assert_array_equal(np.array(shifted.evaluate(POLYGONS)).min(1), xy)
        assert "· 1 patch\n" in shifted.locator(".note-row").first.inner_text()
        back = exported(shifted, "export-annotations", tmp_path / "back.geojson")
        assert back["xmil"]["origin"] == list(BOUNDS[:2])
        np.testing.assert_array_equal(rings(back), rings(theirs))
        for left in (24, 0):  # it asks first
            shifted.locator("[data-action=delete-all]").click()
            expect_count(shifted.locator(".note-row"), left)


def test_another_slides_file_is_warned_of_and_small_tiles_have_no_labels(
    shifted: Any, tmp_path: Path
) -> None:
    heatmaps_file(tmp_path / "other.geojson", name="s2", xmil={"slide": "s2", "origin": [90_000, 0]})
    shifted.evaluate(LABELS)
    shifted.locator("input[type=file]").set_input_files(tmp_path / "other.geojson")
    warned = shifted.locator(".message.problem")
    warned.wait_for()
    expect_text(warned, "slide s2; this is s1")
    expect_text(warned, "24 of them lie outside this slide.")
    assert shifted.evaluate("() => window.written") == []
    shifted.locator("[data-action=go-note]").first.click()
    shifted.wait_for_function("() => window.written.length")  # there is room now
    shifted.locator("[data-action=delete-all]").click()
    expect_count(shifted.locator(".note-row"), 24)
    shifted.locator("[data-action=delete-all]").click()
    expect_count(shifted.locator(".note-row"), 0)
