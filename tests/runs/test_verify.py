"""`verify`: damage, foreign files, changed features and models are found; a whole run has no fault."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import xmil
from xmil.cli import main
from xmil.runs.verify import verify_run


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("verified")
    (root / "features").mkdir()
    rng = np.random.default_rng(0)
    for name in ("a", "b", "c"):
        bag = xmil.Bag(
            rng.normal(size=(40, 6)), coords=rng.integers(0, 999, (40, 2)), patch_size=32, slide_id=name
        )
        xmil.write_bag(bag, root / "features" / f"{name}.h5")
    xmil.save_model(
        xmil.create_model("attnmil", in_dim=6, n_classes=2, dim=8, seed=0), root / "m.safetensors"
    )
    xmil.explain_slides(root / "m.safetensors", root / "features", out=root / "run")
    return root


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made / "run", tmp_path / "run")
    return tmp_path / "run"


def told(run: Path) -> str:
    return "\n".join(map(str, verify_run(xmil.open_run(run))))


def test_a_whole_run_has_no_fault(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert told(made / "run") == ""
    with pytest.raises(SystemExit) as left:
        main(["verify", str(made / "run")])
    assert not left.value.code
    assert "3 slides checked, 0 faults" in capsys.readouterr().out


def test_every_flipped_byte_of_the_scores_is_found(copy: Path) -> None:
    path = copy / "slides" / "b.parquet"
    whole = path.read_bytes()
    place = len(whole) // 8
    path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
    assert "slides/b.parquet" in told(copy)


def test_what_is_missing_cut_off_or_foreign_is_named(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copy / "slides" / "a.parquet").unlink()
    path = copy / "slides" / "b.parquet"
    path.write_bytes(path.read_bytes()[:-40])
    shutil.copy(copy / "slides" / "c.parquet", copy / "slides" / "stranger.parquet")
    faults = told(copy)
    for name in ("slides/a.parquet", "slides/b.parquet", "slides/stranger.parquet: is not in slides.csv"):
        assert name in faults
    with pytest.raises(SystemExit) as left:
        main(["verify", str(copy), "--json"])
    assert left.value.code == 1
    assert '"faults"' in capsys.readouterr().out


def test_changed_features_and_models_are_named(made: Path, tmp_path: Path) -> None:
    root = tmp_path / "moved"
    shutil.copytree(made, root)
    xmil.explain_slides(root / "m.safetensors", root / "features", out=root / "again")
    bag = xmil.read_bag(root / "features" / "a.h5")
    xmil.write_bag(xmil.Bag(bag.features + 1, slide_id="a"), root / "features" / "a.h5")
    xmil.save_model(
        xmil.create_model("attnmil", in_dim=6, n_classes=2, dim=8, seed=1), root / "m.safetensors"
    )
    faults = told(root / "again")
    assert "a.h5 has changed since it was explained" in faults
    assert "the model has changed since" in faults
    assert "slides/b.parquet" not in faults
