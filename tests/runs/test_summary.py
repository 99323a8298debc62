"""The summary of a run: the same bytes whether slides are known from their explaining or read from files."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.runs.cohorts import make_cohort
from xmil.runs import summary
from xmil.runs.explain import explain_slides


def summary_of(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (out / "summary").iterdir()}


@pytest.mark.parametrize("by", ["slide", "case"])
def test_known_slides_add_what_their_files_add(
    tmp_path: Path, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_cohort(tmp_path, 10, instances=12)
    out = tmp_path / "run"
    cohort = folder / "cohort.csv"
    asked = {"out": out, "methods": ["lrp", "gxi"], "cohort": cohort, "by": by, "label": "label"}
    explain_slides(folder / "m0.safetensors", folder / "features", **asked)
    fresh = summary_of(out)
    shutil.rmtree(out / "summary")
    explain_slides(folder / "m0.safetensors", folder / "features", **asked)  # all found: from the files
    assert summary_of(out) == fresh
    for slide in ("s003", "s008"):
        (out / "slides" / f"{slide}.parquet").unlink()
    (out / "summary" / "top.csv").unlink()  # else the same files, made again, leave it as it is
    read: list[Path] = []
    monkeypatch.setattr(
        summary, "read_explanations", lambda path, f=summary.read_explanations: read.append(path) or f(path)
    )
    explain_slides(folder / "m0.safetensors", folder / "features", **asked)
    assert summary_of(out) == fresh
    assert len(read) == (8 if by == "slide" else 6)  # slides of a case are explained together


def test_lists_of_patches_and_sketches_grow_slide_by_slide(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every patch of every slide were sorted at once; and points are counted as they come."""
    for name, value in {"MOST": 2_000, "THINNED": 500}.items():
        monkeypatch.setattr(summary, name, value)
    rng, column, every = np.random.default_rng(0), summary._Column("lrp", True), []
    for number in range(300):
        scores = np.sort(rng.integers(-9, 9, size=12)).astype(float)  # many are equal
        patches = [(f"s{number:03}", i, None, None, None, float(v)) for i, v in enumerate(scores)]
        every += patches
        sketch = summary.Quantiles.of(scores)
        column.add(summary.SlideSummary(f"s{number:03}", "lrp", True, {}, sketch, patches[::-1], patches))
        assert column.quantiles.n_points == sum(map(len, column.quantiles.points)) <= 2_000
    assert column.top == sorted(every, key=lambda p: (-p[-1], p[:2]))[:100]
    assert column.bottom == sorted(every, key=lambda p: (p[-1], p[:2]))[:100]


def test_a_slide_whose_file_is_damaged_behind_its_head_is_explained_again(tmp_path: Path) -> None:
    folder, out = make_cohort(tmp_path, 3, instances=12), tmp_path / "run"
    explain_slides(folder / "m0.safetensors", folder / "features", out=out)
    slide, tables = out / "slides" / "s001.parquet", summary_of(out)
    whole = slide.read_bytes()
    slide.write_bytes(whole[:4] + bytes(36) + whole[40:])
    run = explain_slides(folder / "m0.safetensors", folder / "features", out=out)
    assert run.warnings == []
    assert slide.read_bytes() == whole
    assert summary_of(out) == tables
