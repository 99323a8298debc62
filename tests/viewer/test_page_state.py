"""The page's state: it belongs to its slide, survives links and reloads, and follows the list."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

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
)
from tests.viewer.given_scores import grid, write_run
from tests.viewer.test_page_frames import LABELS
from xmil.heatmaps import SIGNED, Pyramid, Scale, heatmap, write_scores
from xmil.storage import read_explanations
from xmil.viewer.collection import Collection

tifffile = pytest.importorskip("tifffile")


def signed(n: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=n).astype(np.float32)


def cohort(folder: Path, names: list[str]) -> Path:
    for i, name in enumerate(names):
        scores = {("lrp", "benign"): signed(20, i), ("lrp", "tumour"): -signed(20, i)}
        scores |= {("gxi", "benign"): signed(20, i + 9), ("gxi", "tumour"): signed(20, i + 5)}
        write_run(folder, name, scores, coords=grid(5, 4, 64))
    return folder


def settled(page: Any) -> str:
    """The address once it has been written."""
    wait_until_quiet(page)
    return str(page.evaluate("() => location.href"))


def test_item_17_fault_01_an_answer_belongs_to_the_run_that_was_asked(browser: Any, url: str) -> None:
    """Remove patches in one pane and turn to the other before the answer comes; then remove more."""
    with opened(browser, url) as page:
        open_slide(page, url, 1)
        page.evaluate("() => window.xmil.view.split(true)")
        runs = page.evaluate("() => window.xmil.view.panes.map(p => p.evidence.choice.run)")
        assert len(set(runs)) == 2
        n = page.evaluate("() => window.xmil.view.panes[0].evidence.scores.set.n")
        asked = page.evaluate(
            """async () => {
              const view = window.xmil.view, [a, b] = view.panes, bodies = [];
              const fetched = window.fetch;
              window.fetch = (at, init) => {
                if (init?.body) bodies.push(JSON.parse(init.body));
                return fetched(at, init);
              };
              view.activate(a);
              const first = view.whatif.apply([0, 1, 2, 3, 4, 5, 6, 7], "remove");
              view.activate(b);
              await first;
              view.activate(a);
              await view.whatif.apply([10, 11, 12, 13, 14, 15], "remove");
              window.fetch = fetched;
              return bodies.map(({run, keep}) => [run, keep.reduce((sum, [x, y]) => sum + y - x, 0)]);
            }"""
        )
        assert asked == [[runs[0], n - 8], [runs[0], n - 14]]
        removed = page.evaluate(
            "() => [...window.xmil.view.removed].map(([run, m]) => [run, m.reduce((s, x) => s + x, 0)])"
        )
        assert removed == [[runs[0], 14]]
        expect_text(page.locator(".slide-head"), "without 14 patches")


def test_item_17_fault_02_overlapping_patches_show_their_mean(browser: Any, tmp_path: Path) -> None:
    """Patches of 128 px at a step of 64: inside, each place is covered by four; files show the same."""
    coords = grid(6, 5, 64)
    scores = signed(30)
    write_run(tmp_path / "run", "s", {("lrp", "tumour"): scores}, coords=coords, edge=128)
    with served(Collection([tmp_path / "run"])) as url, opened(browser, url) as page:
        open_slide(page, url)
        show_plainly(page)
        limit = page.evaluate("() => window.xmil.view.panes[0].evidence.whisker")
        seen = pixels(page)
        [e] = read_explanations(tmp_path / "run" / "slides" / "s.parquet")
        drawn = np.asarray(
            heatmap(e, picture="map", region=(0, 0, 448, 384), scale=Scale(-limit, limit, True, SIGNED))
        )
        write_scores(tmp_path / "s.ome.tif", [e], Pyramid.of((0, 0, 448, 384)))
        zoom = drawn.shape[1] / 448
        written = np.squeeze(tifffile.imread(tmp_path / "s.ome.tif"))
        for x, y in ((160, 160), (224, 96), (96, 224), (288, 160)):
            over = (coords <= (x, y)).all(axis=1) & (coords + 128 > (x, y)).all(axis=1)
            assert over.sum() == 4
            px, py = place_of(page, x, y)
            shown = seen[round(py), round(px)]
            np.testing.assert_allclose(shown, red_blue(scores[over].mean() / limit), atol=6)
            np.testing.assert_allclose(
                drawn[round(y * zoom), round(x * zoom), :3], red_blue(scores[over].mean() / limit), atol=3
            )
            assert written[y, x] == pytest.approx(scores[over].mean())


def test_item_17_fault_04_a_link_names_its_slide(browser: Any, tmp_path: Path) -> None:
    run = cohort(tmp_path / "run", ["b", "c"])
    with served(Collection([run])) as url, opened(browser, url) as page:
        open_slide(page, url, 0)
        link = settled(page)
    cohort(run, ["a"])  # a slide joins the run, in front of the others
    with served(Collection([run])) as url, opened(browser, url + link[link.index("#") :]) as page:
        page.wait_for_function("() => window.xmil.view?.info?.id")
        assert page.evaluate("() => window.xmil.view.info.id") == "b"


def test_fault_05_next_follows_filter_and_sort(browser: Any, tmp_path: Path) -> None:
    run = cohort(tmp_path / "run", ["a1", "a2", "b1", "a3"])
    with served(Collection([run])) as url, opened(browser, url) as page:
        page.locator("input[type=search]").fill("a")
        page.locator(".column-id button").click()  # descending
        assert page.locator("tbody tr a").all_inner_texts() == ["a3", "a2", "a1"]
        page.locator("tbody tr a").first.click()
        visited = []
        for _ in range(3):
            page.wait_for_function("() => window.xmil.view?.firstPaint")
            visited.append(page.evaluate("() => window.xmil.view.info.id"))
            page.keyboard.press("]")
            if len(visited) < 3:
                page.wait_for_function("id => window.xmil.view?.info?.id !== id", arg=visited[-1])
        assert visited == ["a3", "a2", "a1"]


def test_fault_08_settings_go_along_and_the_address_brings_them_back(browser: Any, tmp_path: Path) -> None:
    run = cohort(tmp_path / "run", ["a", "b"])
    with served(Collection([run])) as url, opened(browser, url) as page:
        open_slide(page, url, 0)
        page.locator("select[name=method]").select_option("gxi")
        page.locator("select[name=target]").select_option("benign")
        page.evaluate("() => window.xmil.view.setDisplay({ threshold: 0.25, sign: 'positive' })")
        page.keyboard.press("s")
        page.keyboard.press("]")
        page.wait_for_function("() => window.xmil.view?.info?.id === 'b' && window.xmil.view.firstPaint")
        state = """() => {
          const v = window.xmil.view, { method, target } = v.panes[0].evidence.choice;
          return [v.panes.length, method, target, v.display.threshold, v.display.sign];
        }"""
        wanted = [2, "gxi", "benign", 0.25, "positive"]
        assert page.evaluate(state) == wanted
        link = settled(page)
        page.reload()
        page.wait_for_function("() => window.xmil.view?.firstPaint")
        assert page.evaluate(state) == wanted
        page.evaluate("() => window.xmil.view.setDisplay({ threshold: 0, sign: 'both' })")
        page.go_back()
        page.wait_for_function("() => window.xmil.view?.info?.id === 'a'")
        page.goto(link)
        page.wait_for_function("() => window.xmil.view?.info?.id === 'b' && window.xmil.view.firstPaint")
        assert page.evaluate(state) == wanted


def test_settings_go_along_past_a_slide_that_has_not_opened_yet(browser: Any, tmp_path: Path) -> None:
    run = cohort(tmp_path / "run", ["a", "b", "c"])
    with served(Collection([run])) as url, opened(browser, url, expect_errors=True) as page:
        open_slide(page, url, 0)
        page.locator("select[name=method]").select_option("gxi")
        page.evaluate("() => window.xmil.view.setDisplay({ sign: 'positive' })")
        page.route("**/slides/1/evidence-0.bin", lambda _: None)  # never answered
        page.keyboard.press("]")
        page.wait_for_function("() => window.xmil.view?.info?.id === 'b'")
        page.keyboard.press("]")
        page.wait_for_function("() => window.xmil.view?.info?.id === 'c' && window.xmil.view.firstPaint")
        assert page.evaluate("() => window.xmil.view.panes[0].evidence.choice.method") == "gxi"
        assert page.evaluate("() => window.xmil.view.display.sign") == "positive"


def test_a_link_brings_the_place_back(browser: Any, url: str) -> None:
    with opened(browser, url) as page:
        open_slide(page, url, 0)
        area = {"x": 300, "y": 200, "width": 800, "height": 500}
        page.evaluate("area => window.xmil.view.showArea(area)", area)
        wait_until_quiet(page)
        link = settled(page)
        before = page.evaluate("() => window.xmil.view.panes[0].area()")
        page.goto("about:blank")
        page.goto(link)
        page.wait_for_function("() => window.xmil.view?.firstPaint")
        wait_until_quiet(page)
        after = page.evaluate("() => window.xmil.view.panes[0].area()")
        for key in ("x", "y", "width", "height"):
            assert abs(before[key] - after[key]) <= 0.02 * before["width"]


def test_fault_09_keys_work_after_a_dropdown_and_with_altgr(browser: Any, tmp_path: Path) -> None:
    run = cohort(tmp_path / "run", ["a", "b"])
    with served(Collection([run])) as url, opened(browser, url) as page:
        open_slide(page, url, 0)
        page.locator("select[name=method]").focus()
        page.keyboard.press("h")
        assert page.evaluate("() => window.xmil.view.display.shown") is False
        page.evaluate(
            """() => document.body.dispatchEvent(new KeyboardEvent("keydown",
              { key: "]", bubbles: true, ctrlKey: true, altKey: true, modifierAltGraph: true }))"""
        )
        page.wait_for_function("() => window.xmil.view?.info?.id === 'b'")


def test_fault_10_attention_is_no_evidence_for_a_class(browser: Any, tmp_path: Path) -> None:
    flat = (1 / 20 + 1e-4 * np.random.default_rng(0).normal(size=20)).astype(np.float32)
    scores = {("attention", "Normal"): flat, ("attention", "Tumour"): flat}
    scores |= {("lrp", "Normal"): signed(20), ("lrp", "Tumour"): -signed(20)}
    write_run(tmp_path / "run", "s", scores, coords=grid(5, 4, 64))
    with served(Collection([tmp_path / "run"])) as url, opened(browser, url) as page:
        open_slide(page, url)
        page.locator("select[name=method]").select_option("attention")
        expect_count(page.locator("select[name=target], select[name=against]"), 0)
        expect_text(page.locator(".pane-head"), "for no class")
        lowest = page.evaluate("() => window.xmil.view.panes[0].evidence.smallest")
        assert lowest == 0  # nearly equal weights get nearly equal colours
        page.locator("select[name=method]").select_option("lrp")
        expect_count(page.locator("select[name=target]"), 1)


def test_fault_11_late_answers_leave_no_boxes(browser: Any, url: str) -> None:
    with opened(browser, url) as page:
        open_slide(page, url, 0)
        page.evaluate("""() => { const v = window.xmil.view; v.pick(v.panes[0], 3); v.show("evidence"); }""")
        wait_until_quiet(page)
        assert page.evaluate("() => window.xmil.view.marks.similar") is None


def test_fault_12_a_click_while_annotating_stays_in_its_panel(browser: Any, url: str) -> None:
    with opened(browser, url) as page:
        open_slide(page, url, 0)
        page.keyboard.press("5")
        page.mouse.click(*place_of(page, 300, 300))
        wait_until_quiet(page)
        assert page.locator("[role=tab][aria-selected=true]").inner_text() == "Annotations"


def test_fault_13_tabs_turn_with_the_arrows(browser: Any, url: str) -> None:
    with opened(browser, url) as page:
        open_slide(page, url, 0)
        page.locator("[role=tab][aria-selected=true]").focus()
        page.keyboard.press("ArrowRight")
        assert page.locator("[role=tab][aria-selected=true]").inner_text() == "Patch"
        assert page.evaluate("() => document.activeElement.dataset.panel") == "patch"
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("ArrowLeft")
        assert page.locator("[role=tab][aria-selected=true]").inner_text() == "Annotations"


def test_fault_06_pictures_and_header_say_what_is_hidden_or_removed(browser: Any, url: str) -> None:
    with opened(browser, url, accept_downloads=True) as page:
        open_slide(page, url, 1)
        page.evaluate(LABELS)

        def saved() -> tuple[str, list[str]]:
            page.evaluate("() => { window.written.length = 0; }")
            with page.expect_download() as got:
                page.locator("[data-action=picture]").click()
            return got.value.suggested_filename, page.evaluate("() => window.written")

        plain, said = saved()
        assert not any("hidden" in text or "removed" in text for text in said)
        page.evaluate("() => window.xmil.view.setDisplay({ threshold: 0.25, sign: 'positive' })")
        limit = page.evaluate("() => window.xmil.view.panes[0].evidence.whisker")
        hidden, said = saved()
        line = next(text for text in said if "hidden" in text)
        assert f"{0.25 * limit:.3g}" in line
        assert "only positive scores" in line
        page.evaluate("() => window.xmil.view.whatif.apply([0, 1, 2, 3, 4], 'remove')")
        page.wait_for_function("() => window.xmil.view.removed.size")
        removed, said = saved()
        assert any("5 patches removed (what if)" in text for text in said)
        assert len({plain, hidden, removed}) == 3
        assert all(part in removed for part in ("lrp-tumour", "above-25", "positive", "without-5"))
        after = page.evaluate("() => Math.max(...window.xmil.view.whatif.history.at(-1).answer.after)")
        expect_text(page.locator(".slide-head"), f"without 5 patches: tumour {100 * after:.1f} %")
        page.keyboard.press("u")
        assert "without" not in page.locator(".slide-head").inner_text()


def test_leaving_is_not_undone_by_a_late_address(browser: Any, tmp_path: Path) -> None:
    """The address is written a moment after a change: never over that of the slide one is on the way to."""
    run = cohort(tmp_path / "run", ["a", "b"])
    with served(Collection([run])) as url, opened(browser, url) as page:
        open_slide(page, url, 0)
        page.evaluate("() => { location.hash = '#/slide/b'; window.xmil.view.link.write(); }")
        page.wait_for_function("() => window.xmil.view?.info?.id === 'b' && window.xmil.view.firstPaint")
