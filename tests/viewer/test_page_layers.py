"""Layers over the evidence: hatch where the sign is unsure, pairs, the deciding set, maps inside patches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.viewer.browser import (
    expect_attribute,
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
from tests.viewer.given_scores import grid, signed, write_run
from tests.viewer.make_inside import EDGE, write_concepts, write_pairs
from tests.viewer.make_run import Made, make_run
from xmil.core.inside import Inside, InsideAudit
from xmil.storage import read_explanation
from xmil.viewer.collection import Collection

COLUMNS = 6


def centre(i: int) -> tuple[float, float]:
    return (i % COLUMNS + 0.5) * EDGE, (i // COLUMNS + 0.5) * EDGE


def with_layers(folder: Path) -> Any:
    """A run of one slide with interactions, a deciding set and maps inside two patches."""
    made = make_run(folder, slides=1, columns=COLUMNS, rows=4, edge=EDGE, models=("attnmil",))
    run, slide = made.runs[0], made.names[0]
    e = read_explanation(run / "slides" / f"{slide}.parquet", method="lrp", target="tumour")
    write_pairs(made)
    path = run / "certificates" / f"{slide}.json"
    paper = json.loads(path.read_text())
    found = {
        "instances": [2, 3, 8],
        "n": 24,
        "sentence": "Three of 24 decide.",
        "target": "tumour",
        "kind": "flip",
    }
    path.write_text(json.dumps({**paper, "deciding": found}))
    maps = np.zeros((2, 4, 4), dtype=np.float32)
    maps[:, 0, 3] = 1.0  # the upper right corner speaks for, the lower left against
    maps[:, 3, 0] = -1.0
    maps[1] *= 0.01  # a weak patch tells its places as plainly
    rows, score = [8, 14], e.scores[[8, 14]]
    audit = InsideAudit(score, 0 * score, score, 0 * score)
    boxes = np.hstack([e.coords[rows], e.coords[rows] + EDGE])
    inside = Inside(maps, boxes, np.array(rows), audit, "tokens", "tumour", "tiny", slide)
    (run / "inside").mkdir()
    inside.save(run / "inside" / f"{slide}.npz")
    return made


def test_pairs_deciding_patches_and_maps_inside_lie_on_their_patches(browser: Any, tmp_path: Path) -> None:
    made = with_layers(tmp_path)
    shown = Collection(made.runs, slides=made.slides, features=[made.features])
    with served(shown, made.models) as url, opened(browser, url) as page:
        open_slide(page, url)
        page.locator("select[name=target]").select_option("tumour")
        show_plainly(page)
        page.locator("input[name=opacity]").fill("0")
        plain = pixels(page)
        page.locator("input[name=layer-pairs]").check()
        page.wait_for_function("() => document.querySelector('.layers').innerText.includes('2 pairs')")
        lined = pixels(page)
        half = [round(v) for v in np.mean([place_of(page, *centre(0)), place_of(page, *centre(21))], axis=0)]
        np.testing.assert_allclose(lined[half[1], half[0]], red_blue(1), atol=12)  # the sure line, for
        page.locator("input[name=layer-pairs]").uncheck()
        page.locator("input[name=layer-deciding]").check()
        expect_text(page.locator(".layers"), "Three of 24 decide.")
        framed = pixels(page)
        changed = np.abs(framed - plain).sum(axis=-1) > 60
        left, middle = (round(v) for v in place_of(page, 2 * EDGE, 0.5 * EDGE))
        assert changed[middle, left - 3 : left + 4].any()
        far, other = (round(v) for v in place_of(page, 5 * EDGE, 2.5 * EDGE))
        assert not changed[other, far - 3 : far + 4].any()
        page.keyboard.press("4")
        page.locator("[data-action=deciding]").click()
        expect_text(page.locator(".selection-bar"), "3 patches selected")
        page.keyboard.press("Escape")
        page.keyboard.press("1")
        page.locator("input[name=opacity]").fill("1")
        page.evaluate("() => window.xmil.view.jump(window.xmil.view.panes[0], 8)")
        page.evaluate(
            "e => window.xmil.view.showArea({ x: e * 1.5, y: e * 0.5, width: 2 * e, height: 2 * e })", EDGE
        )
        wait_until_quiet(page)
        assert (
            "Inside the patch (tokens, tiny): 0 % of the score has a position, 100 % is constant"
            in page.locator(".panel .inside").inner_text()
        )
        near = pixels(page)
        corner = EDGE / 8
        for dx, dy, share in ((EDGE - corner, corner, 1), (corner, EDGE - corner, -1)):
            x, y = place_of(page, 2 * EDGE + dx, EDGE + dy)
            np.testing.assert_allclose(near[round(y), round(x)], red_blue(share), atol=40)
        x, y = place_of(page, 3 * EDGE - corner, 2 * EDGE + corner)
        np.testing.assert_allclose(near[round(y), round(x)], red_blue(1), atol=40)
        link = page.evaluate("() => window.xmil.view.link.state().layers")
        assert set(link) == {"outline", "inside", "deciding"}


def test_one_concepts_part_stands_in_place_of_the_scores(browser: Any, fresh: Made) -> None:
    maps = write_concepts(fresh)
    limit = whisker(maps.scores)
    with served(Collection(fresh.runs, slides=fresh.slides)) as url, opened(browser, url) as page:
        open_slide(page, url)
        page.locator("select[name=target]").select_option("tumour")
        show_plainly(page)
        page.locator("input[name=layer-concepts]").check()
        for concept in (0, 1):
            page.locator(f"[data-concept='{concept}']").click()
            page.locator(".pane-note", has_text=f"Only the part through Concept {concept}").wait_for()
            assert page.locator(f"[data-concept='{concept}'] canvas").count() == 1  # its strongest patch
            shown = page.evaluate("() => [...window.xmil.view.panes[0].evidence.values]")  # what all follow
            np.testing.assert_allclose(shown, maps.values[:, concept], rtol=1e-6)
            best = page.locator(".panel .gallery .patch-button").first
            expect_attribute(best, "data-index", str(maps.values[:, concept].argmax()))
            seen = pixels(page)
            for i in (1, 2, 8, 13, 14):
                x, y = place_of(page, *centre(i))
                share = np.clip(maps.values[i, concept] / limit, -1, 1)
                np.testing.assert_allclose(seen[round(y), round(x)], red_blue(share), atol=6)
        page.locator("input[name=concept-name]").fill("dark nuclei")
        page.keyboard.press("Enter")
        expect_text(page.locator("[data-concept='1']"), "dark nuclei")
        wait_until_quiet(page)
        with opened(browser, page.url) as other:  # another reader's browser
            other.locator(".pane-note", has_text="dark nuclei").wait_for()
        page.reload()
        page.locator(".pane-note", has_text="dark nuclei").wait_for()
        page.locator("select[name=target]").select_option("benign")
        expect_text(page.locator(".layers"), "LRP for tumour.")
        assert page.locator(".pane-note").inner_text() == ""


def test_the_hatch_covers_patches_of_unsure_sign_alone(browser: Any, tmp_path: Path) -> None:
    scores = signed(24)
    stderr = np.full(24, 0.05, dtype=np.float32)
    unsure = np.array([8, 15, 16])
    stderr[unsure] = 5.0
    write_run(
        tmp_path / "run",
        "s",
        {("lrp", "tumour"): scores},
        coords=grid(COLUMNS, 4, EDGE),
        edge=EDGE,
        stderr=stderr,
    )
    sure = np.abs(scores) > 3 * stderr
    with served(Collection([tmp_path / "run"])) as url, opened(browser, url) as page:
        open_slide(page, url)
        show_plainly(page)
        methods = page.locator("select[name=method] option").all_inner_texts()
        assert methods == ["LRP", "LRP (standard error)"]
        plain = pixels(page)
        page.locator("input[name=layer-unsure]").check()
        hatched = pixels(page)
        expect_text(page.locator(".layers"), f"({(~sure).sum()} patches)")
        for i in range(24):
            if i % COLUMNS > 3:
                continue  # below the minimap
            x, y = (round(v) for v in place_of(page, *centre(i)))
            part = (slice(y - 8, y + 9), slice(x - 8, x + 9))
            assert (np.abs(plain[part] - hatched[part]).max() > 30) == (not sure[i]), i
