"""Labels of models without class names: numbers of classes, or names given with --class-names."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.test_cli import run
from tests.runs.cohorts import make_cohort, make_model, table

COMMANDS = {
    "predict": ["--config", "draws=20"],
    "explain": ["--target", "label"],
    "evaluate": ["--methods", "attention", "--steps", "2"],
}
ORDER = ["metastasis", "normal", "normal", "metastasis"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four slides and a model that does not know what its classes are called."""
    make_cohort(tmp_path, 4)
    make_model(tmp_path / "m0.safetensors", class_names=None)
    return tmp_path


def words(folder: Path, name: str, labels: list[str], *more: str) -> list[str]:
    lines = [f"s{i:03},{label}" for i, label in enumerate(labels)]
    (folder / "l.csv").write_text("\n".join(["slide_id,label", *lines]) + "\n")
    asked = [name, "--model", str(folder / "m0.safetensors"), "--features", str(folder / "features")]
    asked += ["--cohort", str(folder / "l.csv"), "--label", "label", "--out", str(folder / name)]
    return [*asked, *COMMANDS[name], *more]


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (
            ORDER,
            "'metastasis' in column 'label' is not a class of the model, which has no class names",
        ),
        (["1", "tumour", "1", "tumour"], "'tumour' in column 'label' is not a class of the model"),
        (["1", "2", "2", "1"], "has a class 2, but"),
        (["-1", "1", "1", "-1"], "has a class -1, but"),
        (["0.5", "1", "1", "0"], "'0.5' in column 'label' is not a class of the model"),
    ],
)
def test_names_are_not_put_in_the_order_of_the_alphabet(
    folder: Path, name: str, labels: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(*words(folder, name, labels), capsys=capsys)
    assert code == 2
    assert message in err
    assert "--class-names" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("name", COMMANDS)
def test_class_names_say_the_order(folder: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(*words(folder, name, ORDER, "--class-names", "normal,metastasis"), capsys=capsys)
    assert code == 0, err
    file = "predictions.csv" if name == "predict" else "slides.csv"
    named = table(folder / name / file)
    code, _, err = run(*words(folder, name, ["1", "0", "0", "1.0"], "--restart"), capsys=capsys)
    assert code == 0, err
    numbered = table(folder / name / file)
    assert [row["correct"] for row in named] == [row["correct"] for row in numbered]
    assert [row["predicted"] for row in named] == [
        ("normal", "metastasis")[int(row["predicted"])] for row in numbered
    ]
