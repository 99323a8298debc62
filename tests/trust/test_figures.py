"""Items 12 and 17: titles, captions and lists speak of what is shown; overlaps mean the same everywhere."""

from __future__ import annotations

import base64
import io
import re
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import xmil
from tests.bench.test_report import made
from xmil.bench import Column, Measure, draws_of, verdict_of, weak_spots
from xmil.core.errors import InputError
from xmil.demo.pipeline import Demo
from xmil.demo.results_page import certificate_section
from xmil.heatmaps import SIGNED, Scale, heatmap
from xmil.viewer.collection import ShownRun


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    """A certificate of the demonstration's slide whose first method is not the best one."""
    demo = Demo(tmp_path_factory.mktemp("demo"), quick=True)
    name, rng = demo.shown("pos_neg").name, np.random.default_rng(0)
    x = rng.normal(size=(20, 6)).astype(np.float32)
    xmil.write_bag(xmil.Bag(x, slide_id=name), demo.out / f"{name}.h5")
    model = xmil.create_model("attnmil", in_dim=6, n_classes=2, seed=1)
    xmil.save_model(model, demo.out / "m.safetensors")
    xmil.evaluate_slides(
        demo.out / "m.safetensors",
        features=demo.out,
        out=demo.folder("evaluate", "pos_neg", "transmil"),
        methods=["random", "single", "lrp"],
        modes=["remove"],
        orders=5,
        steps=10,
    )
    return demo


def test_item_12_a_certificate_and_its_caption_speak_of_one_method(measured: Demo) -> None:
    section = certificate_section(measured)
    [data] = re.findall('base64,([^"]+)"', section)
    [caption] = re.findall("<figcaption>(.+)</figcaption>", section)
    title = Image.open(io.BytesIO(base64.b64decode(data))).info["Title"]
    assert " ".join(title.split()).endswith(unescape(caption))  # in lines that fit the figure
    run = ShownRun(measured.folder("evaluate", "pos_neg", "transmil"))
    name = measured.shown("pos_neg").name
    paper = run.certificate(name)
    assert paper is not None
    assert paper["headline"] == {key: paper["methods"][0][key] for key in ("method", "verdict", "sentence")}
    assert paper["headline"]["sentence"] == unescape(caption)
    told = run.slide_verdict(name)
    assert (told["verdict_method"], told["verdict"]) == ("random", paper["headline"]["verdict"])


def explanation(scores: Any, **more: Any) -> xmil.Explanation:
    coords = np.stack([np.arange(len(scores)) * 64, np.zeros(len(scores), dtype=int)], axis=1)
    kept = {"method": "lrp", "target": xmil.Target(1), "signed": True, "bag": "s", **more}
    logits = np.zeros(2, dtype=np.float32)
    return xmil.Explanation(
        np.asarray(scores, dtype=np.float32), logits, 0.0, coords=coords, patch_size=128, **kept
    )


def words(picture: Any) -> str:
    return " ".join(text.get_text() for text in picture.findobj(lambda a: hasattr(a, "get_text")))


def test_item_12_a_picture_of_one_explanation_has_its_own_warnings_only() -> None:
    plain, doubtful = explanation([1, 2]), explanation([2, 1], method="gxi", warnings=("Doubtful scores.",))
    assert "Doubtful" not in words(heatmap([plain, doubtful], picture="overlay"))
    assert "Doubtful" in words(heatmap([doubtful, plain], picture="overlay"))
    assert "Doubtful" in words(heatmap([plain, doubtful], picture="panel"))


def test_item_12_one_title_is_not_put_over_several_slides() -> None:
    with pytest.raises(InputError, match="different bags"):
        heatmap([explanation([1, 2]), explanation([2, 1], method="gxi", bag="t")])


@pytest.mark.parametrize("task", ["regression", "cox"])
def test_item_12_pictures_of_values_do_not_speak_of_classes(task: str) -> None:
    model = xmil.create_model("attnmil", in_dim=4, n_classes=1, task=task, seed=0)
    scores = xmil.explain(model, np.ones((3, 4), dtype=np.float32))
    placed = replace(explanation([1, -1, 2]), target=scores.target, params=scores.params)
    for told in (words(scores.plot()), words(placed.plot())):
        assert f"for the {'value' if task == 'regression' else 'risk'}" in told
        assert "speaks against" not in told


def test_item_12_the_best_by_one_measure_is_not_named_for_another() -> None:
    unit = made({"lrp": (0.0, 0.1), "other": (9.0, 0.1)})
    for method in ("lrp", "other"):
        unit.values[0, method][:, 0] = np.nan  # no row has a value in the leading measure
    measures = (Measure("up", "Up", ""), Measure("down", "Down", "", -1))
    draws = draws_of(unit, [0])
    verdicts = [verdict_of(unit, draws, measure, [0]) for measure in measures]
    column = Column(unit, measures, (0,), draws, tuple(v for v in verdicts if v is not None))
    assert [v.measure for v in column.verdicts] == ["down"]
    assert column.leader is None
    assert weak_spots([column]) == []


def test_item_17_overlaps_are_the_mean_in_pictures_and_files(tmp_path: Path) -> None:
    tifffile = pytest.importorskip("tifffile")
    from xmil.heatmaps import Pyramid, write_scores

    e = explanation([-1.0, 0.5, 1.0])  # 128 px wide, 64 px apart: pairs overlap
    scale = Scale(-1, 1, True, SIGNED)
    drawn = np.asarray(heatmap(e, picture="map", region=(0, 0, 256, 128), scale=scale))
    write_scores(tmp_path / "s.ome.tif", [e], Pyramid.of((0, 0, 256, 128)))
    written = np.squeeze(tifffile.imread(tmp_path / "s.ome.tif"))
    for x, mean in ((20, -1.0), (90, -0.25), (150, 0.75), (230, 1.0)):
        assert written[64, x] == mean
        at = drawn[drawn.shape[0] // 2, x * drawn.shape[1] // 256]
        np.testing.assert_array_equal(at, scale.paint([mean])[0])
