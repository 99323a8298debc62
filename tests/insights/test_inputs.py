"""`insight` on features, models and evaluations that are not the run's: refused, or said."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import xmil
from xmil.cli import main
from xmil.core.errors import InputError
from xmil.execute import Listener

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
        main([*map(str, words), "--out", str(tmp_path / "i"), "--config", "concepts=2"])
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


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The one line of a command that cannot be done."""
    with pytest.raises(SystemExit) as left:
        main(["insight", *map(str, words), "--config", "concepts=2"])
    said = capsys.readouterr().err.splitlines()
    assert (left.value.code, len(said)) == (2, 1)
    return said[0]


def test_what_does_not_fit_the_run_is_one_line(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = (made / "run", "--features", made / "features", "--out", tmp_path / "i")
    xmil.predict_slides(made / "m.safetensors", made / "features", out=tmp_path / "predicted")
    told = refused(capsys, tmp_path / "predicted", *given[1:])
    assert "a run of `xmil predict`" in told
    assert "not a finished run of `xmil evaluate`" in refused(capsys, *given, "--evaluated", made / "run")
    (tmp_path / "cohort.csv").write_text("slide_id,label\nx,0\ny,1\n")
    told = refused(capsys, *given, "--cohort", tmp_path / "cohort.csv")
    assert "names none of the run's slides" in told
    assert "Its first is 'x', the run's 'a'" in told
    (tmp_path / "cohort.csv").write_text("slide_id,label\na,0\n")
    told = refused(capsys, *given, "--cohort", tmp_path / "cohort.csv", "--label", "grade")
    assert "has no column 'grade'; found label" in told
    xmil.save_model(xmil.create_model("attnmil", in_dim=4, n_classes=2), tmp_path / "m4.safetensors")
    assert "takes 4 features, and the run explained 6" in refused(
        capsys, *given, "--model", tmp_path / "m4.safetensors"
    )
    assert "Unknown method" in refused(capsys, *given, "--methods", "ig")
    assert "Unknown target" in refused(capsys, *given, "--target", "0")
    (tmp_path / "marks").mkdir()
    (tmp_path / "marks" / "x.geojson").write_text("[]")
    told = refused(capsys, *given, "--regions", tmp_path / "marks")
    assert "holds no annotations (SLIDE.geojson) of the run's slides" in told
    assert not (tmp_path / "i").exists()


def test_notes_say_what_was_done(made: Path, tmp_path: Path) -> None:
    """Without pictures none were looked at; `all` is no column."""
    (tmp_path / "cohort.csv").write_text("slide_id,case_id,label\na,p,1\nb,p,0\nc,,1\n")
    heard = Heard()
    given = {"cohort": tmp_path / "cohort.csv", "concepts": 2, "listener": heard}
    found = xmil.insight(made / "run", out=tmp_path / "i", causes=["all"], **given)
    [about_cases] = [line for line in heard.lines if "case_id" in line]
    assert "(c)" in about_cases
    assert not [line for line in heard.lines if "pictures" in line]
    assert "3 slides of 2 cases" in (found.path / "report.html").read_text()


def test_what_is_missing_is_said_and_the_rest_goes_on(made: Path, tmp_path: Path) -> None:
    """One slide without features, one damaged, one left; columns that nothing can be asked of."""
    (tmp_path / "features").mkdir()
    (tmp_path / "features" / "a.h5").write_bytes((made / "features" / "a.h5").read_bytes())
    (tmp_path / "features" / "b.h5").write_bytes(b"no features")
    rows = ["slide_id,label,site,age,time,event", "a,1,north,NaN,-1,2", "c,,north,4,3,1"]
    (tmp_path / "cohort.csv").write_text("\n".join(rows) + "\n")
    heard = Heard()
    found = xmil.insight(
        made / "run", features=tmp_path / "features", cohort=tmp_path / "cohort.csv", out=tmp_path / "i",
        model=made / "m.safetensors", concepts=2, listener=heard,
    )  # fmt: skip
    assert list(found) == ["a"]
    assert list(found.failed) == ["b"]
    said = "\n".join(heard.lines)
    assert "1 slide of the run left out, without features (c)" in said
    assert "cohort.csv: has no row for 1 slide of the run (b)" in said
    assert "without 2 slides without a 'label' (b, c)" in said
    assert "Survival was left out: 'time' must be numbers from 0 on, and 'event' 0 or 1." in said
    card = json.loads((found.path / "card.json").read_text())
    assert card["shortcuts_not_asked"] == [
        "site: known for 1 slide, and 8 are needed", "age: known for 0 slides, and 8 are needed",
    ]  # fmt: skip
