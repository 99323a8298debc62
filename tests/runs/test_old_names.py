"""What was written for version 0.2 runs, or says in one line what to write instead."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xmil
from tests.cli.test_cli import run
from tests.runs.cohorts import make_cohort
from xmil.core.errors import InputError
from xmil.core.request import REMOVED
from xmil.runs.requests import EvaluateRequest, ExplainRequest

FIXTURES = Path(__file__).parents[1] / "fixtures"
LINES = [
    line.split(" | ")
    for line in (FIXTURES / "words_of_0.2.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
]
COHORT = {"model": "m", "features": "f", "out": "o"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_cohort(tmp_path_factory.mktemp("old"), 3)
    (folder / "config.toml").write_text((FIXTURES / "config_of_0.2.toml").read_text(encoding="utf-8"))
    return folder


@pytest.mark.parametrize(("words", "end"), LINES, ids=[words.partition("{")[0] + end for words, end in LINES])
def test_a_command_of_the_version_before_runs_or_says_what_to_write(
    words: str, end: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = shlex.split(words.format(data=data, out=tmp_path / "out"))
    code, _, error = run(*command, capsys=capsys)
    if end == "ok":
        assert code == 0, error
        return
    assert code == 2
    assert end in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_config_of_the_version_before_is_read() -> None:
    config = xmil.load_config(FIXTURES / "config_of_0.2.toml")
    assert (config.model.params, config.train.epochs, config.data.by) == ({"dim": 8}, 1, "slide")


@pytest.mark.parametrize("name", ["preset", "contexts"])
def test_a_parameter_that_went_says_what_to_write(name: str) -> None:
    with pytest.raises(InputError, match=rf"params=.*'{name}'"):
        ExplainRequest.build(**COHORT, **{name: 4})


def test_every_parameter_that_went_belongs_to_a_command() -> None:
    assert {key.partition(".")[0] for key in REMOVED} <= {"explain", "evaluate", "train", "bench"}


@pytest.mark.parametrize(
    ("request_type", "written", "read"),
    [
        (ExplainRequest, {"methods": "lrp,gxi"}, {"methods": ("lrp", "gxi")}),
        (ExplainRequest, {"method": "ig"}, {"methods": ("ig",)}),
        (EvaluateRequest, {"methods": ["lrp"], "modes": "none"}, {"methods": ("lrp",), "modes": ()}),
    ],
)
def test_lists_are_written_as_one_likes(
    request_type: Any, written: dict[str, Any], read: dict[str, Any]
) -> None:
    built = request_type.build(**COHORT, **written)
    assert {name: getattr(built, name) for name in read} == read


def test_numbers_of_numpy_are_numbers() -> None:
    built = ExplainRequest.build(**COHORT, mpp=np.float32(0.5), target=[np.int64(1)])
    assert (built.mpp, built.target) == (0.5, ("1",))
    with pytest.raises(InputError, match="mpp"):
        ExplainRequest.build(**COHORT, mpp=True)
