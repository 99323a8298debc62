"""One cohort from 20x and 40x scanners: 256 px at 0.5 µm/px have two level-0 edges, and are one dataset."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import xmil
from tests.cli.test_cli import inspected, run
from tests.training.cohorts import D, config_of, write_cohort
from xmil.training.training_set import read_training_set

SCANNERS = ((256, 0.5, 256), (512, 0.25, 256))  # level-0 edge, mpp, pixels of a patch


def scanned(folder: Path, scanners: tuple[tuple[int, float, int], ...]) -> Path:
    """A cohort whose slides come from the scanners in turn."""
    write_cohort(folder, n=12)
    for i in range(12):
        edge, mpp, px = scanners[i % len(scanners)]
        x = np.random.default_rng(i).normal(size=(8, D)).astype(np.float32)
        places = edge * np.stack(np.divmod(np.arange(8), 4), axis=1)
        about = {"coords": places, "patch_size": edge, "mpp": mpp, "extra": {"patch_size": px}}
        xmil.write_bag(
            xmil.Bag(x, slide_id=f"s{i}", encoder="enc-a", **about), folder / "features" / f"s{i}.h5"
        )
    return folder


def test_two_scanners_are_one_cohort(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = scanned(tmp_path, SCANNERS)
    assert read_training_set(config_of(folder)).notes == ()
    (report,) = inspected(folder / "features", capsys=capsys)
    assert report["problems"] == []
    model = tmp_path / "m.safetensors"
    xmil.save_model(xmil.create_model("attnmil", in_dim=D, n_classes=2, seed=0), model)
    _, out, _ = run("predict", "--model", model, "--features", folder / "features", "--out", tmp_path / "p",
                    capsys=capsys)  # fmt: skip
    assert "warning" not in out


def test_two_resolutions_are_told(tmp_path: Path) -> None:
    """The same edge in level-0 pixels on both scanners: patches twice as wide on one of them."""
    folder = scanned(tmp_path, ((256, 0.5, 256), (256, 0.25, 256)))
    assert read_training_set(config_of(folder)).notes == ("the features differ in mpp: 0.25, 0.5",)
