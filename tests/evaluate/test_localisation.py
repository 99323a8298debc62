"""Pointing game, relevance mass, and marks from masks and QuPath annotations."""

from __future__ import annotations

import json

import numpy as np
import pytest

from xmil.core.errors import XmilError
from xmil.evaluate import (
    covered_by_polygons,
    marked_by_geojson,
    marked_by_mask,
    pointing_game,
    relevance_mass,
)

COORDS = np.array([[0, 0], [100, 0], [0, 100], [100, 100]])


def test_pointing_game():
    assert pointing_game([1, 0, 0], [0.9, 0.1, 0.2]) == 1.0
    assert pointing_game([0, 0, 1], [0.9, 0.1, 0.2]) == 0.0
    assert pointing_game([1, 0, 1, 0], np.ones(4)) == 0.5
    assert np.isnan(pointing_game([0, 0], [1, 2]))


def test_relevance_mass():
    assert relevance_mass([1, 0, 1], [1.0, 3.0, -2.0]) == 0.25
    assert np.isnan(relevance_mass([1, 0], [-1.0, -2.0]))
    assert np.isnan(relevance_mass([0, 0], [1.0, 2.0]))
    with pytest.raises(XmilError, match="one length"):
        relevance_mass([1], [1.0, 2.0])


@pytest.mark.parametrize("downsample", [1.0, 4.0])
def test_mask_against_counting(downsample):
    rng = np.random.default_rng(0)
    mask = rng.uniform(size=(60, 50)) < 0.5
    coords = rng.integers(-10, 240, size=(40, 2))
    edge = 20
    low = np.rint(coords / downsample).astype(int)
    high = np.maximum(np.rint((coords + edge) / downsample).astype(int), low + 1)
    shares = []
    for (x1, y1), (x2, y2) in zip(low, high, strict=True):
        set_pixels = sum(
            bool(mask[y, x]) for y in range(max(y1, 0), min(y2, 60)) for x in range(max(x1, 0), min(x2, 50))
        )
        shares.append(set_pixels / ((x2 - x1) * (y2 - y1)))
    found = marked_by_mask(mask, coords, patch_size=edge, downsample=downsample, share=0.4)
    np.testing.assert_array_equal(found, np.array(shares) >= 0.4)


def feature(rings, name="Tumor", kind="Polygon"):
    return {
        "type": "Feature",
        "geometry": {"type": kind, "coordinates": rings},
        "properties": {"objectType": "annotation", "classification": {"name": name}},
    }


def square(x, y, edge):
    return [[x, y], [x + edge, y], [x + edge, y + edge], [x, y + edge], [x, y]]


def write(path, content):
    path.write_text(json.dumps(content))
    return path


def test_geojson_with_holes_classes_and_parts(tmp_path):
    tumour = feature([square(0, 0, 200), square(100, 100, 100)])  # all but the last patch
    other = feature([[square(100, 100, 100)]], name="Necrosis", kind="MultiPolygon")
    path = write(tmp_path / "s.geojson", {"type": "FeatureCollection", "features": [tumour, other]})
    marks = lambda **how: marked_by_geojson(path, COORDS, patch_size=100, **how).tolist()  # noqa: E731
    assert marks(names=["Tumor"]) == [True, True, True, False]
    assert marks(names=["Necrosis"]) == [False, False, False, True]
    assert marks() == [True] * 4
    with pytest.raises(XmilError, match="Found: Necrosis, Tumor"):
        marks(names=["Stroma"])


def test_geojson_share_of_a_box(tmp_path):
    path = write(tmp_path / "s.geojson", [feature([square(0, 0, 50)])])  # a quarter of the first patch
    assert marked_by_geojson(path, COORDS, patch_size=100, share=0.5).tolist() == [False] * 4
    assert marked_by_geojson(path, COORDS, patch_size=100, share=0.2).tolist() == [True, False, False, False]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "not a readable GeoJSON"),
        ('[{"geometry": {"type": "Polygon", "coordinates": [[1]]}}]', "damaged"),
    ],
)
def test_bad_geojson(tmp_path, content, words):
    path = tmp_path / "s.geojson"
    path.write_text(content)
    with pytest.raises(XmilError, match=words):
        marked_by_geojson(path, COORDS, patch_size=100)
    with pytest.raises(XmilError, match="no such file"):
        marked_by_geojson(tmp_path / "none.geojson", COORDS, patch_size=100)


def test_covered_shares_are_exact(tmp_path):
    """Overlapping regions, holes and many small ones: the areas that shapely finds."""
    shapely = pytest.importorskip("shapely", reason="shapely is not installed")
    rng = np.random.default_rng(1)
    boxes = rng.integers(-50, 950, size=(60, 2)).astype(float)
    turns = [np.sort(rng.uniform(0, 2 * np.pi, n)) for n in (150, 30, 20)]
    stars = [
        rng.uniform(200, 800, 2) + 300 * np.array([np.cos(t), np.sin(t)]).T * rng.uniform(0.5, 1, (len(t), 1))
        for t in turns
    ]
    small = [np.array(square(*rng.uniform(-80, 1000, 2), e)) for e in rng.uniform(1, 40, 150)]
    hole = np.array(square(480, 480, 60))
    whole = shapely.union_all([shapely.Polygon(ring) for ring in (*stars, *small)])
    for without, area in (([], whole), ([[hole]], whole - shapely.Polygon(hole))):
        expected = [area.intersection(shapely.box(x, y, x + 30, y + 30)).area / 900 for x, y in boxes]
        found = covered_by_polygons([[ring] for ring in (*stars, *small)], boxes, 30, without=without)
        np.testing.assert_allclose(found, expected, atol=1e-8)
    path = write(tmp_path / "s.geojson", [feature([square(0, 0, 100)])])
    edges = np.array([[49, 0], [50, 0], [51, 0], [500, 500]])  # 51, 50 and 49 of 100 columns lie inside
    assert marked_by_geojson(path, edges, patch_size=100).tolist() == [True, True, False, False]


@pytest.mark.parametrize(
    "geometry",
    [
        {"type": "Polygon", "coordinates": [[]]},
        {"type": "Polygon", "coordinates": [[[0]]]},
        {"type": "Polygon", "coordinates": [[[0, 1e999]]]},
        {"type": "Polygon", "coordinates": 10**400},
        {"type": "MultiPolygon", "coordinates": [[["x", "y"]]]},
    ],
)
def test_damaged_geometry_is_told(tmp_path, geometry):
    (tmp_path / "a.geojson").write_text(json.dumps({"features": [{"geometry": geometry, "properties": 3}]}))
    with pytest.raises(XmilError, match="geometry is damaged"):
        marked_by_geojson(tmp_path / "a.geojson", COORDS, patch_size=100)
    (tmp_path / "b.geojson").write_text("[" * 100_000)
    with pytest.raises(XmilError, match="nested too deeply"):
        marked_by_geojson(tmp_path / "b.geojson", COORDS, patch_size=100)
