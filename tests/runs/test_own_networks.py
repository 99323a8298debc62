"""Networks of the user's own on the command line: what a run says of them, and what it can explain."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.runs.cohorts import WIDTH, make_cohort, write_slide
from xmil.cli._app import run
from xmil.storage import open_run

NETS = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Linear(WIDTH, 5), nn.Linear(5, 2)

    def forward(self, x):
        return self.head(self.embed(x).relu().mean(dim=1))


class Log(Net):
    def forward(self, x):
        return super().forward(x).log_softmax(-1)


class Chances(Net):
    def forward(self, x):
        return super().forward(x).softmax(-1)


def chances():
    net = Chances()
    net.returns = "probability"
    return net


def int8():
    return torch.ao.quantization.quantize_dynamic(Net(), {nn.Linear}, dtype=torch.qint8)


def with_an_argument(width):
    return Net()


def without_weights():
    raise OSError("weights.pt is missing")
"""


@pytest.fixture(scope="module")
def cohort(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three slides, and nets."""
    from xmil.data import read_bag

    folder = make_cohort(tmp_path_factory.mktemp("cohort"), 3)
    width = read_bag(min((folder / "features").iterdir())).features.shape[1]
    (folder / "nets.py").write_text(NETS.replace("WIDTH", str(width)), encoding="utf-8")
    return folder


def explain(cohort: Path, name: str, out: Path, *more: str) -> int:
    model = f"{cohort}/nets.py{name and ':'}{name}"
    return run(["explain", "--model", model, "--features", f"{cohort}/features", "--out", str(out), *more])


@pytest.mark.filterwarnings("ignore")  # torch is moving its quantisation to another package
def test_int8_networks_and_probabilities_are_explained(cohort: Path, tmp_path: Path) -> None:
    assert explain(cohort, "int8", tmp_path / "int8", "--methods", "one_added") == 0
    assert explain(cohort, "int8", tmp_path / "int8", "--methods", "one_added") == 0  # the same weights
    assert explain(cohort, "chances", tmp_path / "chances") == 0


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("with_an_argument", "missing 1 required positional argument: 'width'"),
        ("without_weights", "weights.pt is missing"),
        ("", "nets.py:build"),
        ("Chances", "module's attribute returns"),
    ],
)
def test_a_network_that_cannot_be_built_or_read_says_why(
    name: str, fault: str, cohort: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert explain(cohort, name, tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert "unexpected" not in said
    assert fault in said


def test_a_warning_of_all_slides_is_said_once(
    cohort: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert explain(cohort, "Log", tmp_path / "out", "--config", "check=all") == 0
    said = capsys.readouterr()
    assert "3 of 3 slides carry a warning" in said.out + said.err
    assert (said.out + said.err).count("log_softmax") == 1


@pytest.mark.parametrize("fault", ["empty", "link", "nan", "wide"])
def test_a_bad_first_file_fails_alone(fault: str, tmp_path: Path) -> None:
    folder = make_cohort(tmp_path, 3)
    (folder / "nets.py").write_text(NETS.replace("WIDTH", str(WIDTH)), encoding="utf-8")
    first, rng = folder / "features" / "a.h5", np.random.default_rng(0)
    if fault == "empty":
        first.touch()
    elif fault == "link":
        first.symlink_to("nowhere.h5")
    else:
        write_slide(first, rng, 20, width=WIDTH if fault == "nan" else 9)
    if fault == "nan":
        with h5py.File(first, "a") as file:
            file["features"][0, 0] = np.nan
    assert explain(folder, "Net", tmp_path / "out") == 1
    assert list(open_run(tmp_path / "out").failed) == ["a"]
