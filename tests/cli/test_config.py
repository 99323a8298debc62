"""`--config`: options from a file or NAME=VALUE, under the names they have in Python."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.test_cli import run
from tests.runs.cohorts import make_cohort


@pytest.fixture(scope="module")
def cohort(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_cohort(tmp_path_factory.mktemp("config"), 2)


def request_of(out: Path) -> dict[str, object]:
    return dict(json.loads((out / "run.json").read_text())["request"])


def test_a_file_holds_any_option_and_what_is_typed_wins(
    cohort: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "run.toml"
    config.write_text(
        f'model = "{cohort}/m0.safetensors"\nfeatures = "{cohort}/features"\nmethods = ["lrp", "ig"]\n'
        'target = "0"\nseed = 3\ncheck = "none"\n[params.ig]\nsteps = 6\n'
    )
    out = tmp_path / "run"
    words = ("explain", "--config", config, "--config", "seed=5", "--target", "1", "--out", out)
    code, _, error = run(*words, capsys=capsys)
    assert code == 0, error
    stored = request_of(out)
    assert (stored["methods"], stored["target"], stored["seed"]) == (["lrp", "ig"], ["1"], 5)
    assert stored["params"] == {"ig": {"steps": 6}}


@pytest.mark.parametrize(
    ("setting", "fault"),
    [
        ("sead=1", "did you mean 'seed'"),
        ("seed=-1", "--config seed must be"),
        ("seed=many", "--config seed must be"),
        ("check=some", "--config check must be"),
        ("nowhere.toml", "nowhere.toml"),
        ("params=3", "--param must be METHOD.NAME=VALUE"),
        ("mpp=inf", "--mpp must be"),
        ("mpp=nan", "--mpp must be"),
        (f"by={'x' * 3000}", "--config by must be"),
    ],
)
def test_a_bad_setting_takes_one_line(
    setting: str, fault: str, cohort: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = ("--model", cohort / "m0.safetensors", "--features", cohort / "features", "--out", tmp_path / "o")
    code, _, error = run("explain", *paths, "--config", setting, capsys=capsys)
    assert (code, error.count("\n")) == (2, 1)
    assert fault in error
    assert not (tmp_path / "o").exists()


def test_an_option_without_a_flag_is_named_with_its_way(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = run("explain", "--seed", "1", capsys=capsys)
    assert (code, "--config seed=" in error) == (2, True)
    _, out, _ = run("explain", "--help", capsys=capsys)
    assert "seed: " in out


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (("explain", "--config", "seed"), "--config seed=VALUE"),
        (("explain", "--config", "memory=-2"), "--config memory must be"),
        (("heatmap", "run", "--config", "top=-1"), "--config top must be"),
        (("heatmap", "run", "--config", "region=0,0,5,0"), "--config region must be"),
        (("explain", "--mpp", "-1"), "--mpp must be a float in the range (0, inf)"),
        (("explain", "--slides", "nowhere"), "nowhere: no such"),
    ],
)
def test_values_are_checked_before_anything_starts(
    words: tuple[str, ...], fault: str, cohort: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inputs = ("--model", cohort / "m0.safetensors", "--features", cohort / "features")
    more = (*inputs, "--out", tmp_path / "out") if words[0] == "explain" else ()
    code, _, error = run(*words, *more, capsys=capsys)
    assert (code, error.count("\n")) == (2, 1)
    assert fault in error
    assert not (tmp_path / "out").exists()


def test_a_file_takes_the_name_of_a_flag(
    cohort: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "run.toml"
    config.write_text('param = "ig.steps=7"\nmethods = "ig"\ncheck = "none"\n')
    inputs = ("--model", cohort / "m0.safetensors", "--features", cohort / "features")
    code, _, error = run("explain", *inputs, "--config", config, "--out", tmp_path / "run", capsys=capsys)
    assert code == 0, error
    assert request_of(tmp_path / "run")["params"] == {"ig": {"steps": 7}}
