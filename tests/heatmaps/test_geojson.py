"""Tiles for QuPath: valid, on level 0, finite, and readable back; annotations of every shape."""

from __future__ import annotations

import json
from uuid import UUID

import numpy as np
import pytest

from tests.heatmaps.tiles import read_tiles
from tests.slides.squares import boxes_of, explanation, grid
from xmil.core.errors import XmilError
from xmil.evaluate import marked_by_geojson, read_polygons
from xmil.heatmaps import write_geojson

shapely = pytest.importorskip("shapely", reason="shapely is not installed")
XY, EDGE = grid(5, 4, 512, at=(100, 33)), 512


@pytest.fixture
def several():
    rng = np.random.default_rng(0)
    scores = rng.normal(size=len(XY)).astype(np.float32)
    scores[3] = 0
    return [
        explanation(XY, EDGE, scores=rng.uniform(size=len(XY)), method="attention", signed=False),
        explanation(XY, EDGE, scores=scores),
        explanation(XY, EDGE, scores=scores * 1e-7, method="ig", name='a "quoted" class\nµ'),
    ]


def test_what_qupath_reads(tmp_path, several):
    write_geojson(tmp_path / "s.geojson", several)
    found = json.loads((tmp_path / "s.geojson").read_text())
    assert found["type"] == "FeatureCollection"
    assert len(found["features"]) == len(XY)
    for feature, box, score in zip(found["features"], boxes_of(XY, EDGE), several[1].scores, strict=True):
        shape = shapely.geometry.shape(feature["geometry"])
        assert shape.is_valid
        assert shape.bounds == tuple(box)
        assert shape.area == EDGE**2
        about = feature["properties"]
        assert about["objectType"] == "tile"
        assert about["isLocked"] is True
        assert list(about["measurements"]) == ["attention:HPV+", "lrp:HPV+", 'ig:a "quoted" class\nµ']
        assert all(
            isinstance(value, float) and np.isfinite(value) for value in about["measurements"].values()
        )
        words = {1: "supports HPV+", -1: "speaks against HPV+"}.get(np.sign(score))
        assert about.get("classification", {}).get("name") == words
        if words:
            red, _, blue = about["classification"]["color"]
            assert (red > blue) == (score > 0)
    assert len({UUID(feature["id"]) for feature in found["features"]}) == len(XY)


def test_there_and_back(tmp_path, several):
    write_geojson(tmp_path / "s.geojson", several, origin=(70, -9))
    tiles = read_tiles(tmp_path / "s.geojson")
    np.testing.assert_array_equal(tiles.boxes, boxes_of(XY, EDGE))
    for e in several:
        np.testing.assert_array_equal(tiles.measurements[e.column].astype(np.float32), e.scores)
    first = json.loads((tmp_path / "s.geojson").read_text())["features"][0]
    assert first["geometry"]["coordinates"][0][0] == [100 - 70, 33 + 9]


def test_the_same_slide_gives_the_same_file(tmp_path, several):
    for name in "ab":
        write_geojson(tmp_path / name, several)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_unsigned_scores_have_no_class(tmp_path, several):
    write_geojson(tmp_path / "s.geojson", several[:1])
    assert set(read_tiles(tmp_path / "s.geojson").classes) == {None}


def test_not_finite_is_refused(tmp_path):
    scores = np.ones(len(XY))
    scores[2] = np.inf
    with pytest.raises(XmilError, match="finite"):
        write_geojson(tmp_path / "s.geojson", [explanation(XY, EDGE, scores=scores)])
    assert not (tmp_path / "s.geojson").exists()


def test_what_we_write_serves_as_annotation(tmp_path, several):
    write_geojson(tmp_path / "s.geojson", several)
    assert len(read_polygons(tmp_path / "s.geojson")) == len(XY)
    marked = marked_by_geojson(tmp_path / "s.geojson", XY, patch_size=EDGE, names=["supports HPV+"])
    np.testing.assert_array_equal(marked, several[1].scores > 0)


