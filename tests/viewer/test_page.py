"""The page in a real browser: what it shows is what the files say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import xmil
from tests.viewer.browser import (
    expect_count,
    expect_text,
    expect_value,
    open_slide,
    opened,
    pixels,
    place_of,
    red_blue,
    settle,
    show_plainly,
    wait_until_quiet,
    whisker,
)
from tests.viewer.make_run import Made, patch_colours
from xmil.storage import read_explanation

COLUMNS, ROWS, EDGE = 12, 8, 256


@pytest.fixture
def page(browser: Any, url: str) -> Iterator[Any]:
    with opened(browser, url, accept_downloads=True) as found:
        yield found


def scores_of(made: Made, method: str, target: str, run: int = 0, slide: int = 1) -> Any:
    path = made.runs[run] / "slides" / f"{made.names[slide]}.parquet"
    return read_explanation(path, method=method, target=target).scores


def centre(i: int) -> tuple[float, float]:
    return (i % COLUMNS + 0.5) * EDGE, (i // COLUMNS + 0.5) * EDGE


def colour_at(page: Any, i: int, seen: Any = None) -> Any:
    x, y = place_of(page, *centre(i))
    return (pixels(page) if seen is None else seen)[round(y), round(x)]


def clear_of_furniture(i: int) -> bool:
    """Patches that neither the minimap nor the bars cover."""
    return i % COLUMNS < 8 and 1 <= i // COLUMNS < 7


def test_the_cohort_is_listed_sorted_filtered_and_searched(page: Any, made: Made) -> None:
    rows = page.locator("table.slides tbody tr")
    rows.first.wait_for()
    expect_count(rows, 3)
    expect_text(rows.nth(0), "slide-0")
    for text in ("benign", "correct", "96"):
        assert text in rows.nth(0).inner_text()
    expect_count(page.locator("td .verdict"), 3)
    page.wait_for_function("() => document.querySelector('td.thumb img')?.naturalWidth > 0")
    page.get_by_role("button", name="Slide").click()
    expect_text(rows.nth(0), "slide-2")
    page.locator("select[name=label]").select_option("tumour")
    expect_count(rows, 1)
    page.locator("select[name=label]").select_option("")
    page.get_by_role("searchbox").fill("SLIDE-0")
    expect_count(rows, 1)
    page.get_by_role("searchbox").fill("nothing")
    expect_text(rows.first, "No slide matches")
    page.get_by_role("searchbox").fill("")
    rows.nth(1).locator("a").click()
    page.wait_for_function("() => window.xmil.view?.firstPaint")
    assert page.get_by_role("heading", level=1).inner_text() == "slide-1"


def test_switching_method_and_class_shows_their_scores(page: Any, url: str, made: Made) -> None:
    open_slide(page, url, 1)
    show_plainly(page)
    for method, target in (("lrp", "tumour"), ("lrp", "benign"), ("gxi", "tumour")):
        page.locator("select[name=method]").select_option(method)
        page.locator("select[name=target]").select_option(target)
        scores = scores_of(made, method, target)
        seen, scale = pixels(page), whisker(scores)
        shown = [i for i in range(len(scores)) if clear_of_furniture(i)]
        for i in (*sorted(shown, key=lambda i: -scores[i])[:3], *sorted(shown, key=lambda i: scores[i])[:3]):
            np.testing.assert_allclose(colour_at(page, i, seen), red_blue(scores[i] / scale), atol=4)
    page.locator("select[name=against]").select_option("benign")
    scores = scores_of(made, "gxi", "tumour") - scores_of(made, "gxi", "benign")
    i = max((i for i in range(96) if clear_of_furniture(i)), key=lambda i: scores[i])
    np.testing.assert_allclose(colour_at(page, i), red_blue(scores[i] / whisker(scores)), atol=4)
    expect_text(page.locator(".colour-bar"), "for benign")


def test_the_threshold_and_the_signs_hide_patches(page: Any, url: str, made: Made) -> None:
    open_slide(page, url, 1)
    show_plainly(page)
    page.locator("select[name=method]").select_option("gxi")
    scores = scores_of(made, "gxi", "tumour")
    scale = whisker(scores)
    page.locator("input[name=hide]").fill("0.5")
    kept = np.abs(scores) >= 0.5 * scale
    expect_text(page.locator(".panel"), f"{kept.sum()} of 96 patches shown")
    shown = [i for i in range(96) if clear_of_furniture(i)]
    tissue, seen = patch_colours(96, seed=1), pixels(page)
    for i in shown:
        expected = red_blue(scores[i] / scale) if kept[i] else tissue[i]
        np.testing.assert_allclose(colour_at(page, i, seen), expected, atol=9)
    page.locator("[data-sign=positive]").click()
    seen = pixels(page)
    gone = next(i for i in shown if kept[i] and scores[i] < 0)
    np.testing.assert_allclose(colour_at(page, gone, seen), tissue[gone], atol=9)


def test_a_patch_is_inspected(page: Any, url: str, made: Made) -> None:
    open_slide(page, url, 1)
    scores, i = scores_of(made, "lrp", "tumour"), 3 * COLUMNS + 4
    place = place_of(page, *centre(i))
    page.mouse.move(*place)
    rank = int((scores > scores[i]).sum()) + 1
    expect_text(page.locator(".tip"), f"rank {rank} of 96")
    page.mouse.click(*place)
    panel = page.locator(".panel")
    expect_text(panel, f"Patch {i}")
    expect_text(panel, f"rank {rank} of 96")
    expect_count(panel.locator("table.scores tbody tr"), 5)  # attention is one row: it has no class
    page.wait_for_function("() => document.querySelector('img.patch-picture')?.naturalWidth === 256")
    neighbours = panel.locator(".patch-button")
    neighbours.first.wait_for()
    features = xmil.read_bag(made.features / "slide-1.h5").features.astype(np.float64)
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    likeness = unit @ unit[i]
    likeness[i] = -2
    assert neighbours.first.get_attribute("data-index") == str(likeness.argmax())
    neighbours.first.click()
    expect_text(panel, f"Patch {likeness.argmax()}")


def test_galleries_jump_to_the_strongest_patches(page: Any, url: str, made: Made) -> None:
    open_slide(page, url, 1)
    scores = scores_of(made, "lrp", "tumour")
    buttons = page.locator(".panel .gallery").nth(0).locator(".patch-button")
    buttons.first.wait_for()
    order = [int(buttons.nth(k).get_attribute("data-index")) for k in range(buttons.count())]
    assert order == np.argsort(-scores)[: len(order)].tolist()
    buttons.first.click()
    wait_until_quiet(page)
    x, y = place_of(page, *centre(order[0]))
    box = page.locator(".stage").bounding_box()
    assert abs(x - box["x"] - box["width"] / 2) < 3
    assert abs(y - box["y"] - box["height"] / 2) < 3


def draw_lasso(page: Any, corners: list[tuple[float, float]]) -> None:
    page.keyboard.press("l")
    places = [place_of(page, x, y) for x, y in corners]
    page.mouse.move(*places[0])
    page.mouse.down()
    for place in [*places[1:], places[0]]:
        page.mouse.move(*place, steps=4)
    page.mouse.up()


def test_a_lassoed_region_is_removed_and_brought_back(page: Any, url: str, made: Made) -> None:
    open_slide(page, url, 1)
    draw_lasso(page, [(40, 40), (4 * EDGE + 60, 60), (4 * EDGE + 40, 4 * EDGE - 30), (30, 4 * EDGE + 20)])
    inside = [r * COLUMNS + c for r in range(4) for c in range(4)]
    expect_text(page.locator(".selection-bar"), "16 patches selected")
    page.locator(".selection-bar button", has_text="Remove").click()
    page.locator(".whatif-result").wait_for()
    net = xmil.load_model(made.models[0])
    features = torch.from_numpy(xmil.read_bag(made.features / "slide-1.h5").features)
    left = [i for i in range(96) if i not in inside]
    with torch.no_grad():
        before, after = (net(features[rows][None]).softmax(-1)[0] for rows in (list(range(96)), left))
    for k, name in enumerate(("benign", "tumour")):
        row = page.locator(f".compare[data-label={name}]").inner_text()
        assert f"{100 * before[k]:.1f} % → {100 * after[k]:.1f} %" in row
    expect_text(page.locator(".whatif-result"), "80 patches left")
    show = page.locator("[data-panel=evidence]")
    show.click()
    show_plainly(page)
    veil = 0xD0 / 255
    grey = 96 * veil + patch_colours(96, seed=1)[inside[5]] * (1 - veil)
    np.testing.assert_allclose(colour_at(page, inside[5]), grey, atol=9)
    page.keyboard.press("4")
    page.locator("[data-action=undo]").click()
    expect_count(page.locator(".whatif-result"), 0)
    scores = scores_of(made, "lrp", "tumour")
    np.testing.assert_allclose(colour_at(page, 25), red_blue(scores[25] / whisker(scores)), atol=4)


def test_brushed_and_outlined_patches_keep_their_shape(
    page: Any, url: str, tmp_path: Path, made: Made
) -> None:
    shape = pytest.importorskip("shapely.geometry", reason="shapely is not installed").shape
    open_slide(page, url, 1)
    page.keyboard.press("b")
    page.mouse.move(*place_of(page, *centre(26)))
    page.mouse.down()
    page.mouse.move(*place_of(page, *centre(29)), steps=8)
    page.mouse.up()
    expect_text(page.locator(".selection-bar"), "4 patches selected")
    page.keyboard.press("a")
    page.locator("body").press("Escape")
    page.locator("[data-panel=evidence]").click()
    page.locator("select[name=method]").select_option("gxi")
    page.locator("input[name=hide]").fill("0.3")
    page.locator("[data-panel=whatif]").click()
    page.get_by_role("button", name="Select shown patches").click()
    page.locator(".selection-bar button", has_text="Annotate").click()
    with page.expect_download() as got:
        page.locator("[data-action=export-annotations]").click()
    got.value.save_as(tmp_path / "notes.geojson")
    brushed, shown = (
        shape(feature["geometry"])
        for feature in json.loads((tmp_path / "notes.geojson").read_text())["features"]
    )
    assert brushed.bounds == (2 * EDGE, 2 * EDGE, 6 * EDGE, 3 * EDGE)
    scores = scores_of(made, "gxi", "tumour")
    kept = np.flatnonzero(np.abs(scores) >= 0.3 * whisker(scores))
    assert shown.is_valid
    assert shown.area == len(kept) * EDGE**2
    assert all(shown.contains(shape({"type": "Point", "coordinates": centre(i)})) for i in kept)


def test_annotations_and_views_are_exported_and_read_back(page: Any, url: str, tmp_path: Path) -> None:
    open_slide(page, url, 1)
    label = "<script>window.hurt = 1</script>"
    page.keyboard.press("r")
    page.mouse.move(*place_of(page, 2 * EDGE, 2 * EDGE))
    page.mouse.down()
    page.mouse.move(*place_of(page, 5 * EDGE, 4 * EDGE), steps=4)
    page.mouse.up()
    page.locator(".selection-bar button", has_text="Annotate").click()
    page.keyboard.press("n")
    page.keyboard.type(label)
    files = {}
    for action in ("export-annotations", "export-patches", "picture"):
        with page.expect_download() as got:
            page.locator(f"[data-action={action}]").click()
        files[action] = tmp_path / got.value.suggested_filename
        got.value.save_as(files[action])
    exported = json.loads(files["export-annotations"].read_text())
    (feature,) = (one for one in exported["features"] if one["properties"].get("name") == label)
    files["export-annotations"].write_text(json.dumps({**exported, "features": [feature]}))
    assert feature["properties"]["objectType"] == "annotation"
    assert feature["properties"]["classification"]["name"] == "Tumor"
    corners = np.array(feature["geometry"]["coordinates"][0])
    np.testing.assert_allclose(corners.min(0), [2 * EDGE, 2 * EDGE], atol=6)
    np.testing.assert_allclose(corners.max(0), [5 * EDGE, 4 * EDGE], atol=6)
    patches = json.loads(files["export-patches"].read_text())["features"]
    assert len(patches) == 96
    assert {"lrp:tumour", "rank", "percentile"} == set(patches[0]["properties"]["measurements"])
    with Image.open(files["picture"]) as picture:
        assert picture.size[0] > 600
    rows = page.locator(".note-row")
    while rows.count():  # a page that was just closed may have saved its own a moment ago
        rows.first.locator("button", has_text="Delete").click()
    page.locator("input[type=file]").set_input_files(files["export-annotations"])
    page.locator(".note-row").wait_for()
    expect_value(page.locator(".note-row input"), label)
    page.reload()
    page.wait_for_function("() => window.xmil.view?.firstPaint")
    page.locator("[data-panel=notes]").click()
    expect_value(page.locator(".note-row input"), label)
    assert page.evaluate("() => window.hurt === undefined")


def edges_along(line: Any) -> Any:
    """Where a row of pixels changes colour most, as positions between pixels."""
    return np.flatnonzero(np.abs(np.diff(line, axis=0)).sum(axis=1) > 40) + 1


@pytest.mark.parametrize(
    ("ratio", "zooms"), [(1, (1.0, 2.7, 7.3)), pytest.param(2, (2.7,), marks=pytest.mark.full)]
)
def test_evidence_lies_on_its_patches_within_a_pixel(
    browser: Any, url: str, made: Made, ratio: int, zooms: tuple[float, ...]
) -> None:
    """Changes of colour along a row of pixels, in the evidence and in the slide below it."""
    scores = scores_of(made, "gxi", "tumour")
    with opened(browser, url, device_scale_factor=ratio) as page:
        open_slide(page, url, 1)
        page.locator("select[name=method]").select_option("gxi")
        show_plainly(page)
        for zoom in zooms:
            page.evaluate(GO, zoom)
            compare_edges(page, ratio, scores)


def compare_edges(page: Any, ratio: int, scores: Any) -> None:
    wait_until_quiet(page)
    page.mouse.move(5, 5)
    y = round(ratio * place_of(page, 0, 3.5 * EDGE)[1])
    box = page.locator(".stage").bounding_box()
    left, right = round(ratio * box["x"]) + 2, round(ratio * (box["x"] + box["width"])) - 2
    places = {c: ratio * place_of(page, c * EDGE, 3.5 * EDGE)[0] for c in range(1, COLUMNS)}
    painted = edges_along(pixels(page)[y, left:right]) + left
    page.keyboard.press("h")
    drawn = edges_along(pixels(page)[y, left:right]) + left
    page.keyboard.press("h")
    shades = [red_blue(score / whisker(scores)) for score in scores[3 * COLUMNS : 4 * COLUMNS]]
    seen = [c for c, x in places.items() if left + 3 < x < right - 3 and _differ(shades[c - 1], shades[c])]
    assert seen
    grain = max(1.0, (places[2] - places[1]) / EDGE)  # the slide is no sharper than its own pixels
    for c in seen:
        assert np.abs(painted - places[c]).min() <= 1, (c, places[c], painted)
        assert np.abs(drawn - places[c]).min() <= grain, (c, places[c], drawn)


def _differ(a: Any, b: Any) -> bool:
    return float(np.abs(a - b).sum()) > 60


GO = """(zoom) => {
  const { viewport } = window.xmil.view.panes[0].viewer;
  viewport.zoomTo(viewport.getHomeZoom() * zoom, undefined, true);
  const centre = viewport.getCenter();
  centre.x = 0.39;
  centre.y = 0.31;
  viewport.panTo(centre, true);
}"""


def test_two_panes_move_together_and_compare_runs(page: Any, url: str) -> None:
    open_slide(page, url, 1)
    page.keyboard.press("s")
    page.wait_for_function("() => window.xmil.view.panes[1]?.viewer.isOpen()")
    wait_until_quiet(page)
    expect_count(page.locator("select[name=run]"), 2)
    expect_value(page.locator("select[name=run]").nth(1), "1")
    page.locator(".stage").nth(1).hover()
    page.mouse.wheel(0, -400)
    wait_until_quiet(page)
    a, b = (place_of(page, 1000, 700, pane) for pane in (0, 1))
    boxes = [page.locator(".stage").nth(pane).bounding_box() for pane in (0, 1)]
    assert a[0] - boxes[0]["x"] == pytest.approx(b[0] - boxes[1]["x"], abs=1)
    assert a[1] - boxes[0]["y"] == pytest.approx(b[1] - boxes[1]["y"], abs=1)
    page.locator("[data-action=split]").click()
    expect_count(page.locator(".stage"), 1)


def test_the_certificate_shows_curve_account_and_verdict(page: Any, url: str, made: Made) -> None:
    open_slide(page, url, 1)
    page.keyboard.press("3")
    said = json.loads((made.runs[0] / "certificates" / "slide-1.json").read_text())
    panel = page.locator(".panel")
    assert said["methods"][0]["sentence"] in panel.inner_text()
    expect_count(panel.locator("path.morf"), 1)
    expect_count(panel.locator("path.band"), 1)
    expect_count(panel.locator(".account-row"), 6)
    expect_count(panel.locator("table.scores tbody tr"), 2)


def test_keys_and_colours(page: Any, url: str) -> None:
    open_slide(page, url, 1)
    page.keyboard.press("m")
    expect_value(page.locator("select[name=method]"), "attention")
    page.keyboard.press("?")
    assert page.locator("dialog.help").is_visible()
    page.keyboard.press("Escape")
    ground = "() => getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.keyboard.press("t")
    assert page.evaluate(ground) != light
    settle(page)
    page.keyboard.press("]")
    page.keyboard.press("Backspace")
    page.locator("table.slides").wait_for()
