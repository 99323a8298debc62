"""Scales that do not mislead: over the slide, the cohort, two panes and two slides, each with its legend."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.viewer.asking import ask
from tests.viewer.browser import (
    expect_count,
    expect_text,
    open_slide,
    opened,
    pixels,
    place_of,
    red_blue,
    served,
    show_plainly,
    wait_until_quiet,
    whisker,
)
from tests.viewer.given_scores import grid, write_run
from xmil.viewer.app import create_app
from xmil.viewer.collection import Collection

COLUMNS, ROWS, EDGE = 8, 6, 64
N = COLUMNS * ROWS
STRONG, WEAK = 19, 20  # next to each other, in the middle


def tailed(seed: int, factor: float) -> Any:
    """Scatter, one patch at the whiskers' end, and one far beyond."""
    scores = np.random.default_rng(seed).uniform(-1, 1, N).astype(np.float32) * 0.01
    scores[WEAK] = 0.0099
    scores[STRONG] = factor
    return scores


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two slides; on the second all is three times as strong."""
    folder = tmp_path_factory.mktemp("scales") / "run"
    for name, times in (("s0", 1.0), ("s1", 3.0)):
        tumour = times * tailed(int(times), 0.88)
        scores = {("lrp", "benign"): -tumour, ("lrp", "tumour"): tumour, ("gxi", "tumour"): 2 * tumour}
        write_run(folder, name, scores, coords=grid(COLUMNS, ROWS, EDGE), edge=EDGE)
    return folder


def pooled(run: Path) -> Any:
    scores = [tailed(1, 0.88), 3 * tailed(3, 0.88)]
    return np.concatenate([sign * each for each in scores for sign in (-1, 1)]).astype(np.float64)


def colour_of(page: Any, i: int) -> Any:
    x, y = place_of(page, (i % COLUMNS + 0.5) * EDGE, (i // COLUMNS + 0.5) * EDGE)
    return pixels(page)[round(y), round(x)]


def test_the_cohort_has_one_scale_and_small_maps_their_places_on_it(run: Path) -> None:
    app = create_app(Collection([run]))
    found = ask(app, "/api/scales-0.json").json
    assert found["slides"] == 2
    high = float(np.abs(np.percentile(pooled(run), [1, 99])).max())
    assert found["scales"]["lrp"]["high"] == pytest.approx(high, rel=1e-5)
    assert found["scales"]["lrp"]["highest"] == pytest.approx(2.64, rel=1e-5)
    columns = ask(app, "/api/columns-0.json").json["columns"]
    place = next(i for i, c in enumerate(columns) if (c["method"], c["target"]) == ("lrp", "tumour"))
    for key, times in ((0, 1.0), (1, 3.0)):
        small = np.asarray(Image.open(io.BytesIO(ask(app, f"/api/slides/{key}/small-0-{place}.png").body)))
        share = np.clip(times * tailed(int(times), 0.88) / high, -1, 1)
        np.testing.assert_allclose(small.reshape(N, 4)[:, 0], 127.5 * (1 + share), atol=0.51)
        assert (small.reshape(N, 4)[:, 3] == 255).all()
    assert ask(app, "/api/scales-9.json").status == 404


def test_weak_scatter_is_told_from_the_strongest(browser: Any, run: Path) -> None:
    scores = tailed(1, 0.88).astype(np.float64)
    with served(Collection([run])) as url, opened(browser, url) as page:
        open_slide(page, url)
        page.locator("select[name=target]").select_option("tumour")
        show_plainly(page)
        limit = whisker(scores)
        np.testing.assert_allclose(colour_of(page, WEAK), red_blue(scores[WEAK] / limit), atol=4)
        times = f"{scores.max() / limit:.2g} times this scale"
        expect_text(page.locator(".bar-warning"), times)
        page.locator("[data-clip=max]").click()
        expect_count(page.locator(".bar-warning"), 0)
        np.testing.assert_allclose(colour_of(page, WEAK), red_blue(scores[WEAK] / scores.max()), atol=4)
        np.testing.assert_allclose(colour_of(page, STRONG), red_blue(1), atol=4)
        page.locator("[data-clip=cohort]").click()
        high = float(np.abs(np.percentile(pooled(run), [1, 99])).max())
        expect_text(page.locator(".bar-numbers"), f"{high:.3g}")
        np.testing.assert_allclose(colour_of(page, WEAK), red_blue(scores[WEAK] / high), atol=4)
        page.locator("[data-clip=auto]").click()
        expect_text(page.locator(".bar-warning"), times)


@pytest.mark.parametrize(
    ("palette", "strongest"), [("rdbu", [178, 24, 43]), ("puor", [179, 88, 6]), ("prgn", [27, 120, 55])]
)
def test_list_and_wall_have_the_chosen_colours(
    browser: Any, run: Path, palette: str, strongest: list[int]
) -> None:
    kept = json.dumps(json.dumps({"palette": palette}))
    with served(Collection([run])) as url, opened(browser, url) as page:
        page.evaluate(f"() => localStorage.setItem('xmil:display', {kept})")
        page.reload()
        page.wait_for_function("() => document.querySelectorAll('img.small-map')[1]?.naturalWidth > 0")
        small = page.locator("img.small-map").nth(1)
        ground = small.evaluate("(node) => getComputedStyle(node).backgroundColor")
        assert ground == "rgba(0, 0, 0, 0)"  # white would be coloured as the strongest score
        box = small.bounding_box()
        x = box["x"] + (STRONG % COLUMNS + 0.5) * box["width"] / COLUMNS
        y = box["y"] + (STRONG // COLUMNS + 0.5) * box["height"] / (N // COLUMNS)
        np.testing.assert_allclose(pixels(page)[int(y), int(x)], strongest, atol=4)
        page.locator(".to-wall").click()
        frame = page.locator(f".wall-patch[data-key='1'][data-index='{STRONG}']").first
        rgb = frame.evaluate("(node) => getComputedStyle(node).borderTopColor")
        assert rgb == f"rgb({', '.join(map(str, strongest))})"


def test_red_is_one_class_in_the_list_and_the_slide_has_its_colours(browser: Any, run: Path) -> None:
    with served(Collection([run])) as url, opened(browser, url) as page:
        expect_count(page.locator("img.small-map"), 2)
        sources = page.locator("img.small-map").evaluate_all("(all) => all.map((each) => each.src)")
        assert len({source.rsplit("-", 1)[1] for source in sources}) == 1  # one column on every row
        expect_text(page.locator(".cohort-bar"), "for tumour")
        high = float(np.abs(np.percentile(pooled(run), [1, 99])).max())
        expect_text(page.locator(".cohort-bar"), f"{high:.3g}")
        page.locator("select[name=column]").select_option(label="LRP: evidence for benign")
        expect_text(page.locator(".cohort-bar"), "for benign")
        page.locator("table.slides td a").nth(1).click()
        page.wait_for_function("() => window.xmil.view?.firstPaint")
        show_plainly(page)
        expect_text(page.locator(".colour-bar"), "for benign")
        expect_text(page.locator(".bar-numbers"), f"{high:.3g}")
        scores = -3 * tailed(3, 0.88)
        np.testing.assert_allclose(colour_of(page, WEAK), red_blue(scores[WEAK] / high), atol=4)
        page.keyboard.press("Backspace")
        expect_text(page.locator(".cohort-bar"), "for benign")
        page.locator(".to-wall").click()
        frame = page.locator(f".wall-patch[data-key='1'][data-index='{STRONG}']").first
        rgb = frame.evaluate("(node) => getComputedStyle(node).borderTopColor")
        seen = [int(v) for v in rgb.removeprefix("rgb(").removesuffix(")").split(",")]
        np.testing.assert_allclose(seen, red_blue(-1), atol=4)


def numbers(page: Any) -> list[list[str]]:
    return [bar.locator(".bar-numbers span").all_inner_texts() for bar in page.locator(".colour-bar").all()]


def test_two_panes_and_two_slides_share_a_scale(browser: Any, run: Path) -> None:
    with served(Collection([run])) as url, opened(browser, url) as page:
        open_slide(page, url)
        page.locator("select[name=target]").select_option("tumour")
        page.keyboard.press("s")
        page.locator("select[name=method]").nth(1).select_option("gxi")
        wait_until_quiet(page)
        first, second = numbers(page)
        assert first != second
        page.locator("input[name=shared]").check()
        assert numbers(page) == [second, second]  # the wider one
        wait_until_quiet(page)
        page.reload()
        page.wait_for_function("() => window.xmil.view?.panes[1]?.viewer.isOpen()")
        wait_until_quiet(page)
        assert numbers(page) == [second, second]
        page.goto(f"{url}#/compare/s0/s1?a.method=lrp&a.class=tumour&b.method=lrp&b.class=tumour")
        page.wait_for_function("() => window.xmil.compare?.ready")
        wait_until_quiet(page)
        first, second = numbers(page)
        assert first != second
        page.locator("[data-action=same-scale]").click()
        assert numbers(page) == [second, second]


def test_a_link_carries_colours_opacity_fading_and_grey(browser: Any, run: Path) -> None:
    with served(Collection([run])) as url:
        with opened(browser, url) as page:
            open_slide(page, url)
            page.locator("select[name=palette]").select_option("puor")
            page.locator("input[name=opacity]").fill("0.32")
            page.get_by_label("Fade weak evidence").uncheck()
            page.locator("[data-clip=max]").click()
            wait_until_quiet(page)
            link = page.evaluate("() => location.href")
        with opened(browser, link) as page:
            page.wait_for_function("() => window.xmil.view?.firstPaint")
            display = page.evaluate("() => window.xmil.view.display")
            told = (display["palette"], display["opacity"], display["fade"], display["grey"], display["clip"])
            assert told == ("puor", 0.32, False, True, "max")
