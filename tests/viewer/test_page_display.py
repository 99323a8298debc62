"""What the page shows must not mislead: colours, signs, verdicts, pictures, panes."""

# ruff: noqa: RUF001 (the page writes minus and times signs)
from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.viewer.browser import (
    expect_count,
    expect_text,
    expect_value,
    open_slide,
    opened,
    pixels,
    place_of,
    served,
    show_plainly,
    wait_until,
    wait_until_quiet,
)
from tests.viewer.given_scores import grid, signed, write_run
from tests.viewer.make_run import Made, patch_colours, write_slide
from tests.viewer.test_page_frames import LABELS
from xmil.core.explanation import Audit
from xmil.viewer.collection import Collection

EDGE = 64


@pytest.fixture(scope="module")
def url(browser: Any, made: Made) -> Iterator[str]:
    with served(Collection(made.runs, slides=made.slides, features=[made.features])) as address:
        yield address


def centre(i: int, columns: int = 12, edge: int = EDGE) -> tuple[float, float]:
    return (i % columns + 0.5) * edge, (i // columns + 0.5) * edge


def test_tissue_is_grey_below_evidence_alone(browser: Any, url: str) -> None:
    tissue = patch_colours(96, seed=1)
    i = max((r * 12 + c for r in range(1, 7) for c in range(1, 8)), key=lambda i: np.ptp(tissue[i]))
    with opened(browser, url) as page:
        open_slide(page, url, 1)
        x, y = (round(v) for v in place_of(page, *centre(i, edge=256)))
        page.locator("input[name=opacity]").fill("0")
        seen = pixels(page)[y, x]
        assert np.ptp(seen) <= 2
        assert tissue[i].min() < seen[0] < tissue[i].max()
        shown = page.evaluate("() => window.xmil.view.repaints.length")
        page.keyboard.press("h")
        np.testing.assert_allclose(pixels(page)[y, x], tissue[i], atol=9)
        page.keyboard.press("h")
        page.get_by_label("Grey tissue").uncheck()
        np.testing.assert_allclose(pixels(page)[y, x], tissue[i], atol=9)
        assert page.evaluate("() => window.xmil.view.repaints.length") == shown + 3
        wait_until_quiet(page)
        page.reload()
        page.wait_for_function("() => window.xmil.view?.firstPaint")
        assert not page.get_by_label("Grey tissue").is_checked()


def test_low_attention_has_the_colour_of_the_bars_low_end(browser: Any, tmp_path: Path) -> None:
    scores = np.linspace(0.1, 0.9, 96).astype(np.float32)
    write_run(tmp_path / "run", "s", {("attention", "tumour"): scores}, coords=grid(12, 8, EDGE))
    with served(Collection([tmp_path / "run"])) as url, opened(browser, url) as page:
        open_slide(page, url)
        assert page.get_by_label("Fade weak evidence").is_disabled()
        page.locator("input[name=opacity]").fill("1")
        x, y = place_of(page, *centre(2))
        low = page.locator(".bar-colours").evaluate("(bar) => getComputedStyle(bar).backgroundImage")
        first = [int(v) for v in low.split("rgb(")[1].split(")")[0].split(",")]
        np.testing.assert_allclose(pixels(page)[round(y), round(x)], first, atol=25)


def numbers(page: Any) -> list[str]:
    return page.locator(".bar-numbers span").all_inner_texts()


def test_the_bar_says_beyond_only_where_scores_are(browser: Any, tmp_path: Path) -> None:
    up = np.linspace(0.0001, 0.0002, 96).astype(np.float32)
    up[5] = 0.01
    scores = {("lrp", "a"): up, ("lrp", "b"): -up, ("gxi", "a"): np.linspace(-1, 1, 96).astype(np.float32)}
    write_run(tmp_path / "run", "s", scores, coords=grid(12, 8, EDGE))
    with served(Collection([tmp_path / "run"])) as url, opened(browser, url) as page:
        open_slide(page, url)
        page.locator("select[name=target]").select_option("a")
        assert numbers(page) == ["−2×10⁻⁴", "0", "≥ 2×10⁻⁴"]
        page.locator("select[name=target]").select_option("b")
        assert numbers(page) == ["≤ −2×10⁻⁴", "0", "2×10⁻⁴"]
        page.locator("select[name=method]").select_option("gxi")
        assert numbers(page) == ["−1", "0", "1"]


def saved(page: Any) -> Any:
    with page.expect_download() as got:
        page.locator("[data-action=picture]").click()
    return np.asarray(Image.open(io.BytesIO(Path(got.value.path()).read_bytes())).convert("RGB"))


def test_a_saved_picture_says_what_it_shows_and_no_more(browser: Any, tmp_path: Path) -> None:
    run, slides = tmp_path / "run", tmp_path / "slides"
    slides.mkdir()
    scores = signed(96)
    scores[0] = 50
    write_run(
        run, "slide-7", {("lrp", "tumour"): scores, ("lrp", "benign"): -scores}, coords=grid(12, 8, EDGE)
    )
    write_slide(slides / "slide-7.tif", patch_colours(96).reshape(8, 12, 3), edge=EDGE)
    shown = Collection([run], slides=slides)
    with served(shown) as url, opened(browser, url, accept_downloads=True) as page:
        open_slide(page, url)
        page.locator("select[name=target]").select_option("tumour")
        page.evaluate(LABELS)
        plain = saved(page)
        written = page.evaluate("() => window.written")
        assert {"slide-7", "LRP: evidence for tumour"} <= set(written)
        assert set(numbers(page)) <= set(written)
        assert any(text.startswith("≥ ") for text in written)
        page.keyboard.press("r")
        page.mouse.move(*place_of(page, 2 * EDGE, 2 * EDGE))
        page.mouse.down()
        page.mouse.move(*place_of(page, 5 * EDGE, 4 * EDGE), steps=4)
        page.mouse.up()
        page.locator(".selection-bar").wait_for()
        np.testing.assert_array_equal(saved(page), plain)
        page.locator("input[name=opacity]").fill("0")
        assert np.ptp(saved(page)[60:-80], axis=-1).max() <= 2  # grey, as on the screen
        page.keyboard.press("h")
        assert np.ptp(saved(page)[60:-80], axis=-1).max() > 60


def test_no_verdict_on_evidence_that_was_not_measured(browser: Any, url: str, made: Made) -> None:
    said = json.loads((made.runs[0] / "certificates" / "slide-1.json").read_text())["methods"][0]
    other = "benign" if said["target"] == "tumour" else "tumour"
    with opened(browser, url) as page:
        open_slide(page, url, 1)
        page.locator("select[name=target]").select_option(other)
        page.keyboard.press("3")
        panel = page.locator(".panel")
        expect_text(panel, f"only the evidence for {said['target']} was tested")
        expect_count(panel.locator(".verdict-line"), 0)
        expect_text(panel, f"All methods, evidence for {said['target']}")
        panel.locator("[data-action=measured]").click()
        panel.locator(".verdict-line").wait_for()
        expect_value(page.locator("select[name=target]"), said["target"])
        assert said["sentence"] in panel.inner_text()
        page.locator("select[name=against]").select_option(other)
        expect_count(panel.locator(".verdict-line"), 0)


def test_the_badge_is_of_the_method_that_is_shown(browser: Any, tmp_path: Path, url: str, made: Made) -> None:
    said = json.loads((made.runs[0] / "certificates" / "slide-1.json").read_text())["methods"]
    with opened(browser, url) as page:
        open_slide(page, url, 1)
        page.locator("select[name=target]").select_option(said[0]["target"])
        for each in said:
            page.locator("select[name=method]").select_option(each["method"])
            page.wait_for_function(
                "s => document.querySelector('.facts .verdict')?.title === s", arg=each["sentence"]
            )
    scores = {(m, "tumour"): signed(20) for m in ("lrp", "attention", "random")}
    write_run(tmp_path, "s", scores, coords=grid(5, 4, EDGE))
    about = json.loads((tmp_path / "run.json").read_text())
    kinds = {"lrp": "better", "attention": "no better"}
    judged = {"method": "lrp", "kind": "better", "sentence": "Over the cohort.", "cases": list("abcdefgh")}
    judged["methods"] = [{"method": method, "kind": kind} for method, kind in kinds.items()]
    (tmp_path / "run.json").write_text(json.dumps({**about, "verdict": judged}))
    with served(Collection([tmp_path])) as address, opened(browser, address) as page:
        expect_text(page.locator("td .verdict"), "cohort: better than random")
        open_slide(page, address, 0)
        badge = page.locator(".facts .verdict")
        expect_text(badge, "cohort: better than random (8 cases)")
        page.keyboard.press("3")
        expect_text(page.locator(".panel"), "was not tested")
        expect_text(page.locator(".panel"), "Over the cohort.")
        page.locator("select[name=method]").select_option("attention")
        expect_text(badge, "cohort: no better than random (8 cases)")
        page.locator("select[name=method]").select_option("random")
        expect_text(badge, "not tested")


def test_slides_in_two_panes_lie_level(browser: Any, tmp_path: Path) -> None:
    runs = [tmp_path / "a run with a name that is rather long", tmp_path / "b"]
    for run, classes in zip(runs, (("HPV-", "HPV+"), ("HPV+",)), strict=True):
        scores = {(m, t): signed(20) for m in ("lrp", "attention") for t in classes}
        write_run(run, "s", scores, coords=grid(5, 4, EDGE))
    with served(Collection(runs)) as url, opened(browser, url) as page:
        open_slide(page, url)
        page.keyboard.press("s")
        page.wait_for_function("() => window.xmil.view.panes[1]?.viewer.isOpen()")
        expect_count(page.locator("select[name=against]"), 1)  # the panes' heads differ
        for width in (1000, 1280, 1600):
            page.set_viewport_size({"width": width, "height": 800})
            wait_until_quiet(page)
            a, b = (page.locator(".stage").nth(k).bounding_box() for k in (0, 1))
            assert (a["y"], a["height"]) == (b["y"], b["height"]), width
            for k in (0, 1):
                pane = page.locator(".pane").nth(k)
                last, whole = pane.locator(".field").last.bounding_box(), pane.bounding_box()
                assert last["x"] + last["width"] <= whole["x"] + whole["width"], width


def test_the_tip_goes_when_panels_or_methods_change(browser: Any, url: str) -> None:
    with opened(browser, url) as page:
        open_slide(page, url, 1)
        tip = page.locator(".tip")
        for key in ("3", "m"):
            page.mouse.move(5, 5)
            page.mouse.move(*place_of(page, *centre(40, edge=256)))
            tip.wait_for(state="visible")
            page.keyboard.press(key)
            tip.wait_for(state="hidden")


def test_gallery_scores_can_be_told_apart(browser: Any, tmp_path: Path) -> None:
    scores = (1.31e-4 + 1e-8 * np.arange(96)).astype(np.float32)
    write_run(tmp_path / "run", "s", {("lrp", "tumour"): scores}, coords=grid(12, 8, EDGE))
    with served(Collection([tmp_path / "run"])) as url, opened(browser, url) as page:
        open_slide(page, url)
        show_plainly(page)
        captions = page.locator(".gallery").first.locator(".caption")
        captions.first.wait_for()
        texts = captions.all_inner_texts()
        assert len(set(texts)) == len(texts) == 8
        assert texts[0] == "1.3195×10⁻⁴"
        assert page.locator(".gallery .caption").first.evaluate("(c) => c.scrollWidth <= c.clientWidth")


def test_warnings_and_every_share_stand_beside_the_scores(browser: Any, tmp_path: Path) -> None:
    shares = {"instances": 3.0, "bias": 0.25, "baseline": -1.5, "cut": 0.5}
    audit = Audit.close(output=2.25, **shares)
    told = "The model has no background of its own: the bag's mean is the baseline."
    facts = {
        "audit": audit,
        "warnings": [told],
        "params": {"preset": "better", "baseline": "mean of the bag"},
    }
    write_run(tmp_path / "run", "s", {("lrp", "tumour"): signed(20)}, coords=grid(5, 4, EDGE), **facts)
    with served(Collection([tmp_path / "run"])) as url, opened(browser, url, accept_downloads=True) as page:
        open_slide(page, url)
        assert told in page.locator(".panel .warnings").inner_text()
        assert page.locator(".pane-head .warned").get_attribute("title") == told
        page.keyboard.press("3")
        rows = dict(row.split("\n") for row in page.locator(".account-row").all_inner_texts())
        assert {rows["Baseline"], rows["Cut"], rows["Output"]} == {"−1.5", "0.5", "2.25"}
        made = page.locator(".panel .made").inner_text()
        assert "better" in made
        assert "mean of the bag" in made
        page.evaluate(LABELS)
        saved(page)
        assert told in page.evaluate("() => window.written")


def test_full_screen_shows_the_slide_alone_and_leaves_again(browser: Any, url: str) -> None:
    with opened(browser, url) as page:
        open_slide(page, url, 1)
        wait_until_quiet(page)
        before = page.locator(".stage").bounding_box()
        page.keyboard.press("f")
        page.wait_for_function("() => document.fullscreenElement?.classList.contains('slide')")
        page.evaluate("() => window.xmil.view.say('seen')")
        page.wait_for_function(  # the browser tells of the change a frame later
            "() => document.fullscreenElement.contains(document.querySelector('.message'))"
        )
        assert page.locator(".top").evaluate("bar => !document.fullscreenElement.contains(bar)")
        page.keyboard.press("]")  # keys go on
        page.wait_for_function(
            "() => window.xmil.view?.info?.id === 'slide-2' && window.xmil.view.firstPaint"
        )
        if page.evaluate("() => document.fullscreenElement !== null"):
            page.keyboard.press("f")
        page.wait_for_function("() => !document.fullscreenElement")
        wait_until_quiet(page)
        wait_until(page, lambda: page.locator(".stage").bounding_box() == before)


def test_the_label_is_offered_only_where_the_server_serves_it(
    browser: Any, data_dir: Path, tmp_path: Path
) -> None:
    pytest.importorskip("openslide")
    slides = data_dir / "slides"
    write_run(tmp_path / "run", "CMU-1-Small-Region", {("lrp", "t"): signed(20)}, coords=grid(5, 4, 240))
    for labels in (False, True):
        shown = Collection([tmp_path / "run"], slides=slides, labels=labels)
        with served(shown) as url, opened(browser, "about:blank") as page:
            asked: list[str] = []
            page.on("request", lambda request, asked=asked: asked.append(request.url))
            page.goto(f"{url}#/slide/CMU-1-Small-Region")
            page.locator(".image-settings > summary").click()
            expect_count(page.locator(".label-image summary"), int(labels))
            assert not any("label" in address for address in asked)
            if labels:
                page.locator(".label-image summary").click()
                page.wait_for_function("() => document.querySelector('.label-picture')?.naturalWidth > 100")
