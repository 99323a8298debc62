"""Prediction, correctness and verdict on the page are those of the model, method and class that is shown."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from PIL import Image

from tests.viewer.browser import expect_text, expect_value, open_slide, opened, served, wait_until_quiet
from tests.viewer.given_scores import grid, signed, write_run
from xmil.viewer.collection import Collection

CLASSES = ("a", "b", "c")


def write_model(
    folder: Path, predicted: dict[str, str], *, label: str = "b", digest: str = "", **about: Any
) -> Path:
    """Write a run of one model over slides, with a verdict of its own on `lrp` and `random`."""
    for i, name in enumerate(predicted):
        scores = {(m, c): signed(20, 3 * i + k) for m in ("lrp", "random") for k, c in enumerate(CLASSES)}
        write_run(folder, name, scores, coords=grid(5, 4, 64))
    rows = [
        {
            "slide_id": name,
            "case_id": name,
            "label": label,
            "predicted": cls,
            "correct": str(cls == label),
            f"p:{cls}": "0.875",
        }
        for name, cls in predicted.items()
    ]
    with (folder / "slides.csv").open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(
            stream, ["slide_id", "case_id", "label", "predicted", "correct"] + [f"p:{c}" for c in CLASSES]
        )
        writer.writeheader()
        writer.writerows(rows)
    stored = json.loads((folder / "run.json").read_text())
    model = {"digest": digest} if digest else {}
    (folder / "run.json").write_text(json.dumps({**stored, "model": model, **about}))
    return folder


def judged(kind: str, n: int) -> dict[str, Any]:
    methods = [{"method": "lrp", "kind": kind, "srg": 0.4, "cases": n}]
    methods += [{"method": "random", "kind": "no better", "srg": 0.0, "cases": n - 1}]
    return {
        "method": "lrp",
        "kind": kind,
        "sentence": f"{kind}.",
        "methods": methods,
        "cases": list(map(str, range(n))),
    }


def test_the_head_is_of_the_model_whose_map_is_shown(browser: Any, tmp_path: Path) -> None:
    runs = [
        write_model(tmp_path / "first", {"s": "c"}, verdict=judged("better", 12)),
        write_model(tmp_path / "second", {"s": "b"}, verdict=judged("worse", 9)),
    ]
    with served(Collection(runs)) as url, opened(browser, url) as page:
        open_slide(page, url)
        head, badge = page.locator(".slide-head .facts"), page.locator(".facts .verdict")
        target, run = page.locator("select[name=target]"), page.locator("select[name=run]")
        expect_value(target, "c")
        expect_text(head, "wrong")
        expect_text(badge, "LRP: this map was not tested")  # the first class was
        target.select_option("a")
        expect_text(badge, "cohort: better than random (12 cases)")
        page.locator("select[name=method]").select_option("random")
        expect_text(badge, "cohort: no better than random (11 cases)")
        page.locator("select[name=method]").select_option("lrp")
        run.select_option("1")
        expect_text(badge, "cohort: worse than random (9 cases)")
        expect_text(head, "b 88 %")
        expect_text(head, "correct")
        assert "wrong" not in head.inner_text()


def test_pictures_and_figures_say_whether_their_map_was_tested(browser: Any, tmp_path: Path) -> None:
    run = write_model(tmp_path / "run", {"s": "b"}, verdict=judged("better", 12))
    with served(Collection([run])) as url, opened(browser, url, accept_downloads=True) as page:
        open_slide(page, url)
        for target, words in (
            ("b", "LRP: this map was not tested"),
            ("a", "LRP: better than random over the cohort (12 cases)"),
        ):
            page.locator("select[name=target]").select_option(target)
            wait_until_quiet(page)
            with page.expect_download() as got:
                page.locator("[data-action=picture]").click()
            assert words in Image.open(got.value.path()).text["Description"].split("; ")


def test_the_list_opens_the_class_that_is_predicted(browser: Any, tmp_path: Path) -> None:
    run = write_model(tmp_path / "run", {"s0": "a", "s1": "b", "s2": "c"})
    with served(Collection([run])) as url, opened(browser, url) as page:
        target = page.locator("select[name=target]")
        for name, cls in (("s1", "b"), ("s0", "a")):
            page.locator("img.small-map").first.wait_for()
            page.get_by_role("link", name=name, exact=True).click()
            expect_value(target, cls)
            page.keyboard.press("Backspace")
        page.get_by_role("link", name="s0", exact=True).click()
        expect_value(target, "a")
        page.keyboard.press("]")
        expect_text(page.locator("h1"), "s1")
        expect_value(target, "b")
        target.select_option("c")  # a class that the reader chose goes along
        page.keyboard.press("[")
        expect_text(page.locator("h1"), "s0")
        expect_value(target, "c")


def test_a_row_has_no_verdict_of_another_model_or_of_maps_made_otherwise(tmp_path: Path) -> None:
    plain = {"methods": ["lrp"]}
    mine = write_model(
        tmp_path / "mine", {"s": "c"}, digest="m", settings={"params": {"lrp": {"preset": "paper"}}}
    )
    for name, digest in (("other", "o"), ("same", "m")):
        run = write_model(tmp_path / name, {"s": "b"}, digest=digest, settings=plain)
        (run / "certificates").mkdir()
        measured = [
            {
                "method": "lrp",
                "target": "b",
                "verdict": "better",
                "sentence": "It is.",
                "srg": 0.4,
                "aupc": 0.1,
            }
        ]
        paper = {"slide_id": "s", "predicted": 1, "correct": True, "methods": measured, "mode": "remove"}
        (run / "certificates" / "s.json").write_text(json.dumps(paper))
    shown = Collection([mine, tmp_path / "other", tmp_path / "same"])
    row = shown.facts(0)
    assert (row["predicted"], row["correct"], row["verdict"]) == ("c", False, None)
    sets = shown.describe(0)["sets"]
    assert [(each["predicted"], each["correct"]) for each in sets] == [("c", False), ("b", True), ("b", True)]
    again = Collection([tmp_path / "other", mine])
    assert (again.facts(0)["verdict"], again.facts(0)["verdict_target"]) == ("better", "b")
    assert again.describe(0)["sets"][1]["certificate"] is None
