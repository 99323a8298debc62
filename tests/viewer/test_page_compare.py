"""Maps against maps, the slide turned and adjusted, and figures that say what they show."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from tests.viewer.browser import (
    expect_count,
    expect_text,
    open_slide,
    opened,
    pixels,
    place_of,
    red_blue,
    served,
    settle,
    show_plainly,
    wait_until_quiet,
    whisker,
)
from tests.viewer.given_scores import grid, signed, write_run
from tests.viewer.make_run import patch_colours, write_slide
from xmil.viewer.collection import Collection

COLUMNS, ROWS, EDGE = 12, 8, 64
CLEAR = [r * COLUMNS + c for r in (2, 4, 5) for c in (2, 4, 6)]  # not below minimap or scales


@pytest.fixture(scope="module")
def scores() -> dict[tuple[str, str], Any]:
    return {("lrp", "tumour"): signed(96, 0), ("gxi", "tumour"): 50 * signed(96, 1)}


@pytest.fixture(scope="module")
def url(browser: Any, tmp_path_factory: pytest.TempPathFactory, scores: Any) -> Iterator[str]:
    """Two runs of one slide; the second run's scores are others, on the same patches."""
    folder = tmp_path_factory.mktemp("compare")
    other = {key: signed(96, 7 + i) for i, key in enumerate(scores)}
    for name, values in (("a", scores), ("b", other)):
        write_run(folder / name, "s", values, coords=grid(COLUMNS, ROWS, EDGE), edge=EDGE)
    (folder / "slides").mkdir()
    write_slide(folder / "slides" / "s.tif", patch_colours(96).reshape(ROWS, COLUMNS, 3), edge=EDGE)
    with served(Collection([folder / "a", folder / "b"], slides=folder / "slides")) as address:
        yield address


def centre(i: int) -> tuple[float, float]:
    return (i % COLUMNS + 0.5) * EDGE, (i // COLUMNS + 0.5) * EDGE


def colours(page: Any, patches: list[int]) -> Any:
    seen = pixels(page)
    places = [place_of(page, *centre(i)) for i in patches]
    return np.array([seen[round(y), round(x)] for x, y in places])


def test_a_difference_of_two_maps_is_in_units_of_their_scales(browser: Any, url: str, scores: Any) -> None:
    a, b = (values / whisker(values) for values in scores.values())
    apart = a - b
    wanted = [red_blue(np.clip(apart[i] / whisker(apart), -1, 1)) for i in CLEAR]
    with opened(browser, url) as page:
        open_slide(page, url)
        show_plainly(page)
        options = page.locator("select[name=minus] option").all_inner_texts()
        assert len(options) == 4  # none, the other method, and both of the other run
        page.locator("select[name=minus]").select_option(label="a · Gradient x input: tumour")
        np.testing.assert_allclose(colours(page, CLEAR), wanted, atol=6)
        expect_text(page.locator(".colour-bar"), "more in this")
        page.keyboard.press("3")
        expect_count(page.locator(".panel .verdict-line"), 0)
        wait_until_quiet(page)
        page.reload()
        page.wait_for_function("() => window.xmil.view?.firstPaint")
        minus = page.evaluate("() => window.xmil.view.panes[0].evidence.choice.minus")
        assert minus == {"run": 0, "method": "gxi", "target": "tumour"}


def test_the_slide_turns_with_its_evidence_and_the_image_is_adjusted(
    browser: Any, url: str, scores: Any
) -> None:
    values = scores["lrp", "tumour"]
    with opened(browser, url) as page:
        open_slide(page, url)
        show_plainly(page)
        page.locator(".image-settings summary").click()
        wanted = [red_blue(np.clip(values[i] / whisker(values), -1, 1)) for i in CLEAR]
        for _ in range(2):
            page.keyboard.press("o")
            wait_until_quiet(page)
            np.testing.assert_allclose(colours(page, CLEAR), wanted, atol=6)
            page.mouse.move(*place_of(page, *centre(CLEAR[0])))
            assert page.locator(".tip strong").inner_text() == f"Patch {CLEAR[0]}"
            page.mouse.move(5, 5)
        page.locator("[data-action=as-scanned]").click()
        page.locator("[data-objective='40']").click()
        wait_until_quiet(page)
        assert page.locator(".magnification").inner_text() == "40×"  # noqa: RUF001
        page.keyboard.press("0")
        wait_until_quiet(page)
        page.locator("input[name=opacity]").fill("0")
        tissue = colours(page, CLEAR)
        page.locator("input[name=brightness]").fill("0.5")
        np.testing.assert_allclose(colours(page, CLEAR), tissue / 2, atol=4)
        page.locator("input[name=brightness]").fill("1")
        page.locator("input[name=gamma]").fill("2")
        np.testing.assert_allclose(colours(page, CLEAR), 255 * (tissue / 255) ** 0.5, atol=4)


def saved(page: Any, dpi: str, kind: str, folder: Path) -> Path:
    page.locator("[data-action=figure]").click()
    page.locator("select[name=dpi]").select_option(dpi)
    page.locator("select[name=figure-kind]").select_option(kind)
    with page.expect_download() as got:
        page.locator("[data-action=save-figure]").click()
    path = folder / got.value.suggested_filename
    got.value.save_as(path)
    return path


def test_figures_have_their_resolution_settings_and_a_name_of_their_own(
    browser: Any, url: str, tmp_path: Path
) -> None:
    with opened(browser, url, accept_downloads=True) as page:
        open_slide(page, url)
        show_plainly(page)
        page.evaluate("() => window.xmil.view.setDisplay({ threshold: 0.25 })")
        page.evaluate("() => window.xmil.view.region([[[[64, 64], [256, 64], [256, 200], [64, 64]]]], null)")
        page.evaluate("() => { const v = window.xmil.view; v.show('notes'); v.notes.add(); }")
        settle(page)
        files = [saved(page, "96", "png", tmp_path), saved(page, "300", "png", tmp_path)]
        files.append(saved(page, "96", "svg", tmp_path))
        assert len({file.name for file in files}) == 3
        with page.expect_download() as got:
            page.locator("[data-action=picture]").click()
        quick = Image.open(io.BytesIO(Path(got.value.path()).read_bytes()))
        width = page.evaluate("() => window.xmil.view.panes[0].stage.clientWidth")
        small, large = (Image.open(io.BytesIO(file.read_bytes())) for file in files[:2])
        assert (small.width, large.width) == (width, round(width * 300 / 96))
        assert large.info["dpi"][0] == pytest.approx(300, abs=0.5)
        facts = json.loads(large.info["xmil"])
        assert (facts["slide"], facts["panes"][0]["method"], facts["display"]["threshold"]) == (
            "s",
            "lrp",
            0.25,
        )
        assert "hidden" in large.info["Description"]
        seen, drawn = (np.asarray(im.convert("RGB"), dtype=float) for im in (quick, small))
        middle = (slice(120, -120), slice(120, -260))
        assert np.abs(seen[middle] - drawn[middle]).mean() < 4  # from tiles as on the screen
        root = ElementTree.parse(files[2]).getroot()  # noqa: S314 (our own file)
        space = "{http://www.w3.org/2000/svg}"
        assert json.loads(root.findtext(f"{space}metadata"))["panes"][0]["target"] == "tumour"
        texts = [node.text for node in root.iter(f"{space}text")]
        assert "LRP: evidence for tumour" in texts
        assert len(list(root.iter(f"{space}path"))) == 1
