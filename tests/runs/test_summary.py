"""The summary of a run: the same bytes whether slides are known from their explaining or read from files."""

from __future__ import annotations

import shutil
from pathlib import Path

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
    asked = {"out": out, "methods": "lrp,gxi", "cohort": folder / "cohort.csv", "by": by, "label": "label"}
    explain_slides(folder / "m0.safetensors", folder / "features", **asked)
    fresh = summary_of(out)
    shutil.rmtree(out / "summary")
    explain_slides(folder / "m0.safetensors", folder / "features", **asked)  # all found: from the files
    assert summary_of(out) == fresh
    for slide in ("s003", "s008"):
        (out / "slides" / f"{slide}.parquet").unlink()
    read: list[Path] = []
    monkeypatch.setattr(
        summary, "_summarise_file", lambda path, f=summary._summarise_file: read.append(path) or f(path)
    )
    explain_slides(folder / "m0.safetensors", folder / "features", **asked)
    assert summary_of(out) == fresh
    assert len(read) == (8 if by == "slide" else 6)  # slides of a case are explained together
