"""Exports for other programs, read back: values and places are exact."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest

import xmil
from tests.heatmaps.tiles import read_tiles
from xmil.cli import main
from xmil.core.errors import FileError
from xmil.heatmaps import read_asap
from xmil.storage import write_explanations


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
    tiles = read_tiles(tmp_path / "plain.geojson")
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


def test_asap_comes_back(run: Path, tmp_path: Path) -> None:
    tiles = read_asap(exported(run, "asap"))
    e = xmil.open_run(run).explanation("s")
    np.testing.assert_array_equal(tiles.boxes, e.boxes())
    np.testing.assert_array_equal(tiles.measurements["lrp:1"].astype(np.float32), e.scores)
    foreign = tmp_path / "a.xml"
    foreign.write_text(
        '<ASAP_Annotations><Annotations><Annotation Name="Annotation 0" Type="Polygon" PartOfGroup="None">'
        '<Coordinates><Coordinate Order="0" X="1.5" Y="2" /><Coordinate Order="1" X="9" Y="4" />'
        "</Coordinates></Annotation></Annotations></ASAP_Annotations>"
    )
    found = read_asap(foreign)
    assert (found.boxes.tolist(), found.measurements, found.classes) == ([[1.5, 2, 9, 4]], {}, (None,))
    foreign.write_text("<ASAP_Annotations><Annotations>")
    with pytest.raises(FileError, match="not a readable file"):
        read_asap(foreign)


def test_dicom_maps_and_annotations_come_back(run: Path) -> None:
    hd = pytest.importorskip("highdicom")
    e = xmil.open_run(run).explanation("s")
    held = [i for i in range(12) if i != 5]  # a hole
    write_explanations([e.take(held)], run / "slides" / "s.parquet")
    e = xmil.open_run(run).explanation("s")
    made = hd.pm.ParametricMap.from_dataset(pydicom_read(exported(run, "dicom")))
    pixels = made.get_total_pixel_matrix(apply_real_world_transform=False, dtype=np.float32)
    pixels = np.where(pixels == np.float32(made.FloatPixelPaddingValue), np.nan, pixels)
    assert pixels.shape == (3, 4)
    assert np.isnan(pixels).sum() == 1
    for (x, y), score in zip(e.coords, e.scores, strict=True):
        assert pixels[y // 64, x // 64] == score
    assert made.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0].PixelSpacing == [0.032, 0.032]
    notes = hd.ann.MicroscopyBulkSimpleAnnotations.from_dataset(
        pydicom_read(exported(run, "dicom-annotations"))
    )
    (group,) = notes.get_annotation_groups()
    drawn = group.get_graphic_data("2D")
    assert [[*d.min(0), *d.max(0)] for d in drawn] == e.boxes().tolist()
    _, values, _ = group.get_measurements()
    np.testing.assert_array_equal(values[:, 0].astype(np.float32), e.scores)


def pydicom_read(path: Path) -> Any:
    import pydicom

    return pydicom.dcmread(path)


def test_an_unknown_format_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["export", str(run), "--to", "qpath"])
    assert left.value.code == 2
    assert "Unknown export 'qpath'. Did you mean 'qupath'?" in capsys.readouterr().err
