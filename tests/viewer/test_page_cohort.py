"""The cohort on the page: counts that filter, small heatmaps, and the patches that say most."""

from __future__ import annotations

import io
from collections import Counter
from typing import Any

import numpy as np
from PIL import Image

from tests.viewer.asking import ask
from tests.viewer.browser import expect_count, expect_text, opened, served
from tests.viewer.make_run import Made
from xmil.storage import read_explanation
from xmil.viewer.collection import Collection


def test_the_wall_holds_the_strongest_patches_of_each_group(app: Any, made: Made) -> None:
    columns = ask(app, "/api/columns-0.json").json["columns"]
    ends = ["against tumour", "for tumour"]
    place = columns.index({"method": "lrp", "target": "tumour", "ends": ends})
    assert not any(column["method"] == "attention" for column in columns)  # it has no sign
    wall = ask(app, f"/api/wall-0-{place}.json").json
    slides = ask(app, "/api/run.json").json["slides"]
    slow: dict[Any, list[Any]] = {}
    for slide in slides:
        path = made.runs[0] / "slides" / f"{slide['id']}.parquet"
        scores = read_explanation(path, method="lrp", target="tumour").scores
        best = sorted(((float(s), slide["key"], i) for i, s in enumerate(scores) if s > 0), reverse=True)[:3]
        slow.setdefault((slide["label"], slide["correct"]), []).extend(best)
    found = {(group["label"], group["correct"]): group for group in wall["groups"]}
    assert found.keys() == slow.keys()
    for key, best in slow.items():
        wanted = sorted(best, reverse=True)[:12]
        told = [(p["score"], p["key"], p["index"]) for p in found[key]["supporting"]]
        assert [entry[1:] for entry in told] == [entry[1:] for entry in wanted]
        np.testing.assert_allclose([e[0] for e in told], [e[0] for e in wanted], rtol=1e-6)
        assert all(p["score"] < 0 for p in found[key]["refuting"])
    for wrong in ("/api/wall-0-99.json", "/api/wall-9-0.json", "/api/columns-9.json"):
        assert ask(app, wrong).status == 404
    small = Image.open(io.BytesIO(ask(app, f"/api/slides/1/small-0-{place}.png").body))
    assert small.size == (12, 8)  # one pixel per patch
    scores = read_explanation(
        made.runs[0] / "slides" / "slide-1.parquet", method="lrp", target="tumour"
    ).scores
    grey = np.asarray(small)[..., 0].astype(int) - 128
    assert np.sign(grey.ravel()[np.abs(scores).argmax()]) == np.sign(scores[np.abs(scores).argmax()])


def test_counts_filter_and_the_wall_leads_to_its_patches(browser: Any, made: Made) -> None:
    shown = Collection(made.runs, slides=made.slides, features=[made.features])
    with served(shown) as url, opened(browser, url) as page:
        page.locator("table.slides td").first.wait_for()
        page.wait_for_function("() => document.querySelector('img.small-map')?.naturalWidth > 0")
        slides = page.evaluate("() => window.xmil.run.slides")
        counts = Counter((slide["label"], slide["predicted"]) for slide in slides)
        (label, predicted), count = counts.most_common(1)[0]
        page.locator(".confusion summary").click()
        cell = page.locator(f".confusion [data-label={label}][data-predicted={predicted}]")
        assert cell.inner_text() == str(count)
        cell.click()
        expect_count(page.locator("table.slides tbody tr"), count)
        shares = page.locator("td.column-probability").all_inner_texts()
        assert all(share.endswith(" %") for share in shares)
        page.locator(f".confusion [data-label={label}][data-predicted={predicted}]").click()
        expect_count(page.locator("table.slides tbody tr"), len(slides))
        page.locator(".to-wall").click()
        patch = page.locator(".wall-patch").first
        patch.wait_for()
        key, index = (int(patch.get_attribute(f"data-{name}")) for name in ("key", "index"))
        page.wait_for_function("() => document.querySelector('.wall-patch img')?.naturalWidth > 0")
        patch.click()
        page.wait_for_function("() => window.xmil.view?.firstPaint")
        assert page.evaluate("() => [window.xmil.view.row.key, window.xmil.view.marks.picked.index]") == [
            key,
            index,
        ]
        expect_text(page.locator(".panel"), f"Patch {index}")