RING = [[0, 0], [200, 0], [200, 200], [0, 200], [0, 0]]
HOLE = [[100, 100], [200, 100], [200, 200], [100, 200], [100, 100]]
COORDS = np.array([[0, 0], [100, 0], [0, 100], [100, 100], [300, 300]])


def annotation(geometry):
    about = {"objectType": "annotation", "classification": {"name": "Tumor", "color": [200, 0, 0]}}
    return {"type": "Feature", "id": "x", "geometry": geometry, "properties": about}


POLYGON = annotation({"type": "Polygon", "coordinates": [RING, HOLE]})
FAR = [[[300, 300], [400, 300], [400, 400], [300, 400], [300, 300]]]
PARTS = annotation({"type": "MultiPolygon", "coordinates": [[RING, HOLE], FAR]})


@pytest.mark.parametrize(
    ("content", "marked"),
    [
        ({"type": "FeatureCollection", "features": [POLYGON]}, [1, 1, 1, 0, 0]),
        (POLYGON, [1, 1, 1, 0, 0]),
        ([POLYGON], [1, 1, 1, 0, 0]),
        ([PARTS], [1, 1, 1, 0, 1]),
        (PARTS, [1, 1, 1, 0, 1]),
        (POLYGON["geometry"], [1, 1, 1, 0, 0]),
        ({"type": "GeometryCollection", "geometries": [PARTS["geometry"]]}, [1, 1, 1, 0, 1]),
    ],
)
def test_annotations_of_qupath(tmp_path, content, marked):
    """With holes, as a collection, a list, a single feature or bare; against shapely."""
    path = tmp_path / "s.geojson"
    path.write_text(json.dumps(content))
    found = marked_by_geojson(path, COORDS, patch_size=100)
    np.testing.assert_array_equal(found, np.array(marked, dtype=bool))
    shapes = [shapely.Polygon(rings[0], rings[1:]) for rings in read_polygons(path)]
    whole = shapely.union_all(shapes)
    shares = [whole.intersection(shapely.box(x, y, x + 100, y + 100)).area / 1e4 for x, y in COORDS]
    np.testing.assert_array_equal(found, np.array(shares) >= 0.5)


def test_annotations_drawn_on_the_bounds_of_a_slide(tmp_path):
    """QuPath counts from the corner of the scanned area; `origin` says where that is."""
    path = tmp_path / "s.geojson"
    path.write_text(json.dumps(POLYGON))
    moved = COORDS + np.array([1000, 700])
    assert not marked_by_geojson(path, moved, patch_size=100).any()
    found = marked_by_geojson(path, moved, patch_size=100, origin=(1000, 700))
    assert found.tolist() == [True, True, True, False, False]


def test_a_file_names_its_own_origin(tmp_path, several):
    """What is written for a slide with a bounds offset marks the same patches, whatever origin is given."""
    path = tmp_path / "s.geojson"
    write_geojson(path, several, origin=(30, 20))
    for given in ({}, {"origin": (0, 0)}, {"origin": (30, 20)}):
        marked = marked_by_geojson(path, XY, patch_size=EDGE, names=["supports HPV+"], **given)
        np.testing.assert_array_equal(marked, several[1].scores > 0)
    path.write_text(json.dumps({"type": "FeatureCollection", "xmil": {"origin": [1]}, "features": [POLYGON]}))
    with pytest.raises(XmilError, match="damaged"):
        read_polygons(path)


@pytest.mark.parametrize(("content", "words"), [("{", "not a readable"), ('[{"geometry": 3}]', "damaged")])
def test_damaged_files(tmp_path, content, words):
    (tmp_path / "s.geojson").write_text(content)
    with pytest.raises(XmilError, match=words):
        read_polygons(tmp_path / "s.geojson")
    with pytest.raises(XmilError, match="no such file"):
        read_polygons(tmp_path / "none.geojson")
