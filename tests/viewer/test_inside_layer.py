"""Maps inside patches on the page: they lie where the cause lies, and belong to the scores beside them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import xmil
from tests.viewer.asking import app_of, ask
from tests.viewer.make_inside import EDGE, inside_of, kept
from tests.viewer.make_run import Made
from xmil.encoders.encoder import Encoder, Transform
from xmil.storage import read_explanations
from xmil.viewer.collection import Collection
from xmil.viewer.static_copy import export


def test_the_page_gets_the_maps_with_their_places_and_account(fresh: Made) -> None:
    app = app_of(fresh)
    assert not ask(app, "/api/slides/0/slide.json").json["sets"][0]["inside"]
    missing = ask(app, "/api/slides/0/inside-0.json")
    assert (missing.status, "`xmil inside` makes them" in missing.json["error"]) == (404, True)
    maps = np.random.default_rng(0).normal(size=(2, 112, 112)).astype(np.float32)
    inside = inside_of(fresh, maps, [3, 7])
    kept(fresh, inside)
    assert ask(app, "/api/slides/0/slide.json").json["sets"][0]["inside"]
    found = ask(app, "/api/slides/0/inside-0.json").json
    assert (found["height"], found["width"], found["method"]) == (56, 56, "tokens")
    for i, one in enumerate(found["maps"]):
        assert one["box"] == inside.boxes[i].tolist()
        slow = [maps[i, y : y + 2, x : x + 2].sum() for y in range(0, 112, 2) for x in range(0, 112, 2)]
        np.testing.assert_allclose(one["values"], slow, rtol=1e-4, atol=1e-5)
        assert sum(one["values"]) + one["constant"] + one["other"] == pytest.approx(one["score"], abs=1e-3)


def test_maps_of_another_explanation_are_refused(fresh: Made) -> None:
    inside = inside_of(fresh, np.ones((1, 4, 4), dtype=np.float32), [2])
    app = app_of(fresh)
    moved = replace(inside, boxes=inside.boxes + 1)
    other = replace(inside, audit=replace(inside.audit, score=inside.audit.score + 1))
    far = replace(inside, patches=np.array([10_000]))
    for wrong in (moved, other, far):
        kept(fresh, wrong)
        answer = ask(app, "/api/slides/0/inside-0.json")
        assert (answer.status, "belong to another explanation" in answer.json["error"]) == (422, True)


def test_a_static_copy_has_the_maps(fresh: Made, tmp_path: Path) -> None:
    kept(fresh, inside_of(fresh, np.ones((1, 4, 4), dtype=np.float32), [2]))
    page = tmp_path / "page"
    page.mkdir()
    (page / "index.html").write_text("<p>")
    export(Collection(fresh.runs, slides=fresh.slides), tmp_path / "copy", longest=64, page=page)
    stored = json.loads((tmp_path / "copy" / "api" / "slides" / "0" / "inside-0.json").read_text())
    assert stored == ask(app_of(fresh), "/api/slides/0/inside-0.json").json


class Redness(nn.Module):
    """How much red there is, place by place of 8 px, then the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.AvgPool2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(torch.relu(x[:, :1] - x[:, 1:2] - 0.5)).mean(dim=(2, 3))


@pytest.mark.parametrize("corner", [(0, 0), (50, 3), (27, 41)])
def test_a_planted_square_lies_right_on_the_page(fresh: Made, corner: tuple[int, int]) -> None:
    import tifffile

    path = fresh.slides / f"{fresh.names[0]}.tif"
    path = path if path.is_file() else next(fresh.slides.glob(f"{fresh.names[0]}.*"))
    stored = read_explanations(fresh.runs[0] / "slides" / f"{fresh.names[0]}.parquet")[0]
    x0, y0 = (int(v) for v in stored.coords[9] + corner)
    pixels = np.full((4 * EDGE, 6 * EDGE, 3), 200, dtype=np.uint8)
    pixels[y0 : y0 + 12, x0 : x0 + 12] = (250, 20, 20)
    tifffile.imwrite(path, pixels, photometric="rgb", tile=(64, 64))
    scale = Transform(mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    relevance = np.full((len(stored.scores), 1), stored.scores[9], dtype=np.float32)
    e = replace(stored, relevance=relevance, mpp=0.5)
    encoder = Encoder("red", 1, Redness(), scale)
    kept(fresh, xmil.explain_inside(None, encoder, path, e, patches=[9]))
    found = ask(app_of(fresh), "/api/slides/0/inside-0.json").json
    one = found["maps"][0]
    row, column = divmod(int(np.abs(one["values"]).argmax()), found["width"])
    left, top, right, bottom = one["box"]
    x = left + (right - left) * (column + 0.5) / found["width"]
    y = top + (bottom - top) * (row + 0.5) / found["height"]
    assert x0 - 8 <= x <= x0 + 20
    assert y0 - 8 <= y <= y0 + 20
