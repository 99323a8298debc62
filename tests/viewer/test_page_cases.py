"""The page where something is missing, hostile, damaged or large; and as an exported folder."""

from __future__ import annotations

import functools
import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xmil
from tests.runs.cohorts import command
from tests.runs.test_cohort_faults import survival_folds
from tests.viewer.browser import (
    expect_count,
    expect_text,
    expect_value,
    open_slide,
    opened,
    pixels,
    place_of,
    red_blue,
    served,
    show_plainly,
    wait_until_quiet,
)
from tests.viewer.given_scores import SWITCHES, grid, signed, write_run
from tests.viewer.make_run import patch_colours, write_slide
from xmil.cli._app import run
from xmil.viewer.collection import Collection
from xmil.viewer.static_copy import export

HOSTILE = "<img src=x onerror=document.title='hurt'>"


def test_scripts_in_names_are_text(browser: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    scores = {("lrp", target): signed(20) for target in ("benign", HOSTILE)}
    write_run(run, HOSTILE, scores, coords=grid(5, 4, 64))
    with served(Collection([run])) as url, opened(browser, url) as page:
        assert page.locator("table.slides td a").inner_text() == HOSTILE
        open_slide(page, url)
        assert page.get_by_role("heading", level=1).inner_text() == HOSTILE
        assert page.locator("select[name=target] option").nth(1).inner_text() == HOSTILE
        page.locator("select[name=target]").select_option(HOSTILE)
        assert HOSTILE in page.locator(".colour-bar").inner_text()
        expect_count(page.locator("img[src=x]"), 0)
        assert page.title() != "hurt"


def test_geojson_from_elsewhere_is_checked(browser: Any, tmp_path: Path) -> None:
    write_run(tmp_path / "run", "s", {("lrp", "tumour"): signed(20)}, coords=grid(5, 4, 64))
    ring = [[0, 0], [128, 0], [128, 128], [0, 128], [0, 0]]
    kind = {"name": HOSTILE, "color": [1, 2, 3]}
    features = [
        {
            "type": "Feature",
            "geometry": {"type": "Polygon", "coordinates": [ring]},
            "properties": {"name": HOSTILE},
        },
        {
            "type": "Feature",
            "geometry": {"type": "MultiPolygon", "coordinates": [[ring]]},
            "properties": {"classification": kind},
        },
        {"type": "Feature", "geometry": {"type": "Point", "coordinates": [1, 2]}, "properties": {}},
        {"type": "Feature", "geometry": {"type": "Polygon", "coordinates": [[[0, None], [1, 1]]]}},
        None,
    ]
    good, bad, other = (tmp_path / name for name in ("good.geojson", "bad.geojson", "other.json"))
    good.write_text(json.dumps({"type": "FeatureCollection", "features": features}))
    bad.write_text("{not json")
    other.write_text("{}")
    with served(Collection([tmp_path / "run"])) as url, opened(browser, url) as page:
        open_slide(page, url)
        page.keyboard.press("5")
        for path, said in (
            (bad, "bad.geojson is not valid JSON"),
            (other, "no GeoJSON features"),
            (good, "3 annotations read; 2 features that are not polygons, lines or points left out"),
        ):
            page.locator("input[type=file]").set_input_files(path)
            page.locator(".message", has_text=said).wait_for()
        expect_count(page.locator(".note-row"), 3)
        expect_value(page.locator(".note-row input").first, HOSTILE)
        assert HOSTILE in page.locator(".note-row").nth(1).inner_text()
        expect_text(page.locator(".note-row").first, "4 patches")
        expect_count(page.locator("img[src=x]"), 0)


def test_without_an_image_the_evidence_has_a_blank_canvas(browser: Any, tmp_path: Path) -> None:
    coords = grid(6, 5, 64) + 10_000
    write_run(tmp_path / "run", "bare", {("lrp", "tumour"): signed(30)}, coords=coords)
    with served(Collection([tmp_path / "run"])) as url, opened(browser, url) as page:
        open_slide(page, url)
        show_plainly(page)
        page.locator("input[name=full]").fill("1")
        scores, seen = signed(30), pixels(page)
        for i in (7, 14, 20):
            x, y = place_of(page, *(coords[i] + 32))
            expected = red_blue(scores[i] / np.abs(scores).max())
            np.testing.assert_allclose(seen[round(y), round(x)], expected, atol=4)
        expect_text(page.locator(".scale-bar"), "px")


def test_a_polygon_selects_the_patches_in_it(browser: Any, tmp_path: Path) -> None:
    write_run(tmp_path / "run", "s", {("lrp", "tumour"): signed(20)}, coords=grid(5, 4, 64))
    with served(Collection([tmp_path / "run"])) as url, opened(browser, url) as page:
        open_slide(page, url)
        for ending in ("Enter", "double click"):
            page.keyboard.press("p")
            for x, y in [(10, 10), (140, 10), (140, 140)]:
                page.mouse.click(*place_of(page, x, y))
            if ending == "Enter":
                page.mouse.click(*place_of(page, 10, 140))
                page.keyboard.press("Enter")
            else:
                page.mouse.dblclick(*place_of(page, 10, 140))
            expect_text(page.locator(".selection-bar"), "4 patches selected")
            page.keyboard.press("Escape")
            assert page.locator(".selection-bar").is_hidden()


def test_without_coordinates_the_scores_are_a_list(browser: Any, tmp_path: Path) -> None:
    write_run(tmp_path / "run", "lost", {("lrp", "tumour"): signed(30)})
    with served(Collection([tmp_path / "run"])) as url, opened(browser, url) as page:
        open_slide(page, url)
        rows = page.locator(".score-list tbody tr")
        order = [int(rows.nth(k).get_attribute("data-index")) for k in range(rows.count())]
        assert order == np.argsort(-signed(30)).tolist()
        rows.nth(2).get_by_role("button").click()
        expect_text(page.locator(".panel"), "rank 3 of 30")


def test_overlapping_patches_off_any_grid_are_drawn(browser: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    coords = rng.integers(0, 90_000, size=(400, 2))
    scores = np.where(np.arange(400) % 2, 1, -1).astype(np.float32)
    write_run(tmp_path / "run", "loose", {("lrp", "tumour"): scores}, coords=coords, edge=1777)
    with served(Collection([tmp_path / "run"])) as url, opened(browser, url) as page:
        open_slide(page, url)
        show_plainly(page)
        seen = pixels(page)
        last = [399, 398]  # nothing lies above them
        for i in last:
            x, y = place_of(page, *(coords[i] + 888))
            np.testing.assert_allclose(seen[round(y), round(x)], red_blue(scores[i]), atol=4)


@pytest.mark.parametrize(("task", "logits"), [("regression", (2.5,)), ("cox", (0.7,))])
def test_models_without_classes_show_their_value(
    browser: Any, tmp_path: Path, task: str, logits: tuple[float, ...]
) -> None:
    name = "value" if task == "regression" else "risk"
    run = tmp_path / "run"
    write_run(run, "s", {("lrp", name): signed(20)}, coords=grid(5, 4, 64), logits=logits, task=task)
    with served(Collection([run])) as url, opened(browser, url) as page:
        open_slide(page, url)
        said = page.locator(".facts").inner_text()
        assert f"{name.capitalize()}" in said
        assert f"{logits[0]}" in said
        expect_text(page.locator(".colour-bar"), f"raises {name}")
        expect_count(page.locator("select[name=against]"), 0)


def test_fault_15_the_risk_of_an_ensemble_is_the_mean_of_risks(browser: Any, tmp_path: Path) -> None:
    """In the header, in a what-if, and in the account of what is left."""
    folder = survival_folds(tmp_path)
    assert run(command(folder, models=2)) == 0
    models = [folder / f"m{i}.safetensors" for i in range(2)]
    bag = xmil.read_bag(folder / "features" / "s000.h5")
    whole, left = (
        float(np.mean([xmil.explain(xmil.load_model(path), rows).output for path in models]))
        for rows in (bag.features, bag.features[5:])
    )
    shown = Collection([folder / "run"], features=[folder / "features"])
    with served(shown, models) as url, opened(browser, url) as page:
        open_slide(page, url)
        said = page.locator(".facts").inner_text().replace("\n", "")
        assert f"Risk{whole:.3g}".replace("-", "\u2212") in said
        value = page.evaluate("() => window.xmil.view.info.sets[0].value")
        assert value == pytest.approx(whole, rel=1e-5)  # the risk of the mean output is 5e-4 off
        page.evaluate("() => window.xmil.view.whatif.apply([0, 1, 2, 3, 4], 'remove')")
        told = f"without 5 patches: {left:.3g}".replace("-", "\u2212")
        page.locator(".facts", has_text=told).wait_for()
        after = page.evaluate("() => window.xmil.view.whatif.history.at(-1).answer.after")
        assert after == pytest.approx([left], rel=1e-5)
        page.keyboard.press("4")
        page.locator("[data-action=explain-left]").click()
        page.locator(".pane-note", has_text="Explained without 5 patches").wait_for()
        output = page.evaluate("() => window.xmil.view.panes[0].evidence.column.output")
        assert output == pytest.approx(left, rel=1e-4)


def test_a_damaged_slide_is_a_message_and_the_rest_works(browser: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for name in ("good", "torn"):
        write_run(run, name, {("lrp", "tumour"): signed(20)}, coords=grid(5, 4, 64))
    (run / "slides" / "torn.parquet").write_bytes(b"PAR1 torn")
    with served(Collection([run])) as url, opened(browser, url) as page:
        page.locator("table.slides .problem").wait_for()
        expect_text(page.locator("table.slides .problem"), "torn")
        page.goto(f"{url}#/slide/torn")
        page.locator(".banner").wait_for()
        expect_text(page.locator(".banner"), "torn.parquet")
        open_slide(page, url, 0)
        expect_count(page.locator(".banner"), 0)


def test_a_missing_slide_is_a_message(browser: Any, tmp_path: Path) -> None:
    write_run(tmp_path / "run", "s", {("lrp", "tumour"): signed(20)}, coords=grid(5, 4, 64))
    with (
        served(Collection([tmp_path / "run"])) as url,
        opened(browser, f"{url}#/slide/77", expect_errors=True) as page,
    ):
        page.locator(".banner").wait_for()
        expect_text(page.locator(".banner"), "77")


@contextmanager
def any_web_server(folder: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize("longest", [None, pytest.param(300, marks=pytest.mark.full)])
def test_an_exported_folder_opens_from_any_web_server(
    browser: Any, tmp_path: Path, longest: int | None
) -> None:
    run, slides, scores = tmp_path / "run", tmp_path / "images", signed(96)
    slides.mkdir()
    write_run(run, "slide", {("lrp", "tumour"): scores, ("gxi", "tumour"): -scores}, coords=grid(12, 8, 64))
    tissue = patch_colours(96)
    write_slide(slides / "slide.tif", tissue.reshape(8, 12, 3), edge=64)
    assert not export(Collection([run], slides=slides), tmp_path / "out", longest=longest)
    with any_web_server(tmp_path / "out") as url, opened(browser, url) as page:
        page.locator("table.slides td a").click()
        open_slide(page, url)
        show_plainly(page)
        page.locator("input[name=full]").fill("1")
        page.locator("select[name=method]").select_option("gxi")
        i = 3 * 12 + 5
        x, y = place_of(page, 5.5 * 64, 3.5 * 64)
        expected = red_blue(-scores[i] / np.abs(scores).max())
        np.testing.assert_allclose(pixels(page)[round(y), round(x)], expected, atol=4)
        page.keyboard.press("h")
        np.testing.assert_allclose(pixels(page)[round(y), round(x)], tissue[i], atol=12)
        page.mouse.click(x, y)
        picture = page.locator("canvas.patch-picture")
        picture.wait_for()
        middle = "c.getContext('2d').getImageData(c.width / 2, c.height / 2, 1, 1)"
        colour = f"(c) => [...{middle}.data].slice(0, 3)"
        page.wait_for_function("() => window.xmil.view.panes[0].viewer.world.getItemAt(0).getFullyLoaded()")
        wait_until_quiet(page)
        np.testing.assert_allclose(picture.evaluate(colour), tissue[i], atol=16)
        expect_count(page.locator(".panel", has_text="Most similar"), 0)
        page.keyboard.press("4")
        expect_text(page.locator(".panel"), "exported copy")


@pytest.mark.full  # it measures time, which a busy machine has none of
def test_25000_patches_are_repainted_at_once(browser: Any, tmp_path: Path) -> None:
    """The bounds leave room for slow machines; benchmarks/viewer_page.py has the figures."""
    scores = {
        (m, t): signed(25_000, k) for k, (m, t) in enumerate((m, t) for m in ("lrp", "gxi") for t in "ab")
    }
    write_run(tmp_path / "run", "large", scores, coords=grid(200, 125, 64))
    with served(Collection([tmp_path / "run"])) as url, opened(browser, url) as page:
        open_slide(page, url)
        assert page.evaluate("() => window.xmil.view.firstPaint") < 20_000
        assert np.median(page.evaluate(SWITCHES), axis=0)[0] < 500
