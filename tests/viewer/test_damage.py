"""What is wrong with one file stays with it; files may change while they are served."""

from __future__ import annotations

import shutil
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.viewer.asking import app_of, ask, pixels
from tests.viewer.make_run import Made, write_slide
from xmil.core.explanation import Explanation
from xmil.storage import read_explanations, write_explanations


def test_numbers_that_json_lacks_become_null(fresh: Made) -> None:
    path = fresh.runs[0] / "slides" / "slide-0.parquet"
    (first, *_) = read_explanations(path)
    logits = np.array([np.nan, np.inf], dtype=np.float32)
    write_explanations([_replaced(first, logits=logits, output=float("nan"))], path)
    found = ask(app_of(fresh), "/api/slides/0/slide.json")
    assert found.json["sets"][0]["logits"] == [None, None]
    assert found.json["sets"][0]["columns"][0]["output"] is None


def _replaced(e: Explanation, **changes: Any) -> Explanation:
    from dataclasses import replace

    return replace(e, **changes)


@pytest.mark.parametrize("damage", ["picture", "scores", "header", "both"])
def test_damage_stays_with_its_slide(fresh: Made, damage: str) -> None:
    picture, scores = fresh.slides / "slide-0.tif", fresh.runs[0] / "slides" / "slide-0.parquet"
    if damage in ("picture", "both"):
        picture.write_bytes(picture.read_bytes()[:200])
    if damage in ("scores", "both"):
        scores.write_bytes(scores.read_bytes()[:-100])
    if damage == "header":
        table = pq.read_table(scores)
        pq.write_table(table.replace_schema_metadata({b"xmil": b'{"layout": 1, "columns": []}'}), scores)
    app = app_of(fresh)
    lines = ask(app, "/api/run.json").json["slides"]
    assert lines[1]["error"] is None
    bad = ask(app, "/api/slides/0/slide.json").json
    assert "slide-0" in bad["error"]
    assert str(fresh.slides.parent) not in bad["error"]
    assert (bad["image"] is None) == (damage in ("picture", "both"))
    assert len(bad["sets"]) == (damage == "picture")
    if damage != "picture":
        answer = ask(app, "/api/slides/0/evidence-0.bin")
        assert answer.status == 422
        assert "slide-0" in answer.json["error"]
    else:
        assert ask(app, "/tiles/0/8/0_0.jpeg").status == 422
        assert ask(app, "/api/slides/0/thumbnail.jpeg").status == 422
    assert ask(app, "/api/slides/1/slide.json").json["error"] is None
    assert ask(app, "/api/slides/1/evidence-0.bin").status == 200
    assert ask(app, "/tiles/1/8/0_0.jpeg").status == 200


def test_pixels_damaged_inside_the_slide(fresh: Made) -> None:
    path = fresh.slides / "slide-0.tif"
    content = bytearray(path.read_bytes())
    content[16:400] = b"\xff" * 384
    path.write_bytes(content)
    app = app_of(fresh)
    slide = ask(app, "/api/slides/0/slide.json").json
    finest = slide["image"]["finest"] if slide["image"] else 8
    assert ask(app, f"/tiles/0/{finest}/0_0.jpeg").status in (200, 422)
    assert ask(app, "/tiles/1/8/0_0.jpeg").status == 200


def test_failed_slides_are_listed_with_the_reason(fresh: Made) -> None:
    (fresh.runs[0] / "failures.csv").write_text(
        "slide_id,error\nlost,no features were found\nodd,'/home/me/data/odd.h5: n/a'\n"
    )
    app = app_of(fresh)
    assert ask(app, "/api/run.json").json["slides"][3]["error"] == "'odd.h5: n/a'"
    line = ask(app, "/api/run.json").json["slides"][2]
    assert (line["id"], line["error"], line["n"]) == ("lost", "no features were found", None)
    assert ask(app, "/api/slides/2/slide.json").json["error"] == "no features were found"


def test_files_may_change_while_they_are_served(fresh: Made) -> None:
    app = app_of(fresh)
    path, picture = fresh.runs[0] / "slides" / "slide-0.parquet", fresh.slides / "slide-0.tif"
    before = ask(app, "/api/slides/0/evidence-0.bin").body
    tile = ask(app, "/tiles/0/8/0_0.jpeg")

    stored = read_explanations(path)
    write_explanations([_replaced(e, scores=e.scores + 1) for e in stored], path)
    after = ask(app, "/api/slides/0/evidence-0.bin").body
    n = len(stored[0])
    np.testing.assert_allclose(
        np.frombuffer(after[8 * n :], "<f4"), np.frombuffer(before[8 * n :], "<f4") + 1, rtol=1e-6
    )
    write_slide(picture, np.full((4, 6, 3), 9, dtype=np.uint8), edge=64)
    changed = ask(app, "/tiles/0/8/0_0.jpeg")
    assert changed.body != tile.body
    assert pixels(changed.body).max() < 15

    path.write_bytes(b"PAR1 cut")
    assert ask(app, "/api/slides/0/evidence-0.bin").status == 422
    path.unlink()
    assert ask(app, "/api/slides/0/evidence-0.bin").status == 404
    picture.unlink()
    assert ask(app, "/tiles/0/8/0_0.jpeg").status in (404, 422)
    (fresh.runs[0] / "slides.csv").write_bytes(b"\xff\xfe\x00 not a table")
    (fresh.runs[0] / "run.json").write_text("[")
    assert [s["id"] for s in ask(app, "/api/run.json").json["slides"]] == fresh.names
    write_explanations(stored, path)
    assert ask(app, "/api/slides/0/evidence-0.bin").body == before
    shutil.rmtree(fresh.runs[0])
    assert ask(app, "/api/run.json").status == 200
    assert ask(app, "/api/slides/1/evidence-0.bin").status == 404


def test_new_slides_join_at_the_end(fresh: Made) -> None:
    app = app_of(fresh)
    assert len(ask(app, "/api/run.json").json["slides"]) == 2
    (first, *_) = read_explanations(fresh.runs[0] / "slides" / "slide-0.parquet")
    write_explanations([_replaced(first, bag="a-new")], fresh.runs[0] / "slides" / "a-new.parquet")
    assert [s["id"] for s in ask(app, "/api/run.json").json["slides"]] == [*fresh.names, "a-new"]
    assert ask(app, "/api/slides/2/slide.json").json["id"] == "a-new"
