"""A training that is killed, or finds no room on the disk, ends in the same weights, without half files."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from benchmarks.killed.training import kill_training

import xmil
from tests.training.cohorts import config_of, settings, write_cohort
from xmil.training.config import dumps


def test_three_kills_change_nothing(tmp_path):
    folder = write_cohort(tmp_path, n=20)
    content = settings(folder, model={"dropout": 0.2}, train={"epochs": 30, "repeats": 2})
    (folder / "config.toml").write_text(dumps(content))
    report = kill_training(folder / "config.toml", tmp_path / "work", kills=3, seed=0, start="fork")
    assert report.kills == 3
    assert report.differences == []
    assert report.half_files == []


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 120 kB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = shutil.which("mount")
    made = mount and subprocess.run(
        [mount, "-t", "tmpfs", "-o", "size=120k", "tmpfs", str(place)], capture_output=True
    )
    if not made or made.returncode:
        pytest.skip("no right to mount a small file system here")
    yield place
    subprocess.run(["umount", str(place)], check=True)  # noqa: S607


@pytest.mark.parametrize("tensorboard", [False, True])
def test_a_full_disk_is_told_and_the_run_goes_on_once_there_is_room(tmp_path, small_disk, tensorboard):
    folder = write_cohort(tmp_path, n=20)
    model = {"dim": 32, "dropout": 0.2}
    change = {"epochs": 25, "repeats": 3, "tensorboard": tensorboard}
    config = config_of(folder, out=str(small_disk / "out"), model=model, train=change)
    with pytest.raises(xmil.XmilError, match=r"cannot be written.*No space left"):
        xmil.train(config)
    assert not list(small_disk.rglob("*.part"))
    for path in small_disk.rglob("model.safetensors"):
        xmil.load_model(path)
    subprocess.run(["mount", "-o", "remount,size=10m", str(small_disk)], check=True)  # noqa: S607
    xmil.train(config)
    xmil.train(config_of(folder, out=str(tmp_path / "whole"), model=model, train=change))
    whole, broken = tmp_path / "whole", small_disk / "out"
    assert (whole / "predictions.csv").read_text() == (broken / "predictions.csv").read_text()
