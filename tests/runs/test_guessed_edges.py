"""A patch edge that was guessed from spacing is announced wherever a map or a number rests on it."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import numpy as np
import pyarrow.parquet as pq
import pytest

import xmil
from tests.cli.test_cli import run
from tests.runs.cohorts import table
from xmil.core.errors import XmilError
from xmil.heatmaps.words import figure_notes
from xmil.runs.embed import SlidePatches
from xmil.runs.requests import EmbedRequest
from xmil.storage import KEY
from xmil.viewer.layers import read_evidence

SLIDES = 9


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Features as CLAM writes them, without patches/: patches of 256 px lie 768 px apart."""
    root = tmp_path_factory.mktemp("spaced")
    (root / "h5_files").mkdir()
    rng = np.random.default_rng(0)
    for i in range(SLIDES):
        with h5py.File(root / "h5_files" / f"s{i}.h5", "w") as file:
            file["features"] = rng.normal(size=(12, 6)).astype(np.float32)
            file["coords"] = 768 * np.stack(np.divmod(np.arange(12), 4), axis=1).astype(np.int32)
    model = xmil.create_model("attnmil", in_dim=6, n_classes=2, dim=8, seed=0)
    xmil.save_model(model, root / "m.safetensors")
    return root


def explain(root: Path, out: Path, *more: str, capsys: pytest.CaptureFixture[str]) -> str:
    words = ("explain", "--model", root / "m.safetensors", "--features", root / "h5_files", "--out", out)
    code, said, error = run(*words, "--config", "check=none", *more, capsys=capsys)
    assert code == 0, error
    return said


def test_one_line_says_for_all_slides_that_the_edge_is_a_guess(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):  # the second run finds its slides done
        said = explain(root, tmp_path / "run", capsys=capsys)
        (line,) = [line for line in said.splitlines() if "768" in line]
        assert f"{SLIDES} slides" in line
        assert "--patch-size" in line
        assert all("768 px" in row["warnings"] for row in table(tmp_path / "run" / "slides.csv"))
    assert any("768 px" in text for text in xmil.open_run(tmp_path / "run").warnings)
    header = json.loads(pq.read_schema(tmp_path / "run" / "slides" / "s0.parquet").metadata[KEY])
    assert header["edge_guess"]
    assert "--patch-size" in header["edge_note"]


def test_the_map_says_so_until_the_edge_is_set(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    explain(root, tmp_path / "run", capsys=capsys)
    words = ("heatmap", tmp_path / "run", "--names", "s0,s1", "--pictures", "overlay", "--size", "60")
    edges = {}
    for name, more in {"guessed": (), "set": ("--patch-size", "256")}.items():
        code, said, error = run(*words, "--out", tmp_path / name, *more, capsys=capsys)
        assert code == 0, error
        collection = json.loads((tmp_path / name / "geojson" / "s0.geojson").read_text())
        (x0, _), (x1, _) = collection["features"][0]["geometry"]["coordinates"][0][:2]
        note = table(tmp_path / name / "slides.csv")[0]["note"]
        edges[name] = (x1 - x0, [sum("768 px" in text for text in said.splitlines())])
        assert ("768 px" in note, "note" in collection["xmil"]) == (name == "guessed",) * 2
    assert edges == {"guessed": (768, [1]), "set": (256, [0])}
    e = xmil.open_run(tmp_path / "run").explanation("s0")
    assert "768 px" in " ".join(figure_notes([e]))
    assert figure_notes([e.placed(patch_size=256)]) == []
    shown = read_evidence(tmp_path / "run" / "slides" / "s0.parquet").columns[0]
    assert "768 px" in " ".join(shown["warnings"])


def test_a_run_whose_edge_is_set_says_nothing(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = explain(root, tmp_path / "run", "--patch-size", "256", capsys=capsys)
    assert "patch edge" not in said
    assert all(not row.get("warnings") for row in table(tmp_path / "run" / "slides.csv"))
    assert xmil.open_run(tmp_path / "run").explanation("s0").patch_size == 256


def test_inspect_says_so_of_a_folder_in_one_line(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, said, _ = run("inspect", root / "h5_files", capsys=capsys)
    (line,) = [line for line in said.splitlines() if "guess" in line]
    assert f"{SLIDES} of {SLIDES} files" in line
    assert "--patch-size" in line


def test_patches_with_a_guessed_edge_are_not_embedded(root: Path) -> None:
    request = EmbedRequest.build(tiles=root, slides=(root,), encoder="resnet18", patch_px=256)
    path = root / "h5_files" / "s0.h5"
    with pytest.raises(XmilError, match="768 px would be a guess"):
        SlidePatches(path, path, request)
