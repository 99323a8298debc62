"""Exports for other programs, read back: values and places are exact."""

from __future__ import annotations

import gzip
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest

import xmil
from xmil.cli import main
from xmil.core.storage import write_explanations
from xmil.heatmaps.exports import read_geojson


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "slides").mkdir()
    rng = np.random.default_rng(0)
    corners = np.array([[x * 64, y * 64] for y in range(3) for x in range(4)])
    e = xmil.Explanation(
        rng.normal(size=12).astype(np.float32), np.array([0.0, 1.0], np.float32), 1.0, "lrp", xmil.Target(1),
        True, bag="s", coords=corners, patch_size=64, mpp=0.5,
    )  # fmt: skip
    write_explanations([e], tmp_path / "slides" / "s.parquet")
    return tmp_path


def exported(run: Path, to: str) -> Path:
    with pytest.raises(SystemExit) as left:
        main(["export", str(run), "--to", to])
    assert not left.value.code
    (found,) = (path for path in (run / "export" / to).iterdir())
    return found


def test_qupath_reads_gzipped_geojson(run: Path, tmp_path: Path) -> None:
    path = exported(run, "qupath")
    assert path.name == "s.geojson.gz"
    (tmp_path / "plain.geojson").write_bytes(gzip.decompress(path.read_bytes()))
    tiles = read_geojson(tmp_path / "plain.geojson")
    e = xmil.open_run(run).explanation("s")
    np.testing.assert_array_equal(tiles.boxes.astype(int), e.boxes())
    np.testing.assert_array_equal(tiles.measurements["lrp:1"].astype(np.float32), e.scores)


def test_asap_has_a_rectangle_per_patch_in_its_group(run: Path) -> None:
    root = ET.parse(exported(run, "asap")).getroot()  # noqa: S314  # our own file
    e = xmil.open_run(run).explanation("s")
    notes = root.findall("./Annotations/Annotation")
    assert len(notes) == 12
    groups = {group.get("Name") for group in root.findall("./AnnotationGroups/Group")}
    for i, note in enumerate(notes):
        corners = np.array([[float(c.get("X")), float(c.get("Y"))] for c in note.iter("Coordinate")])
        assert [*corners.min(0), *corners.max(0)] == e.boxes()[i].tolist()
        assert np.float32(note.get("Name").split()[-1]) == e.scores[i]
        assert note.get("PartOfGroup") in groups
        assert ("against" in note.get("PartOfGroup")) == (e.scores[i] < 0)


def test_an_unknown_format_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["export", str(run), "--to", "qpath"])
    assert left.value.code == 2
    assert "Unknown export 'qpath'. Did you mean 'qupath'?" in capsys.readouterr().err
