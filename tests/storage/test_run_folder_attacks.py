"""What others may put into a run's folder: pipes, links that lead out, labels and texts of absurd length."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import xmil
from xmil.data.inspection import inspect_run
from xmil.heatmaps import caption
from xmil.storage import lock_folder, open_explanations, read_provenance

RUN = Path(__file__).parents[1] / "fixtures" / "runs" / "explain"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Path(shutil.copytree(RUN, tmp_path / "run"))


def looked_at(run: Path) -> list[Callable[[], Any]]:
    """Every way in which the folder is read."""
    first = run / "slides" / "s0.parquet"
    return [
        lambda: repr(xmil.open_run(run)),
        lambda: xmil.open_run(run).table(),
        lambda: xmil.open_run(run).explanation("s0", method="lrp", target="pos"),
        lambda: xmil.Explanation.load(first, method="lrp", target="pos"),
        lambda: read_provenance(first),
        lambda: inspect_run(run),
        lambda: open_explanations(run).rows,
    ]


@pytest.mark.parametrize("name", ["run.json", "slides.csv", "failures.csv", "slides/s0.parquet"])
@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_pipes_do_not_hang_and_links_do_not_lead_out(run: Path, name: str, kind: str) -> None:
    place, secret = run / name, run.parent / "secret"
    shutil.move(place, secret)
    if kind == "pipe":
        os.mkfifo(place)
    else:
        place.symlink_to(secret)
    refused = 0
    for look in looked_at(run):
        try:
            look()
        except xmil.XmilError as error:
            refused += 1
            assert "\n" not in str(error)  # noqa: PT017 - not every way of looking reads every file
    assert refused >= (1 if kind == "pipe" or name != "slides/s0.parquet" else 0)


def test_absurd_cells_are_read_as_text(run: Path) -> None:
    """A label of 5,000 digits, a superscript, nesting without end."""
    header = (run / "slides.csv").read_text().splitlines()[0].split(",")
    for cell in ("9" * 5000, "²", "[" * 100_000, "1e999"):
        (run / "slides.csv").write_text(",".join(header) + "\ns0" + f",{cell}" * (len(header) - 1) + "\n")
        row = xmil.open_run(run).rows["s0"]
        assert caption("s0", {"label": row["label"]}, class_names=("neg", "pos")).label == cell
    model = xmil.create_model("meanpool", in_dim=2, n_classes=2, seed=0)
    with pytest.raises(xmil.XmilError, match="Unknown class"):
        xmil.explain(model, torch.ones(3, 2), target="9" * 5000)


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_the_lock_of_a_folder_empties_nothing_and_waits_for_nobody(tmp_path: Path, kind: str) -> None:
    kept, lock = tmp_path / "kept.txt", tmp_path / "run" / ".lock"
    kept.write_text("mine")
    lock.parent.mkdir()
    make: dict[str, Callable[[], Any]] = {
        "link": lambda: lock.symlink_to(kept),
        "pipe": lambda: os.mkfifo(lock),
        "folder": lock.mkdir,
    }
    make[kind]()
    with pytest.raises(xmil.XmilError, match="remove it"), lock_folder(lock.parent):
        pass
    assert kept.read_text() == "mine"
