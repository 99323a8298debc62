"""The demonstration in little: the real commands from slides to report, twice."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import xmil
from xmil.cli._app import run
from xmil.demo import pipeline
from xmil.demo.digit_slides import draw_bags, evidence, labels
from xmil.demo.encoders import encode_digits
from xmil.demo.pipeline import METHODS, Demo
from xmil.demo.results_page import read_results, verdict

pytest.importorskip("openslide")
pytest.importorskip("tifffile")
pytest.importorskip("lightning_fabric")

pytestmark = pytest.mark.early
LITTLE = {"train": 200, "val": 24, "test": 24, "slide": 2, "epochs": 5, "steps": 4, "orders": 2}
TWO_PAIRS = [("pos_neg", "attnmil"), ("pos_neg", "transmil")]  # the ones that the report shows large


@pytest.fixture(scope="module", autouse=True)
def _little(full: bool) -> Iterator[None]:
    """All four pairs of task and model in the full tests only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "QUICK", LITTLE)
        patch.setattr("os.sched_getaffinity", lambda _: {0})  # all in this process
        if not full:
            patch.setattr(Demo, "pairs", TWO_PAIRS)
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Demo, str]:
    """The folder of a little demonstration, and what it printed."""
    import contextlib
    import io

    out = tmp_path_factory.mktemp("demo") / "out"
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = run(["demo", "--quick", "--out", str(out)])
        demo = Demo(out, quick=True)
        assert len(demo.bags["slide"]) == LITTLE["slide"]  # drawn now, in the little size
    assert code == 0, (out / "log.txt").read_text("utf-8")
    return demo, said.getvalue()


def test_labels_and_evidence_follow_the_definition() -> None:
    for slide in draw_bags("train", 100, seed=3):
        present = set(slide.digits.tolist())
        assert labels(slide)["pos_neg"] == (
            "yes" if len({4, 6, 8} & present) > len({5, 7, 9} & present) else "no"
        )
        assert evidence(slide, "pos_neg").tolist() == [
            (d in (4, 6, 8)) - (d in (5, 7, 9)) for d in slide.digits
        ]
        pairs = [{a, a + 1} for a in range(4) if {a, a + 1} <= present]
        assert labels(slide)["adjacent_pairs"] == ("yes" if pairs else "no")
        assert evidence(slide, "adjacent_pairs").tolist() == [
            int(any(d in p for p in pairs)) for d in slide.digits
        ]


def test_no_digit_is_in_two_pools() -> None:
    seen = {
        split: {row for bag in draw_bags(split, 40, seed=0) for row in bag.rows} for split in ("train", "val")
    }
    test = {row for split in ("test", "slide") for bag in draw_bags(split, 40, seed=0) for row in bag.rows}
    assert not seen["train"] & seen["val"]
    assert not test & (seen["train"] | seen["val"])


def test_a_line_for_each_stage(made: tuple[Demo, str]) -> None:
    demo, said = made
    lines = said.splitlines()
    for number in range(1, 10):
        assert re.fullmatch(rf"\[{number}/9\] .* \d+\.\d s", lines[number - 1])
    assert verdict(read_results(demo)) in said
    assert f"xmil view {demo.out / 'explain'}" in said


def test_embedded_slides_are_the_digits_embedded(made: tuple[Demo, str]) -> None:
    """What `xmil tile` and `xmil embed` make of a slide is what further bags hold, to the last bits."""
    demo, _ = made
    known = encode_digits()
    for slide in demo.bags["slide"]:
        bag = xmil.read_bag(demo.out / "features" / f"{slide.name}.h5")
        assert np.array_equal(bag.coords, slide.coords)
        assert (bag.patch_size, bag.mpp, bag.encoder) == (256, 0.5, "digits")
        np.testing.assert_allclose(bag.features, known[slide.rows], atol=1e-6)


def test_numbers_are_those_of_the_files(made: tuple[Demo, str]) -> None:
    demo, _ = made
    for result in read_results(demo):
        assert set(result.auprc2) == set(METHODS)
        slides = demo.folder("explain", result.task, result.model) / "slides"
        values = []
        for slide in demo.bags["slide"]:
            truth = evidence(slide, result.task)
            for cls, sign in ((0, -1), (1, 1)):
                e = xmil.Explanation.load(slides / f"{slide.name}.parquet", method="lrp", target=cls)
                values.append(xmil.auprc2(sign * truth, e.scores))
        assert result.auprc2["lrp"] == pytest.approx(np.nanmean(values))
        assert 0 <= result.auroc <= 1


def test_lrp_finds_the_evidence_that_attention_cannot_tell(made: tuple[Demo, str]) -> None:
    [result] = [r for r in read_results(made[0]) if (r.task, r.model) == ("pos_neg", "attnmil")]
    assert result.auprc2["lrp"] > result.auprc2["attention"]


def test_the_report_stands_alone(made: tuple[Demo, str]) -> None:
    demo, _ = made
    text = (demo.out / "report.html").read_text("utf-8")
    sources = re.findall('(?:src|href)="([^"]{0,40})', text)
    assert len(sources) == 2 + len(demo.pairs)
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert "<script" not in text
    assert verdict(read_results(demo)) in text
    for result in read_results(demo):
        assert re.search(rf">{result.auprc2['lrp']:.2f}(</b>)?</td>", text)
    assert "xmil view " in text


def test_the_picture_is_red_and_blue(made: tuple[Demo, str]) -> None:
    with Image.open(made[0].out / "pictures" / "pos_neg-attnmil.png") as picture:
        pixels = np.asarray(picture.convert("RGB")).astype(int)
    red, _, blue = np.moveaxis(pixels, -1, 0)
    assert ((red - blue) > 60).sum() > 2000
    assert ((blue - red) > 60).sum() > 2000


def test_a_second_run_leaves_what_is_done(made: tuple[Demo, str], capsys: pytest.CaptureFixture[str]) -> None:
    demo, _ = made
    models = sorted((demo.out / "models").rglob("model.safetensors"))
    stamps = [path.stat().st_mtime_ns for path in models]
    stages = json.loads((demo.out / "stages.json").read_text())
    (demo.out / "stages.json").write_text(json.dumps([*stages[:4], *stages[5:]]))  # training must look again
    assert run(["demo", "--quick", "--json", "--out", str(demo.out)]) == 0
    told, said = capsys.readouterr()
    assert said.count("done before") == 8
    found = {(pair["task"], pair["model"]): pair["auprc2"]["lrp"] for pair in json.loads(told)["pairs"]}
    assert found == {(r.task, r.model): r.auprc2["lrp"] for r in read_results(demo)}
    assert "0 models trained, 1 already done" in (demo.out / "log.txt").read_text("utf-8")
    assert [path.stat().st_mtime_ns for path in models] == stamps


def test_a_folder_of_another_demonstration_is_refused(
    made: tuple[Demo, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["demo", "--quick", "--seed", "7", "--out", str(made[0].out)]) == 2
    assert "has a demonstration with other settings; choose another --out" in capsys.readouterr().err


def test_what_is_missing_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pipeline, "NEEDED", ("numpy", "no_such_module"))
    assert run(["demo", "--out", str(tmp_path / "o")]) == 2
    assert "needs no_such_module; pip install 'xmil[slides,train]'" in capsys.readouterr().err


def test_a_stage_that_fails_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Demo, "draw_slides", lambda self: (self.out / "slides").mkdir())
    assert run(["demo", "--quick", "--out", str(tmp_path / "o")]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "'xmil tile" in err
    assert "contains no slides" in (tmp_path / "o" / "log.txt").read_text("utf-8")
