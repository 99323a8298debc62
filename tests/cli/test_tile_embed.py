"""`xmil tile` and `xmil embed`: from slides to features, one command each; broken slides take a line each."""

from __future__ import annotations

import csv
import json
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest

import xmil
from tests.cli.test_cli import run
from tests.slides.pyramids import textured, write_pyramid
from tests.slides.test_slide import broken

pytest.importorskip("openslide")

MEAN = "tests.encoders.builders:network"
BOX = (256, 128, 384, 256)


@pytest.fixture
def slides(tmp_path: Path) -> Path:
    folder = tmp_path / "slides"
    folder.mkdir()
    for i, name in enumerate(("one", "two")):
        write_pyramid(folder / f"{name}.tif", textured([BOX], (900, 600), seed=i))
    return folder


def tile(slides: Path, out: Path, *more: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    return run("tile", slides, "--out", out, "--size", 128, "--min-tissue", 0.5, *more, capsys=capsys)


def test_slides_to_features(slides: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "tiles"
    code, text, _ = tile(slides, out, capsys=capsys)
    done, then = text.splitlines()
    assert (code, done) == (0, f"12 patches on 2 slides, 0 already done, 0 failed. Written to {out}.")
    words = shlex.split(then.removeprefix("Next: xmil "), comments=True)
    assert words == ["embed", "--tiles", str(out), "--slides", str(slides), "--encoder", "ENCODER"]
    assert run("inspect", out, slides, capsys=capsys)[1].splitlines()[-1] == then
    record = json.loads((out / "run.json").read_text())
    assert (record["kind"], record["settings"]["size"], record["settings"]["mpp"]) == ("tile", 128, 0.5)
    code, text, _ = run(*words[:-1], MEAN, "--device", "cpu", capsys=capsys)
    assert (code, "12 patches of 2 slides" in text) == (0, True)
    explain = f"xmil explain --model MODEL --features {out / 'features_network'} --out run --slides {slides}"
    assert text.splitlines()[-1] == f"Next: {explain}"
    assert run("inspect", out, slides, capsys=capsys)[1].splitlines()[-1] == f"Next: {explain}"
    bag = xmil.read_bag(out / "features_network" / "one.h5")
    assert bag.features.shape == (6, 24)
    assert bag.boxes()[0].tolist() == [256, 128, 384, 256]
    code, text, _ = run("inspect", out, out / "features_network", capsys=capsys)
    assert (code, text.count("a folder of feature files"), text.count("trident: 2")) == (0, 2, 2)
    shutil.copytree(out / "features_network", out / "features_other")
    text = run("inspect", out, slides, capsys=capsys)[1]
    both = f"{out / 'features_network'} and {out / 'features_other'}"
    assert (f"features are in {both}" in text, "Next:" in text) == (
        True,
        False,
    )
    files = sorted(path.name for path in (out / "features_network").iterdir() if path.name[0] != ".")
    assert files == ["failures.csv", "ledger.jsonl", "one.h5", "run.json", "slides.csv", "two.h5"]


def test_a_run_goes_on_where_it_stopped(
    slides: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "tiles"
    tile(slides, out, capsys=capsys)
    (out / "patches" / "two_patches.h5").unlink()
    kept = (out / "patches" / "one_patches.h5").stat().st_mtime_ns
    code, text, _ = tile(slides, out, capsys=capsys)
    assert (code, "6 patches on 1 slide, 1 already done" in text) == (0, True)
    assert (out / "patches" / "one_patches.h5").stat().st_mtime_ns == kept
    code, _, err = tile(slides, out, "--overlap", 8, capsys=capsys)
    assert (code, "other settings (overlap 0, not 8)" in err) == (2, True)
    code, text, _ = tile(slides, out, "--overlap", 64, "--restart", capsys=capsys)
    assert (code, "0 already done" in text) == (0, True)
    # 7 x 5 steps of 64, the outer ones half on tissue, without the corners, which are a quarter
    assert len(xmil.open_bag(out / "patches" / "one_patches.h5")) == 31


def test_names_that_clash_do_not_stop_the_rest(
    slides: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "tiles"
    tile(slides, out, capsys=capsys)
    embed = ("embed", "--tiles", out, "--slides", slides, "--encoder", MEAN, "--device", "cpu")
    (slides / "two.svs").write_text("no slide")
    (slides / "one.png").write_text("a picture")
    for command, done in ((("tile", slides, "--out", tmp_path / "t", "--size", 128), "on"), (embed, "of")):
        code, text, _ = run(*command, capsys=capsys)
        assert code == 1
        assert f"patches {done} 1 slide, 0 already done, 1 failed" in text
        assert text.count("the slide 'two'") == 1
        assert text.count("one.png: ") == 1
    with (tmp_path / "t" / "failures.csv").open() as file:
        assert [row["slide_id"] for row in csv.DictReader(file)] == ["two"]


def test_another_slide_mpp_tiles_again(
    slides: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the slides that store no mpp of their own, and their features; the record follows."""
    write_pyramid(slides / "bare.tif", textured([BOX], (900, 600)), mpp=None)
    out, patches = tmp_path / "tiles", tmp_path / "tiles" / "patches"
    tile(slides, out, "--slide-mpp", 0.5, capsys=capsys)
    embed = ("embed", "--tiles", out, "--slides", slides, "--encoder", MEAN, "--device", "cpu")
    run(*embed, capsys=capsys)
    kept = (patches / "one_patches.h5").stat().st_mtime_ns
    code, text, _ = tile(slides, out, "--slide-mpp", 0.25, capsys=capsys)
    assert (code, "on 1 slide, 2 already done" in text) == (0, True)
    assert xmil.open_bag(patches / "bare_patches.h5").patch_size == 256
    assert (patches / "one_patches.h5").stat().st_mtime_ns == kept
    for more, found in (((), 3), (("--slide-mpp", 0.25), 3)):
        _, text, _ = tile(slides, out, *more, capsys=capsys)
        assert f"{found} already done" in text
        assert json.loads((out / "run.json").read_text())["slide_mpp"] == 0.25
    _, text, _ = run(*embed, capsys=capsys)
    assert "2 already done" in text
    assert xmil.open_bag(out / "features_network" / "bare.h5").patch_size == 256


def test_broken_slides_take_a_line_each(
    slides: Path, tmp_path: Path, data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = broken(slides, (data_dir / "slides" / "CMU-1-Small-Region.svs").read_bytes())
    write_pyramid(slides / "no-mpp.tif", textured([BOX], (900, 600)), mpp=None)
    write_pyramid(slides / "white.tif", np.full((600, 900, 3), 245, dtype=np.uint8))
    said |= {"no-mpp.tif": "stores no microns per pixel", "white.tif": "no tissue found"}
    out = tmp_path / "tiles"
    code, text, _ = tile(slides, out, capsys=capsys)
    assert code == 1
    assert "12 patches on 2 slides" in text
    with (out / "failures.csv").open() as file:
        failed = {row["slide_id"]: row["error"] for row in csv.DictReader(file)}
    assert set(failed) == {name.rpartition(".")[0] for name in said}
    for name, reason in said.items():
        line = failed[name.rpartition(".")[0]]
        assert reason in line
        assert name in line
        assert reason in text
    code, text, _ = tile(slides, out, "--slide-mpp", 0.5, capsys=capsys)
    assert (code, "no-mpp: mpp as given, not from the file" in text) == (1, True)
    assert (out / "patches" / "no-mpp_patches.h5").is_file()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["tile", "absent", "--out", "o"], "absent: no such file or folder"),
        (["tile", ".", "--out", "o"], "contains no slides"),
        (["tile", "text.svs", "--out", "o"], "No slide could be used"),
        (["tile", "text.svs", "--out", "o", "--size", "1"], "--size"),
        (["embed", "--tiles", "t", "--slides", ".", "--encoder", MEAN], "t: no such folder"),
        (["embed", "--tiles", ".", "--slides", ".", "--encoder", MEAN], "contains no patches"),
    ],
)
def test_nothing_to_do(
    arguments: list[str],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    if "text.svs" in arguments:
        (tmp_path / "text.svs").write_text("no slide")
    code, _, err = run(*arguments, capsys=capsys)
    assert code == 2
    assert reason in err
    assert err.count("xmil: error:") == 1


def test_options_of_embed(slides: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "tiles"
    tile(slides, out, capsys=capsys)
    (slides / "two.tif").unlink()
    common = ("embed", "--tiles", out, "--slides", slides, "--encoder", MEAN)
    code, _, err = run(*common, "--config", "normalise=1,2", capsys=capsys)
    assert (code, "normalise must be six numbers" in err) == (2, True)
    options = ("--config", "normalise=0,0,0,1,1,1", "--config", "input_size=32", "--batch", 4)
    code, text, _ = run(*common, *options, "--out", tmp_path / "f", capsys=capsys)
    assert code == 1
    assert "two: failed: no slide of this name" in text
    features = xmil.read_bag(tmp_path / "f" / "one.h5").features
    assert 0 < features.min() <= features.max() < 1  # colours as they are


def test_real_slides(data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One command each; the slide without mpp is named and asked for."""
    out = tmp_path / "tiles"
    code, text, _ = run("tile", data_dir / "slides", "--out", out, "--mpp", 1, capsys=capsys)
    assert code == 1
    assert "stores no microns per pixel; pass --slide-mpp" in text
    code, text, _ = run(
        "tile", data_dir / "slides", "--out", out, "--mpp", 1, "--slide-mpp", 0.5, capsys=capsys
    )
    assert (code, "1 already done, 0 failed" in text) == (0, True)
    code, *_ = run(
        *(
            "embed",
            "--tiles",
            out,
            "--slides",
            data_dir / "slides",
            "--encoder",
            MEAN,
            "--config",
            "stain_norm=true",
        ),
        capsys=capsys,
    )
    assert code == 0
    for path in sorted((out / "features_network").glob("*.h5")):
        bag = xmil.read_bag(path)
        assert len(bag) > 10
        assert np.isfinite(bag.features).all()
