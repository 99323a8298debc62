"""Maps inside patches as a sheet and as tiles for QuPath."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.slides.pyramids import textured, write_pyramid
from xmil.core.errors import InputError, UnknownNameError
from xmil.core.inside_patch import Inside, InsideAudit
from xmil.heatmaps.exports import read_geojson
from xmil.heatmaps.inside_sheet import draw_inside, write_inside_geojson


def made(k: int = 3) -> Inside:
    rng = np.random.default_rng(0)
    maps = rng.normal(size=(k, 4, 4)).astype(np.float32)
    corners = np.array([[64 * i, 32] for i in range(k)])
    audit = InsideAudit(*(np.zeros(k, dtype=np.float32) for _ in range(4)))
    return Inside(maps, np.hstack([corners, corners + 60]), np.arange(k), audit, "tokens", "1", "tiny", "s")


def test_places_lie_in_the_geojson_where_they_lie_in_the_patch(tmp_path: Path) -> None:
    inside = made()
    write_inside_geojson(tmp_path / "s.geojson", inside)
    tiles = read_geojson(tmp_path / "s.geojson")
    np.testing.assert_array_equal(tiles.boxes.astype(int), inside.cells().reshape(-1, 4))
    np.testing.assert_allclose(tiles.measurements["inside-tokens:1"], inside.maps.ravel(), rtol=1e-6)


def test_the_sheet_shows_each_patch_beside_its_map(tmp_path: Path) -> None:
    path = write_pyramid(tmp_path / "s.tif", textured([(0, 0, 320, 256)], (320, 256)), levels=())
    figure = draw_inside(made(), path)
    shown = [axis for axis in figure.axes if axis.images]
    assert len(shown) == 6
    np.testing.assert_array_equal(np.asarray(shown[1].images[-1].get_array()), made().maps[0])
    assert len([axis for axis in draw_inside(made()).axes if axis.images]) == 3
    assert made().plot().get_suptitle().endswith("red speaks for 1, colours by patch")
    largest = np.abs(made().maps).max(axis=(1, 2))
    for scale, limits in (("patch", largest), ("sheet", np.full(3, largest.max()))):
        axes = [axis for axis in draw_inside(made(), scale=scale).axes if axis.images]
        np.testing.assert_allclose([axis.images[0].norm.vmax for axis in axes], limits, rtol=1e-6)
    with pytest.raises(UnknownNameError, match="scale 'slide'"):
        draw_inside(made(), scale="slide")
    with pytest.raises(InputError, match="'alpha'"):
        draw_inside(made(), alpha=2)
