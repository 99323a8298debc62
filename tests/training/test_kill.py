"""A training killed at any moment ends in the same weights, without half files."""

from __future__ import annotations

from benchmarks.killed import kill_training

from tests.training.cohorts import settings, write_cohort
from xmil.training.toml import dumps


def test_three_kills_change_nothing(tmp_path):
    folder = write_cohort(tmp_path, n=20)
    content = settings(folder, model={"dropout": 0.2}, train={"epochs": 30, "repeats": 2})
    (folder / "config.toml").write_text(dumps(content))
    report = kill_training(folder / "config.toml", tmp_path / "work", kills=3, seed=0, start="fork")
    assert report.kills == 3
    assert report.differences == []
    assert report.half_files == []
