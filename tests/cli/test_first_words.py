"""What the program says in the first hour: mistakes that are common, and pictures that must not mislead."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import xmil
from tests.cli.test_cli import run
from tests.training.cohorts import config_of, write_cohort
from xmil.execute import Listener
from xmil.heatmaps import Scale
from xmil.training.train import train

DIM = 6


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Six feature files with places, two models with named classes."""
    monkeypatch.chdir(tmp_path)
    Path("features").mkdir()
    for i in range(6):
        coords = 256 * np.stack(np.divmod(np.arange(12), 4), axis=1)
        features = np.random.default_rng(i).normal(size=(12, DIM)).astype("float32")
        xmil.write_bag(xmil.Bag(features, coords=coords, patch_size=256), f"features/s{i}.h5")
    for seed in (0, 1):
        names = ["benign", "tumour"]
        model = xmil.create_model("attnmil", in_dim=DIM, n_classes=2, dim=8, seed=seed, class_names=names)
        xmil.save_model(model, f"m{seed}.safetensors")
    return tmp_path


class Stopped(Listener):
    """Interrupts a run after three slides."""

    @contextmanager
    def counting(self, what: str, total: int) -> Iterator[Callable[[], None]]:
        left = [3]

        def advance() -> None:
            left[0] -= 1
            if not left[0]:
                raise KeyboardInterrupt

        yield advance


def test_a_picture_of_another_model_stays(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("explain", "--features", "features/s0.h5", "--model")
    assert run(*words, "m0.safetensors", capsys=capsys)[0] == 0
    first = Path("s0.heatmap.png").read_bytes()
    code, out, _ = run(*words, "m1.safetensors", capsys=capsys)
    assert (code, "Picture: s0.heatmap-2.png" in out) == (0, True)
    assert (Path("s0.heatmap.png").read_bytes(), len(list(Path().glob("*.png")))) == (first, 2)
    for model in ("m0", "m1"):  # of the same models: they are replaced
        assert run(*words, f"{model}.safetensors", capsys=capsys)[0] == 0
    assert len(list(Path().glob("*.png"))) == 2


def test_drawing_an_unfinished_run_says_so(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt):
        xmil.explain_slides("m0.safetensors", "features", out="run", listener=Stopped())
    code, out, _ = run("heatmap", "run", "--pictures", "map", "--to", "png", capsys=capsys)
    assert (code, "unfinished" in out) == (1, True)
    xmil.explain_slides("m0.safetensors", "features", out="run")
    code, out, _ = run("heatmap", "run", "--pictures", "map", "--to", "png", capsys=capsys)
    assert (code, "unfinished" in out, "6 slides" in out) == (0, False, True)


def test_colours_that_clip_are_checked_at_once_and_the_hint_names_the_run(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    xmil.explain_slides("m0.safetensors", "features", out="my run")
    for clip in ("150", "20", "wiskers"):
        code, _, err = run("heatmap", "my run", "--clip", clip, capsys=capsys)
        assert (code, "--clip must be" in err, Path("my run/heatmaps").exists()) == (2, True, False)
    from xmil.runs.heatmap import describe_clipped, unclipped_command
    from xmil.runs.requests import DrawRequest

    assert "--out own" in unclipped_command(DrawRequest.build(run="my run", out="own"))
    (line,) = describe_clipped({"s0": 0.4}, unclipped_command(DrawRequest.build(run="my run")))
    words = shlex.split(line.partition("; xmil ")[2].removesuffix(" tells them apart."))
    assert run(*words, "--pictures", "map", "--to", "png", capsys=capsys)[0] == 0


def test_nearly_equal_attention_looks_equal() -> None:
    values = np.linspace(0.02217, 0.02226, 45)
    colours = Scale.of(values, signed=False).paint(values)[:, :3].astype(int)
    assert np.abs(colours - colours[0]).max() <= 3
    spread = Scale.of([0.01, 0.02, 0.04], signed=False)
    assert (spread.low, spread.high) == (0.01, 0.04)


def test_common_slips_are_named(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("explain", "--model", "m0.safetensors", "--features", "features")
    cases = {
        ("--config", "output=myrun"): "--out myrun",
        ("--out", "run", "--target", "5"): "0 (benign), 1 (tumour)",
        ("--out", "run", "--device", "cuda:9"): "GPU",
        ("--out", "run", "--encoder", "resnet18"): "--encoder is for slides without features",
    }
    for more, fragment in cases.items():
        code, _, err = run(*words, *more, capsys=capsys)
        assert (code, fragment in err, err.count("\n")) == (2, True, 1), err
    code, _, err = run("embed", "--tiles", "t", "--slides", "s", "--encoder", "resnet81", capsys=capsys)
    assert (code, "Unknown encoder 'resnet81'. Did you mean 'resnet18'?" in err) == (2, True)
    code, out, _ = run("explain", "--help", capsys=capsys)
    assert (code, "bool" in out) == (0, False)


def test_without_coordinates_the_next_step_is_possible(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("plain").mkdir()
    np.save("plain/a.npy", np.random.default_rng(0).normal(size=(9, DIM)).astype("float32"))
    code, out, _ = run(
        "explain", "--model", "m0.safetensors", "--features", "plain", "--out", "run", capsys=capsys
    )
    words = shlex.split(out.splitlines()[-1].removeprefix("Next: xmil "), comments=True)
    assert (code, run(*words, "--steps", 5, "--orders", 2, capsys=capsys)[0]) == (0, 0)
    assert words[0] == "evaluate"


def test_the_progress_of_training_shows_the_epoch_that_ended(tmp_path: Path) -> None:
    seen = []
    config = config_of(write_cohort(tmp_path, n=20), train={"epochs": 3, "device": "cpu"})
    train(config, on_job=lambda job, number: seen.append)
    last = seen[-1]
    best = json.loads((Path(config.out) / "model" / "metrics.json").read_text())["best"]
    assert (last.epoch, last.batch, last.batches) == (3, last.batches, last.batches)
    assert last.best == pytest.approx(best)


def test_a_case_with_two_labels_is_not_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [f"s{i},c{i // 2},{'a' if i // 2 % 2 else 'b'}" for i in range(20)]
    rows[1] = "s1,c0,a"
    table = tmp_path / "cohort.csv"
    table.write_text("Slide_ID,case_id,label\n" + "\n".join(rows) + "\n")
    code, _, err = run("split", table, "--stratify", "label", capsys=capsys)
    assert (code, "c0 (a, b)" in err) == (2, True)
    code, out, _ = run("split", table, capsys=capsys)
    assert (code, "slide_id from the column 'Slide_ID'" in out) == (0, True)
