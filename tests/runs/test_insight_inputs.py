"""`insight` on features, models and evaluations that are not the run's: refused, or said."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import xmil
from xmil.cli import main
from xmil.core.errors import InputError
from xmil.core.runfiles import write_run
from xmil.runs.listener import Listener

NAMES = ("a", "b", "c")


class Heard(Listener):
    """Keeps the warnings."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def warn(self, sentence: str) -> None:
        self.lines.append(sentence)


def features(root: Path, width: int = 6, seed: int = 0) -> Path:
    root.mkdir()
    rng = np.random.default_rng(seed)
    for name in NAMES:
        values, coords = rng.normal(size=(20, width)), rng.integers(0, 999, (20, 2))
        xmil.write_bag(xmil.Bag(values, coords=coords, patch_size=32, slide_id=name), root / f"{name}.h5")
    return root


def model(path: Path, seed: int) -> Path:
    xmil.save_model(xmil.create_model("attnmil", in_dim=6, n_classes=2, dim=8, seed=seed), path)
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("inputs")
    features(root / "features")
    explained = model(root / "m.safetensors", 0)
    model(root / "other.safetensors", 7)
    xmil.explain_slides(explained, root / "features", out=root / "run", target="1")
    return root


@pytest.mark.parametrize(
    "table", [None, "method,mode\n", "method,mode,n,mean,low,high\nlrp,remove,3,x,0,1\n"]
)
def test_what_is_no_evaluation_is_refused_before_the_work(
    table: str | None, made: Path, tmp_path: Path
) -> None:
    (tmp_path / "eval").mkdir()
    write_run(tmp_path / "eval", "evaluate", {})
    if table is not None:
        (tmp_path / "eval" / "summary.csv").write_text(table + "lrp,remove\n")
    told = "no such file" if table is None else "not a table of measures"
    with pytest.raises(
        InputError, match=rf"summary\.csv: {told}; give the folder of a finished xmil evaluate"
    ):
        xmil.insight(
            made / "run", features=made / "features", out=tmp_path / "i", evaluated=tmp_path / "eval"
        )
    assert not (tmp_path / "i").exists()


def test_features_of_another_width_are_refused(made: Path, tmp_path: Path) -> None:
    wide = features(tmp_path / "wide", width=8)
    with pytest.raises(
        InputError, match=r"a\.h5: has 8 features, and the run explained 6; give the features"
    ):
        xmil.insight(made / "run", features=wide, out=tmp_path / "i", concepts=2)
    assert not (tmp_path / "i").exists()


def test_other_features_of_the_width_are_said(made: Path, tmp_path: Path) -> None:
    heard, other = Heard(), features(tmp_path / "other", seed=1)
    xmil.insight(made / "run", features=other, out=tmp_path / "i", concepts=2, listener=heard)
    told = "The features of 3 slides (a, b, c) are not those that the run explained"
    assert [line for line in heard.lines if told in line]
    assert told in (tmp_path / "i" / "card.md").read_text()
    heard = Heard()
    xmil.insight(made / "run", features=made / "features", out=tmp_path / "j", concepts=2, listener=heard)
    assert heard.lines == []


def test_another_model_is_said_and_passes_nothing(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["insight", made / "run", "--features", made / "features", "--model", made / "other.safetensors"]
    with pytest.raises(SystemExit) as left:
        main([*map(str, words), "--out", str(tmp_path / "i"), "--concepts", "2"])
    said = capsys.readouterr()
    assert not left.value.code
    assert "The run was explained with other models than other.safetensors" in said.out + said.err
    sanity = json.loads((tmp_path / "i" / "card.json").read_text())["sanity"]
    assert sanity["weights drawn anew"].startswith(
        "no verdict: the scores made again are not those of the run"
    )


def test_an_evaluation_of_another_model_is_said(made: Path, tmp_path: Path) -> None:
    heard = Heard()
    (tmp_path / "cohort.csv").write_text("slide_id,label\na,0\nb,1\nc,0\n")
    kept = {"cohort": tmp_path / "cohort.csv", "methods": "lrp", "out": tmp_path / "ev", "steps": 3}
    xmil.evaluate_slides(made / "other.safetensors", made / "features", **kept)
    xmil.insight(
        made / "run", features=made / "features", evaluated=tmp_path / "ev", out=tmp_path / "i", concepts=2,
        listener=heard,
    )  # fmt: skip
    told = "ev evaluated other models than the run's"
    assert [line for line in heard.lines if told in line]
    assert told in (tmp_path / "i" / "card.md").read_text()
